"""Jobs with experts: what moves their routers' biases and what does not, and what comes out of them."""

import pytest
import torch
from jobs import job, train, values

from kforge_parallel.fsdp import full
from kforge_testing import run_ranks

EXPERTS = {
    "model__vocab_size": 64,
    "model__n_experts": 4,
    "model__expert_dim": 12,
    "model__router": "sigmoid",
    "model__router_bias": True,
    "model__router_bias_rate": 0.01,
    "model__balance_loss": 0.1,
}
EP = {"parallel__ep": 2}


def everything(parts):
    """Weights, biases and the optimizer's state, in full."""
    found = {f"model.{name}": full(tensor) for name, tensor in parts.model.state_dict().items()}

    def walk(path, value):
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{path}.{key}", inner)
        elif isinstance(value, torch.Tensor):
            found[path] = full(value)

    walk("optim", parts.optimizer.state_dict())
    return found


def spoil_one_expert(rank, world, config, victim):
    """What there is before and after each of four steps; at the third, one expert computes no numbers on one rank."""
    from kforge_train.build import build
    from kforge_train.trainer import Trainer

    with build(config) as parts:
        trainer = Trainer(parts)
        parts.optimizer.init_state()

        def spoil(experts, args, rows):
            if trainer.next_step == 2 and rank == victim:
                return torch.cat((rows[:-1], rows[-1:] * torch.nan))
            return rows

        parts.model.layers["1"].moe.experts.register_forward_hook(spoil)
        seen = [everything(parts)]
        for _ in range(4):
            trainer.step()
            seen.append(everything(parts))
        return seen


@pytest.mark.parametrize("victim", [0, 1])
def test_an_expert_that_computes_no_numbers_changes_nothing_anywhere(tokens, tmp_path, victim):
    ranks = run_ranks(spoil_one_expert, 2, job(tokens, tmp_path, **EXPERTS, **EP), victim, init=False)
    for seen in ranks:
        assert sum(name.endswith("router.bias") for name in seen[0]) == 2 and len(seen[0]) > 30
        for name in seen[0]:
            before, after = seen[2][name], seen[3][name]
            assert torch.equal(before, after), name
            assert after.isfinite().all()
            assert all(
                torch.equal(mine, theirs)
                for mine, theirs in zip(seen_at(ranks[0], name), seen_at(seen, name), strict=True)
            )
        for step in (1, 2, 4):
            moved = [name for name in seen[0] if not torch.equal(seen[step][name], seen[step - 1][name])]
            assert "model.layers.1.moe.router.bias" in moved and "model.layers.1.moe.experts.w_down" in moved


def seen_at(seen, name):
    return [state[name] for state in seen]


def test_evaluation_between_steps_moves_nothing(tokens, tmp_path):
    """Nor does it count: with one after each step, all is as without."""
    for name, every in (("with", 1), ("without", 0)):
        config = job(tokens, tmp_path / name, **EXPERTS, **EP, train__eval_every_steps=every)
        assert run_ranks(train, 2, config, init=False) == [0, 0]
    assert len(values(tmp_path / "with", "loss", "eval")) == 6
    for name in ("loss", "grad_norm", "moe/0/load_max", "moe/1/entropy", "moe/1/bias_range", "moe/balance_loss"):
        assert values(tmp_path / "with", name) == values(tmp_path / "without", name), name


def biases(rank, world, config, until):
    """Go on to a step, save, and return the biases of both layers."""
    from kforge_train.build import build
    from kforge_train.trainer import Trainer

    with build(config) as parts:
        trainer = Trainer(parts)
        trainer.restore()
        while trainer.next_step < until:
            trainer.step()
        trainer.save()
        return torch.stack([parts.model.layers[layer].moe.router.bias for layer in "01"])


def test_the_rate_of_the_biases_may_change_at_a_resume(tokens, tmp_path):
    first = run_ranks(biases, 2, job(tokens, tmp_path, **EXPERTS, **EP), 3, init=False)[0]
    changed = {**EXPERTS, "model__router_bias_rate": 0.5}
    second = run_ranks(biases, 1, job(tokens, tmp_path, **changed), 4, init=False)[0]
    steps = (first / 0.01).round()
    assert steps.any() and torch.allclose(first, steps * 0.01)
    moved = (second - first).abs()
    assert moved.any() and torch.allclose(moved, torch.where(moved > 0.25, 0.5, 0.0).to(moved.dtype), atol=1e-12)


def exported(rank, world, config):
    """After three steps, the weights as they are written for transformers."""
    from kforge_model import to_hf
    from kforge_parallel import full_state
    from kforge_train.build import build
    from kforge_train.trainer import Trainer

    with build(config) as parts:
        trainer = Trainer(parts)
        for _ in range(3):  # after two, the biases are back where they were
            trainer.step()
        if world > 1:
            with pytest.raises(ValueError, match="is a DTensor, spread over ranks"):
                to_hf(parts.model.state_dict(), config.model)
        return to_hf(full_state(parts.model), config.model)


def test_a_job_over_ranks_writes_the_experts_of_all_for_transformers(tokens, tmp_path):
    latents = {"attention": "mla", "head_dim": 6, "rope_dim": 2, "kv_lora_rank": 8, "q_lora_rank": 6, "norm_eps": 1e-6}
    model = {f"model__{name}": value for name, value in {**latents, "n_kv_heads": None, "moe_pattern": "DM"}.items()}
    model |= {**EXPERTS, "model__shared_experts": 1}
    over = job(tokens, tmp_path / "over", **model, parallel__tp=2, parallel__ep=4)
    (expected,) = run_ranks(exported, 1, job(tokens, tmp_path / "one", **model), init=False)
    for written in run_ranks(exported, 4, over, init=False):
        assert written.keys() == expected.keys()
        assert "model.layers.1.mlp.experts.3.up_proj.weight" in written
        assert written["model.layers.1.mlp.gate.e_score_correction_bias"].any()
        for name, weight in expected.items():
            assert (written[name] - weight).abs().max() < 1e-10, name
