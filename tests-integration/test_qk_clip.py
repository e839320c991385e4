"""Attention scores that exceed optim.qk_clip are scaled down, alike in every layout, at full precision."""

import pytest
import torch
from jobs import job

from kforge_testing import run_ranks
from kforge_train import ConfigError

TAU = 0.01
CLIPPED = {"optim__name": "muon", "optim__qk_clip": TAU, "optim__qk_clip_every_steps": 2, "data__microbatch_rows": 1}


def four_steps(rank, world, config):
    """The greatest score of each head over the window, as the loop saw it after each step; the weights at the end."""
    from kforge_parallel import full_parameters
    from kforge_train import qk_clip, trainer
    from kforge_train.build import build

    seen = []

    def watched(model, optimizer, optim, mesh, window, gate, step):
        qk_clip.clip_scores(model, optimizer, optim, mesh, window, gate, step)
        scores = torch.stack([qk_clip.max_logits(model, b["input_ids"], qk_clip.rows_of(b)) for b in window]).amax(0)
        seen.append(scores.max().item())

    trainer.clip_scores = watched
    with build(config) as parts:
        loop = trainer.Trainer(parts)
        for _ in range(4):
            loop.step()
        full = {name: parts.optimizer.full_weight(name).clone() for name, _ in parts.model.named_parameters()}
        return seen, full_parameters(parts.model), full


@pytest.fixture(scope="module")
def one(tokens, tmp_path_factory):
    return run_ranks(four_steps, 1, job(tokens, tmp_path_factory.mktemp("one"), **CLIPPED), init=False)[0][:2]


def test_scores_stay_under_the_threshold(tokens, tmp_path, one):
    free = {**CLIPPED, "optim__qk_clip": 0.0}
    unclipped = run_ranks(four_steps, 1, job(tokens, tmp_path, **free), init=False)[0][0]
    assert min(unclipped) > 2 * TAU
    assert unclipped[0] == one[0][0] > TAU  # not due
    # A layer sees what the clipped one before it makes of its rows, so its scores still move a little.
    assert max(one[0][1], one[0][3]) <= TAU * 1.001


LAYOUTS = {
    "shard2": {},
    "shard2-kept": {"parallel__reshard_after_forward": False},
    "tp2": {"parallel__tp": 2, "parallel__dp_shard": 1},
    "tp4": {"parallel__tp": 4, "parallel__dp_shard": 1},  # two key/value heads on four ranks
    "shard2-tp2": {"parallel__dp_shard": 2, "parallel__tp": 2},
    "rep2-shard2": {"parallel__dp_replicate": 2, "parallel__dp_shard": 2},
    "cp2-tp2": {"parallel__cp": 2, "parallel__tp": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_law_1_scores_are_clipped_alike_in_every_layout(tokens, tmp_path, one, layout):
    even = {"model__vocab_size": 64}
    if "tp" in layout:  # a vocabulary that tp divides
        one = run_ranks(four_steps, 1, job(tokens, tmp_path / "one", **CLIPPED, **even), init=False)[0][:2]
    else:
        even = {}
    world = 2 if layout in ("shard2", "shard2-kept", "tp2") else 4
    config = job(tokens, tmp_path / "run", **CLIPPED, **even, **LAYOUTS[layout])
    ranks = run_ranks(four_steps, world, config, init=False)
    for step in range(4):
        assert max(seen[step] for seen, *_ in ranks) == pytest.approx(one[0][step], rel=1e-10)
    for _, weights, _ in ranks:
        for name, right in one[1].items():
            assert (weights[name] - right).abs().max() <= 1e-10 * right.abs().max(), name


def test_split_storage_is_scaled_at_full_precision(tokens, tmp_path):
    narrow = {"parallel__precision": "bf16", "optim__muon_ns_dtype": "float32"}
    runs = {
        storage: run_ranks(four_steps, 2, job(tokens, tmp_path / storage, **CLIPPED, **narrow, **changes), init=False)
        for storage, changes in {"fp32": {}, "split": {"parallel__storage": "split"}}.items()
    }
    (seen, _, fp32), (other, halves, split) = runs["fp32"][0], runs["split"][0]
    assert seen[1] <= TAU * 1.02  # activations are bfloat16
    assert other == pytest.approx(seen, rel=0.02)
    for name, weight in split.items():
        weight, right = (t.to_local() if hasattr(t, "to_local") else t for t in (weight, fp32[name]))
        assert weight.dtype == torch.float32
        assert (weight - right).abs().max() <= 0.05 * right.abs().max() + 1e-6, name
    wqkv = "layers.0.attn.wqkv.weight"
    assert halves[wqkv].dtype == torch.bfloat16
    full = torch.cat([rank[2][wqkv].to_local() for rank in runs["split"]])
    assert torch.equal(full.to(torch.bfloat16), halves[wqkv])  # both halves were scaled, together
    assert not torch.equal(full, halves[wqkv].to(torch.float32))


def refused(rank, world, config):
    """Bits of the weights before and after the clip of a refused step, and of one whose scores are no numbers."""
    from kforge_train.build import build
    from kforge_train.qk_clip import clip_scores

    with build(config) as parts:
        window = parts.loader.next()
        weights = {name: p.detach().to_local() for name, p in parts.model.named_parameters()}
        before = {name: weight.clone() for name, weight in weights.items()}

        def clip(gate):
            clip_scores(parts.model, parts.optimizer, config.optim, parts.mesh, window, torch.tensor(gate), 2)
            return {name for name, weight in weights.items() if not torch.equal(weight, before[name])}

        kept = clip(0.0)
        changed = clip(1.0)
        weights["layers.0.attn.wqkv.weight"].fill_(torch.nan)
        weights["layers.1.attn.wqkv.weight"].copy_(before["layers.1.attn.wqkv.weight"])
        clip(1.0)
        return kept, changed, bool(weights["layers.1.attn.wqkv.weight"].isfinite().all())


def test_gate_0_and_scores_that_are_no_numbers_change_nothing(tokens, tmp_path):
    kept, changed, finite = run_ranks(refused, 1, job(tokens, tmp_path, **CLIPPED), init=False)[0]
    assert kept == set()
    assert changed == {"layers.0.attn.wqkv.weight", "layers.1.attn.wqkv.weight"}
    assert finite


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model__qk_norm": "per_head"}, "changes nothing under model.qk_norm"),
        ({"parallel__pp": 2}, "parallel.pp = 2, as no rank has all layers"),
        ({"optim__name": "schedule_free", "optim__schedule": "constant"}, "schedule_free evaluates an average"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(tokens, tmp_path, changes, words):
    with pytest.raises((ConfigError, ValueError), match=words):
        job(tokens, tmp_path, **{**CLIPPED, **changes})
