"""Modules cut by every word of a plan, against the same modules on one process, in float64."""

from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kforge_testing import run_ranks

ROWS, TOKENS, DIM, HEADS, KV_HEADS, HEAD_DIM, WIDE, VOCAB = 2, 8, 12, 4, 2, 3, 8, 16


class Attention(nn.Module):
    """Projections with biases and a norm of heads; the mean over tokens stands in for softmax."""

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(DIM, HEADS * HEAD_DIM)
        self.k = nn.Linear(DIM, KV_HEADS * HEAD_DIM)
        self.q_norm = nn.LayerNorm(HEAD_DIM)
        self.o = nn.Linear(HEADS * HEAD_DIM, DIM)

    def forward(self, x):
        q, k = (w(x).unflatten(-1, (-1, HEAD_DIM)) for w in (self.q, self.k))
        k = k.repeat_interleave(q.shape[-2] // k.shape[-2], -2)
        return self.o((self.q_norm(q) * torch.tanh(k.cumsum(1))).flatten(-2))


class Gated(nn.Module):
    """A fused weight [2, WIDE, DIM]: both parts are views; down is a parameter used in the module's own forward."""

    def __init__(self):
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(2, WIDE, DIM))
        self.down = nn.Parameter(torch.empty(DIM, WIDE))

    def forward(self, x):
        gate, up = F.linear(x, self.gate_up.flatten(0, 1)).unflatten(-1, (2, -1)).unbind(-2)
        return F.linear(F.silu(gate) * up, self.down)


class FusedAttention(nn.Module):
    """One weight [KV, queries a group + 1, head, DIM], cut by groups of heads."""

    def __init__(self):
        super().__init__()
        self.qk = nn.Parameter(torch.empty(KV_HEADS, HEADS // KV_HEADS + 1, HEAD_DIM, DIM))
        self.o = nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)

    def forward(self, x):
        heads = F.linear(x, self.qk.flatten(0, 2)).unflatten(-1, self.qk.shape[:3])
        q, k = heads[..., :-1, :], heads[..., -1:, :]
        return self.o((q * torch.tanh(k.cumsum(1))).flatten(-3))


class Head(nn.Module):
    """Sum of log-probabilities of the inputs themselves, over a part of the vocabulary or all of it."""

    group, vocab_start = None, 0

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(VOCAB, DIM))

    def forward(self, x, ids):
        from kforge_parallel.collectives import reduce

        z = F.linear(x, self.weight)
        own = (ids >= self.vocab_start) & (ids < self.vocab_start + self.weight.shape[0])
        target = z.gather(-1, (ids - self.vocab_start).where(own, 0)[..., None])[..., 0].where(own, 0)
        total = z.exp().sum(-1)
        if self.group is not None:
            target, total = reduce(target, self.group), reduce(total, self.group)
        return (total.log() - target).sum()


class Block(nn.Module):
    def __init__(self, mixer, mlp):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.mixer = mixer()
        self.mlp = mlp()

    def forward(self, x):
        x = x + self.mixer(self.norm(x))
        return x + self.mlp(x)


class Model(nn.Module):
    shape: ClassVar = {"n_kv_heads": KV_HEADS}
    block_list = "layers"
    plan: ClassVar = {
        "embed": "vocab_embedding",
        "layers.*.norm": "sequence",
        "layers.0.mixer": "gather",
        "layers.0.mixer.q": "colwise",
        "layers.0.mixer.k": "colwise_kv",
        "layers.0.mixer.q_norm": "replicate",
        "layers.0.mixer.o": "rowwise",
        "layers.*.mlp.gate_up": "packed_colwise",
        "layers.*.mlp.down": "rowwise",
        "head": "vocab_loss",
    }
    fused: ClassVar = {"layers.1.mixer.qk": "colwise", "layers.1.mixer.o": "rowwise", "layers.1.mixer": "gather"}

    def __init__(self, tied=False, with_fused=False):
        super().__init__()
        self.tied = tied
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleDict({"0": Block(Attention, Gated)})
        if with_fused:
            self.layers["1"] = Block(FusedAttention, Gated)
            self.plan = {**self.plan, **self.fused}
        self.head = Head()
        if tied:
            self.head.weight = self.embed.weight

    def fsdp_units(self):
        return [["embed", "head"]] if self.tied else [["embed"], ["head"]]

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.layers.values():
            x = block(x)
        return self.head(x, ids)


def values(name, shape):
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=generator, dtype=torch.float64) / 2


def fill(model):
    from torch.distributed.tensor import DTensor, distribute_tensor

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = values(name, parameter.shape)
            if isinstance(parameter, DTensor):
                whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
                parameter.to_local().copy_(whole.to_local())
            else:
                parameter.copy_(whole)


IDS = torch.arange(4 * TOKENS).view(4, TOKENS) * 5 % VOCAB


def on_ranks(rank, world, tp, tied, with_fused, sequence_parallel):
    """Loss, gradients in full, and whether those that ranks hold alike are alike bit for bit."""
    import torch.distributed as dist

    from kforge_parallel import ParallelConfig, launch, parallelize

    config = ParallelConfig(tp=tp, precision="fp64", sequence_parallel=sequence_parallel)
    mesh = launch(config)
    model = parallelize(lambda: Model(tied, with_fused), mesh, config, init=fill, gradients="sum")
    assert not tied or model.head.weight is model.embed.weight
    rows = IDS.chunk(mesh.data_size)[mesh.data_rank]
    loss = model(rows)
    loss.backward()
    total = loss.detach() / mesh.copies
    dist.all_reduce(total)
    gradients, alike = {}, True
    for name, parameter in model.named_parameters():
        assert parameter.grad.placements == parameter.placements, name
        if parameter.placements[-1].is_replicate():
            everyone = [torch.empty_like(parameter.grad.to_local()) for _ in range(tp)]
            dist.all_gather(everyone, parameter.grad.to_local(), group=mesh.tp.get_group())
            alike &= all(torch.equal(everyone[0], other) for other in everyone)
        gradients[name] = parameter.grad.full_tensor()
    return total.item(), gradients, alike


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "whole"])
@pytest.mark.parametrize(
    ("world", "tp", "tied", "with_fused"),
    [(2, 2, True, True), (4, 2, False, True), (4, 4, False, False), (4, 4, True, False)],
    ids=["tp2-tied", "tp2-fsdp2", "tp4-fewer-kv-heads", "tp4-tied"],
)
def test_loss_and_gradients_are_those_of_one_process(world, tp, tied, with_fused, sequence_parallel):
    model = Model(tied, with_fused).double()
    fill(model)
    loss = model(IDS)
    loss.backward()
    for total, gradients, alike in run_ranks(on_ranks, world, tp, tied, with_fused, sequence_parallel):
        assert total == pytest.approx(loss.item(), rel=1e-13)
        assert alike
        for name, parameter in model.named_parameters():
            difference = (gradients[name] - parameter.grad).abs().max() / parameter.grad.abs().max()
            assert difference < 1e-12, name


def refusals(rank, world):
    from kforge_parallel import ParallelConfig, launch, parallelize

    config = ParallelConfig(tp=world, precision="fp64")
    mesh = launch(config)
    said = []
    for build, plan in [
        (lambda: nn.Sequential(nn.Linear(4, 6)), None),
        (lambda: nn.Sequential(nn.Linear(4, 6)), {"0": "colwise"}),
        (lambda: nn.Sequential(nn.Linear(4, 8)), {"0": "colwise_kv"}),
        (lambda: nn.Sequential(nn.Linear(4, 8)), {"0": "vocab_loss"}),
    ]:
        try:
            parallelize(build, mesh, config, plan=plan)
        except ValueError as error:
            said.append(str(error))
    model = parallelize(Model, mesh, config, gradients="sum")
    try:
        model(IDS[:, :6])
    except ValueError as error:
        said.append(str(error))
    return said


def test_what_cannot_be_cut_is_refused_with_both_numbers():
    unplanned, odd, kv, head, tail = run_ranks(refusals, 4)[0]
    assert "tp = 4 needs to know how to cut Sequential" in unplanned and "plan={" in unplanned
    assert "0.weight has 6 entries along dimension 0, which tp = 4 does not divide" in odd
    assert "does not say how many key/value heads" in kv
    assert "Linear is to work on a part of the vocabulary" in head
    assert "rows of 6 tokens cannot be split over tp = 4" in tail and "sequence_parallel = false" in tail


class Twice(nn.Module):
    """One MLP used under two names."""

    plan: ClassVar = {"*.0": "colwise", "*.2": "rowwise", "norm": "sequence"}

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.first = self.second = nn.Sequential(nn.Linear(DIM, WIDE), nn.GELU(), nn.Linear(WIDE, DIM))

    def forward(self, x):
        x = x + self.first(self.norm(x))
        return x + self.second(x)


def used_twice(rank, world):
    from kforge_parallel import ParallelConfig, launch, parallelize

    config = ParallelConfig(tp=world, precision="fp64")
    mesh = launch(config)
    model = parallelize(Twice, mesh, config, init=fill, gradients="sum")
    x = values("x", (2, TOKENS, DIM)).chunk(world, 1)[rank]
    model(x).square().sum().backward()
    return {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}


def test_a_module_used_twice_is_cut_once():
    model = Twice().double()
    fill(model)
    model(values("x", (2, TOKENS, DIM))).square().sum().backward()
    for gradients in run_ranks(used_twice, 2):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-11, atol=1e-11, msg=name)


class Pair(nn.Linear):
    def forward(self, x):
        return super().forward(x), None


class Odd(nn.Module):
    """Modules that tensor parallelism cannot serve as they are called or built."""

    plan: ClassVar = {"up": "colwise", "down": "rowwise", "embed": "vocab_embedding"}

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(VOCAB, DIM, max_norm=1.0 if kind == "limit" else None)
        self.up, self.down = nn.Linear(DIM, WIDE), nn.Linear(WIDE, DIM)
        self.drop = nn.Dropout(0.1 if kind == "dropout" else 0.0)
        if kind == "tuple":
            self.down = Pair(WIDE, DIM)

    def forward(self, ids):
        x = self.embed(ids)
        return self.down(self.up(ids if self.kind == "integers" else x))


def odd_models(rank, world):
    from kforge_parallel import ParallelConfig, launch, parallelize

    config = ParallelConfig(tp=world, precision="fp64", sequence_parallel=False)
    mesh = launch(config)
    said = []
    for kind in ("integers", "tuple", "limit", "dropout"):
        try:
            parallelize(lambda kind=kind: Odd(kind), mesh, config)(IDS)
            said.append("nothing")
        except (TypeError, ValueError) as error:
            said.append(str(error))
    return said


def test_modules_that_cannot_be_served_are_named():
    integers, several, limit, dropout = run_ranks(odd_models, 2)[0]
    assert "Linear gets its input from other tensor-parallel ranks" in integers
    assert "must return one tensor" in several and "it returned tuple" in several
    assert "an embedding with max_norm = 1.0 cannot be cut over the vocabulary" in limit
    assert "drop drops values with p = 0.1" in dropout and "sequence_parallel to true" in dropout


class Crossed(nn.Module):
    """Cross attention of a kind: both inputs are gathered, by keyword, before a norm that is followed by own heads."""

    plan: ClassVar = {
        "mix": "gather",
        "mix.norm": "sequence",
        "mix.inner": "gather",
        "mix.inner.q": "colwise",
        "mix.inner.k": "colwise",
        "mix.inner.o": "rowwise",
        "out": "sequence",
    }

    def __init__(self):
        super().__init__()
        self.mix = nn.Module()
        self.mix.norm = nn.LayerNorm(DIM)
        self.mix.inner = Inner()
        self.mix.forward = lambda x, other: self.mix.inner(self.mix.norm(x), kv=self.mix.norm(other))
        self.out = nn.LayerNorm(DIM)

    def forward(self, x):
        return self.out(x + self.mix(x, other=torch.tanh(x)))


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.o = nn.Linear(DIM, WIDE), nn.Linear(DIM, WIDE), nn.Linear(WIDE, DIM)

    def forward(self, x, kv):
        return self.o(input=self.q(input=x) * self.k(kv).cumsum(1))


def crossed(rank, world, sequence_parallel):
    from kforge_parallel import ParallelConfig, launch, parallelize

    mesh = launch(ParallelConfig(tp=world, precision="fp64", sequence_parallel=sequence_parallel))
    model = parallelize(Crossed, mesh, init=fill, gradients="sum")
    x = values("x", (2, TOKENS, DIM))
    model(x.chunk(world, 1)[rank] if sequence_parallel else x).square().sum().backward()
    return {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "whole"])
def test_every_input_of_a_gathered_module_and_what_it_holds(sequence_parallel):
    model = Crossed().double()
    fill(model)
    model(values("x", (2, TOKENS, DIM))).square().sum().backward()
    for gradients in run_ranks(crossed, 2, sequence_parallel):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-11, atol=1e-11, msg=name)


def test_compiled_code_serves_every_object_that_comes_beside_the_input():
    from kforge_parallel.tensor import _entered

    made = []

    def backend(graph, inputs):
        made.append(graph)
        return graph.forward

    class Rows:
        pass

    def enter(x, rows):
        (x, same), _ = _entered(nn.Identity(), lambda part: part * 2, False, (x, rows), {})
        return x + 1, same

    compiled, x = torch.compile(enter, backend=backend), torch.ones(3)
    for rows in (Rows(), Rows(), Rows()):
        y, same = compiled(x, rows)
        assert y.tolist() == [3.0, 3.0, 3.0] and same is rows
    assert len(made) == 1
