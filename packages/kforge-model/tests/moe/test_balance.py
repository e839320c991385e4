"""Losses, counts and the bias that even out the load: where they come from, and that they come once."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from kforge_model import LocalExchange, ModelConfig, Rows, Transformer
from kforge_model.moe.balance import bias_rate

SIZES: dict[str, Any] = {
    "vocab_size": 53, "dim": 16, "n_layers": 2, "n_heads": 2, "n_experts": 6, "expert_dim": 12, "init_std": 0.3,
}  # fmt: skip
LOSSES = {"balance_loss": 0.7, "router_z_loss": 0.03}
IDS = torch.randint(53, (8, 8), generator=torch.Generator().manual_seed(4))


def model_of(**changes: Any) -> Transformer:
    return Transformer(ModelConfig(**{**SIZES, **changes})).double()


def step(model: Transformer, ids: Tensor = IDS, scale: Any = 1 / 64, main: float = 1.0) -> None:
    loss, _ = model(ids, labels=ids, scale=scale)
    (loss * main).backward()


def gradients(model: Transformer) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def same(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 1e-12) -> bool:
    return a.keys() == b.keys() and all((a[n] - b[n]).abs().max() <= tolerance * b[n].abs().max() for n in a)


def loads(model: Transformer) -> list[list[int]]:
    return [moe.counted()[:-3].int().tolist() for moe in model._mixtures()]


@pytest.mark.parametrize("microbatches", [2, 4, 8])
def test_c14_the_auxiliary_loss_does_not_grow_with_accumulation(microbatches: int) -> None:
    """The same 8 sequences as 1x8, 2x4, 4x2, 8x1, the main loss times 0."""
    model = model_of(**LOSSES)
    step(model, main=0.0)
    whole, reported = gradients(model), model.balance_stats()
    assert whole["layers.0.moe.router.weight"].abs().max() > 1e-4
    model.update_balance()
    for part in IDS.chunk(microbatches):
        step(model, part, main=0.0)
    assert same(gradients(model), whole)
    parts = model.balance_stats()
    assert parts.keys() == reported.keys()
    assert all(parts[name].item() == pytest.approx(value.item(), rel=1e-12) for name, value in reported.items())


def test_c14_statistics_of_a_microbatch_depend_on_it() -> None:
    """balance_over = "batch" says so: equal where all sequences are."""
    model = model_of(**LOSSES, balance_over="batch")
    assert not model.config.layout_exact

    def both(ids: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        step(model, ids, main=0.0)
        whole = gradients(model)
        for part in ids.chunk(4):
            step(model, part, main=0.0)
        return whole, gradients(model)

    assert same(*both(IDS[:1].expand(8, -1))) and not same(*both(IDS), tolerance=1e-3)


def _recomputed(model: Transformer, how: str) -> None:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        save = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.sort.stable)
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    options = {"context_fn": partial(create_selective_checkpoint_contexts, policy)} if how == "selective" else {}
    for block in model.layers.values():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)  # type: ignore[method-assign]


@pytest.mark.parametrize("how", ["full", "selective"])
def test_c15_recomputation_counts_the_load_once(how: str) -> None:
    """64 tokens, top 2: 128 a layer, not 256."""
    plain, again = model_of(**LOSSES, router_bias=True), model_of(**LOSSES, router_bias=True)
    _recomputed(again, how)
    step(plain)
    step(again)
    assert [sum(layer) for layer in loads(again)] == [128, 128] and loads(again) == loads(plain)
    assert same(gradients(again), gradients(plain), 0.0)
    again.eval()
    again(IDS, labels=IDS, scale=1 / 64)
    assert loads(again) == loads(plain)
    assert again.balance_stats() == plain.balance_stats()
    plain.update_balance()
    again.update_balance()
    for name, bias in plain.named_buffers():
        assert bias.any() and torch.equal(again.get_buffer(name), bias)


def test_c15_only_training_counts() -> None:
    model = model_of(**LOSSES)
    nothing = [[0] * 6] * 2
    model(IDS, labels=IDS, scale=1.0)  # no backward
    with torch.no_grad():
        model(IDS, labels=IDS, scale=1.0)
    model.eval()
    step(model)
    assert loads(model) == nothing
    evaluated = gradients(model)
    plain = model_of()
    step(plain)
    assert same(evaluated, gradients(plain))  # no auxiliary loss in evaluation
    model.train()
    model(IDS).sum().backward()  # no loss of ours: counted, and no auxiliary loss
    plain.train()
    plain(IDS).sum().backward()
    assert [sum(layer) for layer in loads(model)] == [128, 128]
    assert same(gradients(model), gradients(plain))


def test_counts_are_the_routers_choice() -> None:
    model = model_of(expert_capacity=0.5)
    chosen = []
    for block in model.layers.values():
        block.moe.router.register_forward_hook(lambda module, args, routing: chosen.append(routing.ids))
    step(model)
    assert loads(model) == [ids.flatten().bincount(minlength=6).tolist() for ids in chosen]
    stats = model.balance_stats()
    for layer, ids in enumerate(chosen):
        count = ids.flatten().bincount(minlength=6).double()
        places = math.ceil(0.5 * 128 / 6)
        assert stats[f"moe/{layer}/load_max"].item() == pytest.approx((count.max() / count.mean()).item())
        assert stats[f"moe/{layer}/load_min"].item() == pytest.approx((count.min() / count.mean()).item())
        dropped = (count - places).clamp(min=0).sum() / 128
        assert stats[f"moe/{layer}/dropped"].item() == pytest.approx(dropped.item())


def test_stats_against_the_formulas() -> None:
    model = model_of(balance_loss=0.3, router="sigmoid", router_bias=True, n_layers=1, moe_pattern="M", mtp_depth=1)
    routings = []
    for moe in model._mixtures():
        moe.router.register_forward_hook(lambda module, args, routing: routings.append(routing))
        moe.router.bias.copy_(torch.arange(6) * 0.01)  # type: ignore[union-attr, operator]
    step(model)
    stats = model.balance_stats()
    assert {name.split("/")[1] for name in stats} == {"0", "1", "balance_loss"}
    uneven = []
    for layer, (ids, _, p, _) in enumerate(routings):
        assert stats[f"moe/{layer}/entropy"].item() == pytest.approx(-(p * p.log()).sum(1).mean().item())
        assert stats[f"moe/{layer}/bias_range"].item() == pytest.approx(0.05)
        assert stats[f"moe/{layer}/dropped"].item() == 0
        for row_ids, row_p in zip(ids.view(8, 16), p.view(8, 8, 6), strict=True):
            uneven.append((row_ids.bincount(minlength=6) * 6 / 16 * row_p.mean(0)).sum())
    assert stats["moe/balance_loss"].item() == pytest.approx(torch.stack(uneven).mean().item())
    assert all(value.ndim == 0 for value in stats.values())
    empty = model_of().balance_stats()
    assert not any(value.any() for value in empty.values())
    assert Transformer(ModelConfig(dim=16, n_heads=2, n_layers=1)).balance_stats() == {}


def test_balance_is_1_where_all_is_even() -> None:
    """Tokens that are alike but for the expert that they like best, each liked by as many."""
    model = model_of(n_layers=1, dim=6, n_heads=1, moe_top_k=1, router_norm=False)
    moe = model._mixtures()[0]
    with torch.no_grad():
        moe.router.weight.copy_(torch.eye(6))  # type: ignore[union-attr, operator]
    x = torch.eye(6, dtype=torch.float64).repeat(2, 1).view(1, 12, 6).requires_grad_()
    moe(x).sum().backward()
    stats = model.balance_stats()
    assert stats["moe/balance_loss"].item() == pytest.approx(1.0)
    assert stats["moe/0/load_max"].item() == stats["moe/0/load_min"].item() == 1.0


# ------------------------------------------------------------------------------------------------ weights of tokens


@pytest.mark.parametrize("over", ["sequence", "batch"])
def test_a_scale_of_each_token(over: str) -> None:
    """Of one value it is that value; where it differs, a row weighs the sum of its tokens."""
    model = model_of(**LOSSES, balance_over=over)
    step(model, main=0.0)
    one = gradients(model)
    step(model, scale=torch.full((8, 8), 1 / 64, dtype=torch.float64), main=0.0)
    assert same(gradients(model), one)

    model = model_of(balance_loss=0.7, balance_over=over)
    weight = torch.rand(8, 8, dtype=torch.float64)
    step(model, scale=weight, main=0.0)
    got = gradients(model)
    if over == "sequence":
        for row, w in zip(IDS, weight, strict=True):
            step(model, row[None], scale=w.sum().item() / 8, main=0.0)
    else:
        step(model, scale=weight.mean().item(), main=0.0)
    assert same(gradients(model), got)


def test_z_loss_of_a_scale_of_each_token() -> None:
    model = model_of(router_z_loss=0.03, n_layers=1)
    weight = torch.rand(8, 8, dtype=torch.float64)
    logits = []
    handle = model._mixtures()[0].router.register_forward_hook(lambda m, a, routing: logits.append(routing.logits))
    step(model, scale=weight, main=0.0)
    handle.remove()
    got = gradients(model)["layers.0.moe.router.weight"]
    z = 0.03 * (logits[0].exp().sum(1).log() ** 2 * weight.flatten()).sum()
    assert z.item() > 0
    model(IDS)
    (right,) = torch.autograd.grad(_z(model, weight), [model.get_parameter("layers.0.moe.router.weight")])
    assert (got - right).abs().max() < 1e-12 * right.abs().max()


def _z(model: Transformer, weight: Tensor) -> Tensor:
    found: list[Tensor] = []
    handle = model._mixtures()[0].router.register_forward_hook(lambda m, a, routing: found.append(routing.logits))
    model(IDS)
    handle.remove()
    return 0.03 * (found[0].exp().sum(1).log() ** 2 * weight.flatten()).sum()


def test_a_stage_without_labels_takes_the_weight_from_the_rows() -> None:
    model = model_of(**LOSSES)
    step(model)
    whole = gradients(model)
    first, last = model.stage(True, [0], False), model.stage(False, [1], True)
    scale = torch.tensor(1 / 64, dtype=torch.float64)
    rows = dataclasses.replace(Rows.plain(8, 8), scale=scale)
    loss, _ = last(first(IDS, rows), rows, IDS, scale)
    loss.backward()
    assert same(gradients(model), whole)


# ---------------------------------------------------------------------------------------------------- parts of rows


class Half(LocalExchange):
    """The exchange of a rank that has half of each row, which gets what ``total`` returns for what it has counted."""

    def __init__(self, total: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.total = total

    def sum_counts(self, counts: Tensor) -> Tensor:
        return self.total(counts)


@pytest.mark.parametrize("scale", ["one", "here", "whole"])
def test_rows_on_two_ranks_add_up(scale: str) -> None:
    """Each half with the counts of both: the gradients, and the stats, of the whole rows. A scale of each token comes
    cut as the tokens are (context parallelism), or whole (tensor parallelism)."""
    torch.manual_seed(0)
    model = model_of(balance_loss=0.7)
    moe = model._mixtures()[0]
    x = torch.randn(8, 8, 16, dtype=torch.float64)
    weight = torch.rand(8, 8, dtype=torch.float64)

    def run(part: Tensor, scale: Tensor) -> None:
        rows = dataclasses.replace(Rows.plain(*part.shape[:2]), scale=scale)
        (moe(part, rows) * 0).sum().backward()

    run(x, torch.tensor(0.1, dtype=torch.float64) if scale == "one" else weight)
    whole, stats = gradients(model), moe.counted()
    moe.tally.clear()
    halves = x.chunk(2, dim=1)
    sent: list[Tensor] = []
    received: list[Tensor] = []

    def collect(counts: Tensor) -> Tensor:
        sent.append(counts)
        return counts

    def receive(counts: Tensor) -> Tensor:
        return received.pop(0)

    for total in (collect, receive):
        received += [a + b for a, b in zip(sent[: len(sent) // 2], sent[len(sent) // 2 :], strict=True)] * 2
        moe.exchange = Half(total)
        model.zero_grad()
        moe.tally.clear()
        for half, w in zip(halves, weight.chunk(2, dim=1), strict=True):
            run(half, {"one": torch.tensor(0.1, dtype=torch.float64), "here": w, "whole": weight}[scale])
    assert same(gradients(model), whole)
    assert torch.allclose(moe.counted(), stats, rtol=1e-12)


def test_a_z_loss_cannot_tell_its_tokens_in_a_whole_scale() -> None:
    moe = model_of(router_z_loss=0.1)._mixtures()[0]
    rows = dataclasses.replace(Rows.plain(2, 8), scale=torch.ones(2, 8))
    with pytest.raises(ValueError, match=r"scale of \(2, 8\) tokens does not fit \(2, 4\).*router_z_loss = 0"):
        moe(torch.randn(2, 4, 16, dtype=torch.float64), rows)


# ------------------------------------------------------------------------------------------------------------- bias


def test_the_bias_moves_once_by_the_sign_of_the_load() -> None:
    model = model_of(router_bias=True, router_bias_rate=0.01)
    step(model)
    before = loads(model)
    reduced: list[Tensor] = []

    def reduce(totals: Tensor) -> None:  # as if another rank had seen the same
        reduced.append(totals.clone())
        totals.mul_(2)

    model.update_balance(reduce)
    assert len(reduced) == 1 and reduced[0].shape[0] == 2
    for moe, load in zip(model._mixtures(), before, strict=True):
        right = [0.01 * ((sum(load) / 6 > n) - (sum(load) / 6 < n)) for n in load]
        assert moe.router.bias.tolist() == pytest.approx(right)  # type: ignore[union-attr]
    assert loads(model) == [[0] * 6] * 2
    moved = {name: bias.clone() for name, bias in model.named_buffers()}
    model.update_balance()  # nothing was counted: nothing moves
    assert all(torch.equal(model.get_buffer(name), bias) for name, bias in moved.items())


@pytest.mark.parametrize("gate", [0.0, 1.0])
def test_a_skipped_step_does_not_move_the_bias(gate: float) -> None:
    model = model_of(router_bias=True)
    step(model)
    model.update_balance(gate=torch.tensor(gate))
    assert all(bias.any().item() == bool(gate) for _, bias in model.named_buffers())
    assert loads(model) == [[0] * 6] * 2


@pytest.mark.parametrize("bias", [False, True])
def test_an_update_returns_the_stats_of_what_it_counted(bias: bool) -> None:
    model = model_of(router_bias=bias)
    step(model)
    before, after = model.balance_stats(), model.update_balance()
    assert loads(model) == [[0] * 6] * 2
    for name, value in before.items():
        moved = 0.002 if name.endswith("bias_range") else value.item()  # some experts up, some down
        assert after[name].item() == pytest.approx(moved)
    assert Transformer(ModelConfig(dim=16, n_heads=2, n_layers=1)).update_balance() == {}


def test_the_load_evens_out() -> None:
    model = model_of(router_bias=True, router_bias_rate=0.02, router="sigmoid", n_layers=1)
    uneven = []
    for _ in range(60):
        step(model)
        model.zero_grad()
        uneven.append(model.balance_stats()["moe/0/load_max"].item())
        model.update_balance()
    assert uneven[-1] < 1.25 < uneven[0]


def test_schedules_of_the_rate() -> None:
    def rates(**changes: Any) -> list[float]:
        config = ModelConfig(**SIZES, router_bias=True, router_bias_rate=0.1, **changes)
        return [bias_rate(config, step, 10) for step in (0, 1, 5, 10, 20)]

    assert rates() == [0.1] * 5
    assert rates(router_bias_schedule="cosine") == pytest.approx(
        [0.1, 0.05 * (1 + math.cos(math.pi / 10)), 0.05, 0.0, 0.0]
    )
    assert rates(router_bias_schedule="warmup", router_bias_warmup_steps=4) == pytest.approx(
        [0.025, 0.05, 0.1, 0.1, 0.1]
    )


def test_the_update_takes_its_rate_from_the_schedule() -> None:
    model = model_of(router_bias=True, router_bias_rate=0.4, router_bias_schedule="cosine")
    step(model)
    model.update_balance(step=5, steps=10)
    moved = torch.cat([bias for _, bias in model.named_buffers()])
    assert moved.any() and torch.allclose(moved.abs()[moved != 0], torch.tensor(0.2, dtype=moved.dtype))


def test_counts_are_in_no_state_and_survive_nothing() -> None:
    model = model_of(router_bias=True)
    step(model)
    assert [name for name in model.state_dict() if "tally" in name or "count" in name] == []
    assert all(isinstance(module, nn.Module) for module in model.modules())
    model.init_weights(1)
    assert loads(model) == [[0] * 6] * 2 and not any(bias.any() for _, bias in model.named_buffers())


def test_stages_tell_of_all_layers_and_move_their_own() -> None:
    """Two stages, whose sums are added as ranks would: stats and biases are those of the whole model."""
    changes = {"router_bias": True, "router_bias_rate": 0.01, "n_layers": 4, "moe_pattern": "DM", "mtp_depth": 1}
    whole = model_of(**changes, router="sigmoid")
    first, last = whole.stage(True, [0, 1], False), whole.stage(False, [2, 3], True)
    parts = copy.deepcopy((first, last))
    step(whole)
    h = parts[0](IDS, labels=IDS, scale=1 / 64)
    parts[1](h, labels=IDS, scale=1 / 64, ids=IDS)[0].backward()
    want = whole.balance_stats()
    tables: list[Tensor] = []
    for part in parts:
        part.balance_stats(tables.append)
    total = torch.stack(tables).sum(0)
    for update in (False, True):
        got = [
            (part.update_balance if update else part.balance_stats)(lambda table: table.copy_(total)) for part in parts
        ]
        want = whole.update_balance() if update else want
        for stats in got:
            assert stats.keys() == want.keys()
            assert all(stats[name].item() == pytest.approx(want[name].item(), rel=1e-12) for name in want)
    for part in parts:
        for name, bias in part.named_buffers():
            assert bias.any() and torch.equal(bias, whole.get_buffer(name)), name
