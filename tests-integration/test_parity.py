"""The layout changes nothing but speed: one process against two and four, in float64."""

import logging

import pytest
import torch
from jobs import job, train, values

from kforge_testing import run_ranks

LAYOUTS = [
    pytest.param({}, id="packed"),
    pytest.param({"data__microbatch_rows": 1}, id="accumulated"),
    pytest.param({"data__isolate_documents": False}, id="plain-rows"),
    pytest.param({"parallel__recompute": "full"}, id="recompute"),
    pytest.param({"model__tie_embeddings": True, "parallel__reshard_after_forward": False}, id="tied"),
]


def three_steps(rank, world, config):
    """Losses, gathered gradients of every step and the weights at the end."""
    from kforge_optim import clip
    from kforge_parallel import full_parameters
    from kforge_train.build import build
    from kforge_train.evaluate import evaluate

    losses, norms, gradients = [], [], []
    with build(config) as parts:
        for _ in range(3):
            window = parts.loader.next()
            scale = 1.0 / parts.engine.scored_tokens(window)
            loss = parts.engine.forward_backward(window, scale)
            gradients.append({name: p.grad.full_tensor().clone() for name, p in parts.model.named_parameters()})
            norm = clip.total_norm(parts.model.parameters())
            factor = clip.clip_factor(norm, config.optim.clip_norm)
            vote = parts.guard.vote(loss, norm, False)
            parts.optimizer.step(scale=factor, gate=vote.gate)
            parts.optimizer.zero_grad()
            losses.append(vote.loss.item())
            norms.append(norm.item())
        heldout = evaluate(parts.model, parts.heldout, config, parts.mesh)
        return losses, norms, gradients, full_parameters(parts.model), heldout


def worst(a, b):
    assert a.keys() == b.keys()
    return max(((a[name] - b[name]).abs().max() / b[name].abs().max()).item() for name in b)


def check_spread(one, ranks):
    for losses, norms, gradients, weights, heldout in ranks:
        assert losses == pytest.approx(one[0], rel=1e-12)
        assert norms == pytest.approx(one[1], rel=1e-12)
        assert all(norm > 0.05 for norm in norms)  # the clip was at work
        assert max(worst(a, b) for a, b in zip(gradients, one[2], strict=True)) < 1e-10
        assert worst(weights, one[3]) < 1e-10
        assert heldout == pytest.approx(one[4], rel=1e-12)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("changes", LAYOUTS)
def test_fsdp_equals_one_process(tokens, tmp_path, changes, optimizer):
    changes = {**changes, "optim__name": optimizer, "optim__clip_norm": 0.05}
    one = run_ranks(three_steps, 1, job(tokens, tmp_path / "one", **changes), init=False)[0]
    for world in (2, 4):
        check_spread(one, run_ranks(three_steps, world, job(tokens, tmp_path / f"{world}", **changes), init=False))


AXES = {
    "rep2-shard2": {"parallel__dp_replicate": 2, "parallel__dp_shard": 2},
    "tp2": {"parallel__tp": 2},
    "tp4": {"parallel__tp": 4},  # two key/value heads on four ranks
    "shard2-tp2": {"parallel__dp_shard": 2, "parallel__tp": 2},
    "shard2-cp2": {"parallel__dp_shard": 2, "parallel__cp": 2, "parallel__cp_style": "ring"},
    "cp2-tp2": {"parallel__cp": 2, "parallel__tp": 2, "parallel__cp_style": "ulysses"},
}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_axes_together_equal_one_process(tokens, tmp_path, optimizer):
    """Loader, engine, guard, optimizer and evaluation on meshes of more axes; tests-integration/parity has them all."""
    changes = {"optim__name": optimizer, "optim__clip_norm": 0.05, "data__microbatch_rows": 1}
    changes |= {"model__vocab_size": 64, "model__qk_norm": "per_head"}  # a multiple of tp
    one = run_ranks(three_steps, 1, job(tokens, tmp_path / "one", **changes), init=False)[0]
    for name, axes in AXES.items():
        config = job(tokens, tmp_path / name, **changes, **axes)
        check_spread(one, run_ranks(three_steps, 2 if name == "tp2" else 4, config, init=False))


def test_fp8_agrees_within_its_bound(tokens, tmp_path):
    """Not exact (`ParallelConfig.layout_exact`): values below the normal range round by the largest of their tensor, by
    up to 2⁻¹⁷ of it. Losses, first gradients and their norm stay within 1e-3; a weight cast under the scale of one rank
    only is off by a power of two."""
    changes = {"parallel__fp8": "tensorwise", "data__microbatch_rows": 1, "model__dim": 32, "model__vocab_size": 64}
    config = job(tokens, tmp_path / "one", **changes)
    assert not config.parallel.layout_exact
    losses, norms, gradients, *_ = run_ranks(three_steps, 1, config, init=False)[0]
    bf16 = job(tokens, tmp_path / "none", **{**changes, "parallel__fp8": "none"})
    plain = run_ranks(three_steps, 1, bf16, init=False)[0]
    assert 1e-3 < worst(gradients[0], plain[2][0]) < 0.5  # it is in use, and near
    assert losses == pytest.approx(plain[0], rel=0.02)
    for axes in ({}, {"parallel__tp": 2}):
        config = job(tokens, tmp_path / str(len(axes)), **changes, **axes)
        for mine in run_ranks(three_steps, 2, config, init=False):
            assert mine[0][0] == pytest.approx(losses[0], rel=1e-5)
            assert mine[0] == pytest.approx(losses, rel=1e-3)
            assert mine[1][0] == pytest.approx(norms[0], rel=1e-3)
            assert worst(mine[2][0], gradients[0]) < 1e-3


def train_telling(rank, world, config):
    """What is logged of FP8."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("kforge_parallel").addHandler(handler)
    logging.getLogger("kforge_parallel").setLevel(logging.INFO)
    assert train(rank, world, config) == 0
    return [line for line in said if line.startswith("parallel.fp8 = ")]


def test_c41_modules_that_do_not_fit_stay_in_bf16_and_the_loss_is_near(tokens, tmp_path):
    """Width 64, vocabulary 1,000, feed-forward width 100, one key/value head of 24, six experts; 50 steps."""
    sizes = {"dim": 64, "vocab_size": 1000, "ffn_dim": 100, "n_heads": 2, "n_kv_heads": 1, "head_dim": 24}
    sizes |= {"n_experts": 6, "moe_pattern": "DM", "expert_dim": 32}
    changes = {f"model__{name}": size for name, size in sizes.items()}
    changes |= {"parallel__precision": "bf16", "train__steps": 50, "train__eval_rows": 0, "optim__lr": 3e-3}
    losses = {}
    for mode in ("none", "tensorwise", "rowwise"):
        config = job(tokens, tmp_path / mode, **changes, parallel__fp8=mode)
        (said,) = run_ranks(train_telling, 1, config, init=False, timeout_s=200)
        losses[mode] = values(tmp_path / mode, "loss")
        if mode != "none":
            listed = dict(part.split(": ", 1) for part in said[0].removeprefix(f"parallel.fp8 = {mode}: ").split("; "))
            assert listed.pop("head").startswith("fp8_skip has *head")
            assert listed.pop("layers.*.moe.router") == "fp8_skip has *router"
            assert listed.pop("layers.*.moe.experts") == "experts stay in the compute dtype"
            fits = "has a size that is no multiple of 16"
            assert listed.pop("layers.*.mlp.w_gate_up") == f"[2, 100, 64] {fits}"
            assert listed.pop("layers.*.mlp.w_down") == f"[64, 100] {fits}"
            assert listed == {"layers.*.attn.wqkv (2)": "fp8", "layers.*.attn.wo (2)": "fp8"}
            assert losses[mode] == pytest.approx(losses["none"], rel=0.02) and losses[mode] != losses["none"]


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_fp8_in_stages_agrees_with_one_process(tokens, tmp_path, schedule):
    changes = {"parallel__fp8": "tensorwise", "data__microbatch_rows": 2, "model__dim": 32, "model__vocab_size": 64}
    changes |= {"model__n_layers": 4, "train__steps": 3}
    runs = {"one": {}, "stages": {"parallel__pp": 2, "parallel__pp_schedule": schedule}}
    for world, (name, axes) in enumerate(runs.items(), start=1):
        run_ranks(train, world, job(tokens, tmp_path / name, **changes, **axes), init=False)
    one, stages = (values(tmp_path / name, "loss") for name in runs)
    assert len(one) == 3 and stages == pytest.approx(one, rel=1e-3)


def stages_in_8_bits(rank, world, config, gathered):
    """How many weights of this rank travel in 8 bits, after training."""
    import kforge_parallel.build as parallel

    counts = []
    gather = parallel.gather_in_fp8

    def noted(root, mesh):
        if gathered:
            gather(root, mesh)
            counts.append(len(vars(root)["fp8_weights"].parts))

    parallel.gather_in_fp8 = noted
    assert train(rank, world, config) == 0
    return sum(counts)


def test_weights_of_stages_travel_in_8_bits(tokens, tmp_path):
    """In float64 a part has the bits of the whole under its scale: losses are the same, wherever weights are cast."""
    changes = {"parallel__fp8": "tensorwise", "data__microbatch_rows": 2, "model__dim": 32, "model__vocab_size": 64}
    changes |= {
        "model__n_layers": 4,
        "train__steps": 4,
        "parallel__pp": 2,
        "parallel__dp_shard": 2,
        "data__global_rows": 16,
    }
    found = []
    for gathered in (False, True):
        config = job(tokens, tmp_path / str(gathered), **changes, parallel__pp_schedule="interleaved_1f1b")
        counts = run_ranks(stages_in_8_bits, 4, config, gathered, init=False)
        assert all(count > 0 for count in counts) == gathered
        found.append((values(tmp_path / str(gathered), "loss"), values(tmp_path / str(gathered), "loss", "eval")))
    assert found[0] == found[1] and len(found[0][0]) == 4


def test_the_loss_is_that_of_an_independent_mean(tokens, tmp_path):
    """The first logged loss is the mean over scored tokens of the whole batch, whatever the microbatches."""
    config = job(tokens, tmp_path / "run", data__microbatch_rows=2)
    (losses, *_), _ = run_ranks(three_steps, 2, config, init=False)
    expected = run_ranks(mean_by_hand, 1, config, init=False)[0]
    assert losses[0] == pytest.approx(expected, rel=1e-12)


def test_utilisation_counts_attention_inside_documents(tokens, tmp_path):
    """FLOPs of a packed job are those of its documents' lengths; a row is counted whole where they see one another."""
    from kforge_data import TokenShards, pack_rows
    from kforge_model import flops_per_token
    from kforge_train.build import attended_lengths

    for isolated in (True, False):
        config = job(tokens, tmp_path / str(isolated), data__isolate_documents=isolated, data__row_tokens=128)
        source = TokenShards(config.data.train)
        count = source.row_count(128)
        assert count < 256  # so all of it is looked at
        lengths = attended_lengths(source, config.data)
        if isolated:
            docs = pack_rows(source.read_rows(range(count), 128)).doc_ids
            pairs = sum((row == number).sum() ** 2 for row in docs for number in set(row.tolist()))
            assert sum(n * n for n in lengths) == pairs
            assert flops_per_token(config.model, lengths) < flops_per_token(config.model, 128)
        else:
            assert lengths == [128]
        done = run_ranks(flops_told, 1, config, init=False)[0]
        assert done == flops_per_token(config.model, lengths)


def flops_told(rank, world, config):
    from kforge_train.build import build

    with build(config) as parts:
        return parts.tracker.flops_per_token


def mean_by_hand(rank, world, config):
    from dataclasses import replace

    from kforge_train.build import build
    from kforge_train.engine import rows_of

    with build(replace(config, data=replace(config.data, microbatch_rows=None))) as parts:
        (batch,) = parts.loader.next()
        logits = parts.model(batch["input_ids"], rows_of(batch))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).item()
