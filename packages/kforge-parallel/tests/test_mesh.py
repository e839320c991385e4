import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kforge_parallel import ParallelConfig, mesh_table, resolve_axes
from kforge_testing import run_ranks

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@pytest.mark.parametrize("world", [1, 2, 7, 64])
def test_minus_one_takes_all(world):
    rest = {"pp": 1, "dp_replicate": 1, "cp": 1, "tp": 1, "ep": 1}
    assert resolve_axes(ParallelConfig(), world) == {**rest, "dp_shard": world}


@pytest.mark.parametrize(("axis", "world"), [(4, 2), (2, 4), (1, 3)])
def test_a_product_other_than_the_world_is_refused_with_both_numbers(axis, world):
    with pytest.raises(ValueError, match=f"wants {axis} process(es)?, but {world} are running"):
        resolve_axes(ParallelConfig(dp_shard=axis), world)


def test_a_world_that_the_fixed_axes_do_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"6 processes cannot be divided .* product is 4 \(tp 4\)"):
        resolve_axes(ParallelConfig(tp=4), 6)


def test_ep_divides_what_it_is_laid_over():
    with pytest.raises(
        ValueError, match=r"parallel\.ep = 4 does not divide the 6 processes of dp_shard 3 × cp 1 × tp 2"
    ):
        resolve_axes(ParallelConfig(pp=2, tp=2, ep=4), 12)
    assert resolve_axes(ParallelConfig(pp=2, tp=2, ep=6), 12)["ep"] == 6


@settings(deadline=None)
@given(
    sizes=st.fixed_dictionaries({axis: st.integers(1, 4) for axis in AXES}),
    filled=st.sampled_from((None, *AXES)),
)
def test_any_axis_can_take_what_is_left(sizes, filled):
    world = math.prod(sizes.values())
    given_sizes = {axis: -1 if axis == filled else size for axis, size in sizes.items()}
    assert resolve_axes(ParallelConfig(**given_sizes), world) == {**sizes, "ep": 1}


@st.composite
def layouts(draw):
    sizes = {axis: draw(st.integers(1, 3)) for axis in AXES}
    inner = sizes["dp_shard"] * sizes["cp"] * sizes["tp"]
    sizes["ep"] = draw(st.sampled_from([n for n in range(1, inner + 1) if inner % n == 0]))
    return sizes


@settings(deadline=None)
@given(sizes=layouts(), per_host=st.integers(1, 9))
def test_the_groups_of_every_axis_hold_each_rank_once(sizes, per_host):
    world = math.prod(sizes[axis] for axis in AXES)
    table = mesh_table(sizes, world, per_host)
    inner = sizes["dp_shard"] * sizes["cp"] * sizes["tp"]
    expected = {**sizes, "expert_shard": inner // sizes["ep"], "fsdp": sizes["dp_shard"] * sizes["cp"]}
    assert set(table.groups) == set(expected)
    for axis, groups in table.groups.items():
        assert sorted(rank for group in groups for rank in group) == list(range(world))
        assert {len(group) for group in groups} == {expected[axis]}
        hosts = [{rank // per_host for rank in group} for group in groups]
        assert table.crossing[axis] == sum(len(some) > 1 for some in hosts)
    assert (table.crossing["tp"] > 0) == bool(table.warnings)
    assert str(table)


@settings(deadline=None)
@given(sizes=layouts())
def test_both_roots_give_every_rank_a_place_of_its_own(sizes):
    world = math.prod(sizes[axis] for axis in AXES)
    table = mesh_table(sizes, world)
    dense = [tuple(place[axis] for axis in AXES) for place in table.ranks]
    experts = [tuple(place[axis] for axis in ("pp", "dp_replicate", "expert_shard", "ep")) for place in table.ranks]
    assert dense == sorted(set(dense))  # as many as ranks, in their order: the last axis is the fastest
    assert experts == sorted(set(experts))
    # One expert group and its shards together are the ranks of one replica of one stage.
    for stage in range(sizes["pp"]):
        for replica in range(sizes["dp_replicate"]):
            here = {"pp": stage, "dp_replicate": replica}
            ranks = {place["rank"] for place in table.ranks if here.items() <= place.items()}
            covered = [set(group) for group in table.groups["ep"] if set(group) & ranks]
            assert set().union(*covered) == ranks
            assert sum(map(len, covered)) == len(ranks)
    # ep is laid over tp first, then cp, then dp_shard.
    for group in table.groups["ep"]:
        assert group == list(range(group[0], group[0] + sizes["ep"]))


def of_torch(rank, world, layouts):
    import torch
    import torch.distributed as dist

    import kforge_parallel as kp
    from kforge_parallel.mesh import build_mesh

    found = []
    for sizes in layouts:
        config = kp.ParallelConfig(**sizes)
        mesh = build_mesh(config, kp.find_world(), torch.device("cpu"))
        dense, expert = mesh.device_mesh, mesh.expert_mesh
        dims = {"fsdp": "dp_shard", **{axis: axis for axis in ("pp", "dp_replicate", "tp")}}
        groups = {axis: dense[dim].mesh.tolist() for axis, dim in dims.items()}
        if expert is not None:
            groups |= {axis: expert[axis].mesh.tolist() for axis in ("expert_shard", "ep")}
        groups["cp"] = [mesh.rank] if mesh.cp_group is None else dist.get_process_group_ranks(mesh.cp_group)
        data = (mesh.data_rank, mesh.data_size, mesh.copies, mesh.tp_rank, mesh.tp_size, mesh.cp_rank, mesh.cp_size)
        found.append(
            (groups, mesh.fsdp.mesh.tolist(), mesh.fsdp.mesh_dim_names, mesh.tp.mesh.tolist(), data, str(mesh))
        )
    return found


LAYOUTS = [
    {},
    {"dp_replicate": 2},
    {"tp": 2},
    {"dp_shard": 1, "dp_replicate": 2, "tp": 2},
    {"dp_shard": 1, "cp": 2, "tp": 2},
    {"pp": 2, "tp": 2, "ep": 2},
    {"dp_shard": 2, "cp": 2, "ep": 2},
]


def test_torch_lays_out_what_the_table_says():
    for rank, found in enumerate(run_ranks(of_torch, 4, LAYOUTS)):
        for sizes, (groups, fsdp, names, tp, data, text) in zip(LAYOUTS, found, strict=True):
            table = mesh_table(sizes, 4)
            place = table.ranks[rank]
            for axis, ranks in groups.items():
                assert ranks in table.groups[axis]
                assert rank in ranks
            assert ("ep" in groups) == (table.axes["ep"] > 1)
            assert tp == groups["tp"]
            if table.axes["dp_replicate"] > 1:
                assert names == ("dp_replicate", "dp_shard")
                assert fsdp[place["dp_replicate"]] == groups["fsdp"]
            else:
                assert names == ("dp_shard",)
                assert fsdp == groups["fsdp"]
            shards, parts = table.axes["dp_shard"], table.axes["dp_replicate"] * table.axes["dp_shard"]
            reads, cp = place["dp_replicate"] * shards + place["dp_shard"], table.axes["cp"]
            assert data == (reads, parts, 4 // parts // cp, place["tp"], table.axes["tp"], place["cp"], cp)
            assert text.endswith("on cpu (torchrun)")
