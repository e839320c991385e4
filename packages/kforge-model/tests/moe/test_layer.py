"""A layer with experts in its place: built, sharded, saved, compiled, generated with, looked into."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kforge_model import (
    GatedMLP,
    KVCache,
    LocalExchange,
    ModelConfig,
    MoE,
    PlainMLP,
    Rows,
    Transformer,
    attention_weights,
    capture,
    generate,
    max_logits,
    scale_qk,
    score,
)
from kforge_testing import run_ranks

SIZES: dict[str, Any] = {
    "vocab_size": 53, "dim": 16, "n_layers": 3, "n_heads": 2, "n_experts": 6, "expert_dim": 12, "max_seq_len": 64,
    "moe_pattern": "DMM",
}  # fmt: skip
LOSSES = {"balance_loss": 0.7, "router_z_loss": 0.03}
IDS = torch.randint(53, (2, 12), generator=torch.Generator().manual_seed(4))


def model_of(dtype: torch.dtype = torch.float64, std: float = 0.3, **changes: Any) -> Transformer:
    return Transformer(ModelConfig(**{**SIZES, "init_std": std, **changes})).to(dtype)


def step(model: Transformer) -> dict[str, Tensor]:
    model.zero_grad()
    loss, _ = model(IDS, labels=IDS, scale=1 / 24)
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("mlp", ["swiglu", "relu2"])
def test_shared_experts_are_as_many_as_they_say(mlp: str) -> None:
    """Two of them, one by one, are the one feed-forward half of twice the width."""
    moe = model_of(shared_experts=2, mlp=mlp).layers["1"].moe
    assert isinstance(moe, MoE) and isinstance(moe.shared, GatedMLP if mlp == "swiglu" else PlainMLP)
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    one = type(moe.shared)(16, 12, moe.shared.activation).double()
    total = torch.zeros_like(x)
    for n in range(2):
        weights = {
            name: weight.chunk(2, 1 if name.startswith("w_down") or weight.ndim == 3 else 0)[n]
            for name, weight in moe.shared.state_dict().items()
        }
        one.load_state_dict(weights)
        total = total + one(x)
    assert (moe.shared(x) - total).abs().max() < 1e-13
    moe.eval()
    with_shared = moe(x)
    moe.shared = None
    assert (with_shared - moe(x) - total).abs().max() < 1e-13


def test_names() -> None:
    model = model_of(shared_experts=1, router_bias=True, mtp_depth=1)
    assert model.layers["0"].moe is None and model.layers["1"].mlp is None
    assert [name for name, _ in model.layers["1"].named_parameters() if name.startswith("m")] == [
        "mlp_norm.weight",
        "moe.router.weight",
        "moe.experts.w_gate_up",
        "moe.experts.w_down",
        "moe.shared.w_gate_up.weight",
        "moe.shared.w_down.weight",
    ]
    assert [name for name, _ in model.named_buffers()] == ["layers.1.moe.router.bias", "layers.2.moe.router.bias"]
    plan = {name: word for name, word in model.plan.items() if ".moe" in name}
    assert plan == {
        "layers.*.moe.router": "sequence",
        "layers.*.moe.experts": "experts",
        "layers.*.moe.shared.w_gate_up": "sequence",
        "layers.*.moe.shared.w_down": "sequence",
    }
    assert model.mtp["0"].block.mlp is not None  # layer 3 of the pattern DMM
    assert not any(".experts." in name for name in model.fused_weights)
    assert model.shape["n_experts"] == 6


def test_initial_values() -> None:
    model = Transformer(ModelConfig(**{**SIZES, "dim": 64, "n_heads": 4, "expert_dim": 64, "mup_base_dim": 16}))
    parts = dict(model.layers["1"].moe.named_parameters())
    for name, right in (("router.weight", 1.0), ("experts.w_gate_up", 1.0), ("experts.w_down", 6**-0.5)):
        assert parts[name].std().item() == pytest.approx(0.02 * 0.5 * right, rel=0.1)
    experts = parts["experts.w_down"]
    assert not torch.equal(experts[0], experts[1])
    scales = model.lr_scales()
    assert scales["layers.1.moe.experts.w_down"] == scales["layers.1.moe.router.weight"] == 0.25


def _cut(rank: int, world: int) -> dict[str, Tensor]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor, init_device_mesh

    def deal_out(name: str, module: nn.Module, mesh: Any) -> None:
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(leaf, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))

    with torch.device("meta"):
        model = Transformer(ModelConfig(**SIZES, router_bias=True, shared_experts=1))
    mesh = init_device_mesh("cpu", (world,))
    distribute_module(model.layers["2"].moe.experts, mesh, deal_out)  # experts by expert, the rest by FSDP
    for name in ("0", "1"):
        fully_shard(model.layers[name])
    model.to_empty(device="cpu")
    model.init_weights(11)
    assert not any(bias.any() for bias in model.buffers())
    return {
        name: parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter.detach()
        for name, parameter in model.named_parameters()
    }


def test_shards_start_from_the_same_bits() -> None:
    plain = Transformer(ModelConfig(**SIZES, router_bias=True, shared_experts=1))
    plain.init_weights(11)
    for got in run_ranks(_cut, 3):
        for name, parameter in plain.named_parameters():
            assert torch.equal(got[name], parameter), name


def test_stages_have_their_layers_and_their_counts() -> None:
    model = model_of(router_bias=True)
    first, last = model.stage(True, [0, 1], False), model.stage(False, [2], True)
    whole = step(model)
    counted = model.update_balance(gate=torch.tensor(0.0))
    model.zero_grad()
    loss, _ = last(first(IDS), labels=IDS, scale=1 / 24)
    loss.backward()
    assert torch.equal(loss, whole["loss"])
    parts = [first.balance_stats(), last.balance_stats()]
    assert parts[0].keys() == parts[1].keys() == counted.keys()
    for name, value in counted.items():  # of a layer that a stage does not have it says 0
        assert torch.allclose(sum(part[name] for part in parts), value, rtol=1e-12), name  # type: ignore[arg-type]
    first.update_balance()
    assert first.get_buffer("layers.1.moe.router.bias").any()
    dense = model.stage(True, [0], False)
    for stats in (dense.balance_stats(), dense.update_balance()):
        assert stats.keys() == counted.keys() and not any(stats.values())


def test_state_dict_has_the_bias() -> None:
    model, other = model_of(router_bias=True), model_of(router_bias=True, std=0.1)
    step(model)
    model.update_balance()
    other.load_state_dict(model.state_dict())
    assert other.get_buffer("layers.1.moe.router.bias").any()
    assert torch.equal(other(IDS), model(IDS))
    assert torch.equal(copy.deepcopy(model)(IDS), model(IDS))


@pytest.mark.parametrize("capacity", [None, 0.5])
@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_generation(router: str, capacity: float | None) -> None:
    """A cached step gives the logits of the whole row, and generates what a loop over whole rows generates: what is
    computed together, padding too, drops nobody's tokens."""
    model = model_of(router=router, router_bias=True, shared_experts=1, expert_capacity=capacity).eval()
    model.get_buffer("layers.1.moe.router.bias").copy_(torch.arange(6) * 0.02)
    with torch.no_grad():
        whole = model(IDS)
        cache = KVCache(model.config, 12)
        parts = [model(IDS[:, :5], cache=cache)] + [model(IDS[:, t : t + 1], cache=cache) for t in range(5, 12)]
    assert (torch.cat(parts, 1) - whole[:, 4:]).abs().max() < 1e-12
    ids = IDS[:, :4]
    for _ in range(6):
        ids = torch.cat((ids, model(ids)[:, -1:].argmax(-1)), 1)
    model.train()
    assert torch.equal(generate(model, IDS[:, :4], 6, temperature=0.0), ids)
    prompts = generate(model, [IDS[0, :4], IDS[1, :2]], 3, temperature=0.0)
    assert torch.equal(prompts[0], ids[0, :7])
    assert torch.equal(generate(model, IDS[:, :4], 6, temperature=0.0, prefill_chunk=3), ids)
    score(model, IDS)
    assert not any(value.any() for name, value in model.balance_stats().items() if "bias_range" not in name)


def test_capacity_is_of_training() -> None:
    """The rows that a row is computed with make a difference in training, and none in evaluation."""
    model = model_of(expert_capacity=0.5)
    assert (model(IDS)[:1] - model(IDS[:1])).abs().max() > 1e-3
    model.eval()
    assert (model(IDS)[:1] - model(IDS[:1])).abs().max() < 1e-12
    assert torch.equal(model(IDS), model_of().eval()(IDS))


def test_looking_inside() -> None:
    model = model_of()
    with capture(model, ["layers.*.moe", "layers.*.moe.router"]) as seen:
        model(IDS)
    assert list(seen) == ["layers.1.moe", "layers.1.moe.router", "layers.2.moe", "layers.2.moe.router"]
    assert seen["layers.1.moe"][0].shape == (2, 12, 16) and seen["layers.1.moe.router"][0][0].shape == (24, 2)
    assert attention_weights(model, IDS)[1].shape == (2, 2, 12, 12)
    before = max_logits(model, IDS)
    scale_qk(model, 1, 0, 0.5)
    assert max_logits(model, IDS)[1, 0].item() == pytest.approx(before[1, 0].item() / 2)


def test_checkpointed_blocks_train_alike() -> None:
    plain, again = model_of(**LOSSES), model_of(**LOSSES)
    for block in again.layers.values():
        forward = block.forward
        block.forward = lambda *a, forward=forward: checkpoint(forward, *a, use_reentrant=False)  # type: ignore[method-assign]
    a, b = step(again), step(plain)
    assert all(torch.equal(a[name], b[name]) for name in b)


@pytest.mark.parametrize("changes", [{}, {"router": "sigmoid", "shared_experts": 1}, {"expert_capacity": 0.9}])
def test_compiled_blocks_are_the_blocks(changes: dict[str, Any]) -> None:
    torch.compiler.reset()
    plain, compiled = model_of(**LOSSES, **changes), model_of(**LOSSES, **changes)
    for block in compiled.layers.values():
        block.compile(backend="aot_eager")
    right, got = step(plain), step(compiled)
    for name, value in right.items():
        assert (got[name] - value).abs().max() <= 1e-12 * value.abs().max(), name
    assert compiled.balance_stats() == plain.balance_stats()
    with torch.no_grad():
        assert (compiled.eval()(IDS) - plain.eval()(IDS)).abs().max() < 1e-12


def test_other_loads_compile_nothing_anew() -> None:
    torch.compiler.reset()
    model, frames = model_of(**LOSSES), torch._dynamo.utils.counters["frames"]
    for block in model.layers.values():
        block.compile(backend="eager", dynamic=False)
    compiled, loads = [], []
    for seed in range(4):
        ids = torch.randint(53, (2, 12), generator=torch.Generator().manual_seed(seed))
        model(ids, labels=ids, scale=1 / 24)[0].backward()
        compiled.append(frames["total"])
        loads.append(model.layers["1"].moe.counted()[:6].tolist())  # type: ignore[union-attr, operator]
        model.update_balance()
    assert compiled[0] == compiled[-1] > 0
    assert loads[0] != loads[1] != loads[2] != loads[3]


def test_an_exchange_in_the_place_of_the_local_one() -> None:
    class Counted(LocalExchange):
        calls = 0

        def forward(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
            self.calls += 1
            assert x.shape == (24, 16) and ids.shape == weights.shape == (24, 2) and experts.n_experts == 6
            return super().forward(x, ids, weights, experts)

    model = model_of()
    right = step(model)
    for layer in ("1", "2"):
        model.layers[layer].moe.exchange = Counted()
    assert torch.equal(step(model)["loss"], right["loss"])
    assert model.layers["1"].moe.exchange.calls == 1


def test_rows_of_any_kind_carry_the_scale() -> None:
    class Mine:
        def __init__(self) -> None:
            plain = Rows.plain(2, 12)
            self.position_ids, self.cu_seqlens, self.max_seqlen, self.doc_ids = plain.position_ids, None, 12, None

    model, rows = model_of(**LOSSES), Mine()
    right = step(model)
    model.zero_grad()
    model(IDS, rows, IDS, 1 / 24)[0].backward()
    assert not hasattr(rows, "scale")
    assert all(torch.equal(p.grad, right[n]) for n, p in model.named_parameters())  # type: ignore[arg-type]


def test_bfloat16_trains() -> None:
    model = model_of(torch.bfloat16, std=0.1, router_bias=True, **LOSSES)
    wide = model_of(torch.float32, std=0.1, router_bias=True, **LOSSES)
    wide.load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()})
    got, right = step(model), step(wide)
    assert got["loss"].item() == pytest.approx(right["loss"].item(), rel=0.01)
    assert all(torch.isfinite(value).all() for value in got.values()) and got.keys() == right.keys()
    assert got["layers.1.moe.router.weight"].dtype == torch.bfloat16
