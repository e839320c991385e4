"""Which rank stands where, and who is in a group with whom: a layout as data and as a picture. Standard library only.

Works for any number of processes, on any machine: nothing is started or contacted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kforge_parallel.axes import AXES, EXPERT_AXES, count_text, expert_shard, product_text, resolve_axes
from kforge_parallel.config import ParallelConfig

_WHAT = {
    "tp": "splits every matrix: transfers inside every block",
    "cp": "splits every row of tokens: transfers in every attention",
    "fsdp": "shards weights, gradients, optimizer state: transfers for every block",
    "dp_replicate": "copies of the shards: one more sum of gradients a step",
    "pp": "splits the list of blocks: activations from stage to stage",
    "ep": "splits the experts: two exchanges of tokens in every block",
    "expert_shard": "shards each expert's weights: transfers for every block",
}
_MOST_RANKS, _MOST_ROWS, _MOST_COLUMNS = 64, 8, 16
_MOST_PROCESSES = 1_000_000  # the table has a row for each


@dataclass(frozen=True)
class MeshTable:
    """A layout as data; ``str()`` draws it."""

    world: int
    """Number of processes."""
    ranks_per_host: int
    """Ranks 0 to this - 1 are on host 0, and so on."""
    hosts: int
    """Number of hosts."""
    axes: dict[str, int]
    """Size of every axis, ``ep`` last."""
    ranks: list[dict[str, int]]
    """For each rank: rank, host, and its position on every axis of both roots (expert_shard and ep on the second)."""
    groups: dict[str, list[list[int]]]
    """Axis -> its groups, each a list of ranks. Each rank is in one group of every axis. ``fsdp``: the ranks over
    which FSDP2 shards, dp_shard and cp together."""
    crossing: dict[str, int]
    """Axis -> how many of its groups have ranks on more than one host."""
    warnings: list[str]
    """What makes the layout slow."""

    def __str__(self) -> str:
        return "\n".join(_draw(self))


def mesh_table(config: ParallelConfig | Mapping[str, int], world_size: int, ranks_per_host: int = 8) -> MeshTable:
    """Place ``world_size`` ranks on the axes of ``config`` (or of a mapping such as ``{"tp": 2}``).

    Raises ValueError for axes that do not fit the number of processes, and for more than 1,000,000 of them.
    """
    if not isinstance(config, ParallelConfig):
        unknown = sorted(set(config) - {*AXES, "ep"})
        if unknown:
            raise ValueError(f"{', '.join(unknown)}: no such axis; axes are {', '.join((*AXES, 'ep'))}")
        config = ParallelConfig(**config)  # type: ignore[arg-type]  # names checked above
    if ranks_per_host < 1:
        raise ValueError(f"ranks per host = {ranks_per_host} must be at least 1")
    if world_size > _MOST_PROCESSES:
        raise ValueError(
            f"world = {world_size} is more than the {_MOST_PROCESSES:,} processes that a table is made for"
        )
    axes = resolve_axes(config, world_size)
    dense = {name: axes[name] for name in AXES}
    experts = {**axes, "expert_shard": expert_shard(axes)}
    expert = {name: experts[name] for name in EXPERT_AXES}
    ranks = [
        {"rank": rank, "host": rank // ranks_per_host, **_position(rank, dense), **_position(rank, expert)}
        for rank in range(world_size)
    ]
    groups = {name: _groups(ranks, set(AXES) - {name}) for name in AXES}
    groups["fsdp"] = _groups(ranks, {"pp", "dp_replicate", "tp"})
    groups["expert_shard"] = _groups(ranks, {"pp", "dp_replicate", "ep"})
    groups["ep"] = _groups(ranks, {"pp", "dp_replicate", "expert_shard"})
    crossing = {
        name: sum(group[0] // ranks_per_host != group[-1] // ranks_per_host for group in some)
        for name, some in groups.items()
    }
    return MeshTable(
        world=world_size,
        ranks_per_host=ranks_per_host,
        hosts=-(-world_size // ranks_per_host),
        axes=axes,
        ranks=ranks,
        groups=groups,
        crossing=crossing,
        warnings=_warnings(axes, crossing, len(groups["tp"]), ranks_per_host),
    )


def _position(rank: int, sizes: dict[str, int]) -> dict[str, int]:
    """Where a rank is on axes of these sizes, the last of which is the fastest."""
    position: dict[str, int] = {}
    for name in reversed(sizes):
        rank, position[name] = divmod(rank, sizes[name])
    return {name: position[name] for name in sizes}


def _groups(ranks: list[dict[str, int]], equal: set[str]) -> list[list[int]]:
    """Ranks that have equal positions on the axes ``equal``, in order."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for place in ranks:
        groups.setdefault(tuple(place[name] for name in sorted(equal)), []).append(place["rank"])
    return list(groups.values())


def _warnings(axes: Mapping[str, int], crossing: Mapping[str, int], tp_groups: int, ranks_per_host: int) -> list[str]:
    if not crossing["tp"]:
        return []
    return [
        f"{crossing['tp']} of {tp_groups} tp groups cross hosts: transfers inside every block would go over the "
        f"network between hosts of {ranks_per_host} ranks; set tp to a divisor of {ranks_per_host}"
    ]


def _draw(table: MeshTable) -> Iterator[str]:
    per = f"{table.hosts} hosts of {table.ranks_per_host}" if table.hosts > 1 else "one host"
    yield f"{count_text(table.world)} on {per}" + (f": {product_text(table.axes)}" if table.world > 1 else "")
    yield ""
    yield from _draw_root(table, AXES)
    if table.axes["ep"] > 1:
        yield ""
        yield f"experts (expert_shard {len(table.groups['expert_shard'][0])} × ep {table.axes['ep']}):"
        yield ""
        yield from _draw_root(table, EXPERT_AXES)
    yield ""
    yield from _draw_axes(table)
    for warning in table.warnings:
        yield ""
        yield f"warning: {warning}"


def _draw_root(table: MeshTable, axes: tuple[str, ...]) -> Iterator[str]:
    """One line for each group of the fastest axis that is larger than 1, under the host of its first rank.

    ``|`` is where a host ends inside a group of tp or ep. A longer axis goes on in a line of its own on each host.
    """
    fastest = next((name for name in reversed(axes) if _size(table, name) > 1), axes[-1])
    outer = [name for name in axes[: axes.index(fastest)] if _size(table, name) > 1]
    rows = table.groups[fastest]
    if fastest not in ("tp", "ep"):
        rows = [part for row in rows for part in _by_host(table, row)]
    digits, host_digits = len(str(table.world - 1)), len(str(table.hosts - 1))
    head, tail = (_MOST_ROWS, 2) if table.world > _MOST_RANKS and len(rows) > _MOST_ROWS + 3 else (len(rows), 0)
    said_host, said = -1, dict.fromkeys(outer, -1)
    for n, row in enumerate(rows):
        if head <= n < len(rows) - tail:
            if n == head:
                yield f"  … {len(rows) - head - tail} more such lines …"
            continue
        place = table.ranks[row[0]]
        host = f"host {place['host']:>{host_digits}}" if place["host"] != said_host else ""
        if host:
            said = dict.fromkeys(outer, -1)  # said anew on each host
        cells = []
        for i, name in enumerate(outer):
            text = f"{name} {place[name]:>{len(str(_size(table, name) - 1))}}"
            changed = any(place[slower] != said[slower] for slower in outer[: i + 1])
            cells.append(text if changed else " " * len(text))
        said_host, said = place["host"], {name: place[name] for name in outer}
        label = fastest if len(row) > 1 else "rank"
        yield "  ".join((f"  {host:<{5 + host_digits}}", *cells, f"{label} [{_row_text(table, row, digits)}]"))


def _by_host(table: MeshTable, row: list[int]) -> list[list[int]]:
    parts: dict[int, list[int]] = {}
    for rank in row:
        parts.setdefault(table.ranks[rank]["host"], []).append(rank)
    return list(parts.values())


def _size(table: MeshTable, axis: str) -> int:
    """Size of an axis of either root."""
    return len(table.groups[axis][0])


def _row_text(table: MeshTable, row: list[int], digits: int) -> str:
    """Ranks of a row, with ``|`` between two that are on different hosts."""
    skip = range(_MOST_COLUMNS - 2, len(row) - 1) if len(row) > _MOST_COLUMNS else range(0)
    text = ""
    for i, rank in enumerate(row):
        if i in skip:
            text += " …" if i == skip[0] else ""
            continue
        if i:
            before = skip[0] - 1 if skip and i - 1 in skip else i - 1
            text += " | " if table.ranks[row[before]]["host"] != table.ranks[rank]["host"] else " "
        text += f"{rank:>{digits}}"
    return text


def _draw_axes(table: MeshTable) -> Iterator[str]:
    """The table of groups: size, how many, the first one's ranks, and whether they cross hosts."""
    names = ["tp", "cp", "fsdp", "dp_replicate", "pp"]
    if table.axes["ep"] > 1:
        names += ["ep", "expert_shard"]
    rows = [("groups", "size", "number", "the first", "cross hosts", "what the axis does")]
    for name in names:
        groups = table.groups[name]
        if len(groups[0]) == 1:
            continue
        label = "dp_shard × cp (FSDP)" if name == "fsdp" and table.axes["cp"] > 1 else name
        label = "dp_shard (FSDP)" if label == "fsdp" else label
        first = " ".join(map(str, groups[0] if len(groups[0]) <= 8 else [*groups[0][:4], "…", groups[0][-1]]))
        crossing = table.crossing[name]
        crosses = "no" if not crossing else "all" if crossing == len(groups) else f"{crossing} of {len(groups)}"
        rows.append((label, str(len(groups[0])), str(len(groups)), first, crosses, _WHAT[name]))
    if len(rows) == 1:
        yield "no groups: one process has the whole model"
        return
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    for name, size, number, first, crosses, what in rows:
        yield (
            f"{name:<{widths[0]}}  {size:>{widths[1]}}  {number:>{widths[2]}}  {first:<{widths[3]}}  "
            f"{crosses:<{widths[4]}}  {what}"
        )
