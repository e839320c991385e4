"""The vote on every step: one all-reduce that carries the loss, what is not finite, and who asked to stop.

A rank that leaves the loop, or skips a step, on what it alone has seen leaves all others waiting in their next
collective. So nothing is decided locally: the ballots are summed, every rank reads the same sum and applies the same
rule to it.

The ballot of rank r in a group of W ranks is float64 [1 + W]::

    [ local loss, or 0 where not finite | 0 ... 0  code_r  0 ... 0 ]

Summed, slot 0 is the global loss and slot 1 + r holds what rank r reported, so that the log can name the rank. That is
8 bytes a rank, 8 KB on 1,024 ranks: still a message whose time is its latency.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor

from kforge_resilience.config import ResilienceConfig

Action = Literal["ok", "stop", "abort"]
OnEvent = Callable[[str, dict[str, Any]], None]

# Bits of a rank's code. A float64 sum of such codes, one rank a slot, is exact.
LOSS_NAN, LOSS_INF, NORM_NAN, NORM_INF, STOP, SAVE = 1, 2, 4, 8, 16, 32

_log = logging.getLogger("kforge_resilience")


class Verdict(str):
    """What all ranks do after a step: the string "ok", "stop" or "abort", with why.

    - "ok": go on (also after a skipped step, see ``skipped``).
    - "stop": some rank was asked to stop; save a checkpoint and leave with ``exitcodes.STOPPED``.
    - "abort": not finite, and the policy ends the run; leave with ``exitcodes.NONFINITE``.
    """

    step: int | None
    """Number of the step that was voted on; None before the first vote."""
    skipped: bool
    """The step's gate was 0: something was not finite on some rank, and no rank changed its weights."""
    reason: str
    """One sentence that names what, rank and step; empty when there is nothing to say."""
    ranks: tuple[int, ...]
    """Global ranks that are the cause: their loss was not finite or, where no loss explains it, their norm."""
    stop_ranks: tuple[int, ...]
    """Global ranks that asked to stop."""
    save: bool
    """Some rank asked for a checkpoint."""
    skipped_in_a_row: int
    """Skipped steps one after the other, up to and with this one."""
    skipped_total: int
    """Skipped steps since the start of the run, over all restarts whose state was loaded."""

    def __new__(
        cls,
        action: Action,
        *,
        step: int | None = None,
        skipped: bool = False,
        reason: str = "",
        ranks: tuple[int, ...] = (),
        stop_ranks: tuple[int, ...] = (),
        save: bool = False,
        skipped_in_a_row: int = 0,
        skipped_total: int = 0,
    ) -> Verdict:
        self = super().__new__(cls, action)
        self.step, self.skipped, self.reason = step, skipped, reason
        self.ranks, self.stop_ranks, self.save = ranks, stop_ranks, save
        self.skipped_in_a_row, self.skipped_total = skipped_in_a_row, skipped_total
        return self

    @property
    def action(self) -> Action:
        """The word itself, for those who prefer a name to a comparison with the verdict."""
        return cast(Action, str(self))


@dataclass(frozen=True)
class Vote:
    """What a vote gives: two device scalars at once, and the host verdict of the vote before."""

    gate: Tensor
    """float32, 0-dim, on the device: 1 when loss and norm of this step are finite on every rank, else 0."""
    loss: Tensor
    """float64, 0-dim, on the device: sum of the local losses of this step over ranks; NaN when one is not finite."""
    verdict: Verdict
    """Of the vote before this one ("ok" at the first)."""


@dataclass
class _Pending:
    step: int
    host: Tensor
    copied: torch.cuda.Event | None


class Guard:
    """Agreement of all ranks on every step: `vote` once a step, on every rank.

    The gate of step k is known on the device at once. The host's verdict on step k comes with vote k + 1 (or from
    `settle`): it is read from a copy made while the device went on, so that the device never runs dry. Reading it
    waits until the device has done vote k, with the whole of step k + 1 queued behind it.

    ``group``: the ranks that vote; None is the default group, or this process alone where there is none.
    ``on_event``: ``on_event(kind, values)`` with kind "skip", "abort" or "stop", called on the first rank of the group
    only and once per occurrence; without it the same sentence goes to the logger ``kforge_resilience``.

    Raises RuntimeError on a vote when a process group was started after this guard was made without one.
    """

    def __init__(
        self,
        config: ResilienceConfig | None = None,
        device: torch.device | str = "cpu",
        group: dist.ProcessGroup | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        self.config = config if config is not None else ResilienceConfig()
        self.device = torch.device(device)
        self._group = group
        self._on_event = on_event if on_event is not None else _to_log
        self._alone = not _group_exists()
        self._ranks = [0] if self._alone else dist.get_process_group_ranks(group)
        self._slot = 0 if self._alone else dist.get_rank(group)
        self._stopping = False
        self._next_step = 1
        self._skipped_total = 0
        self._skipped_in_a_row = 0
        self._last = Verdict("ok")
        self._pending: _Pending | None = None
        # Two buffers: the copy of vote k + 1 may be on its way while the host still reads that of vote k.
        width = 1 + len(self._ranks)
        pinned = self.device.type == "cuda"
        self._hosts = [torch.empty(width, dtype=torch.float64, pin_memory=True) for _ in range(2)] if pinned else []

    def vote(self, loss: Tensor, norm: Tensor, stop: bool, step: int | None = None, *, save: bool = False) -> Vote:
        """One all-reduce; every rank of the group calls it once a step, whatever it has seen.

        loss: 0-dim, this rank's part of the global loss (the sum over ranks is the loss; a rank that only holds a
        copy of another's passes zero). norm: 0-dim gradient norm, of the rank or global. stop: this rank was asked to
        stop. step: number of the step, counted from 1 (= steps done after it); by default one more than the last. save:
        this rank asks for a checkpoint, by its clock, say.

        Returns gate and loss of this step, and the verdict of the vote before.
        """
        if self._alone and _group_exists():
            raise RuntimeError(
                "this Guard was made before the process group and would vote alone; make it after init_process_group"
            )
        step = self._next_step if step is None else step
        self._next_step = step + 1
        ballot = self._ballot(loss, norm, stop * STOP + save * SAVE)
        if not self._alone:
            dist.all_reduce(ballot, group=self._group)
        gate, total = _tally(ballot)
        pending = self._send(ballot, step)
        previous = self.settle()
        self._pending = pending
        return Vote(gate, total, previous)

    def settle(self) -> Verdict:
        """The verdict of the last vote; waits for the device where it must. "ok" before any vote.

        To be called before what depends on the last step: a checkpoint, the end of the loop. Calling it again, or
        voting after it, counts and reports nothing twice.
        """
        if self._pending is not None:
            pending, self._pending = self._pending, None
            if pending.copied is not None:
                pending.copied.synchronize()
            self._last = self._judge(pending.step, [int(code) for code in pending.host[1:].tolist()])
        return self._last

    def state_dict(self) -> dict[str, int]:
        """Counts that a restart goes on with; equal on all ranks. Settles the last vote first."""
        self.settle()
        return {
            "next_step": self._next_step,
            "skipped_total": self._skipped_total,
            "skipped_in_a_row": self._skipped_in_a_row,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take up the counts of `state_dict`. A vote that was not settled is forgotten."""
        self._next_step = int(state["next_step"])
        self._skipped_total = int(state["skipped_total"])
        self._skipped_in_a_row = int(state["skipped_in_a_row"])
        self._pending = None
        self._stopping = False
        self._last = Verdict("ok", skipped_in_a_row=self._skipped_in_a_row, skipped_total=self._skipped_total)

    def _ballot(self, loss: Tensor, norm: Tensor, wishes: int) -> Tensor:
        loss, norm = loss.detach(), norm.detach()
        code = loss.isnan() * LOSS_NAN + loss.isinf() * LOSS_INF + norm.isnan() * NORM_NAN + norm.isinf() * NORM_INF
        ballot = torch.zeros(1 + len(self._ranks), dtype=torch.float64, device=self.device)
        ballot[0] = loss.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        ballot[1 + self._slot] = code + wishes
        return ballot

    def _send(self, ballot: Tensor, step: int) -> _Pending:
        if not self._hosts:
            return _Pending(step, ballot, None)
        host = self._hosts[0]
        self._hosts.reverse()
        host.copy_(ballot, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(self.device))
        return _Pending(step, host, copied)

    def _judge(self, step: int, codes: list[int]) -> Verdict:
        """The same rule on the same sums on every rank."""
        loss_ranks = self._who(codes, LOSS_NAN | LOSS_INF)
        norm_ranks = self._who(codes, NORM_NAN | NORM_INF)
        if loss_ranks and (len(norm_ranks) == len(codes) or set(norm_ranks) <= set(loss_ranks)):
            norm_ranks = ()  # one bad loss makes the norm bad wherever gradients are summed: no second culprit
        stop_ranks = self._who(codes, STOP)
        skipped = bool(loss_ranks or norm_ranks)
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        self._skipped_total += skipped
        limit = self.config.max_skipped_in_a_row
        too_many = limit > 0 and self._skipped_in_a_row >= limit
        action: Action = "ok"
        if skipped and (self.config.nonfinite == "abort" or too_many):
            action = "abort"
        elif stop_ranks:
            action = "stop"
        parts = []
        if skipped:
            parts.append(self._what(codes, loss_ranks, norm_ranks))
            parts.append(f"skipped on all ranks ({self._skipped_in_a_row} in a row, {self._skipped_total} in all)")
        if action == "abort":
            cause = "nonfinite = 'abort'" if self.config.nonfinite == "abort" else f"max_skipped_in_a_row = {limit}"
            parts.append(f"the run ends ({cause})")
        if stop_ranks:
            parts.append(f"stop asked for on {_name(stop_ranks)}")
        verdict = Verdict(
            action,
            step=step,
            skipped=skipped,
            reason=f"step {step}: {'; '.join(parts)}" if parts else "",
            ranks=tuple(sorted({*loss_ranks, *norm_ranks})),
            stop_ranks=stop_ranks,
            save=bool(self._who(codes, SAVE)),
            skipped_in_a_row=self._skipped_in_a_row,
            skipped_total=self._skipped_total,
        )
        self._report(verdict)
        return verdict

    def _who(self, codes: list[int], bits: int) -> tuple[int, ...]:
        return tuple(rank for rank, code in zip(self._ranks, codes, strict=True) if code & bits)

    def _what(self, codes: list[int], loss_ranks: tuple[int, ...], norm_ranks: tuple[int, ...]) -> str:
        """ "loss is nan on rank 1, gradient norm is inf on rank 3"; only what says who the cause is."""
        words = [("loss is nan", LOSS_NAN, loss_ranks), ("loss is inf", LOSS_INF, loss_ranks)]
        words += [("gradient norm is nan", NORM_NAN, norm_ranks), ("gradient norm is inf", NORM_INF, norm_ranks)]
        found = [(word, tuple(r for r in self._who(codes, bit) if r in ranks)) for word, bit, ranks in words]
        return ", ".join(f"{word} on {self._name(ranks)}" for word, ranks in found if ranks)

    def _name(self, ranks: tuple[int, ...]) -> str:
        return "every rank" if len(ranks) == len(self._ranks) > 1 else _name(ranks)

    def _report(self, verdict: Verdict) -> None:
        kind = "abort" if verdict == "abort" else "skip" if verdict.skipped else "stop" if verdict.stop_ranks else None
        if kind == "stop" and self._stopping:
            kind = None  # the flag stays up until the run has ended: said once
        self._stopping = bool(verdict.stop_ranks)
        if kind is None or self._slot != 0:
            return
        self._on_event(
            kind,
            {
                "step": verdict.step,
                "reason": verdict.reason,
                "ranks": list(verdict.ranks),
                "stop_ranks": list(verdict.stop_ranks),
                "skipped_in_a_row": verdict.skipped_in_a_row,
                "skipped_total": verdict.skipped_total,
            },
        )


def _tally(ballot: Tensor) -> tuple[Tensor, Tensor]:
    """Gate (float32) and global loss (float64) of the summed ballots [1 + W], on the device."""
    codes = ballot[1:]
    good = torch.remainder(codes, STOP).sum() == 0
    loss_bad = torch.remainder(codes, NORM_NAN).sum() > 0
    # masked_fill, not where: where would bring its number to the device by a copy that waits.
    return good.to(torch.float32), ballot[0].masked_fill(loss_bad, torch.nan)


def _group_exists() -> bool:
    return dist.is_available() and dist.is_initialized()


def _name(ranks: tuple[int, ...]) -> str:
    """(1,) -> "rank 1"; (0, 1, 2, 5) -> "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def _to_log(kind: str, values: dict[str, Any]) -> None:
    _log.log(logging.ERROR if kind == "abort" else logging.WARNING, "%s", values["reason"])
