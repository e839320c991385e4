"""The loss is the mean over scored tokens, however they are spread over microbatches."""

import pytest
import torch

from kforge_testing import run_ranks

LABELS = torch.tensor([[3, 1, 4, 1, 5, -100], [-100, 2, -100, -100, -100, -100], [-100] * 6, [2, 7, 1, 8, 2, 8]])


def microbatches(rows, labels):
    ids = torch.arange(labels.numel()).view_as(labels) % 11
    positions = torch.arange(labels.shape[1]).expand_as(labels)
    return [
        {
            "input_ids": ids[part],
            "labels": labels[part],
            "position_ids": positions[part],
            "doc_ids": None,
            "cu_seqlens": None,
            "max_seqlen": labels.shape[1],
        }
        for part in rows
    ]


def loss_and_gradients(rank, world, rows, labels):
    from kforge_model import ModelConfig, Transformer
    from kforge_parallel import launch, parallelize
    from kforge_train.engine import PlainEngine

    mesh = launch()
    config = ModelConfig(vocab_size=11, dim=8, n_layers=2, n_heads=2)
    model = parallelize(
        lambda: Transformer(config), mesh, init=lambda m: m.init_weights(3), precision="fp64", gradients="sum"
    )
    engine = PlainEngine(model, mesh)
    window = microbatches(rows, labels)
    count = engine.scored_tokens(window)
    loss = engine.forward_backward(window, 1.0 / count.clamp(min=1))
    torch.distributed.all_reduce(loss)
    return count.item(), loss.item(), {n: p.grad.full_tensor().clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    "rows", [[slice(0, 2), slice(2, 4)], [slice(i, i + 1) for i in range(4)], [slice(0, 3), slice(3, 4)]], ids=len
)
def test_microbatches_of_unequal_counts_make_the_same_mean(rows):
    whole = run_ranks(loss_and_gradients, 1, [slice(0, 4)], LABELS)[0]
    parts = run_ranks(loss_and_gradients, 1, rows, LABELS)[0]
    assert parts[0] == whole[0] == 12
    assert parts[1] == pytest.approx(whole[1], rel=1e-13)
    for name, gradient in whole[2].items():
        torch.testing.assert_close(parts[2][name], gradient, rtol=1e-11, atol=1e-14)


def test_a_window_without_a_label_changes_nothing():
    count, loss, gradients = run_ranks(loss_and_gradients, 1, [slice(0, 4)], torch.full((4, 6), -100))[0]
    assert (count, loss) == (0, 0)
    assert all(bool((gradient == 0).all()) for gradient in gradients.values())
