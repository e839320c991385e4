"""Split storage trains the weights that fp32 storage trains, bit for bit."""

import torch
from jobs import job

from kforge_parallel.fsdp import full
from kforge_testing import run_ranks


def five_steps(rank, world, config):
    """Gradients and fp32 weights of every step, in full."""
    from kforge_train.build import build
    from kforge_train.trainer import Trainer

    found = []
    with build(config) as parts:
        trainer = Trainer(parts)
        step, gradients = parts.optimizer.step, {}

        def noted(**scalars):
            gradients.update({name: full(p.grad) for name, p in parts.model.named_parameters()})
            step(**scalars)

        parts.optimizer.step = noted
        for _ in range(6):
            weights = {name: full(parts.optimizer.full_weight(name)) for name, _ in parts.model.named_parameters()}
            found.append((weights, dict(gradients)))
            trainer.step()
    return found


def test_one_process_trains_the_same_bits(tokens, tmp_path):
    """The bf16 halves are what a cast makes of the fp32 weights, ties excepted: up to the first, all is equal."""
    fp32, split = (
        run_ranks(five_steps, 1, job(tokens, tmp_path / storage, **OPTIONS, parallel__storage=storage), init=False)[0]
        for storage in ("fp32", "split")
    )
    compared = 0
    for (weights, gradients), (split_weights, split_gradients) in zip(fp32, split, strict=True):
        assert weights.keys() == split_weights.keys()
        for name, weight in weights.items():
            assert torch.equal(weight, split_weights[name]), name
        for name, gradient in gradients.items():
            assert torch.equal(gradient, split_gradients[name]), name
        compared += 1
        if any(((w.view(torch.int32) & 0xFFFF) == 0x8000).any() for w in weights.values()):
            break
    assert compared >= 1 and len(fp32[0][0]) > 10


OPTIONS = {"parallel__precision": "bf16", "data__microbatch_rows": 4, "train__seed": 2}
