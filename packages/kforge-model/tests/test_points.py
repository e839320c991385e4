"""What is kept is what the modules returned; what attention looks at follows the formula."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kforge_model import ModelConfig, Rows, Transformer
from kforge_model.generation import generate
from kforge_model.points import attention_weights, capture, find_points
from kforge_model.rope import Rotary, rope_frequencies

MLA = {"attention": "mla", "kv_lora_rank": 12, "head_dim": 12, "rope_dim": 4}


def build(**options: Any) -> Transformer:
    model = Transformer(ModelConfig(vocab_size=37, dim=32, n_layers=3, n_heads=4, init_std=0.3, **options)).double()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize("offload", [False, True])
def test_outputs_by_name(offload: bool) -> None:
    model = build()
    ids = torch.randint(37, (2, 7))
    with capture(model, ["layers.*.mlp", "layers.0.attn", "head"], offload=offload) as seen:
        logits = model(ids)
        _, nll = model(ids, None, ids, 1.0)
    assert list(seen) == ["layers.0.attn", "layers.0.mlp", "layers.1.mlp", "layers.2.mlp", "head"]
    assert all(len(calls) == 2 for calls in seen.values())
    assert torch.equal(seen["head"][0], logits) and torch.equal(seen["head"][1][1], nll)
    assert not seen["head"][0].requires_grad and logits.requires_grad
    block = model.layers["0"]
    h = model.embed(ids)
    x = h + seen["layers.0.attn"][0]
    assert (block.mlp(block.mlp_norm(x)) - seen["layers.0.mlp"][0]).abs().max() < 1e-12
    model(ids)
    assert len(seen["head"]) == 2  # nothing is kept afterwards


class Found(NamedTuple):
    value: Tensor
    parts: list[Tensor]


class Splits(torch.nn.Module):
    def forward(self, x: Tensor) -> Found:
        return Found(x + 1, [x, 2 * x])


def test_tuples_and_lists_stay_what_they_are() -> None:
    model = torch.nn.ModuleDict({"splits": Splits()})
    x = torch.ones(3, requires_grad=True)
    with capture(model, "splits", offload=True) as seen:
        out = model["splits"](x)
    kept = seen["splits"][0]
    assert isinstance(kept, Found) and isinstance(kept.parts, list)
    assert torch.equal(kept.value, out.value) and torch.equal(kept.parts[1], out.parts[1])
    assert not kept.value.requires_grad and not kept.parts[1].requires_grad


def test_hooks_go_when_the_model_fails() -> None:
    model = build()
    with pytest.raises(ValueError, match="ids hold 99"), capture(model, "head"):
        model(torch.full((1, 2), 99))
    assert not model.head._forward_hooks


def test_compiled_blocks_are_seen() -> None:
    model = build()
    ids = torch.randint(37, (2, 7))
    torch._dynamo.reset()
    for block in model.layers.values():
        block.compile(backend="eager", fullgraph=True)
    right = model(ids)
    with capture(model, "layers.*.attn.wo") as seen:
        assert torch.equal(model(ids), right)
    assert all(len(calls) == 1 for calls in seen.values())
    assert attention_weights(model, ids)[2].shape == (2, 4, 7, 7)
    torch._dynamo.reset()


def test_a_generated_token_is_a_call() -> None:
    with capture(model := build(), "layers.1") as seen:
        generate(model, torch.zeros(2, 3, dtype=torch.int64), 4)
    assert [tuple(h.shape) for h in seen["layers.1"]] == [(2, 3, 32), *[(2, 1, 32)] * 3]


def test_patterns() -> None:
    model = build()
    assert find_points(model, "layers.[02]") == ["layers.0", "layers.2"]
    assert find_points(model, ["*"]) == ["embed", "layers", "norm", "head", "mtp"]  # * does not reach over a dot
    with pytest.raises(ValueError, match=r"no module .* 'layers\.\*\.mpl'; near it are layers\.\*\.mlp"):
        find_points(model, ["head", "layers.*.mpl"])
    with pytest.raises(ValueError, match="its parts are embed, layers, norm, head, mtp"):
        find_points(model, "zzzzzzzz")


def naive_weights(model: Transformer, h: Tensor, positions: Tensor, seen: Tensor, layer: int) -> Tensor:
    """One row's weights [H,S,S], a head at a time, from the block's input h [S,D]."""
    config, attn = model.config, model.layers[str(layer)].attn
    x = model.layers[str(layer)].attn_norm(h)
    rotary = Rotary.at(positions[None], rope_frequencies(config, config.window_of(layer))[0], h.dtype)

    def turned(y: Tensor) -> Tensor:  # [S,R]
        return rotary.rotate(y[None, :, None])[0, :, 0]

    result = []
    for head in range(config.n_heads):
        if config.attention == "gqa":
            group, at = divmod(head, config.n_heads // config.kv_heads)
            weight, bias = attn.wqkv.weight[group], attn.wqkv.bias
            q, k = x @ weight[at].T, x @ weight[-2].T
            if bias is not None:
                q, k = q + bias[group, at], k + bias[group, -2]
            q, k = turned(q), turned(k)
        else:
            nope, wide = attn.unrotated, attn.head_dim
            q = (x @ attn.wq.weight.T)[:, head * wide : (head + 1) * wide]
            latent, key = (x @ attn.wkv_a.weight.T).split((attn.rank, attn.rotated), 1)
            first = head * (nope + attn.value_dim)
            k = attn.kv_a_norm(latent) @ attn.wkv_b.weight[first : first + nope].T
            q, k = torch.cat((q[:, :nope], turned(q[:, nope:])), 1), torch.cat((k, turned(key)), 1)
        scores = q @ k.T * config.score_scale
        if config.attn_softcap:
            scores = config.attn_softcap * (scores / config.attn_softcap).tanh()
        top = scores.masked_fill(~seen, -math.inf).exp()
        total = top.sum(-1, keepdim=True)
        result.append(top / (total + attn.sinks[head].exp() if config.sinks else total))
    return torch.stack(result)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_kv_heads": 2, "qkv_bias": True, "rope_dim": 4},
        {"n_kv_heads": 1, "window": 3, "window_pattern": "WF", "sinks": True, "attn_softcap": 1.5, "attn_scale": 0.7},
        {**MLA, "sinks": True, "window": 4, "window_pattern": "FW"},
    ],
)
@torch.no_grad()
def test_attention_weights(options: dict[str, Any], packed: bool) -> None:
    model = build(**options)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    ids = torch.randint(37, (2, 9))
    lengths = [[4, 5], [9]] if packed else [[9], [9]]
    rows = Rows.packed(lengths) if packed else None
    model.train()
    got = attention_weights(model, ids, rows, layers=[2, 1])
    assert list(got) == [2, 1] and all(module.training for module in model.modules())
    with capture(model, "layers.*") as blocks:
        model(ids, rows)
    for layer, weights in got.items():
        for row in range(2):
            positions = torch.cat([torch.arange(n) for n in lengths[row]])
            docs = torch.cat([torch.full((n,), at) for at, n in enumerate(lengths[row])])
            seen = (docs[:, None] == docs).tril()
            if (window := model.config.window_of(layer)) is not None:
                seen = seen.triu(1 - window)
            right = naive_weights(model, blocks[f"layers.{layer - 1}"][0][row], positions, seen, layer)
            assert (weights[row] - right).abs().max() < 1e-12


def test_a_layer_that_is_not_there() -> None:
    model = build()
    with pytest.raises(ValueError, match="no layer 3 here; there are 0, 1, 2"):
        attention_weights(model, torch.zeros(1, 2, dtype=torch.int64), layers=[3])
    stage = model.stage(False, [1, 2], False)
    assert list(attention_weights(stage, torch.randn(1, 5, 32, dtype=torch.float64))) == [1, 2]
