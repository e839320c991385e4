"""No block is compiled anew once lengths, rows and documents have varied; names, values and gradients are as before."""

import pytest
import torch
from measured import Measured, measure
from torch import nn

from kforge_parallel import compile_blocks


@pytest.fixture
def graphs():
    """How many graphs there are, from none."""
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


def run(model, x, longest, train=True):
    model.zero_grad()
    with torch.set_grad_enabled(train):
        y = model(x.requires_grad_(train), longest)
    if train:
        y.sum().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters() if train)]


def pair():
    torch.manual_seed(1)
    plain = Measured()
    compiled = Measured()
    compiled.load_state_dict(plain.state_dict())
    compile_blocks(list(compiled.layers), backend="aot_eager")
    assert [n for n, _ in plain.named_parameters()] == [n for n, _ in compiled.named_parameters()]
    return plain, compiled


def both(plain, compiled, rows, tokens, longest, train=True):
    x = torch.randn(rows, tokens, 8, generator=torch.Generator().manual_seed(tokens))
    for a, b in zip(run(plain, x, longest, train), run(compiled, x, longest, train), strict=True):
        torch.testing.assert_close(a, b)


def test_twelve_lengths_evaluation_and_a_last_short_batch_compile_nothing_more(graphs):
    models = pair()
    for rows, tokens, train in ((4, 16, True), (4, 24, True), (4, 16, False), (3, 16, False), (3, 24, True)):
        both(*models, rows, tokens, 16, train)
    warm = graphs()
    assert warm == 5
    with torch.compiler.set_stance("fail_on_recompile"):
        for step, tokens in enumerate(range(32, 32 + 12 * 8, 8)):
            both(*models, 4, tokens, 16)
            both(*models, 4 - step % 3, tokens, 16, train=False)
            both(*models, 2 + step % 3, tokens, 16)
    assert graphs() == warm


def test_sizes_of_one_have_three_graphs_and_no_more(graphs):
    """torch makes a 1 a constant of a graph: of the rows, of the tokens, or of both."""
    models = pair()
    for rows, tokens in ((4, 16), (4, 24), (3, 16)):
        both(*models, rows, tokens, 16)
    warm = graphs()
    for rows, tokens in ((4, 1), (1, 16), (1, 1)):
        both(*models, rows, tokens, 16)
    assert graphs() == warm + 3
    with torch.compiler.set_stance("fail_on_recompile"):
        for rows, tokens in ((2, 1), (3, 1), (1, 24), (1, 32), (1, 1), (2, 40), (4, 16)):
            both(*models, rows, tokens, 16)
    assert graphs() == warm + 3


def test_one_length_keeps_its_constants_while_evaluations_have_others(graphs):
    made = []

    def backend(graph, inputs):
        made.append(graph)
        return graph

    model = Measured()
    compile_blocks(list(model.layers), backend=backend)
    run(model, torch.randn(4, 16, 8), 16)
    (trained,) = made
    for rows in (4, 3, 2):
        run(model, torch.randn(rows, 16, 8), 16, train=False)
    calls = []
    trained.forward = lambda *args, forward=trained.forward: calls.append(args) or forward(*args)
    run(model, torch.randn(4, 16, 8), 16)
    assert len(made) == 3 and len(calls) == 2
    assert not any(isinstance(value, int | torch.SymInt) for args in calls for value in args)  # no size is an input


def test_the_longest_document_is_a_number_from_its_second_value_on(graphs):
    """Ten values: under one graph for each, torch would give up at the eighth and run the blocks uncompiled."""
    models = pair()
    for longest in (128, 256):
        both(*models, 4, 16, longest)
    warm = graphs()
    assert warm == 2
    with torch.compiler.set_stance("fail_on_recompile"):
        for longest in range(384, 128 * 13, 128):
            both(*models, 4, 16, longest)
    assert graphs() == warm


def test_the_planted_fault_is_found(graphs, monkeypatch):
    """Under constants alone every length is compiled."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, backend: compile_(f, backend=backend, dynamic=False))
    models = pair()
    for tokens in (16, 24):
        both(*models, 4, tokens, 16)
    with pytest.raises(RuntimeError, match="recompil"), torch.compiler.set_stance("fail_on_recompile"):
        both(*models, 4, 32, 16)


def test_numbers_may_be_constants_where_sizes_are_none(graphs):
    """What blocks of several graphs want."""
    model = Measured()
    compile_blocks(list(model.layers), backend="aot_eager", constants=True)
    plain = Measured()
    plain.load_state_dict(model.state_dict())
    for tokens in (16, 24):
        both(plain, model, 4, tokens, 16)
    warm = graphs()
    with torch.compiler.set_stance("fail_on_recompile"):
        for tokens in range(32, 80, 8):
            both(plain, model, 4, tokens, 16)
        with pytest.raises(RuntimeError, match="recompil"):
            both(plain, model, 4, 16, 32)
    assert graphs() == warm == 2


def test_more_graphs_than_torch_would_make_are_made(graphs):
    """A function whose layers differ in a constant has a graph for each."""

    class Scaled(nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.factor = factor

        def forward(self, x):
            return x * self.factor

    layers = [Scaled(2 + i) for i in range(12)]
    compile_blocks(layers, backend="aot_eager")
    x = torch.ones(3)
    assert [layer(x)[0].item() for layer in layers] == [2 + i for i in range(12)]
    assert graphs() == 12
    assert measure(x, 5).item() == 8.0
