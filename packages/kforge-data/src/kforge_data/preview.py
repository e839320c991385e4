"""What a job's mixture will have given, step by step, before anything is trained."""

from __future__ import annotations

import itertools
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kforge_data.config import DataConfig
from kforge_data.mixture import Mixture
from kforge_data.stats import new_figure

if TYPE_CHECKING:
    from collections.abc import Sequence


class Window(NamedTuple):
    """Steps first..last-1 of a job and what they read of one source."""

    first: int
    last: int
    name: str
    asked: float
    """Share of the tokens (or documents, if the mixture is by these) that the weights ask for at its first step."""
    realised: float
    rows: int
    epochs: float
    """How often the source has been gone through when the window ends."""


def read_data_config(path: str | Path) -> DataConfig:
    """The table [data] of a job's TOML file. ValueError that names what is wrong with it."""
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8")).get("data")
        if not isinstance(table, dict):
            raise ValueError("it has no table [data]")
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}
        return DataConfig(**values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}".replace("DataConfig.__init__()", "[data]")) from error


def preview(sources: Sequence[Mixture], config: DataConfig, steps: int, windows: int = 20) -> list[Window]:
    """Shares of every source over ``windows`` parts of the first ``steps`` steps. Nothing is read but lengths.

    ``sources`` are those of `training_sources`. A part ends where rows get another length.
    """
    if steps < 1 or windows < 1:
        raise ValueError(f"steps = {steps} and windows = {windows} must be at least 1")
    size, lengths = config.batch_size(), config.row_lengths()
    edges = {round(i * steps / min(windows, steps)) for i in range(min(windows, steps) + 1)}
    edges |= {begin for begin, _ in lengths if begin < steps}
    found, through = [], dict.fromkeys(sources[0].names, 0.0)
    for number, (mixture, (begin, row)) in enumerate(zip(sources, lengths, strict=True)):
        end = min(lengths[number + 1][0], steps) if number + 1 < len(lengths) else steps
        base, limit = size.before(begin), mixture.position_limit(row)
        if limit is not None and size.before(end) - base > limit:
            raise ValueError(
                f"{end - begin} steps read {size.before(end) - base} rows, and the mixture ends after {limit}, when "
                "every source has given its max_epochs"
            )
        sizes = mixture.row_sizes(row)
        inside = sorted(edge for edge in edges if begin <= edge <= end)
        for first, last in itertools.pairwise(inside):
            before, after = (mixture.counts(size.before(step) - base, row) for step in (first, last))
            asked = mixture.asked(size.before(first) - base)
            read = {name: (after[name] - before[name]) * sizes[name][1] for name in mixture.names}
            for name in mixture.names:
                rows = after[name] - before[name]
                through[name] += rows / sizes[name][0]
                found.append(
                    Window(first, last, name, asked[name], read[name] / sum(read.values()), rows, through[name])
                )
    return found


def draw_shares(windows: Sequence[Window], path: str | Path) -> None:
    """A PNG: realised shares as steps, what the weights ask for dashed."""
    figure, axes = new_figure()
    for i, name in enumerate(dict.fromkeys(window.name for window in windows)):
        mine = [window for window in windows if window.name == name]
        edges = [mine[0].first, *(window.last for window in mine)]
        axes.stairs([window.realised for window in mine], edges, baseline=None, color=f"C{i % 10}", label=name)
        axes.stairs([w.asked for w in mine], edges, baseline=None, color=f"C{i % 10}", linestyle="--", alpha=0.6)
    axes.set_xlabel("step")
    axes.set_ylabel("share (dashed: asked for)")
    axes.set_ylim(0, 1)
    axes.legend()
    figure.savefig(path, format="png")
