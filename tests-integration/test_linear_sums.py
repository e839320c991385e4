"""Gradients that products of linear modules add up by themselves are seen by all who look at gradients: norms, groups,
clipping, optimizers of two kinds, QK-clip."""

import math

import pytest
import torch
from jobs import job

from kforge_metrics import read_events
from kforge_testing import run_ranks

OPTIONS = {"parallel__precision": "bf16", "parallel__storage": "split", "data__microbatch_rows": 4, "train__seed": 2}
MUON = {"optim__name": "muon", "optim__qk_clip": 1e-3, "optim__qk_clip_every_steps": 1}
PRODUCTS = ("wqkv.weight", "wo.weight", "w_gate_up.weight", "w_down.weight")


def three_steps(rank, world, config, types):
    """Weights and gradients by name before each step of the optimizer; names of its groups; weights at the end."""
    import kforge_parallel.build
    from kforge_train.build import build
    from kforge_train.trainer import Trainer

    kforge_parallel.build.LINEAR_SUMS = types
    with build(config) as parts:
        trainer = Trainer(parts)
        step, seen = parts.optimizer.step, []

        def weights():
            return {name: parts.optimizer.full_weight(name).clone() for name, _ in parts.model.named_parameters()}

        def noted(**scalars):
            seen.append((weights(), {name: p.grad.clone() for name, p in parts.model.named_parameters()}))
            step(**scalars)

        parts.optimizer.step = noted
        for _ in range(3):
            trainer.step()
        parts.tracker.close()
        groups = {group.name: list(group.parameters) for group in parts.optimizer.groups}
        return seen, groups, weights()


@pytest.mark.parametrize("options", [{"optim__clip_norm": 0.1}, MUON], ids=["adamw", "muon"])
def test_the_loop_sees_them(tokens, tmp_path, options):
    (old, _, old_end), (new, groups, end) = (
        run_ranks(
            three_steps,
            1,
            job(tokens, tmp_path / name, **OPTIONS, **options),
            types,
            init=False,
        )[0]
        for name, types in (("old", ()), ("new", ("cpu",)))
    )
    products = {name for name in end if name.endswith(PRODUCTS)}
    assert len(products) == 8
    weights, gradients = new[0]
    for name, gradient in gradients.items():
        before = old[0][1][name]
        assert torch.equal(weights[name], old[0][0][name]) and gradient.dtype == torch.float32
        if name in products:  # of two microbatches, each rounded before
            assert 0 < (gradient - before).abs().max() <= 2**-7 * before.abs().max(), name
        else:
            assert torch.equal(gradient, before), name
    for name in products:  # the optimizer takes them
        assert not torch.equal(end[name], weights[name]), name
        assert (end[name] - old_end[name]).abs().max() < 0.2 * (end[name] - weights[name]).abs().max(), name
    logged = [event.values for event in read_events(tmp_path / "new" / "events.jsonl") if event.kind == "step"]
    for (_, each), values in zip(new, logged, strict=True):
        squares = {name: gradient.double().square().sum().item() for name, gradient in each.items()}
        assert values["grad_norm"] == pytest.approx(math.sqrt(sum(squares.values())), rel=1e-5)
        for group, names in groups.items():
            assert values[f"norm/{group}"] == pytest.approx(math.sqrt(sum(squares[n] for n in names)), rel=1e-5)
