from __future__ import annotations

import logging
import math
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from kforge_resilience import Guard, ResilienceConfig, Verdict
from kforge_testing import run_ranks

GOOD = (1.0, 1.0, False)
NAN, INF = math.nan, math.inf


def scalar(value: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(value, dtype=dtype)


def play(guard: Guard, steps: list[tuple[float, float, bool]]) -> dict[str, Any]:
    """Vote on (loss, norm, stop) of each step; what came out, as plain values."""
    votes = [guard.vote(scalar(loss), scalar(norm), stop) for loss, norm, stop in steps]
    last = guard.settle()
    verdicts = [vote.verdict for vote in votes] + [last]
    return {
        "gates": [vote.gate.item() for vote in votes],
        "losses": [vote.loss.item() for vote in votes],
        "verdicts": [str(v) for v in verdicts],
        "steps": [v.step for v in verdicts],
        "reasons": [v.reason for v in verdicts],
        "ranks": [v.ranks for v in verdicts],
        "counts": [(v.skipped_in_a_row, v.skipped_total) for v in verdicts],
    }


class CountCollectives(TorchDispatchMode):
    """Names of the c10d operations that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.seen[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


# One process, no group


def test_gate_of_this_step_and_verdict_of_the_one_before() -> None:
    guard = Guard()
    first = guard.vote(scalar(2.5), scalar(1.0), False)
    assert first.gate.dtype == torch.float32 and first.gate.shape == () and first.gate.item() == 1.0
    assert first.loss.dtype == torch.float64 and first.loss.item() == 2.5
    assert first.verdict == "ok" and first.verdict.step is None

    second = guard.vote(scalar(NAN), scalar(1.0), False)
    assert second.gate.item() == 0.0 and math.isnan(second.loss.item())
    assert second.verdict == "ok" and second.verdict.step == 1 and not second.verdict.skipped

    third = guard.vote(scalar(2.0), scalar(1.0), True)
    assert third.gate.item() == 1.0  # the step of a stop counts: it is saved
    assert third.verdict == "ok" and third.verdict.step == 2 and third.verdict.skipped
    assert guard.settle() == "stop" and guard.settle().step == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["loss", "norm"])
def test_what_is_not_finite_closes_the_gate(dtype: torch.dtype, bad: float, where: str) -> None:
    loss, norm = (bad, 1.0) if where == "loss" else (1.0, bad)
    vote = Guard(on_event=lambda kind, values: None).vote(scalar(loss, dtype), scalar(norm, dtype), False)
    assert vote.gate.item() == 0.0
    # a bad norm leaves the loss as it is
    assert math.isnan(vote.loss.item()) if where == "loss" else vote.loss.item() == 1.0


def test_settling_twice_counts_once() -> None:
    events: list[tuple[str, dict[str, Any]]] = []
    guard = Guard(on_event=lambda kind, values: events.append((kind, values)))
    guard.vote(scalar(NAN), scalar(1.0), False)
    assert guard.settle() is guard.settle()
    vote = guard.vote(scalar(1.0), scalar(1.0), False)
    assert vote.verdict.step == 1 and vote.verdict.skipped_total == 1
    assert [kind for kind, _ in events] == ["skip"]
    assert events[0][1]["step"] == 1 and events[0][1]["ranks"] == [0]


def test_skipped_in_a_row_ends_the_run_at_the_limit() -> None:
    config = ResilienceConfig(max_skipped_in_a_row=3)
    seen = play(Guard(config), [(NAN, 1.0, False)] * 2 + [GOOD] + [(1.0, INF, False)] * 3)
    assert seen["verdicts"] == ["ok"] * 6 + ["abort"]
    assert seen["counts"][1:] == [(1, 1), (2, 2), (0, 2), (1, 3), (2, 4), (3, 5)]
    assert "max_skipped_in_a_row = 3" in seen["reasons"][-1] and "step 6" in seen["reasons"][-1]
    unlimited = play(Guard(ResilienceConfig(max_skipped_in_a_row=0)), [(NAN, 1.0, False)] * 50)
    assert set(unlimited["verdicts"]) == {"ok"}


def test_abort_policy_goes_before_stop() -> None:
    seen = play(Guard(ResilienceConfig(nonfinite="abort")), [GOOD, (INF, 1.0, True)])
    assert seen["verdicts"] == ["ok", "ok", "abort"] and seen["gates"] == [1.0, 0.0]
    assert "nonfinite = 'abort'" in seen["reasons"][-1]


def test_state_goes_on_after_a_restart() -> None:
    config = ResilienceConfig(max_skipped_in_a_row=3)
    guard = Guard(config)
    for _ in range(2):
        guard.vote(scalar(NAN), scalar(1.0), False)
    state = guard.state_dict()  # settles the second vote
    assert state == {"next_step": 3, "skipped_total": 2, "skipped_in_a_row": 2}

    fresh = Guard(config)
    fresh.load_state_dict(state)
    assert fresh.vote(scalar(NAN), scalar(1.0), False).verdict == "ok"
    last = fresh.settle()
    assert last == "abort" and last.step == 3 and last.skipped_total == 3


def test_step_number_may_be_given() -> None:
    guard = Guard()
    guard.vote(scalar(1.0), scalar(1.0), False, step=41)
    assert guard.vote(scalar(1.0), scalar(1.0), False).verdict.step == 41
    assert guard.settle().step == 42


def test_default_event_is_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kforge_resilience"):
        play(Guard(), [GOOD, (NAN, NAN, False), (1.0, 1.0, True), (1.0, 1.0, True)])
    assert [r.levelname for r in caplog.records] == ["WARNING", "WARNING"]
    assert caplog.messages[0] == "step 2: loss is nan on rank 0; skipped on all ranks (1 in a row, 1 in all)"
    assert caplog.messages[1] == "step 3: stop asked for on rank 0"  # said once, though the flag stays up


def test_verdict_is_a_string_that_survives_pickle() -> None:
    verdict = Verdict("stop", step=3, stop_ranks=(1,), reason="why")
    again = pickle.loads(pickle.dumps(verdict))
    assert again == "stop" and again.step == 3 and again.stop_ranks == (1,) and again.reason == "why"
    assert {verdict: 1}["stop"] == 1 and again.action == "stop" and type(again.action) is str


def test_gate_leaves_weights_alone_when_a_gradient_is_not_finite() -> None:
    """Five steps of SGD with momentum, a bad gradient at the third: nothing moves there, later steps are normal."""
    for bad in (INF, NAN):
        guard = Guard(on_event=lambda kind, values: None)
        weight, momentum, track = torch.ones(4), torch.zeros(4), []
        for step in range(1, 6):
            grad = torch.full((4,), 0.5)
            if step == 3:
                grad[1] = bad
            vote = guard.vote(weight.sum(), grad.norm(), False)
            open_gate = vote.gate > 0
            momentum = torch.where(open_gate, 0.9 * momentum + grad, momentum)
            weight = torch.where(open_gate, weight - 0.1 * momentum, weight)
            track.append(weight.clone())
        assert torch.equal(track[2], track[1])
        assert all(bool(torch.isfinite(w).all()) for w in track) and not torch.equal(track[3], track[2])
        assert guard.state_dict()["skipped_total"] == 1


# Several processes


def bad_loss_on_one_rank(rank: int, world: int, bad: float, culprit: int, policy: str) -> dict[str, Any]:
    events: list[tuple[str, dict[str, Any]]] = []
    config = ResilienceConfig(nonfinite="skip" if policy == "skip" else "abort")
    guard = Guard(config, on_event=lambda kind, values: events.append((kind, values)))
    steps: list[tuple[float, float, bool]] = [GOOD] * 8
    # As in training: the loss is bad on one rank, and the summed gradients make the norm NaN everywhere.
    steps[4] = (bad if rank == culprit else 1.0, NAN, False)
    return {**play(guard, steps), "events": events}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    ("bad", "culprit", "policy"), [(NAN, 1, "skip"), (INF, 1, "skip"), (NAN, 0, "skip"), (NAN, 1, "abort")]
)
def test_bad_loss_on_one_rank_is_one_decision_of_all(world: int, bad: float, culprit: int, policy: str) -> None:
    results = run_ranks(bad_loss_on_one_rank, world, bad, culprit, policy)
    for seen in results:
        assert seen["gates"] == [1.0] * 4 + [0.0] + [1.0] * 3
        assert [math.isnan(loss) for loss in seen["losses"]] == [False] * 4 + [True] + [False] * 3
        assert seen["losses"][0] == world
        assert seen["verdicts"] == ["ok"] * 5 + ["abort" if policy == "abort" else "ok"] + ["ok"] * 3
        assert seen["ranks"][5] == (culprit,) and seen["steps"][5] == 5
        assert seen["reasons"] == results[0]["reasons"]
    # One line in all, from the first rank, that names rank and step.
    assert [len(seen["events"]) for seen in results] == [1] + [0] * (world - 1)
    kind, values = results[0]["events"][0]
    assert kind == policy and values["step"] == 5 and values["ranks"] == [culprit]
    word = "nan" if math.isnan(bad) else "inf"
    assert values["reason"].startswith(f"step 5: loss is {word} on rank {culprit}; skipped on all ranks")


def bad_norm(rank: int, world: int, local: bool) -> dict[str, Any]:
    guard = Guard(on_event=lambda kind, values: None)
    return play(guard, [(1.0, INF if rank == 1 or not local else 1.0, False)])


def test_bad_norm_names_the_ranks_that_saw_it() -> None:
    for seen in run_ranks(bad_norm, 3, True):
        assert seen["ranks"][1] == (1,) and "gradient norm is inf on rank 1;" in seen["reasons"][1]
    for seen in run_ranks(bad_norm, 3, False):
        assert seen["ranks"][1] == (0, 1, 2) and "gradient norm is inf on every rank;" in seen["reasons"][1]


def stop_on_one_rank(rank: int, world: int) -> dict[str, Any]:
    guard = Guard(on_event=lambda kind, values: None)
    # The flag of rank 1 goes up in its third step and stays up.
    return play(guard, [(1.0, 1.0, rank == 1 and step >= 3) for step in range(1, 6)])


def test_stop_of_one_rank_is_seen_by_all_at_the_same_step() -> None:
    for seen in run_ranks(stop_on_one_rank, 3):
        assert seen["verdicts"] == ["ok", "ok", "ok", "stop", "stop", "stop"]
        assert seen["steps"][3] == 3 and seen["gates"] == [1.0] * 5
        assert seen["reasons"][3] == "step 3: stop asked for on rank 1"


def reduced_loss(rank: int, world: int) -> list[float]:
    torch.manual_seed(rank)
    parts = torch.randn(20, dtype=torch.float64) * 1e3
    guard = Guard()
    sums = [guard.vote(part, scalar(1.0), False).loss.item() for part in parts]
    gathered: list[list[float]] = [[] for _ in range(world)]
    dist.all_gather_object(gathered, parts.tolist())
    expected = [math.fsum(values) for values in zip(*gathered, strict=True)]
    return [abs(a - b) / max(abs(b), 1.0) for a, b in zip(sums, expected, strict=True)]


def test_reduced_loss_is_the_sum_in_float64() -> None:
    for errors in run_ranks(reduced_loss, 4):
        assert max(errors) < 1e-12


def count_collectives(rank: int, world: int) -> dict[str, int]:
    guard = Guard(on_event=lambda kind, values: None)
    with CountCollectives() as count:
        for step in range(1, 11):
            bad = step == 4 and rank == 1
            guard.vote(scalar(NAN if bad else 1.0), scalar(1.0), step == 9 and rank == 0)
        guard.settle()
        guard.state_dict()
    return dict(count.seen)


def test_one_collective_a_vote() -> None:
    for seen in run_ranks(count_collectives, 2):
        assert seen == {"c10d::allreduce_": 10}


def two_groups(rank: int, world: int) -> dict[str, Any]:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    events: list[str] = []
    guard = Guard(group=groups[rank // 2], on_event=lambda kind, values: events.append(values["reason"]))
    return {**play(guard, [(NAN if rank == 3 else 1.0, 1.0, False)]), "events": events}


def test_a_subgroup_votes_by_itself_and_names_global_ranks() -> None:
    results = run_ranks(two_groups, 4)
    assert [seen["gates"] for seen in results] == [[1.0], [1.0], [0.0], [0.0]]
    assert [len(seen["events"]) for seen in results] == [0, 0, 1, 0]
    assert "on rank 3;" in results[2]["events"][0]


def late_group(rank: int, world: int) -> str:
    guard = Guard()
    dist.init_process_group("gloo", rank=rank, world_size=world)
    dist.barrier()  # or a rank that is done is gone before the other has met it
    try:
        guard.vote(scalar(1.0), scalar(1.0), False)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_guard_made_before_the_group_refuses_to_vote_alone() -> None:
    for message in run_ranks(late_group, 2, init=False):
        assert "made before the process group" in message


@pytest.mark.gpu
def test_vote_on_cuda_never_synchronises() -> None:
    guard = Guard(device="cuda", on_event=lambda kind, values: None)
    good, bad = torch.ones((), device="cuda"), torch.full((), NAN, device="cuda")
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        votes = [guard.vote(bad if step == 3 else good, good, step == 5) for step in range(1, 7)]
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert [vote.verdict.skipped for vote in votes] == [False, False, False, True, False, False]
    assert [str(vote.verdict) for vote in votes] == ["ok"] * 5 + ["stop"]
    assert [vote.gate.item() for vote in votes] == [1.0, 1.0, 0.0, 1.0, 1.0, 1.0]
    assert guard.settle() == "ok"


def test_a_wish_to_save_is_that_of_all_and_changes_nothing_else() -> None:
    for world in (1, 2):
        for verdict, gate in run_ranks(wishing, world):
            assert verdict == ["ok", "ok"] and gate == [1.0, 1.0]


def wishing(rank: int, world: int) -> tuple[list[str], list[float]]:
    guard = Guard()
    one = torch.ones(())
    votes = [guard.vote(one, one, False, save=rank == world - 1), guard.vote(one, one, False)]
    verdicts = [votes[1].verdict, guard.settle()]
    assert [verdict.save for verdict in verdicts] == [True, False]
    assert not any(verdict.skipped or verdict.stop_ranks or verdict.reason for verdict in verdicts)
    return [verdict.action for verdict in verdicts], [vote.gate.item() for vote in votes]
