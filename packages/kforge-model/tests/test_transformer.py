"""The whole model against a plain float64 reimplementation, and the properties its users rely on."""

from __future__ import annotations

import copy
import math
import pickle
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kforge_model import ModelConfig, Rows, Transformer, fuse, num_parameters, rope_frequencies, separate
from kforge_testing import run_ranks

SIZES: dict[str, Any] = {
    "vocab_size": 53, "dim": 24, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "ffn_dim": 40,
    "max_seq_len": 64, "rope_theta": 500.0,
}  # fmt: skip
CONFIG = ModelConfig(**SIZES)
TIED = ModelConfig(**SIZES, tie_embeddings=True)
LATENT = {"attention": "mla", "n_kv_heads": None, "head_dim": 10, "rope_dim": 4, "kv_lora_rank": 12}

OPTIONS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_embeddings": True},
    "mha": {"n_kv_heads": None},
    "mqa": {"n_kv_heads": 1},
    "norm-per-head": {"qk_norm": "per_head"},
    "norm-across-heads": {"qk_norm": "across_heads", "norm_placement": "post"},
    "sandwich": {"norm": "layernorm", "norm_placement": "sandwich", "qk_norm": "across_heads", "norm_eps": 0.1},
    "biases": {"qkv_bias": True, "out_bias": True, "mlp_bias": True},
    "gate": {"attn_gate": True},
    "window": {"window": 4},
    "windows": {"window": 5, "window_pattern": "WF", "rope_theta_window": 30.0},
    "soft-caps": {"attn_softcap": 1.5, "logit_softcap": 3.0, "attn_scale": 0.3},
    "sinks": {"sinks": True, "window": 6, "window_pattern": "FW"},
    "partial": {"rope_dim": 4, "embed_scale": 3.0},
    "yarn": {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_len": 32, "rope_high": 8.0},
    "latent": LATENT,
    "latent-queries": {**LATENT, "q_lora_rank": 9, "v_head_dim": 7, "attn_gate": True, "sinks": True, "out_bias": True},
    **{name: {"mlp": name} for name in ("geglu", "geglu_tanh", "gelu", "gelu_tanh", "relu")},
    "relu2": {"mlp": "relu2", "mlp_bias": True},
    "geglu-biases": {"mlp": "geglu", "mlp_bias": True},
    "padded": {"vocab_multiple": 64},
    "mup": {"mup_base_dim": 6, "init": "truncated_normal"},
    "further": {"mtp_depth": 2},
    "experts": {"n_experts": 6, "expert_dim": 12},
    "experts-losses": {"n_experts": 6, "expert_dim": 12, "balance_loss": 0.7, "router_z_loss": 0.02},
    "experts-batch": {"n_experts": 4, "balance_loss": 0.5, "balance_over": "batch", "router_scale": 1.7},
    "experts-sigmoid": {
        "n_experts": 6,
        "expert_dim": 12,
        "moe_top_k": 3,
        "router": "sigmoid",
        "router_bias": True,
        "router_scale": 2.5,
        "shared_experts": 2,
        "balance_loss": 0.5,
    },
    "experts-groups": {
        "n_experts": 8,
        "expert_dim": 12,
        "router": "sigmoid",
        "router_bias": True,
        "router_groups": 4,
        "router_top_groups": 2,
        "moe_top_k": 3,
    },
    "experts-groups-softmax": {
        "n_experts": 8,
        "expert_dim": 12,
        "router_groups": 4,
        "router_top_groups": 2,
        "router_norm": False,
        "router_bias": True,
        "balance_loss": 0.5,
    },
    "experts-capacity": {"n_experts": 6, "expert_dim": 12, "expert_capacity": 0.8, "router_norm": False},
    "experts-one": {"n_experts": 6, "moe_top_k": 1, "router_norm": False, "router_z_loss": 0.02},
    "experts-all": {"n_experts": 4, "moe_top_k": 4, "expert_dim": 20, "norm_placement": "sandwich"},
    "experts-pattern": {"n_experts": 6, "moe_pattern": "DM", "mtp_depth": 2, "balance_loss": 0.5, "window": 5},
    "experts-relu2": {"n_experts": 6, "expert_dim": 12, "mlp": "relu2", "shared_experts": 1},
    "further-tied-windows": {"mtp_depth": 1, "tie_embeddings": True, "window": 5, "window_pattern": "FFFW"},
}
"""Every choice of a model, by itself or with what it must go with."""


BY_DOCUMENT = {"balance_loss": 0.0, "balance_over": "sequence", "expert_capacity": None}
"""What makes experts work on each document by itself, whichever row it lies in."""


def config_of(name: str, **changes: Any) -> ModelConfig:
    return ModelConfig(**{**SIZES, **OPTIONS[name], **changes})


def make(config: ModelConfig = CONFIG, dtype: torch.dtype = torch.float64, std: float = 0.3) -> Transformer:
    """Weights large enough that every part matters; norms away from 1, biases and sinks away from 0."""
    model = Transformer(ModelConfig(**{**config.__dict__, "init_std": std})).to(dtype)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith(("bias", "sinks")):
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(dtype) / 4)
        for buffer in model.buffers():
            buffer.add_(torch.randn(buffer.shape, generator=generator) / 8)
    return model


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": lambda g: g * torch.sigmoid(g),
    "geglu": lambda g: g * (1 + torch.erf(g / 2**0.5)) / 2,
    "geglu_tanh": lambda g: g * (1 + torch.tanh((2 / math.pi) ** 0.5 * (g + 0.044715 * g**3))) / 2,
    "relu": lambda g: g.clamp(min=0),
    "relu2": lambda g: g.clamp(min=0) ** 2,
}
ACTIVATIONS |= {"gelu": ACTIVATIONS["geglu"], "gelu_tanh": ACTIVATIONS["geglu_tanh"]}


class Reference:
    """The model written from the papers, float64: matrices, explicit masks, one query head at a time."""

    def __init__(self, weights: Mapping[str, Tensor], config: ModelConfig, docs: Tensor) -> None:
        self.p, self.config, self.docs = separate(weights, config), config, docs
        self.aux: dict[str, Tensor] = {}
        """Of each layer with experts: its balance loss and z-loss, for a scale of 1."""
        seq = docs.shape[1]
        self.position = torch.stack([torch.stack([(d[: i + 1] == d[i]).sum() - 1 for i in range(seq)]) for d in docs])

    def norm(self, name: str, x: Tensor) -> Tensor:
        if f"{name}.bias" in self.p:
            x = x - x.mean(-1, keepdim=True)
        x = x / (x.pow(2).mean(-1, keepdim=True) + self.config.norm_eps).sqrt() * self.p[f"{name}.weight"]
        return x + self.p.get(f"{name}.bias", 0.0)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.p[f"{name}.weight"].T + self.p.get(f"{name}.bias", 0.0)

    def turn(self, x: Tensor, layer: int) -> Tensor:
        """x [B,S,H,Dh], its first features rotated as complex numbers."""
        frequency, factor = rope_frequencies(self.config, self.config.window_of(layer))
        half = len(frequency)
        angle = self.position[:, :, None, None] * frequency
        turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((turned.real * factor, turned.imag * factor, x[..., 2 * half :]), -1)

    def heads(self, at: str, x: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """q [B,S,H,Dh], k [B,S,KV,Dh], v [B,S,KV,Dv]."""
        c = self.config
        if c.attention == "mla":
            nope = c.head_size - c.rope_size
            q = self.linear(f"{at}.wq", x) if c.q_lora_rank is None else self.linear(
                f"{at}.wq_b", self.norm(f"{at}.q_a_norm", self.linear(f"{at}.wq_a", x))
            )  # fmt: skip
            q = q.unflatten(-1, (c.n_heads, c.head_size))
            q = torch.cat((q[..., :nope], self.turn(q[..., nope:], layer)), -1)
            both = self.linear(f"{at}.wkv_a", x)
            latent = self.norm(f"{at}.kv_a_norm", both[..., : c.kv_lora_rank])
            shared = self.turn(both[..., None, c.kv_lora_rank :], layer)
            kv = self.linear(f"{at}.wkv_b", latent).unflatten(-1, (c.n_heads, nope + c.value_size))
            k = torch.cat((kv[..., :nope], shared.repeat_interleave(c.n_heads, 2)), -1)
            return q, k, kv[..., nope:]
        q, k, v = (self.linear(f"{at}.w{n}", x) for n in "qkv")
        if c.qk_norm == "across_heads":
            q, k = self.norm(f"{at}.q_norm", q), self.norm(f"{at}.k_norm", k)
        q, k, v = (t.unflatten(-1, (-1, c.head_size)) for t in (q, k, v))
        if c.qk_norm == "per_head":
            q, k = self.norm(f"{at}.q_norm", q), self.norm(f"{at}.k_norm", k)
        return self.turn(q, layer), self.turn(k, layer), v

    def attention(self, at: str, x: Tensor, layer: int) -> Tensor:
        c, seq = self.config, x.shape[1]
        q, k, v = self.heads(at, x, layer)
        row, column = torch.arange(seq)[:, None], torch.arange(seq)
        seen = (self.docs[:, :, None] == self.docs[:, None, :]) & (column <= row)
        if (window := c.window_of(layer)) is not None:
            seen = seen & (column > row - window)
        out = []
        for h in range(c.n_heads):
            group = h * k.shape[2] // c.n_heads
            scores = q[:, :, h] @ k[:, :, group].mT * (c.head_size**-0.5 if c.attn_scale is None else c.attn_scale)
            if c.attn_softcap:
                scores = c.attn_softcap * torch.tanh(scores / c.attn_softcap)
            weights = scores.exp() * seen
            total = weights.sum(-1, keepdim=True) + (self.p[f"{at}.sinks"][h].exp() if c.sinks else 0.0)
            out.append(weights / total @ v[:, :, group])
        y = torch.cat(out, -1)
        if c.attn_gate:
            y = y * torch.sigmoid(self.linear(f"{at}.w_gate", x))
        return self.linear(f"{at}.wo", y)

    def mlp(self, at: str, x: Tensor) -> Tensor:
        act = ACTIVATIONS[self.config.mlp]
        hidden = self.linear(f"{at}.w_up", x)
        hidden = act(self.linear(f"{at}.w_gate", x)) * hidden if f"{at}.w_gate.weight" in self.p else act(hidden)
        return self.linear(f"{at}.w_down", hidden)

    def choice(self, scores: list[float]) -> list[int]:
        """The experts of one token, whose biased scores are given."""
        c, size = self.config, self.config.n_experts // self.config.router_groups
        best = 1 if c.router == "softmax" else 2
        groups = sorted(
            range(c.router_groups), key=lambda g: -sum(sorted(scores[g * size : (g + 1) * size], reverse=True)[:best])
        )
        allowed = [e for g in groups[: c.router_top_groups] for e in range(g * size, (g + 1) * size)]
        return sorted(allowed, key=lambda e: -scores[e])[: c.moe_top_k]

    def moe(self, at: str, x: Tensor) -> Tensor:
        c, (rows, seq) = self.config, x.shape[:2]
        logits = x @ self.p[f"{at}.router.weight"].T
        scores = logits.softmax(-1) if c.router == "softmax" else torch.sigmoid(logits)
        biased = (scores + self.p.get(f"{at}.router.bias", 0.0)).detach()
        chosen = torch.zeros(rows, seq, c.n_experts)
        for b, t in np.ndindex(rows, seq):
            chosen[b, t, self.choice(biased[b, t].tolist())] = 1
        weights = scores * chosen * c.router_scale
        weights = weights / (scores * chosen).sum(-1, keepdim=True) if c.router_norm else weights

        likely = scores / scores.sum(-1, keepdim=True)
        if c.balance_over == "batch":
            uneven = (chosen.sum((0, 1)) * likely.sum((0, 1))).sum() / rows
        else:
            uneven = (chosen.sum(1) * likely.sum(1)).sum()
        z = (logits.exp().sum(-1).log() ** 2).sum()
        self.aux[at] = c.balance_loss * uneven * c.n_experts / (c.moe_top_k * seq) + c.router_z_loss * z

        if c.expert_capacity is not None:
            places = math.ceil(c.expert_capacity * rows * seq * c.moe_top_k / c.n_experts)
            kept = torch.zeros_like(chosen)
            for e in range(c.n_experts):
                tokens = chosen[..., e].nonzero().tolist()
                for b, t in sorted(tokens, key=lambda bt, e=e: -weights[(*bt, e)].item())[:places]:
                    kept[b, t, e] = 1
            left = (weights * kept).sum(-1, keepdim=True)
            weights = weights * kept * weights.sum(-1, keepdim=True) / (left + (left == 0))
        y = sum(weights[..., e, None] * self.expert(at, e, x) for e in range(c.n_experts))
        return y + self.mlp(f"{at}.shared", x) if c.shared_experts else y

    def expert(self, at: str, e: int, x: Tensor) -> Tensor:
        act = ACTIVATIONS[self.config.mlp]
        if f"{at}.experts.w_up" in self.p:
            hidden = act(x @ self.p[f"{at}.experts.w_up"][e].T)
        else:
            gate, up = self.p[f"{at}.experts.w_gate_up"][e]
            hidden = act(x @ gate.T) * (x @ up.T)
        return hidden @ self.p[f"{at}.experts.w_down"][e].T

    def block(self, at: str, x: Tensor, layer: int) -> Tensor:
        for half in ("attn", "mlp"):
            y = x if self.config.norm_placement == "post" else self.norm(f"{at}.{half}_norm", x)
            if half == "attn":
                y = self.attention(f"{at}.attn", y, layer)
            else:
                y = self.moe(f"{at}.moe", y) if self.config.has_experts(layer) else self.mlp(f"{at}.mlp", y)
            x = x + (y if self.config.norm_placement == "pre" else self.norm(f"{at}.{half}_post_norm", y))
        return x

    def embed(self, ids: Tensor) -> Tensor:
        return self.p["embed.weight"][ids] * self.config.embed_scale

    def head(self, x: Tensor) -> Tensor:
        c = self.config
        logits = x @ self.p.get("head.weight", self.p["embed.weight"])[: c.vocab_size].T
        logits = logits * (c.mup_base_dim / c.dim if c.mup_base_dim else 1.0)
        return c.logit_softcap * torch.tanh(logits / c.logit_softcap) if c.logit_softcap else logits

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in range(self.config.n_layers):
            x = self.block(f"layers.{layer}", x, layer)
        return x

    def logits(self, ids: Tensor) -> Tensor:
        return self.head(self.norm("norm", self.hidden(ids)))

    def further_nll(self, ids: Tensor, labels: Tensor) -> list[Tensor]:
        """Of each depth, the sum over positions that have a label k tokens on, in their document."""
        h, sums, seq = self.norm("norm", self.hidden(ids)), [], ids.shape[1]
        for k in range(1, self.config.mtp_depth + 1):
            at = f"mtp.{k - 1}"
            later = torch.cat((ids[:, k:], torch.zeros(len(ids), k, dtype=torch.int64)), 1)
            joined = torch.cat(
                (self.norm(f"{at}.hidden_norm", h), self.norm(f"{at}.embed_norm", self.embed(later))), -1
            )
            h = self.block(f"{at}.block", self.linear(f"{at}.proj", joined), self.config.n_layers + k - 1)
            h = self.norm(f"{at}.norm", h)
            logp = self.head(h).log_softmax(-1)
            sums.append(
                -sum(
                    logp[b, i, labels[b, i + k]]
                    for b in range(len(ids))
                    for i in range(seq - k)
                    if self.docs[b, i] == self.docs[b, i + k] and labels[b, i + k] != -100
                )
            )
        return sums  # type: ignore[return-value]


def batch(packed: bool) -> tuple[Tensor, Tensor, Rows, Tensor]:
    """ids, labels, rows, documents of each token: two rows of 16."""
    generator = torch.Generator().manual_seed(5)
    ids, labels = torch.randint(53, (2, 2, 16), generator=generator)
    labels = labels.masked_fill(torch.rand(2, 16, generator=generator) < 0.3, -100)
    rows = Rows.packed([[4, 12], [7, 8, 1]]) if packed else Rows.plain(2, 16)
    return ids, labels, rows, torch.zeros(2, 16) if rows.doc_ids is None else rows.doc_ids


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_logits_loss_and_gradients_are_those_of_the_plain_formulas(name: str, packed: bool) -> None:
    model = make(config_of(name))
    config = model.config
    ids, labels, rows, docs = batch(packed)
    weights = {n: t.detach().clone().requires_grad_() for n, t in model.state_dict().items()}
    plain = Reference(weights, config, docs)
    right = plain.logits(ids)
    got = model(ids, rows)
    assert got.shape == (2, 16, config.vocab_size)
    assert (got - right).abs().max() <= 1e-12 * right.abs().max()

    per_token = F.cross_entropy(right.flatten(0, 1), labels.flatten(), reduction="none").view(2, 16)
    total = per_token.sum() * 0.05
    if config.mtp_depth:
        total = total + sum(plain.further_nll(ids, labels)) * 0.05 * config.mtp_weight / config.mtp_depth
    loss, nll = model(ids, rows, labels, 0.05)
    assert (nll - per_token).abs().max() <= 1e-12 * per_token.max()
    assert loss.item() == pytest.approx(total.item(), rel=1e-12)
    loss.backward()
    (total + 0.05 * sum(plain.aux.values())).backward()  # the experts' losses are in the gradients only
    assert len(plain.aux) == sum(config.has_experts(i) for i in range(config.n_layers + config.mtp_depth))
    for n, parameter in model.named_parameters():
        assert parameter.grad is not None and weights[n].grad is not None, n
        assert (parameter.grad - weights[n].grad).abs().max() <= 1e-10 * weights[n].grad.abs().max(), n  # type: ignore[union-attr]


# In bfloat16 a token near the border between two experts goes to the other one: no bound but where all are chosen.
CHOOSING = [name for name in OPTIONS if config_of(name).n_experts and name != "experts-all"]


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [
        *((name, torch.float32, 2e-5) for name in OPTIONS),
        *((name, torch.bfloat16, 0.1) for name in OPTIONS if name not in CHOOSING),
    ],
)
def test_lower_precision_stays_near(name: str, dtype: torch.dtype, tolerance: float) -> None:
    model = make(config_of(name), dtype)
    ids, labels, rows, docs = batch(True)
    right = Reference({n: t.double() for n, t in model.state_dict().items()}, model.config, docs).logits(ids)
    got = model(ids, rows)
    assert got.dtype == dtype
    assert (got.double() - right).abs().max() <= tolerance * right.abs().max()
    loss, nll = model(ids, rows, labels, 0.05)
    assert loss.dtype == nll.dtype == torch.float32


@pytest.mark.parametrize("name", OPTIONS)
def test_a_packed_row_is_its_documents_alone(name: str) -> None:
    """Logits and gradients of a row of three documents, and the sum over the three by themselves."""
    changes = BY_DOCUMENT if "n_experts" in OPTIONS[name] else {}
    packed, alone = make(config_of(name, **changes)), make(config_of(name, **changes))
    ids, labels, _, _ = batch(False)
    loss, nll = packed(ids[:1], Rows.packed([[7, 8, 1]]), labels[:1], 0.1)
    loss.backward()
    total, seen = 0.0, []
    for part in (slice(0, 7), slice(7, 15), slice(15, 16)):
        one, each = alone(ids[:1, part], None, labels[:1, part], 0.1)
        one.backward()
        total += one.item()
        seen.append(each)
    assert (nll - torch.cat(seen, 1)).abs().max() < 1e-12
    assert loss.item() == pytest.approx(total, rel=1e-12)
    for (n, one), two in zip(packed.named_parameters(), alone.parameters(), strict=True):
        assert (one.grad - two.grad).abs().max() <= 1e-10 * two.grad.abs().max(), n  # type: ignore[operator, union-attr]


def test_further_tokens_are_for_training_only() -> None:
    model = make(config_of("further"))
    ids, labels, rows, _ = batch(True)
    with_them = model(ids, rows, labels, 0.1)
    model.eval()
    without = model(ids, rows, labels, 0.1)
    assert torch.equal(with_them[1], without[1])
    assert without[0].item() == pytest.approx(without[1].sum().item() * 0.1) and with_them[0] > without[0]


@pytest.mark.parametrize("tied", [False, True])
def test_initial_loss(tied: bool) -> None:
    config = ModelConfig(
        vocab_size=2048, dim=512, n_layers=4, n_heads=8, n_kv_heads=2, init_std=0.03, tie_embeddings=tied
    )
    model = Transformer(config)
    model.init_weights(1)
    ids, labels = torch.randint(2048, (2, 4, 128))
    with torch.no_grad():
        loss, _ = model(ids, labels=labels, scale=1 / labels.numel())
    assert loss.item() == pytest.approx(math.log(2048) + 0.03**2 * 512 / 2, rel=0.02)


@pytest.mark.parametrize("recompute", [False, True])
def test_documents_do_not_see_one_another(recompute: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    model = make(dtype=torch.float32)
    if recompute:
        for block in model.layers.values():
            plain = block.forward
            block.forward = lambda *a, plain=plain: checkpoint(plain, *a, use_reentrant=False)
    ids = torch.randint(53, (1, 48))
    rows = Rows.packed([[19, 29]])
    before = model(ids, rows)[:, 19:]
    ids[:, :19] = torch.randint(53, (1, 19))
    assert torch.equal(model(ids, rows)[:, 19:], before)
    assert (model(ids[:, 19:]) - before).abs().max() < 1e-5
    assert (model(ids)[:, 19:] - before).abs().max() > 1e-2  # as one document they would
    # and nothing flows back
    x = make().embed.weight.detach()[ids].requires_grad_()  # type: ignore[union-attr]
    rest = make().stage(first=False, layers=range(3), last=True)
    rest(x, rows)[:, 19:].sum().backward()
    assert x.grad is not None and not x.grad[:, :19].any() and x.grad[:, 19:].any()


def test_learns_the_next_token_and_not_the_one_after() -> None:
    config = ModelConfig(vocab_size=10, dim=32, n_layers=1, n_heads=2, max_seq_len=32)
    model = Transformer(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    start = torch.arange(8)[:, None]
    ids = (start + torch.arange(32)) % 10
    for _ in range(60):
        loss, _ = model(ids, labels=(ids + 1) % 10, scale=1 / ids.numel())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert model(torch.tensor([[3, 4, 5]]))[0, -1].argmax() == 6
    with torch.no_grad():
        loss, _ = model(ids, labels=(ids + 1) % 10, scale=1 / ids.numel())
        usual = F.cross_entropy(model(ids).flatten(0, 1), ((ids + 1) % 10).flatten())
    assert abs(loss - usual) < 1e-5


@pytest.mark.parametrize("how", ["plain", "meta", "to", "deepcopy", "pickle", "load", "assign"])
def test_tied_weights_stay_one(how: str) -> None:
    if how == "meta":
        with torch.device("meta"):
            model = Transformer(TIED)
        model.to_empty(device="cpu")
        assert model.head.weight is model.embed.weight  # type: ignore[union-attr]
        model.init_weights(0)
    else:
        model = Transformer(TIED)
        if how == "to":
            model = model.to(torch.bfloat16).double()
        elif how == "deepcopy":
            model = copy.deepcopy(model)
        elif how == "pickle":
            model = pickle.loads(pickle.dumps(model))
        elif how == "assign":
            model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()}, assign=True)
        elif how == "load":
            model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()})
    assert model.head is not None and model.embed is not None
    assert model.head.weight is model.embed.weight
    assert "head.weight" not in model.state_dict()
    assert [n for n, _ in model.named_parameters()].count("embed.weight") == 1
    assert sum(p.numel() for p in model.parameters()) == num_parameters(TIED)


def test_state_of_a_tied_model_loads_with_and_without_the_second_name() -> None:
    model, other = make(TIED), make(TIED, std=0.1)
    state = model.state_dict()
    other.load_state_dict(state)
    assert torch.equal(other.embed.weight, model.embed.weight)  # type: ignore[union-attr]
    other = make(TIED, std=0.1)
    other.load_state_dict({**state, "head.weight": state["embed.weight"]})
    assert torch.equal(other.head.weight, model.embed.weight)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match=r"head\.weight"):
        make(CONFIG).load_state_dict(state)


def _sgd_step(rank: int, world: int, tied: bool) -> dict[str, Tensor]:
    from torch.distributed.fsdp import FSDPModule, fully_shard

    config = TIED if tied else CONFIG
    with torch.device("meta"):
        model = Transformer(config).double()
    for block in model.layers.values():
        fully_shard(block)
    for unit in model.fsdp_units():
        fully_shard([model.get_submodule(name) for name in unit])
    fully_shard(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    model.to_empty(device="cpu")
    model.init_weights(4)
    _step(model, slice(rank, None, world))
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()})
    if tied:
        assert model.head is not None and model.embed is not None
        assert model.head.weight is model.embed.weight
        assert len(list(model.parameters())) == len(list(model.state_dict()))
    return {name: parameter.full_tensor() for name, parameter in model.named_parameters()}  # type: ignore[attr-defined]


def _step(model: Transformer, mine: slice) -> None:
    generator = torch.Generator().manual_seed(0)
    ids, labels = torch.randint(53, (2, 4, 16), generator=generator)
    docs = [[4, 12], [7, 8, 1], [16], [15, 1]]
    loss, _ = model(ids[mine], Rows.packed(docs[mine]), labels[mine], 1 / 64)
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()


@pytest.mark.parametrize("tied", [False, True])
def test_a_step_under_fsdp_is_the_step_of_one_process(tied: bool) -> None:
    alone = Transformer(TIED if tied else CONFIG).double()
    alone.init_weights(4)
    _step(alone, slice(None))
    for got in run_ranks(_sgd_step, 2, tied):
        for name, parameter in alone.named_parameters():
            assert (got[name] - parameter).abs().max() <= 1e-12 * parameter.abs().max(), name


def _mixed_precision(rank: int, world: int, tied: bool) -> tuple[float, float, str]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    def build(**options: Any) -> Transformer:
        model = Transformer(TIED if tied else CONFIG)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, **options)
        for block in model.layers.values():
            fully_shard(block, mp_policy=policy)
        for unit in model.fsdp_units():
            fully_shard([model.get_submodule(name) for name in unit], mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        return model

    ids, labels = torch.arange(32).view(2, 16), torch.arange(1, 33).view(2, 16)
    whole, _ = Transformer(TIED if tied else CONFIG)(ids, labels=labels, scale=1 / 32)
    scale = torch.tensor(1 / 32)
    model = build(cast_forward_inputs=False)
    loss, nll = model(ids, labels=labels, scale=scale)
    assert loss.dtype == nll.dtype == torch.float32
    loss.backward()
    for parameter in model.parameters():
        assert parameter.dtype == torch.float32 and parameter.grad is not None and parameter.grad.dtype == torch.float32
    try:
        build()(ids, labels=labels, scale=scale)
        message = "nothing"
    except ValueError as error:
        message = str(error)
    return whole.item(), loss.item(), message


@pytest.mark.parametrize("tied", [False, True])
def test_bf16_compute_over_fp32_shards(tied: bool) -> None:
    for whole, loss, message in run_ranks(_mixed_precision, 2, tied):
        assert loss == pytest.approx(whole, rel=2e-3)
        assert "cast_forward_inputs" in message


def test_stages_compose_to_the_model_under_the_same_names() -> None:
    model = make()
    ids, labels = torch.randint(53, (2, 2, 16))
    rows = Rows.packed([[4, 12], [16]])
    parts = [
        model.stage(first=True, layers=[0], last=False),
        model.stage(first=False, layers=[1], last=False),
        model.stage(first=False, layers=[2], last=True),
    ]
    h = parts[1](parts[0](ids, rows), rows)
    assert h.shape == (2, 16, 24)
    assert torch.equal(parts[2](h, rows), model(ids, rows))
    assert torch.equal(parts[2](h, rows, labels, 0.1)[0], model(ids, rows, labels, 0.1)[0])
    names = [name for part in parts for name, _ in part.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert [part.fsdp_units() for part in parts] == [[["embed"]], [], [["norm", "head"]]]
    with pytest.raises(ValueError, match="rise within"):
        model.stage(first=True, layers=[3], last=False)
    with pytest.raises(ValueError, match="not in this stage"):
        parts[1].stage(first=True, layers=[1], last=False)


@pytest.mark.parametrize("name", ["tied", "further", "further-tied", "experts-losses"])
def test_gradients_of_stages_add_up_to_those_of_the_model(name: str) -> None:
    changes = OPTIONS["further"] if name == "further-tied" else OPTIONS[name]
    model = make(ModelConfig(**{**SIZES, **changes, "tie_embeddings": "tied" in name}))
    ids, labels = torch.randint(53, (2, 2, 16))
    rows = Rows.packed([[4, 12], [16]])
    loss, nll = model(ids, rows, labels, 0.1)
    loss.backward()
    want = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    first, last = model.stage(True, [0], False), model.stage(False, [1, 2], True)
    names = [{name for name, _ in part.named_parameters()} for part in (first, last)]
    assert names[0] | names[1] == want.keys()
    assert names[0] & names[1] == ({"embed.weight"} if name != "experts-losses" else set())
    assert last.tied == model.tied and last.fsdp_units()[-1][-1] == "head"
    h = first(ids, rows, labels=labels, scale=0.1)
    got, nll_of_stages = last(h, rows, labels=labels, scale=0.1, ids=ids)
    assert torch.equal(nll_of_stages, nll) and got.item() == pytest.approx(loss.item(), rel=1e-13)
    got.backward()
    for key, grad in want.items():
        assert grad is not None
        found = [part.get_parameter(key).grad for part, own in zip((first, last), names, strict=True) if key in own]
        total = torch.stack([one for one in found if one is not None]).sum(0)
        assert (total - grad).abs().max() <= 1e-12 * grad.abs().max(), key


def test_a_stage_that_embeds_further_tokens_wants_the_ids() -> None:
    last = make(config_of("further")).stage(False, [2], True)
    h, labels = torch.randn(1, 4, 24, dtype=torch.float64), torch.ones(1, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"this stage embeds further tokens \(mtp_depth\); pass the token ids"):
        last(h, labels=labels, scale=1.0)
    last.eval()
    assert last(h, labels=labels, scale=1.0)[1].shape == (1, 4)


def test_hidden_states_of_a_stage_may_be_a_part_of_each_row() -> None:
    middle = make().stage(False, [1], False)
    rows, h = Rows.plain(2, 16), torch.randn(2, 8, 24, dtype=torch.float64)
    assert middle._fits((2, 16), (2, 8)) and not middle._fits((2, 12), (2, 8)) and not middle._fits((1, 16), (2, 8))
    with pytest.raises(ValueError, match=r"rows of shape \(2, 16\) do not fit an input of \(2, 8\)"):
        make()(torch.ones(2, 8, dtype=torch.int64), rows)
    with pytest.raises(ValueError, match=r"rows of shape \(2, 16\) do not fit an input of \(2, 7\)"):
        middle(h[:, :7], rows)


def test_stages_may_be_cut_by_what_their_blocks_cost() -> None:
    blocks, last = make().stage_costs()
    model = make()
    assert blocks == [sum(p.numel() for p in model.layers[key].parameters()) for key in model.layers]
    assert last == 53 * 24
    config = config_of("experts", moe_pattern="DMD", moe_top_k=2)
    blocks, last = Transformer(config).stage_costs()
    every = num_parameters(ModelConfig(**SIZES, n_experts=6, expert_dim=12, moe_top_k=2), active=True)
    assert every is not None
    assert blocks == [blocks[0], (every - 2 * 53 * 24 - 24) / 3, blocks[0]]  # two experts of six
    further, last = make(config_of("further")).stage_costs()
    assert last == 3 * 53 * 24 + 2 * further[0]


def test_stages_start_from_the_same_bits() -> None:
    for config in (CONFIG, TIED):
        whole = Transformer(config)
        whole.init_weights(9)
        with torch.device("meta"):
            model = Transformer(config)
        for part in (
            model.stage(first=True, layers=[0, 1], last=False),
            model.stage(first=False, layers=[2], last=True),
        ):
            part.to_empty(device="cpu")
            part.init_weights(9)
            for name, parameter in part.named_parameters():
                assert torch.equal(parameter, whole.get_parameter(name)), name


@pytest.mark.parametrize("name", OPTIONS)
def test_plan_and_units_name_what_exists(name: str) -> None:
    model = Transformer(config_of(name))

    def globbed(full: str) -> str:
        return re.sub(r"^(layers|mtp)\.\d+", r"\1.*", full)

    modules = {globbed(n) for n, _ in model.named_modules()}
    parameters = {globbed(n) for n, _ in model.named_parameters()}
    assert set(model.plan) <= modules | parameters
    words = {"gather", "colwise", "colwise_kv", "colwise_qkv", "packed_colwise", "rowwise", "sequence", "replicate"}
    assert set(model.plan.values()) <= words | {"vocab_embedding", "vocab_loss", "experts"}
    for parameter in parameters:
        assert {parameter, parameter.rpartition(".")[0]} & set(model.plan), parameter
    assert model.get_submodule(model.block_list) is model.layers and list(model.layers) == ["0", "1", "2"]
    further = [[f"mtp.{k}"] for k in range(model.config.mtp_depth)]
    ends = [["embed", "norm", "head"]] if model.tied else [["norm", "head"]]
    assert model.fsdp_units() == [*([] if model.tied else [["embed"]]), *further, *ends]


@pytest.mark.parametrize("name", OPTIONS)
def test_every_matrix_is_a_part_of_a_fused_weight(name: str) -> None:
    """`fused_weights` says how the fused weights split into the matrices that `separate` names."""
    model = make(config_of(name))
    state = model.state_dict()
    apart = separate(state, model.config)
    for weight, (dim, sizes) in model.fused_weights.items():
        parts = [part.flatten(0, -2) for part in state[weight].split(sizes, dim)]
        owner = weight.rsplit(".", 2)[0]
        names = "qkv" if weight.endswith("wqkv.weight") else ("_gate", "_up")
        for leaf, part in zip(names, parts, strict=True):
            assert torch.equal(apart[f"{owner}.w{leaf}.weight"], part)
    again = fuse(apart, model.config)
    assert again.keys() == state.keys() and all(torch.equal(again[n], state[n]) for n in state)
    assert all(tensor.ndim <= 2 for n, tensor in apart.items() if ".experts." not in n)  # batches of matrices


def test_building_leaves_the_default_generator_alone() -> None:
    state = torch.get_rng_state()
    Transformer(CONFIG)
    assert torch.equal(torch.get_rng_state(), state)


def test_user_errors() -> None:
    model = Transformer(CONFIG)
    with pytest.raises(ValueError, match="max_seq_len = 64"):
        model(torch.zeros(1, 65, dtype=torch.int64))
    with pytest.raises(ValueError, match="do not fit"):
        model(torch.zeros(1, 8, dtype=torch.int64), Rows.plain(1, 9))
    with pytest.raises(ValueError, match="scale"):
        model(torch.zeros(1, 8, dtype=torch.int64), labels=torch.zeros(1, 8, dtype=torch.int64))


def test_inputs_that_do_not_fit() -> None:
    ids = torch.zeros(2, 8, dtype=torch.int64)
    padded = Transformer(config_of("padded"))
    assert padded.config.vocab_rows == 64
    for value in (-1, 53, 63, 64, 2**40):
        with pytest.raises(ValueError, match=rf"ids hold {value}, which is no token: they must lie in 0 \.\. 52;"):
            padded(ids.index_fill(1, torch.tensor(3), value))
    with pytest.raises(ValueError, match=r"ids came as torch\.float32, and must be int64 \(or int32\)"):
        padded(ids.float())
    for wrong in (ids[0], ids[None]):
        with pytest.raises(ValueError, match=r"must be \[rows, tokens\]; one row is ids\[None\]"):
            padded(wrong)
    with pytest.raises(ValueError, match=r"labels of shape \(2, 7\) do not fit an input of \(2, 8\)"):
        padded(ids, labels=ids[:, 1:], scale=1.0)
    with pytest.raises(ValueError, match=r"scale = 0\.5 weighs a loss, and there are no labels"):
        padded(ids, scale=0.5)
    later = padded.stage(first=False, layers=[1, 2], last=True)
    for states in (ids, torch.zeros(2, 8, 23), torch.zeros(2, 24)):
        with pytest.raises(ValueError, match=r"this stage takes hidden states \[rows, tokens, 24\]"):
            later(states)
    further = Transformer(config_of("further"))
    with pytest.raises(ValueError, match=r"a scale of shape \(2, 8\) weighs tokens by themselves, and mtp_depth = 2"):
        further(ids, labels=ids, scale=torch.ones(2, 8))


@pytest.mark.parametrize("name", ["untied", "further", "experts-losses", "sinks"])
def test_ids_in_32_bits_and_of_any_strides_are_the_same(name: str) -> None:
    model = make(config_of(name))
    ids, labels, rows, _ = batch(True)
    right = model(ids, rows, labels, 0.1)
    for change in (Tensor.int, lambda t: t.t().contiguous().t()):
        loss, nll = model(change(ids), rows, change(labels), 0.1)
        assert torch.equal(loss, right[0]) and torch.equal(nll, right[1])


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("shape", [(0, 8), (2, 0)])
def test_no_rows_and_no_tokens(name: str, shape: tuple[int, int]) -> None:
    """A rank's part of a batch may be empty: loss and gradients are 0, and every parameter has one."""
    model = make(config_of(name))
    ids = torch.zeros(shape, dtype=torch.int64)
    assert model(ids).shape == (*shape, 53)
    loss, nll = model(ids, labels=ids, scale=0.1)
    loss.backward()
    assert loss == 0 and nll.shape == shape
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("loss", ["linear_cross_entropy", "cross_entropy"])
@pytest.mark.parametrize("name", ["untied", "further", "experts-losses", "experts-batch"])
def test_a_batch_without_labels_weighs_nothing(name: str, loss: str) -> None:
    """1 / 0 scored tokens is an infinite scale."""
    model = make(config_of(name, loss=loss, z_loss=0.1, label_smoothing=0.1))
    ids, labels, rows, _ = batch(True)
    total, nll = model(ids, rows, torch.full_like(labels, -100), 1 / torch.tensor(0.0))
    total.backward()
    assert total == 0 and not nll.any()
    assert not any(p.grad is not None and (p.grad != 0).any() for p in model.parameters())  # NaN is not 0


@pytest.mark.parametrize("name", ["untied", "window", "soft-caps", "sinks", "latent", "further", "experts-all"])
def test_autocast_stays_near(name: str) -> None:
    """Under torch.autocast the products are in bfloat16: the bound is that of a model of that dtype."""
    model = make(config_of(name), torch.float32).eval()
    ids, labels, rows, docs = batch(True)
    right = Reference({n: t.double() for n, t in model.state_dict().items()}, model.config, docs).logits(ids)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids, rows)
        loss, nll = model(ids, rows, labels, 0.05)
    assert (logits.double() - right).abs().max() <= 0.1 * right.abs().max()
    assert loss.dtype == nll.dtype == torch.float32
    loss.backward()
    found = flat_gradient(model)
    model.zero_grad()
    model(ids, rows, labels, 0.05)[0].backward()
    exact = flat_gradient(model)
    assert found.dtype == torch.float32
    assert (found - exact).norm() <= 0.1 * exact.norm()


def flat_gradient(model: Transformer) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("name", ["tied", "further", "experts-sigmoid", "geglu_tanh", "relu2"])
def test_a_copy_and_a_pickle_are_the_model(name: str) -> None:
    model = make(config_of(name))
    ids, labels, rows, _ = batch(True)
    model(ids, rows, labels, 0.1)[0].backward()  # what training leaves behind is copied or left out, and no hindrance
    right = model(ids, rows)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert again.state_dict().keys() == model.state_dict().keys()
        assert torch.equal(again(ids, rows), right)
