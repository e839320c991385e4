"""Rows cut over ranks, against attention one query at a time, in float64."""

from functools import partial
from types import SimpleNamespace

import attending
import chunks
import mixture
import pytest
import torch
from torch import nn

from kforge_parallel import ParallelConfig, shard_rows
from kforge_parallel.columns import clipped_ends, columns_of, document_ends, document_ids, seen
from kforge_parallel.layout import CHUNKS
from kforge_parallel.testing import compare
from kforge_testing import run_ranks

STYLES = tuple(CHUNKS)

# ------------------------------------------------------------------------------------------ rows


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("style", STYLES)
def test_every_token_is_on_one_rank_and_all_have_as_much_to_do(style, size):
    parts = [columns_of(rank, size, style, 24, torch.device("cpu")) for rank in range(size)]
    assert sorted(torch.cat(parts).tolist()) == list(range(24))
    assert all(part.diff().min() > 0 for part in parts)
    keys_seen = {int((part + 1).sum()) for part in parts}
    assert (len(keys_seen) == 1) == (CHUNKS[style] == 2)


def fake_mesh(rank, size, style):
    return SimpleNamespace(cp_size=size, cp_rank=rank, config=ParallelConfig(cp=size, cp_style=style))


@pytest.mark.parametrize("style", STYLES)
def test_no_token_loses_its_label_position_or_document_at_a_cut(style):
    """Documents cross the cuts; ids, labels (which were shifted before), positions and documents stay together."""
    batch = {**attending.BATCH, "cu_seqlens": torch.zeros(3, dtype=torch.int32), "max_seqlen": 16, "row_ids": None}
    names = ("ids", "labels", "positions", "docs")
    found = {}
    for rank in range(4):
        part = shard_rows(batch, fake_mesh(rank, 4, style))
        assert part["whole"] is batch and part["max_seqlen"] == 16 and part["cu_seqlens"] is batch["cu_seqlens"]
        for at, column in enumerate(part["columns"].tolist()):
            found[column] = [part[name][:, at].tolist() for name in names]
    assert found == {at: [batch[name][:, at].tolist() for name in names] for at in range(16)}
    assert shard_rows(batch, fake_mesh(0, 1, style)) == batch


def test_rows_that_cannot_be_cut_are_told_what_could():
    with pytest.raises(ValueError, match=r"= 18 cannot be split over parallel\.cp = 2, .*use row_tokens = 20"):
        shard_rows({"ids": torch.zeros(1, 18)}, fake_mesh(0, 2, "allgather"))
    assert shard_rows({"ids": torch.zeros(1, 18)}, fake_mesh(0, 2, "ulysses"))["ids"].shape == (1, 9)
    with pytest.raises(ValueError, match=r"tensors \{'ids': 16, 'other': 3\} long cannot be cut"):
        shard_rows({"ids": torch.zeros(1, 16), "other": torch.zeros(1, 3)}, fake_mesh(0, 2, "ulysses"))


def test_documents_of_columns():
    docs, _, ends = attending.documents(attending.LENGTHS)
    padded = torch.cat((ends, ends[-1:], ends[-1:]))
    numbers = document_ids(SimpleNamespace(cu_seqlens=padded), 8, 16)
    assert torch.equal(numbers[:, 1:] == numbers[:, :-1], docs[:, 1:] == docs[:, :-1])
    assert document_ids(SimpleNamespace(doc_ids=docs, cu_seqlens=ends), 8, 16) is docs
    assert document_ids(None, 8, 16) is None
    plain, longest = document_ends(None, 3, 16, torch.device("cpu"))
    assert plain.tolist() == [0, 16, 32, 48] and plain.dtype == torch.int32 and longest == 16
    for start, stop in ((0, 16), (4, 8), (0, 12), (12, 16)):
        lengths = clipped_ends(padded, 16, start, stop).diff().tolist()
        expected = [(row[start:stop] == number).sum() for row in docs for number in range(int(row.max()) + 1)]
        assert lengths == [*expected, 0, 0]


def test_what_a_query_sees():
    docs, _, _ = attending.documents([[3, 5]])
    queries, keys = torch.tensor([1, 4, 7]), torch.tensor([0, 1, 3, 4, 6])
    for window in (None, 2):
        expected = [
            [k <= q and (q < 3) == (k < 3) and (window is None or q - k < window) for k in keys.tolist()]
            for q in queries.tolist()
        ]
        assert seen(queries, keys, docs, window).tolist() == [expected]


# ------------------------------------------------------------------------------------------ cores

CASES = [
    # heads, kv heads, width of keys, of values, window, packed
    (4, 4, 3, 3, None, False),
    (4, 2, 3, 3, None, True),
    (4, 1, 3, 5, None, True),
    (8, 2, 4, 2, 3, True),
    (4, 4, 3, 3, 6, False),
]


def tensors_of(heads, kv, width, value, window, packed):
    seed = torch.Generator().manual_seed(1)
    shapes = ((heads, width), (kv, width), (kv, value), (heads, value))
    q, k, v, grad = (torch.randn(8, h, 16, d, generator=seed, dtype=torch.float64) for h, d in shapes)
    docs, positions, ends = attending.documents(attending.LENGTHS if packed else [[16]] * 8)
    whole = SimpleNamespace(doc_ids=docs, cu_seqlens=ends, max_seqlen=16, position_ids=positions)
    core = attending.Core(window)
    core.scale = 0.6
    return core, [x.requires_grad_() for x in (q, k, v)], grad, whole


def attended(rank, world, style):
    """Of each case, this rank's output and gradients."""
    import torch.distributed as dist

    from kforge_parallel.context import CORES

    found = []
    columns = columns_of(rank, world, style, 16)
    for case in CASES:
        core, inputs, grad, whole = tensors_of(*case)
        if style == "ulysses" and case[1] % world and world % case[1]:
            found.append(None)
            continue
        parts = [x.detach()[:, :, columns].requires_grad_() for x in inputs]
        if not case[-1]:
            whole = SimpleNamespace(doc_ids=whole.doc_ids if style == "ulysses" else None)
        rows = SimpleNamespace(columns=columns, whole=whole, position_ids=torch.zeros(8, len(columns)))
        spread = CORES[style](core, dist.group.WORLD)
        out = spread(*parts, spread.prepare(rows, torch.float64))
        out.backward(grad[:, :, columns])
        again = spread(*parts, rows)  # not prepared
        assert torch.equal(out, again)
        found.append([columns, out.detach(), *(x.grad for x in parts)])
    return found


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("style", STYLES)
def test_attention_over_ranks_is_that_of_whole_rows(style, world):
    ranks = run_ranks(attended, world, style)
    for at, case in enumerate(CASES):
        core, inputs, grad, whole = tensors_of(*case)
        right = core(*inputs, whole)
        right.backward(grad)
        for columns, *got in (found[at] for found in ranks):
            for mine, expected in zip(got, (right.detach(), *(x.grad for x in inputs)), strict=True):
                assert (mine - expected[:, :, columns]).abs().max() < 1e-13


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("window", [None, 5, 17])
@pytest.mark.parametrize("documents", [True, False])
def test_chunks_of_queries_against_keys_up_to_their_end_are_attention(monkeypatch, size, window, documents):
    """The path of CUDA, with what its kernel computes by the formula."""
    from kforge_parallel import context

    monkeypatch.setattr(context, "varlen", chunks.varlen)
    random = torch.Generator().manual_seed(3)
    q, k, v, grad = (torch.randn(3, h, 48, 4, generator=random, dtype=torch.float64) for h in (4, 2, 2, 4))
    docs, ends, longest = chunks.packed(3, 48)
    whole = SimpleNamespace(doc_ids=docs, cu_seqlens=ends, max_seqlen=longest) if documents else None
    for x in (q, k, v):
        x.requires_grad_()
    right = chunks.whole_attention(q, k, v, docs if documents else None, window, 0.5)
    gradients = torch.autograd.grad(right, (q, k, v), grad)
    outs = []
    own = nn.Module()
    own.scale, own.window = 0.5, window
    for rank in range(size):
        group = SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: size)
        columns = columns_of(rank, size, "allgather", 48)
        out = context.AllGatherCore(own, group).by_chunks(q[:, :, columns], k, v, whole)
        assert (out - right[:, :, columns]).abs().max() < 1e-13
        outs.append((out * grad[:, :, columns]).sum())
    for mine, expected in zip(torch.autograd.grad(sum(outs), (q, k, v)), gradients, strict=True):
        assert (mine - expected).abs().max() < 1e-13


# ------------------------------------------------------------------------------------------ whole models

trained = partial(compare, batch=attending.BATCH, loss=attending.loss, run=run_ranks, timeout_s=120)


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"cp": 2}, {"microbatches": 2}),
        ({"cp": 2, "cp_style": "ulysses", "recompute": "full"}, {}),
        ({"cp": 4}, {"clip_norm": 0.01}),
        ({"cp": 2, "cp_style": "ring", "recompute": "full"}, {"microbatches": 2}),
        ({"dp_shard": 2, "cp": 2}, {"microbatches": 2}),
        ({"dp_replicate": 2, "cp": 2, "cp_style": "ulysses"}, {}),
        ({"tp": 2, "cp": 2, "recompute": "full"}, {}),
        ({"tp": 2, "cp": 2, "cp_style": "ulysses", "sequence_parallel": False}, {}),
        ({"cp": 2, "ep": 2}, {"model": attending.with_experts}),
        ({"cp": 2}, {"model": attending.with_experts}),
        ({"dp_shard": 2, "cp": 2, "ep": 2}, {"model": attending.with_experts, "microbatches": 2}),
    ],
    ids=lambda value: "-".join(f"{name}{size}" for name, size in value.items() if not callable(size)),
)
def test_a_layout_changes_nothing(axes, options):
    trained(ParallelConfig(**{"dp_shard": 1, **axes}), **{"model": attending.Model, **options}).check()


def averages(rank, world, axes):
    from kforge_parallel import launch, parallelize

    mesh = launch(ParallelConfig(precision="fp64", **axes))
    model = parallelize(attending.with_experts, mesh, init=mixture.fill)
    mine = {name: rows.chunk(mesh.data_size)[mesh.data_rank] for name, rows in attending.BATCH.items()}
    attending.loss(model, shard_rows(mine, mesh), torch.tensor(0.1, dtype=torch.float64)).backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


@pytest.mark.parametrize("axes", [{"dp_shard": 1, "cp": 2, "ep": 2}, {"dp_shard": 2, "cp": 2, "ep": 2}], ids=str)
def test_means_are_over_the_ranks_that_have_other_tokens(axes):
    model = attending.with_experts().double()
    mixture.fill(model)
    attending.loss(model, attending.BATCH, torch.tensor(0.1, dtype=torch.float64)).backward()
    ranks = axes["dp_shard"] * axes["cp"]
    gradients = run_ranks(averages, ranks, axes)[0]
    for name, parameter in model.named_parameters():
        difference = (gradients[name] * ranks - parameter.grad).abs().max()
        assert difference <= 1e-12 * max(parameter.grad.abs().max(), 0.1), name  # a bias on keys has none


def whole_rows(rank, world, style):
    """What a model built over ranks makes of rows that are not cut: in evaluation, and the error in training."""
    from kforge_parallel import launch, parallelize

    mesh = launch(ParallelConfig(precision="fp64", cp=2, cp_style=style))
    model = parallelize(attending.Model, mesh, init=mixture.fill)
    scale = torch.ones((), dtype=torch.float64)
    with pytest.raises(ValueError, match="these rows are not cut") as error:
        model(attending.BATCH, scale)
    model.eval()
    return model(attending.BATCH, scale).item(), str(model.layers[0].attention.core), str(error.value)


@pytest.mark.parametrize("style", STYLES)
def test_whole_rows_are_evaluated_and_never_trained_on(style):
    model = attending.Model().double()
    mixture.fill(model)
    right = model(attending.BATCH, torch.ones((), dtype=torch.float64)).item()
    for value, shown, error in run_ranks(whole_rows, 2, style):
        assert value == pytest.approx(right, rel=1e-13)
        assert "Core(\n  over 2 ranks" in shown
        assert "every one of 2 ranks would train on all of them" in error


# ------------------------------------------------------------------------------------------ what cannot be


class NoCore(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])


class Strange(nn.Module):
    """A core that says nothing of itself."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Module()])
        self.layers[0].core = nn.Identity()
        self.layers[0].weight = nn.Parameter(torch.ones(4))


class Capped(Strange):
    def __init__(self):
        super().__init__()
        self.layers[0].core = attending.Core()
        self.layers[0].core.softcap = 30.0


def refusals(rank, world):
    from kforge_parallel import launch, parallelize

    said = []

    def refused(build, style, given=None):
        mesh = launch(ParallelConfig(cp=2, cp_style=style))
        with pytest.raises(ValueError) as error:
            parallelize(build, mesh, **({} if given is None else {"cp_style": given}))
        said.append(str(error.value))

    refused(NoCore, "allgather")
    refused(NoCore, "ulysses")
    refused(Strange, "allgather")
    refused(Capped, "allgather")
    refused(attending.Model, "allgather", "ulysses")
    parallelize(Capped, launch(ParallelConfig(cp=2, cp_style="ulysses")))
    return said


def test_attention_that_cannot_be_spread_is_refused():
    none, either, strange, capped, other = run_ranks(refusals, 2)[0]
    for said in (none, either):
        assert "parallel.cp = 2, but block 0 of NoCore (Linear) has no attention core" in said
    assert "layers.0.core cannot be spread over parallel.cp = 2: Identity does not say what it computes" in strange
    assert "allgather computes attention itself, without soft-cap; set cp_style to ulysses" in capped
    assert "the mesh cuts rows for cp_style = allgather, but the config says ulysses" in other


def heads_that_do_not_go_round(rank, world):
    import torch.distributed as dist

    from kforge_parallel.context import UlyssesCore

    rows = SimpleNamespace(columns=torch.arange(4), whole=None)
    q, k = torch.zeros(1, 6, 4, 2), torch.zeros(1, 3, 4, 2)
    with pytest.raises(ValueError) as error:
        UlyssesCore(nn.Identity(), dist.group.WORLD)(q, k, k, rows)
    return str(error.value)


def test_heads_that_ulysses_cannot_deal_out_are_told():
    assert (
        "6 query heads and 3 key/value heads cannot be dealt out over cp = 2"
        in run_ranks(heads_that_do_not_go_round, 2)[0]
    )
