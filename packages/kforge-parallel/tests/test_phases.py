import os

import pytest

import kforge_parallel as kp
from kforge_testing import run_ranks

LONG = 3000.0


def waits_for(rank, world, folder, name):
    """Rank 0 enters an all-reduce that rank 1 never does; what it is told."""
    import torch
    import torch.distributed as dist

    config = kp.ParallelConfig(
        dp_shard=1, tp=2, init_timeout_s=LONG, build_timeout_s=LONG, step_timeout_s=LONG, device="cpu"
    )
    mesh = kp.launch(config)
    short = kp.ParallelConfig(**{f"{name}_timeout_s": 1.0})
    both = dist.FileStore(os.path.join(folder, name), world)
    said = ""
    if rank == 0:
        with pytest.raises(RuntimeError) as info, kp.phase(name, short, mesh):
            dist.all_reduce(torch.ones(1), group=mesh.tp.get_group())
        said = str(info.value)
        both.set("told", "")
    both.wait(["told"])
    return said


@pytest.mark.parametrize("name", ["build", "step"])
def test_a_time_out_names_its_phase_value_and_option(name, tmp_path):
    said = run_ranks(waits_for, 2, str(tmp_path), name, init=False)[0]
    assert said.startswith(f"{name}: rank 0 of 2 waited 1 s for the others (parallel.{name}_timeout_s = 1)")


def after_launch(rank, world, folder):
    import torch
    import torch.distributed as dist

    # tp groups are not the group of all: torch would give them its own time-out, half an hour
    times = {"init_timeout_s": LONG, "build_timeout_s": LONG, "step_timeout_s": 0.25}
    mesh = kp.launch(kp.ParallelConfig(dp_shard=1, cp=2, tp=2, **times))
    both = dist.FileStore(os.path.join(folder, "store"), world)
    said = []
    if rank == 0:
        for group in (None, mesh.tp.get_group(), mesh.fsdp.get_group(), mesh.cp_group):
            with pytest.raises(RuntimeError) as info:
                dist.all_reduce(torch.ones(1), group=group)
            said.append(str(info.value))
        both.set("told", "")
    both.wait(["told"])
    return said


def test_every_group_waits_for_the_time_of_a_step_once_launched(tmp_path):
    said = run_ranks(after_launch, 4, str(tmp_path), init=False)[0]
    assert len(said) == 4
    assert all("imed out" in text or "imeout" in text for text in said), said


def other_errors(rank, world):
    mesh = kp.launch(kp.ParallelConfig())
    with pytest.raises(RuntimeError, match="no time to lose"), kp.phase("step", kp.ParallelConfig(), mesh):
        raise RuntimeError("no time to lose")
    with pytest.raises(ZeroDivisionError), kp.phase("build", kp.ParallelConfig(), mesh):
        _ = 1 / 0


def test_errors_that_are_no_time_outs_pass_as_they_are():
    run_ranks(other_errors, 1, init=False)


def never_transfers(rank, world, folder):
    import torch.distributed as dist

    from kforge_parallel import phases

    both = dist.FileStore(os.path.join(folder, "store"), world)
    if rank == 1:
        phases.first_transfer = lambda config, mesh: both.wait(["told"])  # a rank that hangs before it
        kp.launch()
        return ""
    with pytest.raises(RuntimeError) as info:
        kp.launch(kp.ParallelConfig(build_timeout_s=1))
    both.set("told", "")
    return str(info.value)


def test_a_first_transfer_without_an_answer_names_the_group_and_the_interface(tmp_path):
    said = run_ranks(never_transfers, 2, str(tmp_path), init=False)[0]
    assert said.startswith("build: rank 0 of 2 got no answer to its first transfer over all (2 ranks) within 1 s")
    assert "parallel.build_timeout_s" in said
    assert "GLOO_SOCKET_IFNAME=" in said
