"""The greatest scores are those of the formula, and scaling a head scales its scores and no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from kforge_model import ModelConfig, Rows, Transformer, qk_clip
from kforge_model.points import capture
from kforge_model.qk_clip import max_logits, qk_factors, scale_qk
from kforge_testing import run_ranks

MLA = {"attention": "mla", "kv_lora_rank": 12, "head_dim": 12, "rope_dim": 4}
KINDS: dict[str, dict[str, Any]] = {
    "mha": {"qkv_bias": True},
    "gqa": {"n_kv_heads": 2, "qkv_bias": True, "window": 3, "window_pattern": "WF"},
    "mqa": {"n_kv_heads": 1, "sinks": True, "attn_softcap": 1.0},
    "mla": {**MLA, "v_head_dim": 6},
    "mla_q": {**MLA, "q_lora_rank": 10, "window": 4},
}


def build(kind: str, seed: int = 0) -> Transformer:
    config = ModelConfig(vocab_size=37, dim=32, n_layers=2, n_heads=4, init_std=0.3, **KINDS[kind])
    model = Transformer(config).double()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "sinks")):
            nn.init.normal_(parameter, generator=generator)
    return model


@torch.no_grad()
def scores_of(model: Transformer, ids: Tensor, rows: Rows | None, layer: int) -> Tensor:
    """[B,H,S,S], a head at a time, -inf where unseen."""
    attn, config = model.layers[str(layer)].attn, model.config
    given: list[Any] = []
    handle = attn.register_forward_pre_hook(lambda _, args: given.extend(args[:2]))
    model(ids, rows)
    handle.remove()
    q, k, _ = attn.project(*given)
    batch, _, seq, _ = q.shape
    scores = torch.full((batch, config.n_heads, seq, seq), -torch.inf, dtype=q.dtype)
    docs = torch.zeros(batch, seq) if rows is None else rows.doc_ids
    window = config.window_of(layer) or seq
    for b in range(batch):
        for head in range(config.n_heads):
            for i in range(seq):
                for j in range(max(0, i - window + 1), i + 1):
                    if docs[b, i] == docs[b, j]:
                        key = k[b, head * k.shape[1] // config.n_heads, j]
                        scores[b, head, i, j] = config.score_scale * q[b, head, i] @ key
    return scores


@pytest.mark.parametrize("kind", KINDS)
def test_max_logits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(kind)
    ids = torch.randint(37, (2, 9))
    for rows in (None, Rows.packed([[4, 5], [9]])):
        right = torch.stack([scores_of(model, ids, rows, layer).amax((0, 2, 3)) for layer in range(2)])
        for elements in (1 << 26, 1, 2 * 4 * 9 * 2):  # all queries at once, one at a time, two at a time
            monkeypatch.setattr(qk_clip, "CHUNK_ELEMENTS", elements)
            model.train()
            assert (max_logits(model, ids, rows) - right).abs().max() < 1e-12
            assert all(module.training for module in model.modules())
    assert bool((max_logits(model, ids[:0]) == -torch.inf).all())  # nothing was scored


@pytest.mark.parametrize("factor", [0.3, 1.7])
@pytest.mark.parametrize("kind", KINDS)
def test_scaling_a_head_scales_its_scores_and_no_others(kind: str, factor: float) -> None:
    model = build(kind)
    ids = torch.randint(37, (2, 9))
    with capture(model, "layers.0") as before:
        old = max_logits(model, ids)
    scores = scores_of(model, ids, None, 1)
    scale_qk(model, 1, 2, factor)
    with capture(model, "layers.0") as after:
        new = max_logits(model, ids)
    assert torch.equal(before["layers.0"][0], after["layers.0"][0])  # the layer before is as it was
    right = old.clone()
    right[1, 2] *= factor
    assert (new - right).abs().max() < 1e-12
    scores[:, 2] *= factor
    error = (scores_of(model, ids, None, 1) - scores).nan_to_num()  # -inf where unseen, in both
    assert error.abs().max() < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_factors_of_weights_are_what_scaling_head_by_head_does(kind: str) -> None:
    scaled, multiplied = build(kind), build(kind)
    factors = torch.linspace(0.3, 1.7, 8, dtype=torch.float64).reshape(2, 4)
    factors[0, 1] = 1
    for layer in range(2):
        for head in range(4):
            scale_qk(scaled, layer, head, factors[layer, head].item())
    weights = dict(multiplied.named_parameters())
    for name, by in qk_factors(multiplied, factors):
        assert by.ndim == weights[name].ndim
        with torch.no_grad():
            weights[name].mul_(by)
    for name, right in scaled.named_parameters():
        torch.testing.assert_close(weights[name], right, rtol=1e-14, atol=0, msg=name)
    stage = build(kind).stage(False, [1], True)
    assert {name.split(".")[1] for name, _ in qk_factors(stage, factors[1:])} == {"1"}


def test_clipping_to_a_threshold() -> None:
    model = build("gqa")
    ids = torch.randint(37, (2, 9))
    greatest = max_logits(model, ids)
    for head in range(4):
        if greatest[0, head] > 1:
            scale_qk(model, 0, head, 1 / greatest[0, head].item())
    assert (max_logits(model, ids)[0] - greatest[0].clamp(max=1)).abs().max() < 1e-12


def test_a_stage_has_its_layers() -> None:
    model = build("gqa")
    stage = model.stage(False, [1], True)
    ids = torch.randint(37, (2, 9))
    with capture(model, "layers.0") as seen:
        right = max_logits(model, ids)[1:]
    assert (max_logits(stage, seen["layers.0"][0]) - right).abs().max() < 1e-12
    with pytest.raises(ValueError, match="no layer 0 here; there are 1"):
        scale_qk(stage, 0, 0, 0.5)


def _on_shards(rank: int, world: int, kind: str) -> int:
    """Every parameter cut along every dimension it has, and along two at once."""
    whole, cut = build(kind), build(kind)
    for layer, head, factor in ((0, 0, 0.5), (1, 3, 0.3), (0, 2, 1.5)):
        scale_qk(whole, layer, head, factor)
    right = dict(whole.named_parameters())
    checked = 0
    meshes = [(init_device_mesh("cpu", (world,)), [(Shard(dim),) for dim in range(4)])]
    meshes.append((init_device_mesh("cpu", (2, 2)), [(Shard(0), Shard(1)), (Shard(1), Shard(0)), (Shard(0), Shard(0))]))
    for mesh, cuts in meshes:
        for placements in cuts:
            model = build(kind)
            for name, parameter in list(model.named_parameters()):
                if max(p.dim for p in placements) >= parameter.ndim:
                    continue
                owner, leaf = name.rpartition(".")[::2]
                shards = distribute_tensor(parameter.detach(), mesh, placements)
                setattr(model.get_submodule(owner), leaf, nn.Parameter(shards))
            for layer, head, factor in ((0, 0, 0.5), (1, 3, 0.3), (0, 2, 1.5)):
                scale_qk(model, layer, head, factor)
            for name, parameter in model.named_parameters():
                if isinstance(parameter, DTensor):
                    assert torch.equal(parameter.full_tensor(), right[name]), (name, placements)
                    checked += 1
    assert any(not torch.equal(p, right[n]) for n, p in cut.named_parameters())
    return checked


def test_sharded_weights() -> None:
    """Four ranks: more than some dimensions have elements, so some ranks have nothing of them."""
    for kind in ("gqa", "mla"):
        assert min(run_ranks(_on_shards, 4, kind, timeout_s=60)) > 20


def test_user_errors() -> None:
    model = build("mha")
    for factor in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="factor"):
            scale_qk(model, 0, 0, factor)
    with pytest.raises(ValueError, match="head = 4"):
        scale_qk(model, 0, 4, 0.5)
    with pytest.raises(ValueError, match="no layer 2"):
        scale_qk(model, 2, 0, 0.5)
    for kind in ("per_head", "across_heads"):
        normed = Transformer(ModelConfig(vocab_size=37, dim=32, n_layers=1, n_heads=4, qk_norm=kind))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="changes nothing"):
            scale_qk(normed, 0, 0, 0.5)
        with pytest.raises(ValueError, match="changes nothing"):
            list(qk_factors(normed, torch.ones(1, 4)))
