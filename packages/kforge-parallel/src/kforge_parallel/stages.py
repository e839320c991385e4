"""A pipeline as numbers: which schedules there are, which blocks a stage has, and on which rank it lies. Standard
library only.

The blocks are cut into ``pp · stages a rank`` stages, one behind the other. Where a rank has several, they are not
neighbours: stage s lies on rank s mod pp (looped), or runs down the ranks and up again (a V, so that the first rank has
both ends of the model).

    schedule                 stages a rank   placed   backward
    ------------------------ --------------- -------- -------------------------------------------------------------
    gpipe                    1                        all forwards, then all backwards (Huang et al. 2018)
    1f1b                     1                        as soon as it can be (Narayanan et al. 2019, PipeDream-flush)
    interleaved_1f1b         pp_stages, 2    looped   the same (Narayanan et al. 2021, arXiv:2104.04473)
    interleaved_zero_bubble  pp_stages, 2    looped   split: inputs at once, weights where a bubble would be
    zbv                      2               V        split (Qi et al. 2024, arXiv:2405.15362)
    dualpipev                2               V        split in part (DeepSeek-V3, arXiv:2412.19437, cut in half)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kforge_parallel.config import ParallelConfig


@dataclass(frozen=True)
class ScheduleKind:
    """What must be known of a schedule before it is built."""

    torch_name: str
    """The class in torch.distributed.pipelining."""
    stages: int
    """Stages of a rank where ``parallel.pp_stages`` does not say."""
    any_stages: bool = False
    """Whether another number, above 1, can be asked for."""
    v: bool = False
    """Whether the stages run down the ranks and up again."""
    splits_backward: bool = False
    """Whether gradients of inputs and of weights are computed apart."""


SCHEDULES: dict[str, ScheduleKind] = {
    "gpipe": ScheduleKind("ScheduleGPipe", 1),
    "1f1b": ScheduleKind("Schedule1F1B", 1),
    "interleaved_1f1b": ScheduleKind("ScheduleInterleaved1F1B", 2, any_stages=True),
    "interleaved_zero_bubble": ScheduleKind("ScheduleInterleavedZeroBubble", 2, any_stages=True, splits_backward=True),
    "zbv": ScheduleKind("ScheduleZBVZeroBubble", 2, v=True, splits_backward=True),
    "dualpipev": ScheduleKind("ScheduleDualPipeV", 2, v=True, splits_backward=True),
}
"""Word of ``parallel.pp_schedule`` -> what it is."""


def stages_per_rank(config: ParallelConfig) -> int:
    """How many stages each rank has under ``parallel.pp_schedule``."""
    return config.pp_stages or SCHEDULES[config.pp_schedule].stages


def rank_of_stage(stage: int, pp: int, v: bool) -> int:
    """The pipeline rank that has a stage."""
    turn, place = divmod(stage, pp)
    return pp - 1 - place if v and turn % 2 else place


def stages_of_rank(rank: int, config: ParallelConfig, pp: int) -> list[int]:
    """The stages of a pipeline rank, in their order."""
    v = SCHEDULES[config.pp_schedule].v
    return [stage for stage in range(pp * stages_per_rank(config)) if rank_of_stage(stage, pp, v) == rank]


def split_layers(
    config: ParallelConfig, pp: int, n_layers: int, costs: Sequence[float] | None = None, last: float = 0.0
) -> list[range]:
    """The blocks of each stage.

    costs: of each block, for ``parallel.pp_split = "cost"``, in any unit; None: all alike. last: of what follows the
    last block (the head) in the same unit.

    Raises ValueError for fewer blocks than stages, and for ``parallel.pp_layers`` that do not add up.
    """
    stages = pp * stages_per_rank(config)
    if n_layers < stages:
        raise ValueError(
            f"model.n_layers = {n_layers} is fewer than the {stages} stages of parallel.pp = {pp}"
            f"{f' × {stages // pp} a rank' if stages > pp else ''}: a stage would have no block; set pp to at most "
            f"{max(1, n_layers * pp // stages)}, or n_layers to at least {stages}"
        )
    if config.pp_layers:
        if len(config.pp_layers) != stages or sum(config.pp_layers) != n_layers:
            raise ValueError(
                f"parallel.pp_layers = {list(config.pp_layers)} must be {stages} numbers, one for each stage, that add "
                f"up to model.n_layers = {n_layers}"
            )
        counts = list(config.pp_layers)
    elif config.pp_split == "cost" and costs is not None:
        counts = _by_cost(list(costs), last, stages)
    else:
        counts = [n_layers // stages + (stage < n_layers % stages) for stage in range(stages)]
    starts = [sum(counts[:stage]) for stage in range(stages)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def _by_cost(costs: list[float], last: float, stages: int) -> list[int]:
    """Blocks of each stage, so that the most expensive stage is as cheap as can be; of several ways, the one whose
    other stages are the most even."""
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    n = len(costs)
    # best[end]: (largest cost, sum of squares, counts) of the stages so far over the first `end` blocks
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}
    for stage in range(stages):
        further: dict[int, tuple[float, float, list[int]]] = {}
        for begin, (worst, squares, counts) in best.items():
            for end in range(begin + 1, n - (stages - stage - 1) + 1):
                cost = sums[end] - sums[begin] + (last if stage == stages - 1 else 0.0)
                candidate = (max(worst, cost), squares + cost * cost, [*counts, end - begin])
                if end not in further or candidate < further[end]:
                    further[end] = candidate
        best = further
    return best[n][2]


def check_schedule(config: ParallelConfig, pp: int, microbatches: int | None = None) -> None:
    """Raise ValueError for a pipeline that cannot be, with what to change. microbatches: of each rank in a step."""
    kind, word = SCHEDULES[config.pp_schedule], config.pp_schedule
    if pp == 1:
        return
    if kind.splits_backward and config.recompute not in ("none", "auto"):
        raise ValueError(
            f"parallel.recompute = {config.recompute} with parallel.pp_schedule = {word} would run each block up to 7 "
            "times a microbatch: the gradients of weights are computed apart, a group of them after the other, and "
            "each runs the block again; set recompute to none, or pp_schedule to interleaved_1f1b"
        )
    if config.accumulate == "sharded":
        raise ValueError(
            f"parallel.accumulate = sharded cannot be with parallel.pp = {pp}: a schedule reduces gradients once, "
            "after its last microbatch; set accumulate to unsharded"
        )
    if config.cpu_offload:
        raise ValueError(f"parallel.cpu_offload = true has not been proven with parallel.pp = {pp}; set it to false")
    if microbatches is None:
        return
    stages = pp * stages_per_rank(config)
    if word in ("1f1b", "dualpipev") and microbatches < stages:
        raise ValueError(
            f"parallel.pp_schedule = {word} wants at least as many microbatches as its {stages} stages, and a step has "
            f"{microbatches} on each data rank; set data.microbatch_rows lower, or pp_schedule to "
            f"{'gpipe' if word == '1f1b' else 'zbv'}"
        )
    rounds = max(1, microbatches // pp)
    if kind.any_stages and microbatches % rounds:
        raise ValueError(
            f"parallel.pp_schedule = {word} goes through microbatches in {rounds} equal rounds, and {microbatches} of "
            f"them, as a step has on each data rank, are no multiple of it; use fewer than {2 * pp} or a multiple of "
            f"{pp} (data.microbatch_rows, data.global_rows)"
        )
