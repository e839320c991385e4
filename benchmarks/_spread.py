"""The rows of the benchmark of several GPUs: which model in which layout, and what it is held against."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from _rows import LEAN, ROWS, Row, tiny


@dataclass(frozen=True, kw_only=True)
class Spread:
    """One row over all GPUs."""

    row: Row
    kind: str = "row"
    """What its processes do: row (the Trainer), hand (`_by_hand`), saves (in the background; `ckpt_train`), save (once)
    or load (what another row saved)."""
    one: str | None = None
    """The row of h200.py, on one GPU, whose tokens/s are the 1 of its ratio; None: it fits none."""
    against: str | None = None
    """Another row of this benchmark: the time of a step is compared with its."""
    needs: int = 2
    """The GPUs that it takes at least; their number is a multiple of it."""
    scaling: float | None = None
    """The ratio to one GPU that it is to reach."""
    mfu: float | None = None
    """The MFU that it is to reach."""
    times: float | None = None
    """What the time of a step over that of `against` must not exceed."""
    of: str | None = None
    """The row whose checkpoint is loaded."""
    fewer: int = 1
    """Of the GPUs, one in so many is used."""
    trace: bool = False
    """Whether one more step is summed by kernel class."""


def layout(base: Row, name: str, gpus: int, *, together: int = 1, **parallel: Any) -> Row:
    """A row with as many tokens a GPU as on one. ``together``: GPUs that share a microbatch, which has as many more
    rows."""
    return dataclasses.replace(
        base,
        name=name,
        global_rows=base.global_rows * gpus,
        microbatch_rows=base.microbatch_rows * together,
        target=None,
        job={f"parallel.{key}": value for key, value in parallel.items()},
    )


def rows_at(gpus: int) -> dict[str, Spread]:
    """All rows, by name, as they are on so many GPUs."""
    dense, fp32, moe, small = ROWS["8b"], ROWS["8b-fp32"], ROWS["moe"], ROWS["1b"]
    found: dict[str, Spread] = {}

    def add(base: Row, name: str, *, together: int = 1, parallel: dict[str, Any] | None = None, **more: Any) -> None:
        found[name] = Spread(row=layout(base, name, gpus, together=together, **(parallel or {})), **more)

    add(dense, "fsdp", one="8b", scaling=0.95)
    add(dense, "hsdp", one="8b", scaling=0.95, needs=4, parallel={"dp_replicate": 2})
    add(dense, "tp", one="8b", together=gpus, parallel={"tp": gpus})
    add(dense, "tp-fsdp", one="8b", needs=4, together=2, parallel={"tp": 2})
    add(ROWS["8b-fp8"], "fsdp-fp8", one="8b-fp8", scaling=0.95)
    # What a plain script keeps, fp32 weights and moments, is what both of these keep.
    sharded = dataclasses.replace(fp32, recompute="none")
    add(sharded, "fsdp-fp32", against="by-hand", times=1.0)
    add(sharded, "by-hand", kind="hand")

    # One text over all GPUs. 128k tokens have no row on one GPU.
    for tokens, one, recompute in ((32_768, "8b-32k", "selective"), (131_072, None, "full")):
        for style in ("allgather", "ring", "ulysses"):
            text = Row(
                name="text",
                preset="llama3-8b",
                model={"max_seq_len": tokens},
                row_tokens=tokens,
                global_rows=1,
                microbatch_rows=1,
                recompute=recompute,
                recompute_keep=("attention",) if recompute == "selective" else (),
                **LEAN,
            )
            name = f"cp-{tokens // 1024}k" + ("" if style == "allgather" else f"-{style}")
            cut = layout(text, name, 1, cp=gpus, cp_style=style)
            found[name] = Spread(row=cut, one=one)

    single = dataclasses.replace(dense, microbatch_rows=1)
    for schedule in ("1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"):
        add(single, f"pp-{schedule}", one="8b", parallel={"pp": gpus, "pp_schedule": schedule})

    for size in (2, 4, 8):
        add(moe, f"moe-ep{size}", one="moe", needs=size, mfu=0.35, parallel={"ep": size})

    add(small, "fsdp-1b", one="1b", scaling=0.95)
    add(small, "fsdp-1b-muon", against="fsdp-1b", times=1.05, trace=True)
    muon = found["fsdp-1b-muon"].row
    found["fsdp-1b-muon"] = dataclasses.replace(
        found["fsdp-1b-muon"], row=dataclasses.replace(muon, job={**muon.job, "optim.name": "muon"})
    )
    add(small, "saves-1b", kind="saves")
    add(small, "save-1b", kind="save")
    for fewer in (2, 4):
        if gpus % fewer == 0:
            add(small, f"load-1b-by-1-in-{fewer}", kind="load", of="save-1b", fewer=fewer)

    # A model of 70 B parameters has 80 such blocks, which do not fit; the time and memory of one tell those of all.
    for blocks in (2, 4, 8, 16, 32):
        shape = {"preset": "llama3.1-70b", "n_layers": blocks}
        wide = Row(name="70b", model=shape, microbatch_rows=1, recompute="full", reshard_after_forward=True, **LEAN)
        add(wide, f"70b-{blocks}-blocks")
    return {name: spread for name, spread in found.items() if gpus % spread.needs == 0}


def toy(spread: Spread, gpus: int) -> Spread:
    """The same at a size that CPUs take in seconds."""
    row = tiny(spread.row)
    model = {**row.model, "n_heads": 8, "n_kv_heads": 8, "n_layers": 2, "vocab_size": 264}
    if "parallel.pp" in row.job:
        model["n_layers"] = 4 * gpus
    rows = 2 * gpus if spread.row.global_rows > 1 else 1
    row = dataclasses.replace(
        row,
        model=model,
        global_rows=rows,
        microbatch_rows=1 if rows > 1 else row.microbatch_rows,
        timed_steps=3,
    )
    return dataclasses.replace(spread, row=row)
