"""The performance section of README.md, made from the kept results of the benchmarks.

    python tools/performance.py --check     # exit 1, when the section differs from benchmarks/results
    python tools/performance.py --write     # after a benchmark has been run

It stands between two comments that name this tool.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- made by tools/performance.py --write -->", "<!-- end of what tools/performance.py makes -->"

TRAINING = {
    "350m": "0.35 B, fp32 weights",
    "1b": "1.2 B, fp32 weights",
    "1b-fp8": "1.2 B, fp32 weights, FP8 products",
    "8b": "8.0 B, split weights",
    "8b-packed": "8.0 B, split weights, packed documents of 600 tokens on average",
    "8b-fp8": "8.0 B, split weights, FP8 products",
    "8b-32k": "8.0 B, split weights, one text of 32,768 tokens",
    "moe": "9.2 B in 24 layers of 8 experts, 2 a token, split weights",
}
"""Row of benchmarks/h200.py -> what was trained."""
RATIOS = (
    ("muon_cuda", "muon: step / adamw's", "time of a step of 131,072 tokens with Muon / with AdamW, 1.2 B"),
    ("optim_cuda", "adamw, split, bf16 moments, 8B / copy rate", "bytes a second of AdamW over split weights / a copy"),
    ("model_cuda", "dense products / layer of experts", "products of as many FLOPs / a layer of 8 experts"),
    ("ckpt_train_cuda", "1b: a save / 100 steps", "cost of a background save / 100 steps, 1.2 B"),
    ("ckpt_train_cuda", "3b: a save / 100 steps", "the same, 3.2 B"),
    ("ckpt_train_cuda", "3b: longest step / median", "longest step / median while saving, 3.2 B"),
    ("ckpt_cuda", "copying and fsync / a synchronous save", "time of copying the file and fsync / a synchronous save"),
    ("ckpt_cuda", "load / reading the bytes into memory", "time of a load / reading the bytes"),
    ("ckpt_cuda", "16 GiB: plain copies / staging", "time of plain copies to the host / staging 16 GiB"),
    ("loss", "split from fp32", "distance of the loss, split weights from fp32, in spreads of three seeds"),
    ("loss", "packed from fp32", "the same, packed documents"),
    ("loss", "fp8 from fp32", "the same, FP8"),
)
"""Benchmark, row, and what it is, for people."""
COMMANDS = {
    "muon_cuda": "muon.py --device cuda",
    "optim_cuda": "optim.py",
    "model_cuda": "model.py",
    "ckpt_train_cuda": "ckpt_train.py",
    "ckpt_cuda": "ckpt.py",
    "loss": "loss.py",
}


def read(name: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Environment and rows of a kept result."""
    result = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    return result["environment"], {row["row"]: row for row in result["rows"]}


def number(value: float | None) -> str:
    """As it stands in a table."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def with_spread(row: dict[str, Any]) -> str:
    spread = row["spread"]
    return number(row["value"]) + (f" ({number(spread)})" if spread is not None else "")


def section() -> str:
    """The text between the two comments."""
    environment, rows = read("h200")
    dates = sorted({environment["date"], *(row["date"] for row in rows.values() if "date" in row)})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    machine = f"One {environment['gpu']}, torch {environment['torch']}, {when}."
    lines = [
        f"{machine} Sequences of 4,096 tokens and 32,768 tokens a step unless said; compute in bf16; AdamW; loading of",
        "data included; blocks compiled one by one. Value (spread). Floor: the sum of the parts of a step, each timed",
        "alone in the same call. MFU: of 989 TFLOP/s, the peak in bf16, with causal attention.",
        f"`python benchmarks/h200.py --rows {','.join(TRAINING)}`",
        "",
        "| model | tokens/s | target | / floor | MFU | peak GB |",
        "|---|---|---|---|---|---|",
    ]
    once = False
    for name, what in TRAINING.items():
        row = rows[name]
        mark = "" if row["parts"]["counts"] else " *"
        once |= bool(mark)
        floor, peak = (rows[f"{name} {part}"]["value"] for part in ("value/floor", "peak memory"))
        cells = (what, with_spread(row) + mark, number(row["target"]), f"{floor:.2f}", f"{row['parts']['mfu']:.1%}")
        lines.append(f"| {' | '.join(cells)} | {peak:.0f} |")
    if once:
        lines += ["", "\\* timed once; the others twice, with less than 2 % between the two."]
    lines += ["", "| ratio | value | target | command, `python benchmarks/…` |", "|---|---|---|---|"]
    for name, label, what in RATIOS:
        row = read(name)[1][label]
        if row["target"] is None:
            target = ""
        else:
            target = ("≥ " if row["better"] == "higher" else "≤ ") + number(row["target"])
        lines.append(f"| {what} | {with_spread(row)} | {target} | `{COMMANDS[name]}` |")
    return "\n".join(lines + on_several_gpus())


def on_several_gpus() -> list[str]:
    """The table of benchmarks/multi_gpu.py; nothing before it was first run."""
    if not (RESULTS / "multi_gpu.json").exists():
        return []
    environment, rows = read("multi_gpu")
    lines = [
        "",
        f"Several {environment['gpu']} of one host, torch {environment['torch']}, {environment['date']}; as many",
        "tokens a GPU as on one. `python benchmarks/multi_gpu.py --rows all`",
        "",
        "| row | tokens/s a GPU | / one GPU | target | MFU | peak GB |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        if row["unit"] == "tokens/s/GPU":
            ratio = rows.get(f"{name} / one", {"value": None, "target": None})
            parts = row["parts"]
            cells = (name, with_spread(row), number(ratio["value"]), number(ratio["target"]), f"{parts['mfu']:.1%}")
            lines.append(f"| {' | '.join(cells)} | {max(parts['peak_gb']):.0f} |")
    others = [row for name, row in rows.items() if row["unit"] != "tokens/s/GPU" and not name.endswith(" / one")]
    aimed = [row for row in others if row["target"] is not None]
    lines += ["", "| several GPUs | value | unit | target |", "|---|---|---|---|"] if aimed else []
    for row in aimed:
        sign = "≥" if row["better"] == "higher" else "≤"
        lines.append(f"| {row['row']} | {with_spread(row)} | {row['unit']} | {sign} {number(row['target'])} |")
    return lines


def written(readme: str) -> str:
    """The README with the section in its place."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"README.md has no place for the section; it is between {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n{section()}\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true")
    action.add_argument("--write", action="store_true")
    options = parser.parse_args()
    path = ROOT / "README.md"
    old = path.read_text("utf-8")
    new = written(old)
    if options.write:
        path.write_text(new, "utf-8")
    elif new != old:
        print("README.md's performance section is not that of benchmarks/results; run tools/performance.py --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
