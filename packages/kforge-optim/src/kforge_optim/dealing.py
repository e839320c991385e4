"""Matrices dealt to the ranks that share them: which rank works on which, and how their parts get there and back.

A group is the ranks along those mesh dimensions that cut the matrices of a weight. Each matrix has one owner in it, who
gets all its parts, and gives each rank the part of the result that it holds. Owners are found by arithmetic on shapes
and placements, alike on all ranks; nothing is sent for it. Matrices travel in buckets, each of which gives every owner
a bounded number of elements: one all-to-all a mesh dimension on the way in, the last dimension first as its ranks are
the nearest, and the same on the way back. A rank that owns nothing of a bucket joins in all of them.

Ranks that hold the same parts (replicas) are in different groups, and each group does the work for itself: to deal a
matrix over replicas too would save products, and send every update over the slow links between them.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from kforge_optim._torch import foreach_copy_, sharded_dim
from kforge_optim.algorithm import Fused
from kforge_optim.sharding import Box, shard_box

Index = tuple[slice, ...]
Moving = Generator[None, None, list[Tensor]]
"""What yields while an exchange is under way, and returns what has arrived."""


@dataclass(frozen=True)
class Layout:
    """A weight, as all ranks see it."""

    shape: tuple[int, ...]
    fused: Fused | None
    placements: tuple[Placement, ...] = ()

    @property
    def over(self) -> tuple[int, ...]:
        """The mesh dimensions that cut its matrices. Of a fused weight all that cut it: its parts interleave."""
        first = len(self.shape) - 2 if self.fused is None else 0
        dims = [sharded_dim(placement) for placement in self.placements]
        return tuple(at for at, dim in enumerate(dims) if dim is not None and dim >= first)


@dataclass(frozen=True)
class Matrix:
    """One matrix of a weight: ``box`` of it, all dimensions but the last flattened."""

    weight: int
    box: Box

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the box."""
        return tuple(stop - first for first, stop in self.box)

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def columns(self) -> int:
        return self.shape[-1]

    @property
    def cost(self) -> int:
        """Of its orthogonalisation, up to a factor: rows · columns · the smaller of both."""
        return self.rows * self.columns * min(self.rows, self.columns)


@dataclass(frozen=True)
class Part:
    """What this rank holds of a matrix: ``index`` into its shard of the weight."""

    weight: int
    kind: int
    """0: of the update; 1: of what is kept of each row."""
    index: Index


@dataclass(frozen=True)
class Exchange:
    """One all-to-all along a mesh dimension: pieces go out in ``order``, and come in by the rank that sent them."""

    mesh_dim: int
    order: tuple[int, ...]
    sent: tuple[int, ...]
    """Elements of each piece that goes out, in ``order``."""
    sent_to: tuple[int, ...]
    """Elements to each rank along the dimension."""
    received: tuple[int, ...]
    received_from: tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """Where a piece that has come to the owner belongs: ``index`` into ``shape``, of matrix ``member`` of a batch."""

    piece: int
    member: int
    kind: int
    shape: tuple[int, ...]
    index: Index


@dataclass(frozen=True)
class Batch:
    """Matrices of one shape that this rank owns."""

    rows: int
    columns: int
    count: int
    places: tuple[Place, ...]


@dataclass(frozen=True)
class Bucket:
    """What travels together."""

    parts: tuple[Part, ...]
    exchanges: tuple[Exchange, ...]
    batches: tuple[Batch, ...]


def balanced(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Deal jobs to ranks, the longest first, each to the rank that has the least so far (the first of several).

    Returns the jobs of each rank, in that order. No rank's sum exceeds the mean by more than the cost of one job.
    """
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for job in sorted(range(len(costs)), key=lambda job: -costs[job]):
        load, rank = heapq.heappop(loads)
        dealt[rank].append(job)
        heapq.heappush(loads, (load + costs[job], rank))
    return dealt


def matrices_of(weight: int, layout: Layout, held: Box) -> list[Matrix]:
    """The matrices of a weight in the box of it that a group holds together."""
    if layout.fused is None:
        leading = itertools.product(*(range(*bounds) for bounds in held[:-2]))
        return [Matrix(weight, (*((at, at + 1) for at in index), *held[-2:])) for index in leading]
    dim, sizes = layout.fused
    stops = list(itertools.accumulate(sizes))
    return [
        Matrix(weight, (*held[:dim], (stop - size, stop), *held[dim + 1 :]))
        for size, stop in zip(sizes, stops, strict=True)
    ]


@lru_cache(maxsize=64)
def deal(
    layouts: tuple[Layout, ...],
    over: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    row_elements: int,
    owner_elements: int,
) -> list[Bucket]:
    """The plan of one rank for weights whose matrices the mesh dimensions ``over`` cut.

    coordinate: of this rank in the mesh. row_elements: what is kept of each row and travels with it, in elements of the
    update; 0: nothing. owner_elements: the most elements of whole matrices that a bucket gives to one owner; a larger
    matrix is alone.
    """
    return _Dealer(layouts, over, mesh_shape, coordinate, row_elements).buckets(owner_elements)


class _Dealer:
    """Members of the group are named by their coordinates along ``over``."""

    def __init__(
        self,
        layouts: tuple[Layout, ...],
        over: tuple[int, ...],
        mesh_shape: tuple[int, ...],
        coordinate: tuple[int, ...],
        row_elements: int,
    ) -> None:
        self.layouts, self.over, self.mesh_shape, self.coordinate = layouts, over, mesh_shape, coordinate
        self.row_elements = row_elements
        self.kinds = (0, 1) if row_elements else (0,)
        self.me = tuple(coordinate[dim] for dim in over)
        members = list(itertools.product(*(range(mesh_shape[dim]) for dim in over)))
        self.matrices: list[Matrix] = []
        for at, layout in enumerate(layouts):
            box = shard_box(layout.shape, mesh_shape, layout.placements, coordinate, together=over)
            self.matrices += matrices_of(at, layout, box)
        dealt = balanced([matrix.cost for matrix in self.matrices], len(members))
        self.dealt = dealt
        self.owners = {job: member for member, jobs in zip(members, dealt, strict=True) for job in jobs}
        self.boxes: dict[tuple[Layout, tuple[int, ...]], Box] = {}

    def buckets(self, owner_elements: int) -> list[Bucket]:
        found, left = [], [list(reversed(jobs)) for jobs in self.dealt]
        while any(left):
            jobs: list[int] = []
            for own in left:
                elements = 0
                while own:
                    size = math.prod(self.matrices[own[-1]].shape)
                    if elements and elements + size > owner_elements:
                        break
                    jobs.append(own.pop())
                    elements += size
            found.append(self._bucket(jobs))
        return found

    def _bucket(self, jobs: list[int]) -> Bucket:
        begin = self._held(jobs, 0, self.me)
        parts = []
        for job, _, kind in begin:
            weight = self.matrices[job].weight
            box = self._box(weight, self.me, kind)
            parts.append(Part(weight, kind, _index(self._cut(job, self.me, kind), box)))
        exchanges = []
        for done in range(len(self.over)):
            at = self._exchanged(done)
            held, arrived = self._held(jobs, done, self.me), self._held(jobs, done + 1, self.me)
            peers = range(self.mesh_shape[self.over[at]])
            order = [i for peer in peers for i, (job, _, _) in enumerate(held) if self.owners[job][at] == peer]
            exchanges.append(
                Exchange(
                    self.over[at],
                    tuple(order),
                    tuple(self._size(held[i]) for i in order),
                    tuple(sum(self._size(one) for one in held if self.owners[one[0]][at] == peer) for peer in peers),
                    tuple(self._size(one) for one in arrived),
                    tuple(sum(self._size(one) for one in arrived if one[1][at] == peer) for peer in peers),
                )
            )
        return Bucket(tuple(parts), tuple(exchanges), self._batches(self._held(jobs, len(self.over), self.me)))

    def _batches(self, held: list[tuple[int, tuple[int, ...], int]]) -> tuple[Batch, ...]:
        members: dict[tuple[int, int], dict[int, int]] = {}
        places: dict[tuple[int, int], list[Place]] = {}
        for piece, (job, source, kind) in enumerate(held):
            matrix = self.matrices[job]
            key = matrix.rows, matrix.columns
            of = members.setdefault(key, {})
            shape = matrix.shape if kind == 0 else (*matrix.shape[:-1], self.row_elements)
            box = matrix.box if kind == 0 else (*matrix.box[:-1], (0, self.row_elements))
            index = _index(self._cut(job, source, kind), box)
            places.setdefault(key, []).append(Place(piece, of.setdefault(job, len(of)), kind, shape, index))
        return tuple(Batch(*key, len(of), tuple(places[key])) for key, of in members.items())

    def _exchanged(self, done: int) -> int:
        """Which of ``over`` is exchanged along after ``done`` others: from the last to the first."""
        return len(self.over) - 1 - done

    def _held(self, jobs: list[int], done: int, member: tuple[int, ...]) -> list[tuple[int, tuple[int, ...], int]]:
        """(matrix, member whose part of it, kind) of the pieces at ``member`` after ``done`` exchanges, in their order:
        by sender, then as they lay there."""
        past = [self._exchanged(i) for i in range(done)]
        mine = [job for job in jobs if all(self.owners[job][at] == member[at] for at in past)]
        sources = itertools.product(
            *(range(self.mesh_shape[self.over[at]]) if at in past else (member[at],) for at in range(len(self.over)))
        )
        return [(job, source, kind) for source in sources for job in mine for kind in self.kinds]

    def _box(self, weight: int, member: tuple[int, ...], kind: int) -> Box:
        """What ``member`` holds of a weight, or of what is kept of its rows: these are cut as the weight's are."""
        layout = self.layouts[weight]
        box = self.boxes.get((layout, member))
        if box is None:
            coordinate = list(self.coordinate)
            for dim, at in zip(self.over, member, strict=True):
                coordinate[dim] = at
            box = self.boxes[layout, member] = shard_box(layout.shape, self.mesh_shape, layout.placements, coordinate)
        return box if kind == 0 else (*box[:-1], (0, self.row_elements))

    def _cut(self, job: int, member: tuple[int, ...], kind: int) -> Box:
        """The part of a matrix that ``member`` holds, in indices of the whole weight; of its rows, in all of a row."""
        matrix = self.matrices[job]
        box = self._box(matrix.weight, member, kind)
        wanted = matrix.box if kind == 0 else (*matrix.box[:-1], (0, self.row_elements))
        cut = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, box, strict=True)]
        return tuple((first, max(first, stop)) for first, stop in cut)

    def _size(self, piece: tuple[int, tuple[int, ...], int]) -> int:
        return math.prod(stop - first for first, stop in self._cut(*piece))


def _index(cut: Box, box: Box) -> Index:
    """``cut`` relative to the first element of ``box``."""
    if any(first == stop for first, stop in cut):
        return tuple(slice(0, 0) if a == b else slice(0, b - a) for a, b in cut)
    return tuple(slice(first - origin, stop - origin) for (first, stop), (origin, _) in zip(cut, box, strict=True))


def there(exchange: Exchange, mesh: DeviceMesh, pieces: Sequence[Tensor], like: Tensor) -> Moving:
    """Send pieces to where they go; ``like`` has the dtype and the device of what travels."""
    sent = packed([pieces[i] for i in exchange.order], exchange.sent, like)
    arrived, work = _start(exchange.mesh_dim, mesh, sent, exchange.sent_to, exchange.received_from)
    yield
    work.wait()
    return list(arrived.split(exchange.received))


def back(exchange: Exchange, mesh: DeviceMesh, pieces: Sequence[Tensor], like: Tensor) -> Moving:
    """The reverse of `there`: as many pieces of the same sizes, in its order, back to where they came from."""
    sent = packed(pieces, exchange.received, like)
    arrived, work = _start(exchange.mesh_dim, mesh, sent, exchange.received_from, exchange.sent_to)
    yield
    work.wait()
    returned = dict(zip(exchange.order, arrived.split(exchange.sent), strict=True))
    return [returned[i] for i in range(len(returned))]


def packed(pieces: Sequence[Tensor], sizes: Sequence[int], like: Tensor) -> Tensor:
    """Pieces one behind the other, of ``sizes`` elements, on the device of ``like``."""
    device = pieces[0].device if pieces else like.device
    flat = torch.empty(sum(sizes), dtype=like.dtype, device=device)
    targets = [to.view(piece.shape) for to, piece in zip(flat.split(list(sizes)), pieces, strict=True)]
    foreach_copy_(targets, pieces)
    return flat.to(like.device)


def moved(pieces: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    """Pieces on ``device``: as they are, or flat, after one transfer."""
    if not pieces or pieces[0].device == device:
        return pieces
    sizes = [piece.numel() for piece in pieces]
    return packed(pieces, sizes, pieces[0].new_empty(0, device=device)).split(sizes)


def _start(
    mesh_dim: int, mesh: DeviceMesh, sent: Tensor, to: Sequence[int], source: Sequence[int]
) -> tuple[Tensor, dist.Work]:
    """Begin an all-to-all. It moves bits: as bytes, which every backend sends."""
    width = sent.element_size()
    arrived = sent.new_empty(sum(source))
    work = dist.all_to_all_single(
        arrived.view(torch.uint8),
        sent.view(torch.uint8),
        [elements * width for elements in source],
        [elements * width for elements in to],
        group=mesh.get_group(mesh_dim),
        async_op=True,
    )
    assert work is not None
    return arrived, work


def in_flight(jobs: Iterator[Generator[None]]) -> None:
    """Run jobs that yield while an exchange is under way: the next one begins before those under way go on, the newest
    first, so that an exchange begins before the work behind which it hides. The order is the same on all ranks."""
    running: list[Generator[None]] = []
    more = True
    while more or running:
        job = next(jobs, None)
        more = job is not None
        if job is not None:
            running.insert(0, job)
        running = [one for one in running if next(one, one) is None]
