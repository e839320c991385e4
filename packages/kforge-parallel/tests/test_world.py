import os
import re
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kforge_parallel as kp
from kforge_testing import run_ranks

FORMS = [
    ("linux[1,2]", ["linux1", "linux2"]),
    ("gpu[001-004,007]", ["gpu001", "gpu002", "gpu003", "gpu004", "gpu007"]),
    ("alpha,beta", ["alpha", "beta"]),
    ("single", ["single"]),
    ("name-with-dash[08-11]", ["name-with-dash08", "name-with-dash09", "name-with-dash10", "name-with-dash11"]),
    ("rack[1-2]node[3-4]x", ["rack1node3x", "rack1node4x", "rack2node3x", "rack2node4x"]),
    ("a[1-2],b,c[9]", ["a1", "a2", "b", "c9"]),
    ("n[8-11]", ["n8", "n9", "n10", "n11"]),
    ("n[099-101]", ["n099", "n100", "n101"]),
    ("gpu1.cluster.example,gpu2.cluster.example", ["gpu1.cluster.example", "gpu2.cluster.example"]),
    ("linux[1, 2]", ["linux1", "linux2"]),
    ("[1-2]", ["1", "2"]),
]


@pytest.mark.parametrize(("text", "hosts"), FORMS)
def test_c33_host_lists_of_every_form(text, hosts):
    assert kp.expand_hosts(text) == hosts


@pytest.mark.parametrize(("text", "hosts"), FORMS)
def test_c33_the_master_is_the_first_host_of_the_list(text, hosts):
    env = {**SLURM, "SLURM_STEP_NODELIST": text}
    assert kp.find_world(env).address == hosts[0]
    del env["SLURM_STEP_NODELIST"]
    assert kp.find_world({**env, "SLURM_JOB_NODELIST": text}).address == hosts[0]
    # torchrun's variables win, whatever the list is
    assert kp.find_world({**env, **TORCHRUN, "SLURM_JOB_NODELIST": "gpu[1-"}).address == "node0"


MALFORMED = [
    "gpu[1-2",
    "gpu1]",
    "gpu[[1]]",
    "gpu[a-b]",
    "gpu[3-1]",
    "gpu[]",
    "gpu[1,]",
    "",
    "a,,b",
    "a,",
    "(null)",
    "a b",
]


@pytest.mark.parametrize("text", [*MALFORMED, "gpu[1-999999999999]", "a[1-999]b[1-999]"])
def test_c33_malformed_host_lists_are_refused(text):
    with pytest.raises(ValueError, match="cannot be read"):
        kp.expand_hosts(text)
    with pytest.raises(ValueError, match="cannot be read" if text else "SLURM_STEP_NODELIST"):
        kp.find_world({**SLURM, "SLURM_STEP_NODELIST": text, "SLURM_JOB_NODELIST": ""})


def test_tasks_without_a_host_list_are_told_the_variable():
    env = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"}
    said = "SLURM_STEP_NUM_TASKS = 8, but SLURM_STEP_NODELIST does not say .* start with srun, .* export MASTER_ADDR"
    with pytest.raises(ValueError, match=said):
        kp.find_world(env)
    assert kp.find_world({**env, "MASTER_ADDR": "node7"}).address == "node7"
    alone = {**env, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert kp.find_world(alone).address == "127.0.0.1"


@settings(deadline=None)
@given(
    prefix=st.from_regex(r"[a-z][a-z-]{0,5}", fullmatch=True),
    width=st.integers(1, 4),
    spans=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 12)), min_size=1, max_size=4),
)
def test_c33_any_compressed_list_is_what_it_was_made_from(prefix, width, spans):
    numbers = [n for first, more in spans for n in range(first, first + more + 1)]
    items = [str(first).zfill(width) + (f"-{str(first + more).zfill(width)}" if more else "") for first, more in spans]
    expected = [f"{prefix}{str(n).zfill(width)}" for n in numbers]
    assert kp.expand_hosts(f"{prefix}[{','.join(items)}]") == expected
    assert kp.expand_hosts(",".join(expected)) == expected


SLURM = {
    "SLURM_JOB_ID": "123_4",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "2345",
}


def test_world_from_slurm():
    world = kp.find_world(SLURM)
    assert (world.source, world.rank, world.size, world.local_rank, world.local_size) == ("slurm", 5, 8, 1, 4)
    assert world.address == "gpu007"
    assert 1024 <= world.port <= 65535
    assert kp.find_world({**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}).port == world.port


@pytest.mark.parametrize(
    ("tasks", "node", "here"), [("4(x2)", 1, 4), ("2(x3),1", 2, 2), ("2(x3),1", 3, 1), ("8", 0, 8), ("odd", 0, 8)]
)
def test_processes_of_this_host_by_its_number_in_the_step(tasks, node, here):
    env = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": str(node)}
    assert kp.find_world(env).local_size == here


def port(job, **more):
    return kp.find_world({**SLURM, "SLURM_JOB_ID": str(job), **more}).port


def test_c34_ports_of_jobs_with_close_ids_differ():
    ids = (1, 1001, 2001, 10_001, 20_001, 110_001, "123_4", "123_5", "124_4", 123)
    assert len({port(job) for job in ids}) == len(ids)
    steps = {port(123, SLURM_STEP_ID=step) for step in "012"}
    tasks = {port(123, SLURM_ARRAY_TASK_ID=task) for task in "012"}
    assert len(steps | tasks) >= 6


@settings(deadline=None)
@given(st.from_regex(r"[0-9]{1,9}(_[0-9]{1,4})?", fullmatch=True))
def test_c34_a_derived_port_can_be_opened_by_anyone_and_is_given_to_no_one(job):
    assert 1024 <= port(job) < 32_768  # the kernel gives those above to outgoing connections
    assert port(job, SLURM_PROCID="0", SLURM_LOCALID="0") == port(job)


def test_c34_what_the_user_set_is_respected():
    world = kp.find_world({**SLURM, "MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "4242"})
    assert (world.address, world.port) == ("10.0.0.9", 4242)
    world = kp.find_world({**TORCHRUN, "MASTER_ADDR": "::1", "MASTER_PORT": "1023"})
    assert (world.address, world.port) == ("::1", 1023)


def step_of(job, rank, **more):
    """The environment that srun gives a task of a step of two on this host."""
    env = {**SLURM, "SLURM_JOB_ID": job, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    return {**env, "SLURM_STEP_NODELIST": "localhost", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), **more}


def two_jobs(rank, world, jobs):
    import torch
    import torch.distributed as dist

    mesh = kp.launch(kp.ParallelConfig(init_timeout_s=50), step_of(jobs[rank // 2], rank % 2))
    total = torch.tensor([10.0**rank])
    dist.all_reduce(total)
    return mesh.rank, mesh.size, total.item()


@pytest.mark.parametrize("jobs", [("77", "10077"), ("123_4", "123_5")])
def test_c34_two_slurm_jobs_on_one_host_at_once(jobs):
    assert run_ranks(two_jobs, 4, jobs, init=False) == [(0, 2, 11), (1, 2, 11), (0, 2, 1100), (1, 2, 1100)]


SCRIPT = """
import sys, torch, torch.distributed as dist, kforge_parallel as kp
mesh = kp.launch()
total = torch.ones(1)
dist.all_reduce(total)
sys.stdout.write(f"sum {int(total)} of {mesh.size}\\n")  # one write: the other process has the same pipe
sys.stdout.flush()
kp.shutdown()
"""


def test_c34_two_torchrun_jobs_on_one_host_at_once(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    jobs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) for _ in range(2)]
    try:
        for job in jobs:
            assert job.communicate(timeout=100)[0].count("sum 2 of 2") == 2
            assert job.returncode == 0
    finally:
        for job in jobs:
            job.kill()


LAST_COLLECTIVE = """
import sys, torch, torch.distributed as dist, kforge_parallel as kp
kp.launch()
tensor = torch.ones(3)
sys.setswitchinterval(100.0)  # a thread gets the interpreter when this one waits, and at no other time
dist.all_reduce(tensor, async_op=True)
for _ in range(10**7):
    pass
"""


def test_a_script_may_end_right_behind_a_collective():
    # Without the last moment that launch asks for, about every second of these is aborted while Python exits.
    command = [sys.executable, "-c", LAST_COLLECTIVE]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    runs = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) for _ in range(6)]
    assert [(run.communicate(timeout=100)[1], run.returncode) for run in runs] == [("", 0)] * 6


def refused_port(rank, world):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        number = taken.getsockname()[1]
        # Were it to wait for the time-out, this test would run out of its own.
        with pytest.raises(RuntimeError, match=f"cannot open port {number} on localhost: another process uses") as info:
            kp.launch(kp.ParallelConfig(init_timeout_s=5000), step_of("7", 0, MASTER_PORT=str(number)))
        return str(info.value)


def test_c34_a_port_in_use_is_named_at_once():
    said = run_ranks(refused_port, 1, init=False)[0]
    assert said.startswith("start-up: rank 0 of 2 (slurm)")
    assert "MASTER_PORT" in said


def second_job(rank, world, folder):
    """Ranks 0 and 1 are a job; once it runs, ranks 2 and 3 come with the same port."""
    import torch
    import torch.distributed as dist

    number = os.environ["MASTER_PORT"]
    board = dist.FileStore(os.path.join(folder, "board"), world)
    config = kp.ParallelConfig(init_timeout_s=5000)
    env = step_of(str(rank // 2), rank % 2, MASTER_ADDR="127.0.0.1", MASTER_PORT=number)
    if rank < 2:
        kp.launch(config, env)
        board.set(f"up {rank}", "")
        board.wait(["refused 2", "refused 3"])
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item()
    board.wait(["up 0", "up 1"])
    with pytest.raises(RuntimeError, match=f"start-up.*port {number}") as info:
        kp.launch(config, env)
    board.set(f"refused {rank}", "")
    return re.sub(r"\d+", "N", str(info.value))


def test_c34_a_second_job_on_a_users_port_is_refused_on_all_ranks_and_the_first_goes_on(tmp_path):
    first, other, refused, lost = run_ranks(second_job, 4, str(tmp_path), init=False)
    assert (first, other) == (2, 2)
    assert "another process uses it" in refused
    assert "found another job at" in lost


def test_torchrun_wins_over_slurm():
    world = kp.find_world({**SLURM, **TORCHRUN})
    assert (world.source, world.rank, world.size, world.local_rank, world.local_size) == ("torchrun", 3, 4, 1, 2)
    assert (world.address, world.port) == ("node0", 2345)


def test_a_batch_script_and_a_plain_shell_are_one_process():
    batch = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_LOCALID": "0"}
    for env in (batch, {}):
        world = kp.find_world(env)
        assert (world.source, world.rank, world.size) == ("single", 0, 1)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({**TORCHRUN, "RANK": "4"}, "rank 4 does not exist in a world of 4 processes"),
        ({**TORCHRUN, "RANK": "4", "WORLD_SIZE": "1"}, r"in a world of 1 process \("),
        ({"RANK": "1"}, "RANK = 1, but WORLD_SIZE is not set: start with torchrun or srun, or export WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE = 2, but RANK is not set: start with torchrun or srun, or export RANK"),
        ({**SLURM, "WORLD_SIZE": "2"}, "WORLD_SIZE = 2, where SLURM says 8, but RANK is not set"),
        ({**SLURM, "RANK": "0"}, "RANK = 0, where SLURM says 5, but WORLD_SIZE is not set"),
        ({**TORCHRUN, "MASTER_PORT": "http"}, "MASTER_PORT = 'http' must be a number"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "MASTER_PORT"),
        ({**TORCHRUN, "MASTER_PORT": "0"}, "MASTER_PORT = 0 is no port that 4 processes can meet at"),
    ],
)
def test_a_broken_environment_is_named(env, words):
    with pytest.raises(ValueError, match=words):
        kp.find_world(env)


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_processes_of_mpirun_are_told_how_to_start(name):
    said = (
        rf"mpirun has started 4 processes \({name}\).* start with torchrun or srun, or export RANK, WORLD_SIZE, "
        "LOCAL_RANK, MASTER_ADDR, MASTER_PORT"
    )
    # SLURM starts one daemon of mpirun a host, and sees those only
    for env in ({}, SLURM):
        with pytest.raises(ValueError, match=said):
            kp.find_world({**env, name: "4"})
    assert kp.find_world({**TORCHRUN, name: "4"}).source == "torchrun"  # exported
    assert kp.find_world({name: "1"}).source == "single"


def test_srun_may_set_what_others_set_too():
    same = {"PMI_SIZE": "8", "PMI_RANK": "5", "WORLD_SIZE": "8"}
    assert kp.find_world({**SLURM, **same}) == kp.find_world(SLURM)


def launched(rank, world):
    import torch
    import torch.distributed as dist

    mesh = kp.launch(kp.ParallelConfig(init_timeout_s=30))
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    answer = (mesh.rank, mesh.size, mesh.data_rank, mesh.data_size, str(mesh), dist.get_backend(), total.item())
    kp.shutdown()
    kp.shutdown()
    return answer


def test_launch_joins_by_itself():
    assert run_ranks(launched, 3, init=False) == [
        (rank, 3, rank, 3, "dp_shard 3 on cpu (torchrun)", "gloo", 6) for rank in range(3)
    ]


def alone(rank, world):
    import torch.distributed as dist

    mesh = kp.launch(env={})
    return str(mesh), mesh.size, dist.is_initialized()


def test_plain_python_is_a_world_of_one():
    assert run_ranks(alone, 1, init=False) == [("one process on cpu (single)", 1, True)]


def refused(rank, world):
    import torch.distributed as dist

    with pytest.raises(ValueError, match="wants 3 processes, but 2 are running"):
        kp.launch(kp.ParallelConfig(dp_shard=3))
    return dist.is_initialized()


def test_a_mesh_that_does_not_fit_is_refused_before_a_group_exists():
    assert run_ranks(refused, 2, init=False) == [False, False]


def incomplete(rank, world):
    os.environ["WORLD_SIZE"] = "4"  # two never come
    with pytest.raises(RuntimeError, match=rf"start-up: rank {rank} of 4 \(torchrun\) met the others at") as info:
        kp.launch(kp.ParallelConfig(init_timeout_s=1 if rank == 0 else 50))
    return str(info.value)


def threads_of_a_group(rank, world):
    import torch
    import torch.distributed as dist

    def loops():
        tasks = Path("/proc/self/task").glob("*/comm")
        return sum(task.read_text().strip() == "pt_gloo_runloop" for task in tasks)

    kp.launch(kp.ParallelConfig(init_timeout_s=30))
    kp.shutdown()
    kp.launch(kp.ParallelConfig(init_timeout_s=30))
    before = loops()
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=30))
    total = torch.tensor([rank + 1])
    dist.all_reduce(total, group=group)
    return before > 0, loops() - before, total.item()


@pytest.mark.parametrize("interfaces", ["", "lo", "lo,lo"])
def test_one_thread_does_the_collectives_of_a_gloo_group(interfaces):
    """Of two, each writes the name of what has ended into one string: a heap is corrupted once in a long while."""
    said = run_ranks(threads_of_a_group, 2, init=False, env={"GLOO_SOCKET_IFNAME": interfaces})
    assert said == [(True, 1, 3)] * 2


def collectives_of_two_names_at_once(rank, world):
    import torch
    import torch.distributed as dist

    kp.launch(kp.ParallelConfig(init_timeout_s=30))
    group, right = dist.group.WORLD, 0
    for i in range(10_000):
        whole, total = torch.zeros(2), torch.full((2,), float(i))
        works = []
        for _ in range(4):
            works.append(group.allgather_into_tensor_coalesced([whole], [torch.full((2,), float(i))]))
            works.append(dist.all_reduce(total, async_op=True))
        for work in works:
            work.wait()
        right += whole.tolist() == total.tolist() == [i, i]
    return right


def test_collectives_with_names_of_any_length_leave_the_heap_whole():
    """On two threads every other process dies of this."""
    assert run_ranks(collectives_of_two_names_at_once, 1, init=False) == [10_000]


def test_processes_that_never_come_are_named_to_all_who_did():
    for said in run_ranks(incomplete, 2, init=False):
        assert "2 never came within 1 s (parallel.init_timeout_s): rank 2, 3" in said


def headless(rank, world):
    os.environ.update(RANK="1", WORLD_SIZE="2")  # rank 0 never comes
    with pytest.raises(RuntimeError, match=r"start-up: rank 1 of 2 \(torchrun\) did not reach rank 0 at 127") as info:
        kp.launch(kp.ParallelConfig(init_timeout_s=1))
    return str(info.value)


def test_a_master_that_never_comes_is_named():
    assert "within 1 s (parallel.init_timeout_s)" in run_ranks(headless, 1, init=False)[0]


def disagree(rank, world):
    layout = {"tp": 2} if rank == 1 else {"dp_replicate": 2}
    with pytest.raises(RuntimeError) as info:
        kp.launch(kp.ParallelConfig(init_timeout_s=5000, **layout))
    return str(info.value)


def test_ranks_with_different_layouts_are_told():
    for said in run_ranks(disagree, 4, init=False):
        assert re.search(r"rank 1 was given another layout \(.*'tp': 2.*\) than rank 0 \(.*'dp_replicate': 2", said)


def again(rank, world):
    import torch
    import torch.distributed as dist

    sums = []
    for _ in range(3):
        kp.launch(kp.ParallelConfig(init_timeout_s=50))
        total = torch.ones(1)
        dist.all_reduce(total)
        sums.append(total.item())
        kp.shutdown()
    return sums


def test_a_process_can_launch_again():
    assert run_ranks(again, 2, init=False) == [[2, 2, 2]] * 2


def test_slurm_that_shows_each_task_one_device(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    world = kp.find_world(SLURM)
    with pytest.raises(ValueError, match="local rank 1 has no device of its own: this host shows 1"):
        kp.choose_device(kp.ParallelConfig(), world)
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "h100:1")
    assert kp.choose_device(kp.ParallelConfig(), world) == torch.device("cuda", 0)
    assert kp.choose_device(kp.ParallelConfig(device="cpu"), world) == torch.device("cpu")


def untouched(rank, world):
    before = {name: value for name, value in os.environ.items() if "NVLS" in name}
    kp.launch()
    return before == {name: value for name, value in os.environ.items() if "NVLS" in name}


@pytest.mark.parametrize("env", [{}, {"NCCL_NVLS_ENABLE": "1"}], ids=str)
def test_nvlink_multicast_is_left_as_it_is(env):
    assert run_ranks(untouched, 1, init=False, env=env) == [True]
