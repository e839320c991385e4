"""The loader: the batches of each optimizer step, in an order that is a function of (seed, position).

Position p, counted over all processes from the first row of the first epoch, leads to one row. Step k of a run with
`global_rows` = G takes positions k*G to (k+1)*G - 1 (with phases of other sizes, as many as `BatchSize` says), and rank
r of W the r-th of W equal parts of them. So the state is the position and what identifies the sequence; the number of
processes, the microbatch and the read-ahead threads decide who reads a row, never which rows a step has.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kforge_data.batch import PADDING_ROW, Batch, cu_seqlens_length
from kforge_data.batch_size import BatchSize
from kforge_data.best_fit import hash_seed
from kforge_data.lanes import LaneState
from kforge_data.loader_state import STATE_VERSION, check_state, describe, differences
from kforge_data.mixture import ROW_BITS, Mixture
from kforge_data.phases import RowPhase
from kforge_data.sources import in_order, lane_rows, laned_parts, lanes_of, rows_or_error
from kforge_data.workers import (
    PHASE_BITS,
    WORKER_KINDS,
    LaneReader,
    ProcessReader,
    RowReader,
    Rows,
    Sender,
    Sent,
    in_phase,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import TracebackType

    from numpy.typing import NDArray

    from kforge_data.masks import Transform
    from kforge_data.sources import Source

_FIND_ROWS = 512
_WHERE = ("_base_step", "_base_position", "_position", "_starts", "_end", "_quarantined", "_lanes")

logger = logging.getLogger("kforge_data")


class Loader:
    """Hands out this rank's microbatches of one optimizer step after the other.

    Args:
        source: where rows come from, e.g. `TokenShards("shards/train")`.
        row_tokens: S, the length of a row in tokens.
        global_rows: G, rows of one optimizer step over all processes.
        rank, world: this process and how many there are. They may change at every resume.
        seed: chooses the order.
        microbatch_rows: B, rows of one batch, of which the last of a step has what is left; None takes all of G/world.
        batch_phases: (steps, rows of a step over all processes) that come first, one after the other; then G.
        phases: `RowPhase`s, ascending: from a step on, rows of another length or source.
        shuffle: a new pseudo-random order for every epoch; False: rows as they lie.
        isolate_documents: positions restart and boundaries are given per document; False: a row is one text.
            Labels never cross a document either way.
        transforms: what is done to raw rows before they become a batch, as `MaskRepetition` and `AnswersOnly`.
        workers: how many read ahead; 0 reads when asked. The order does not depend on it.
        worker_kind: what reads ahead: each a "thread" of this process, or a process of its own, by "fork" or "spawn".
        device: where tensors go. For CUDA they are pinned on the host, and copied on a stream of their own as soon as
            they are read.
        epochs: None goes on for ever; the rows of the next epoch follow in the same step where one ends inside it.
            A number ends there: the last step is filled up with rows of padding, whose labels are all -100, so that
            every rank has the same number of batches. Nothing is ever dropped.
        accept_changed_data: take the position of a state that belongs to another sequence, and say what differs.

    An epoch has each row once. ValueError for a source without rows, or sizes that do not divide.
    """

    def __init__(
        self,
        source: Source,
        *,
        row_tokens: int,
        global_rows: int,
        rank: int = 0,
        world: int = 1,
        seed: int = 1,
        microbatch_rows: int | None = None,
        batch_phases: Sequence[tuple[int, int]] = (),
        phases: Sequence[RowPhase] = (),
        shuffle: bool = True,
        isolate_documents: bool = True,
        transforms: Sequence[Transform] = (),
        workers: int = 1,
        worker_kind: str = "thread",
        device: str | torch.device = "cpu",
        epochs: int | None = None,
        accept_changed_data: bool = False,
    ) -> None:
        self._size = BatchSize(global_rows, tuple(batch_phases))
        for name, rows in self._size.sizes():
            _check_split(name, rows, rank, world, microbatch_rows)
        if workers < 0:
            raise ValueError(f"workers = {workers} must be 0 (no read-ahead) or more")
        if worker_kind not in WORKER_KINDS:
            raise ValueError(f"worker_kind = {worker_kind!r} is not one of {', '.join(WORKER_KINDS)}")
        if epochs is not None and epochs < 1:
            raise ValueError(f"epochs = {epochs} must be at least 1, or None to go on for ever")
        given = _check_phases([RowPhase(0, row_tokens, source), *phases])
        self._phases = [
            RowPhase(
                phase.step,
                phase.row_tokens,
                in_order(phase.source or source, seed=_phase_seed(seed, k), shuffle=shuffle),
            )
            for k, phase in enumerate(given)
        ]
        for each, _ in self._sources:
            _check_lanes(each, world, epochs)
        self._source, self._row_tokens, self._microbatch_rows = source, row_tokens, microbatch_rows
        self._rows = [rows_or_error(each, length) for each, length in self._sources]
        self._rank, self._world, self._seed, self._shuffle = rank, world, seed, shuffle
        self._isolate_documents, self._device = isolate_documents, torch.device(device)
        sizes = {rows for _, of_step in self._size.sizes() for rows in _cut(of_step // world, microbatch_rows)}
        cu_lengths: list[dict[int, int | None]] = [
            {
                rows: cu_seqlens_length(each, row_tokens=length, microbatch_rows=rows) if isolate_documents else None
                for rows in sizes
            }
            for each, length in self._sources
        ]
        if epochs is not None and any(isinstance(each, Mixture) for each, _ in self._sources):
            raise ValueError("a mixture counts epochs for each source; give it max_epochs, and the loader none")
        if epochs is not None and phases:
            raise ValueError("epochs are counted in rows of one length, and phases have others; leave epochs out")
        self._epochs = epochs
        self._position = 0
        # Steps are counted from here: the start of the run, or the resume that changed the size of steps.
        self._base_step, self._base_position = 0, 0
        self._starts, self._end = self._lay_out([])
        self._found: dict[int, NDArray[np.int64]] = {}
        self._found_lock = threading.Lock()
        # As many as a step has and are read ahead, and those of the step before, which somebody may look at still.
        steps = max(len(_cut(of_step // world, microbatch_rows)) for _, of_step in self._size.sizes())
        keep = 2 * (2 * steps + workers)
        self._reader = RowReader(self._sources, isolate_documents, cu_lengths, transforms, keep)
        self._from_processes: ProcessReader | LaneReader | None = None
        threads = workers if worker_kind == "thread" else min(workers, 1)  # one takes what processes give, in order
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kforge-data") if threads else None
        self._sender = Sender(self._device)
        self._ahead: deque[Future[Sent]] = deque()
        self._workers, self._worker_kind = workers, worker_kind
        self._read_step, self._read_microbatch = 0, 0
        self._quarantined = np.empty(0, np.int64)
        self._lanes: dict[tuple[int, int], dict[int, LaneState]] = {}  # (phase, source) -> lane -> where it stands
        self._closed = False
        self._accept_changed_data = accept_changed_data
        if rank == 0:
            self._warn_of_idle_workers()

    def _warn_of_idle_workers(self) -> None:
        """Say it where there is not enough to read for all workers at a time."""
        lanes = [lanes_of(source) for source, _ in self._sources]
        if self._worker_kind == "thread" and any(isinstance(source, Mixture) for source, _ in self._sources):
            lanes = [0]  # threads may read several sources of one lane at a time
        own = max(lanes) // self._world
        batches = step = 0
        while batches < self._workers and not self._ends_at(step):
            batches, step = batches + self._microbatches(step), step + 1
        if all(lanes) and own < self._workers:
            logger.warning(
                "workers = %d, and each of %d processes has %d of %d lanes, each of which one worker at a time reads: "
                "%d workers are idle; set workers to %d, or have more lanes from the start of a run",
                *(self._workers, self._world, own, max(lanes), self._workers - own, own),
            )
        elif batches < self._workers:
            logger.warning(
                "workers = %d, and all steps together have %d batches for each process: %d workers are idle; set "
                "workers to %d, or microbatch_rows lower",
                *(self._workers, batches, self._workers - batches, batches),
            )

    # Where it stands.

    @property
    def position(self) -> int:
        """Rows consumed so far over all processes; padding does not count."""
        return self._position

    @property
    def step(self) -> int:
        """Number of the step that `next` gives next, from 0."""
        return self._size.step_at(self._position - self._base_position + self._size.before(self._base_step))

    @property
    def epoch(self) -> int:
        """Epoch in which the next row lies, from 0; each phase of other rows counts anew."""
        phase = self._phase_at(self.step)
        return (self._position - self._starts[phase]) // self._rows[phase]

    @property
    def epoch_rows(self) -> int:
        """Rows of one epoch, in the phase of the next step."""
        return self._rows[self._phase_at(self.step)]

    @property
    def row_tokens(self) -> int:
        """Length of the rows of the next step, in tokens."""
        return self._sources[self._phase_at(self.step)][1]

    def rows_of(self, steps: range) -> NDArray[np.int64]:
        """Row ids that these steps take, over all ranks, in order; int64, shorter where the last epoch ends.

        Rows in quarantine are among them.

        ValueError for steps before a resume that changed the size of steps: they were cut otherwise.
        """
        if len(steps) and min(steps) < self._base_step:
            raise ValueError(
                f"step {min(steps)} lies before step {self._base_step}, where a resume changed global_rows to "
                f"{self._size.global_rows} or the phases before; its rows are known to the loader of before"
            )
        found = [np.empty(0, np.int64)]
        for step in steps:
            phase = self._phase_at(step)
            positions = np.arange(self._first(step), self._first(step + 1), dtype=np.int64)
            found.append(in_phase(phase, self._rows_at(phase, positions)))
        return np.concatenate(found)

    def quarantine(self, row_ids: Iterable[int]) -> None:
        """Skip these rows from the next step on: a row of padding, which nothing scores, comes in the place of each.

        No other row moves. They join the state as a sorted list. All ranks must name the same.
        """
        self._quarantined = np.union1d(self._quarantined, np.array([*row_ids], np.int64))
        self._forget_ahead()

    # Batches.

    def next(self) -> list[Batch]:
        """This rank's microbatches of the next step, on the device. StopIteration after the last epoch.

        An error of what reads ahead, or its death, is raised here, and the position stays: the step can be asked for
        again.
        """
        if self._closed:
            raise ValueError("the loader is closed")
        if self._end is not None and self._position >= self._end:
            raise StopIteration
        try:
            step = self.step
            batches = [self._take(step) for _ in range(self._microbatches(step))]
        except StopIteration as error:
            self._forget_ahead()
            raise RuntimeError(
                "a source raised StopIteration while it was read, which is no end of the data"
            ) from error
        except BaseException:
            self._forget_ahead()
            raise
        for batch in batches:
            self._note_lanes(self._phase_at(step), batch)
        self._position = self._first(step + 1)
        return batches

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        return self.next()

    @property
    def _sources(self) -> list[tuple[Source, int]]:
        return [(phase.source, phase.row_tokens) for phase in self._phases if phase.source is not None]

    def _phase_at(self, step: int) -> int:
        return sum(phase.step <= step for phase in self._phases) - 1

    def _lay_out(self, begun: Sequence[int]) -> tuple[list[int], int | None]:
        """Position at which each phase begins, and that at which the sequence ends. ``begun``: those that have begun
        before a resume, and stay where they were."""
        starts = [
            begun[k] if k < len(begun) else self._unbounded_first(phase.step) for k, phase in enumerate(self._phases)
        ]
        if self._epochs is not None:
            return starts, self._epochs * self._rows[0]
        for k, (source, row_tokens) in enumerate(self._sources):
            limit = source.position_limit(row_tokens) if isinstance(source, Mixture) else None
            if limit is not None and (k + 1 == len(starts) or starts[k] + limit < starts[k + 1]):
                return starts, starts[k] + limit
        return starts, None

    def _begun(self, step: int) -> list[list[Any]]:
        """Of each phase that began before a step: its first position, and what it reads."""
        return [
            [start, row_tokens, source.fingerprint]
            for start, (source, row_tokens), phase in zip(self._starts, self._sources, self._phases, strict=True)
            if 0 < phase.step < step
        ]

    def _unbounded_first(self, step: int) -> int:
        return self._base_position + self._size.before(step) - self._size.before(self._base_step)

    def _first(self, step: int) -> int:
        """Position at which a step begins, at most the end of the last epoch."""
        first = self._unbounded_first(step)
        return first if self._end is None else min(first, self._end)

    def _microbatches(self, step: int) -> int:
        return len(_cut(self._size.at(step) // self._world, self._microbatch_rows))

    def _take(self, step: int) -> Batch:
        """The next microbatch, which is one of ``step``; as many as that step has, and one a worker, are read ahead."""
        if self._pool is None:
            return self._sender.receive(self._read(*self._advance()))
        ahead = self._microbatches(step) + self._workers
        if self._worker_kind != "thread" and self._from_processes is None:
            rows = self._row_ids_from(self._read_step, self._read_microbatch)
            options: dict[str, Any] = {"workers": self._workers, "kind": self._worker_kind, "ahead": ahead}
            options["pin"] = self._device.type == "cuda"
            if any(lanes_of(source) for source, _ in self._sources):
                self._from_processes = LaneReader(self._reader, rows, world=self._world, **options)
            else:
                self._from_processes = ProcessReader(self._reader, rows, **options)
        while len(self._ahead) < ahead and not self._ends_at(self._read_step):
            at = self._advance()
            job = self._pool.submit(self._read, *at) if self._from_processes is None else self._pool.submit(self._fetch)
            self._ahead.append(job)
        return self._sender.receive(self._ahead.popleft().result())

    def _read(self, step: int, microbatch: int) -> Sent:
        return self._sender.send(self._reader.read(self._row_ids(step, microbatch), pin=self._device.type == "cuda"))

    def _fetch(self) -> Sent:
        assert self._from_processes is not None
        return self._sender.send(next(self._from_processes))

    def _row_ids_from(self, step: int, microbatch: int) -> Iterator[Rows]:
        """Rows of the microbatches from one on, to the end."""
        while not self._ends_at(step):
            for later in range(microbatch, self._microbatches(step)):
                yield self._row_ids(step, later)
            step, microbatch = step + 1, 0

    def _ends_at(self, step: int) -> bool:
        return self._end is not None and self._first(step) >= self._end

    def _advance(self) -> tuple[int, int]:
        """(step, microbatch) to read, and the cursor moved past it."""
        this = (self._read_step, self._read_microbatch)
        self._read_microbatch += 1
        if self._read_microbatch == self._microbatches(self._read_step):
            self._read_step, self._read_microbatch = self._read_step + 1, 0
        return this

    def _row_ids(self, step: int, microbatch: int) -> Rows:
        """Rows of one microbatch; rows of padding last, in the place of those that are skipped or past the end."""
        rank_rows = self._size.at(step) // self._world
        sizes = _cut(rank_rows, self._microbatch_rows)
        rows, offset = sizes[microbatch], sum(sizes[:microbatch])
        phase = self._phase_at(step)
        here = self._rank_rows(step)[offset : offset + rows]
        if self._quarantined.size:
            here = here[~np.isin(in_phase(phase, here), self._quarantined)]
        row_ids = np.full(rows, PADDING_ROW, np.int64)
        row_ids[: len(here)] = here
        return Rows(phase, row_ids)

    def _rank_rows(self, step: int) -> NDArray[np.int64]:
        """Rows of this rank in a step, in order. Those of some further steps are found with them: to find one costs as
        much as to find a hundred."""
        with self._found_lock:
            if step not in self._found:
                phase, positions = self._phase_at(step), []
                for later in range(step, step + max(1, _FIND_ROWS // (self._size.at(step) // self._world))):
                    if self._phase_at(later) != phase:
                        break
                    rank_rows = self._size.at(later) // self._world
                    first = self._unbounded_first(later)
                    if lanes_of(self._sources[phase][0]):  # whole lanes: every world-th position
                        first += (self._rank - first + self._starts[phase]) % self._world
                        some = first + self._world * np.arange(rank_rows, dtype=np.int64)
                    else:
                        first += self._rank * rank_rows
                        some = np.arange(first, first + rank_rows, dtype=np.int64)
                    positions.append(some if self._end is None else some[some < self._end])
                found = self._rows_at(phase, np.concatenate(positions))
                ends = np.cumsum([len(some) for some in positions])
                self._found = dict(zip(itertools.count(step), np.split(found, ends[:-1]), strict=False))
            return self._found[step]

    def _rows_at(self, phase: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        source, row_tokens = self._sources[phase]
        return source.rows_at(
            positions - self._starts[phase],
            row_tokens=row_tokens,
            seed=_phase_seed(self._seed, phase),
            shuffle=self._shuffle,
        )

    def _forget_ahead(self) -> None:
        for future in self._ahead:
            future.cancel()
        wait(self._ahead)
        self._ahead.clear()
        self._found = {}
        if self._from_processes is not None:
            self._from_processes.close()
            self._from_processes = None
        for phase, (source, _) in enumerate(self._sources):
            for number, part in laned_parts(source).items():
                part.start_at(self._lanes.get((phase, number), {}))
        self._read_step, self._read_microbatch = self.step, 0

    # Lanes.

    def _note_lanes(self, phase: int, batch: Batch) -> None:
        """Take where the lanes stand after the rows of a batch out of it."""
        states = batch.pop("lane_states", None)
        if states is None:
            return
        count = lanes_of(self._sources[phase][0])
        for name, state in zip(batch["row_ids"].tolist(), states.tolist(), strict=True):
            if state[0] < 0:
                continue
            number, row = divmod(name & ((1 << PHASE_BITS) - 1), 1 << ROW_BITS)
            lanes = self._lanes.setdefault((phase, number), {})
            lanes[row % count] = max(lanes.get(row % count, LaneState(0, 0, 0, 0, 0)), LaneState(*state))

    def _lane_states(self) -> dict[str, list[list[int]]]:
        """Where this rank's lanes stand, by number of the source: [lane, `LaneState`] each; empty without lanes."""
        phase = self._phase_at(self.step)
        source, _ = self._sources[phase]
        found = {}
        for number in laned_parts(source):
            lanes = self._lanes.get((phase, number), {})
            found[str(number)] = [
                [lane, *lanes.get(lane, LaneState(0, 0, 0, 0, 0))]
                for lane in range(self._rank, lanes_of(source), self._world)
            ]
        return found

    def _load_lanes(self, state: dict[str, Any], differing: bool) -> None:
        """Take up the lanes of a state; of another sequence, whose lanes are others, from the first document on."""
        self._lanes, phase = {}, self._phase_at(self.step)
        source, row_tokens = self._sources[phase]
        if not lanes_of(source):
            return
        given = lane_rows(source, self._position - self._starts[phase], row_tokens)
        for number in laned_parts(source):
            saved = {lane: LaneState(*at) for lane, *at in state.get("lanes", {}).get(str(number), [])}
            mine = range(self._rank, lanes_of(source), self._world)
            rows = given[number].tolist()
            if differing:
                saved = {lane: LaneState(rows[lane], 0, 0, 0, 0) for lane in mine}
            if missing := [lane for lane in mine if lane not in saved]:
                raise ValueError(
                    f"the state does not say where lane {missing[0]} stands, nor of {len(missing) - 1} more: it is of "
                    "one process of several. Save the states of all, and load what merge_states makes of them"
                )
            if wrong := [lane for lane in mine if saved[lane].row > rows[lane]]:
                raise ValueError(
                    f"lane {wrong[0]} stands at row {saved[wrong[0]].row} in the state, and has given {rows[wrong[0]]} "
                    f"at position {self._position}; the state is damaged"
                )
            self._lanes[phase, number] = {lane: saved[lane] for lane in mine}

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Where the sequence stands and which sequence it is: numbers and a fingerprint, the same on every rank.

        With sources in lanes it has ``lanes`` too, where each lane of this rank stands; `merge_states` joins those of
        all ranks.
        """
        lanes = self._lane_states()
        return {
            **({"lanes": lanes} if lanes else {}),
            "version": STATE_VERSION,
            "position": self._position,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "row_tokens": self._row_tokens,
            "fingerprint": self._source.fingerprint,
            "source": describe(self._source),
            "global_rows": self._size.global_rows,
            "batch_phases": [list(phase) for phase in self._size.phases],
            "base_step": self._base_step,
            "base_position": self._base_position,
            "phases": self._begun(self.step),
            "quarantined": self._quarantined.tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state. world, microbatch_rows, workers, device, isolate_documents and transforms may
        differ.

        So may global_rows, batch_phases and epochs: the rows that follow are the same, cut into other steps, of which
        each has the size that its number says. Another source, seed, row_tokens or shuffle is another sequence, in
        which the position means little: ValueError that lists what differs, unless the loader was told to accept it. A
        damaged state is one that names the field. A state that is refused changes nothing.
        """
        check_state(state)
        kept = {name: getattr(self, name) for name in _WHERE}
        try:
            self._take_up(state)
        except BaseException:
            self.__dict__.update(kept)
            raise
        finally:
            self._forget_ahead()

    def _take_up(self, state: dict[str, Any]) -> None:
        size = BatchSize(state["global_rows"], tuple((n, rows) for n, rows in state.get("batch_phases", [])))
        step, base, position = state["base_step"], state["base_position"], state["position"]
        rows = position - base + size.before(step)
        begun = self._begun(size.step_at(rows))
        differing = differences(state, {**self.state_dict(), "phases": begun})
        if differing and not self._accept_changed_data:
            raise ValueError(
                f"the saved position belongs to another sequence of rows: {differing}. Resume with what it was saved "
                "with, or start the data anew by not loading this state, or take the position as it is "
                "(accept_changed_data)"
            )
        if size == self._size and size.before(size.step_at(rows)) == rows:
            self._base_step, self._base_position = step, base
        else:  # steps from here on are cut otherwise than those before
            self._base_step, self._base_position = size.step_at(rows), position
        self._position = position
        self._starts, self._end = self._lay_out([0, *(start for start, _, _ in state.get("phases", []))])
        self._quarantined = np.array(sorted(state.get("quarantined", [])), np.int64)
        self._load_lanes(state, bool(differing))
        if differing:
            logger.warning("going on at position %s in another sequence of rows: %s", position, differing)

    def close(self) -> None:
        """Stop reading ahead. The state stays readable; `next` is an error from here on."""
        self._closed = True
        self._forget_ahead()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _check_split(name: str, rows: int, rank: int, world: int, microbatch_rows: int | None) -> None:
    """ValueError that says what to change, where the rows of a step cannot be cut for ranks and microbatches."""
    if rows < 1:
        raise ValueError(f"{name} = {rows} must be at least 1")
    if world < 1 or not 0 <= rank < world:
        raise ValueError(f"rank = {rank} is not one of {world} processes, counted from 0")
    if rows % world:
        lower, upper = rows // world * world, -(-rows // world) * world
        choice = f"{lower} or {upper}" if lower else str(upper)
        raise ValueError(
            f"{name} = {rows} cannot be shared evenly by {world} data-parallel processes; set {name} to {choice}"
        )
    if microbatch_rows is not None and microbatch_rows < 1:
        raise ValueError(f"microbatch_rows = {microbatch_rows} must be at least 1")


def _check_phases(phases: list[RowPhase]) -> list[RowPhase]:
    for before, phase in itertools.pairwise(phases):
        if phase.step <= before.step:
            raise ValueError(f"a phase from step {phase.step} does not come after that from step {before.step}")
    return phases


def _phase_seed(seed: int, phase: int) -> int:
    return hash_seed(seed, phase) if phase else seed


def _check_lanes(source: Source, world: int, epochs: int | None) -> None:
    """ValueError that says what to change, where a source in lanes cannot be read so."""
    lanes = lanes_of(source)
    if lanes % world:
        raise ValueError(
            f"lanes = {lanes} cannot be dealt to {world} data-parallel processes, which read whole lanes; use a number "
            "of processes that divides it. Another number of lanes is another order: it takes a new run"
        )
    if lanes and epochs is not None:
        raise ValueError(
            f"epochs = {epochs} cannot be kept: {source!r} does not know its rows before it is read, so only the "
            "number of steps can end it; leave epochs out"
        )


def _cut(rows: int, most: int | None) -> list[int]:
    """Sizes of the microbatches of a rank's rows of a step: ``most`` each, and what is left."""
    size = most or rows
    return [min(size, rows - start) for start in range(0, rows, size)]
