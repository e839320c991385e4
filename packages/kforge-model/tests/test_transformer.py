"""The whole model against a plain float64 reimplementation, and the properties its users rely on."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kforge_model import ModelConfig, Rows, Transformer, num_parameters
from kforge_testing import run_ranks

CONFIG = ModelConfig(
    vocab_size=53, dim=24, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=8, ffn_dim=40, max_seq_len=64, rope_theta=500.0
)
TIED = ModelConfig(**{**CONFIG.__dict__, "tie_embeddings": True})
QK_NORM = ModelConfig(**{**CONFIG.__dict__, "qk_norm": True})


def make(config: ModelConfig = CONFIG, dtype: torch.dtype = torch.float64, std: float = 0.3) -> Transformer:
    """Weights large enough that every part matters; norms away from 1."""
    model = Transformer(ModelConfig(**{**config.__dict__, "init_std": std})).to(dtype)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(dtype) / 4)
    return model


def reference_logits(weights: dict[str, Tensor], config: ModelConfig, ids: Tensor, docs: Tensor) -> Tensor:
    """A Llama forward written from the papers, float64, matrices and explicit masks only."""
    p = {name: tensor.detach().double() for name, tensor in weights.items()}
    batch, seq = ids.shape
    half = config.head_size // 2
    position = torch.stack([torch.stack([(d[: i + 1] == d[i]).sum() - 1 for i in range(seq)]) for d in docs])
    angle = position[:, None, :, None] * config.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)

    def norm(x: Tensor, w: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.norm_eps).sqrt() * w

    def turn(x: Tensor) -> Tensor:
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1)

    hidden = (docs[:, :, None] != docs[:, None, :]) | torch.ones(seq, seq).triu(1).bool()
    x = p["embed.weight"][ids]
    for i in range(config.n_layers):
        y = norm(x, p[f"layers.{i}.attn_norm.weight"])
        q, k, v = (
            (y @ p[f"layers.{i}.attn.w{n}.weight"].T).view(batch, seq, -1, config.head_size).transpose(1, 2)
            for n in "qkv"
        )
        if config.qk_norm:
            q, k = norm(q, p[f"layers.{i}.attn.q_norm.weight"]), norm(k, p[f"layers.{i}.attn.k_norm.weight"])
        repeats = config.n_heads // config.kv_heads
        q, k, v = turn(q), turn(k).repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        scores = (q @ k.transpose(2, 3) / config.head_size**0.5).masked_fill(hidden[:, None], -math.inf)
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, seq, -1)
        x = x + y @ p[f"layers.{i}.attn.wo.weight"].T
        y = norm(x, p[f"layers.{i}.mlp_norm.weight"])
        gate, up, down = (p[f"layers.{i}.mlp.w_{n}.weight"].T for n in ("gate", "up", "down"))
        g = y @ gate
        x = x + (g * torch.sigmoid(g) * (y @ up)) @ down
    return norm(x, p["norm.weight"]) @ p.get("head.weight", p["embed.weight"]).T


@pytest.mark.parametrize("config", [CONFIG, TIED, QK_NORM], ids=["untied", "tied", "qk_norm"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 6e-2)]
)
def test_logits_and_loss(config: ModelConfig, packed: bool, dtype: torch.dtype, tolerance: float) -> None:
    model = make(config, dtype)
    ids = torch.randint(53, (2, 16))
    rows = Rows.packed([[4, 12], [7, 8, 1]]) if packed else Rows.plain(2, 16)
    docs = torch.zeros(2, 16) if rows.doc_ids is None else rows.doc_ids
    right = reference_logits(model.state_dict(), config, ids, docs)
    got = model(ids, rows)
    assert got.dtype == dtype
    assert (got.double() - right).abs().max() <= tolerance * right.abs().max()
    labels = torch.randint(53, (2, 16)).masked_fill(torch.rand(2, 16) < 0.3, -100)
    loss, nll = model(ids, rows, labels, 0.05)
    per_token = F.cross_entropy(right.flatten(0, 1), labels.flatten(), reduction="none").view(2, 16)
    assert loss.dtype == nll.dtype == torch.promote_types(dtype, torch.float32)
    assert (nll.double() - per_token).abs().max() <= tolerance * per_token.max()
    assert loss.item() == pytest.approx(0.05 * per_token.sum().item(), rel=tolerance)


def test_gradients_are_those_of_the_plain_formula() -> None:
    model = make(TIED)
    ids, labels = torch.randint(53, (2, 2, 16))
    rows = Rows.packed([[4, 12], [16]])
    model(ids, rows, labels, 1.0)[0].backward()
    other = make(TIED)
    F.cross_entropy(other(ids, rows).flatten(0, 1), labels.flatten(), reduction="sum").backward()
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        assert one.grad is not None and two.grad is not None
        assert (one.grad - two.grad).abs().max() <= 1e-12 * two.grad.abs().max(), name


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


@pytest.mark.parametrize("how", ["plain", "meta", "to", "deepcopy", "load"])
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


def test_plan_and_units_name_what_exists() -> None:
    model = Transformer(CONFIG)
    modules = {name.replace(".0.", ".*.") for name, _ in model.named_modules()}
    assert set(Transformer.plan) <= modules
    assert set(Transformer.plan.values()) <= {
        "gather", "colwise", "colwise_kv", "rowwise", "sequence", "vocab_embedding", "vocab_loss"
    }  # fmt: skip
    owners = {
        name.rpartition(".")[0] for name, _ in model.named_parameters() if not name.startswith(("layers.1", "layers.2"))
    }
    gathered = {"layers.*.attn", "layers.*.mlp"}
    assert {owner.replace(".0.", ".*.") for owner in owners} | gathered == set(Transformer.plan)
    assert model.get_submodule(Transformer.block_list) is model.layers and list(model.layers) == ["0", "1", "2"]
    assert model.fsdp_units() == [["embed"], ["norm", "head"]]
    assert Transformer(TIED).fsdp_units() == [["embed", "norm", "head"]]


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
