import pytest

import kforge_parallel as kp
from kforge_testing import run_ranks


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("linux[1,2]", ["linux1", "linux2"]),
        ("gpu[001-004,007]", ["gpu001", "gpu002", "gpu003", "gpu004", "gpu007"]),
        ("alpha,beta", ["alpha", "beta"]),
        ("single", ["single"]),
        ("name-with-dash[08-11]", ["name-with-dash08", "name-with-dash09", "name-with-dash10", "name-with-dash11"]),
        ("rack[1-2]node[3-4]x", ["rack1node3x", "rack1node4x", "rack2node3x", "rack2node4x"]),
        ("a[1-2],b,c[9]", ["a1", "a2", "b", "c9"]),
    ],
)
def test_host_lists_of_every_form(text, hosts):
    assert kp.expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["gpu[1-2", "gpu1]", "gpu[[1]]", "gpu[a-b]", "gpu[3-1]", "gpu[]", "", "a,,b"])
def test_malformed_host_lists_are_refused(text):
    with pytest.raises(ValueError, match="cannot be read"):
        kp.expand_hosts(text)


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


def test_slurm_ports_of_jobs_with_close_ids_differ():
    ports = {kp.find_world({**SLURM, "SLURM_JOB_ID": str(job)}).port for job in (1, 1001, 10_001, 20_001, "123_5")}
    assert len(ports) == 5


def test_what_the_user_set_is_respected():
    world = kp.find_world({**SLURM, "MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "4242"})
    assert (world.address, world.port) == ("10.0.0.9", 4242)


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
        ({**TORCHRUN, "RANK": "4"}, "rank 4 does not exist in a world of 4"),
        ({**TORCHRUN, "MASTER_PORT": "http"}, "MASTER_PORT = 'http' must be a number"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "MASTER_PORT"),
        ({**TORCHRUN, "MASTER_PORT": "0"}, "MASTER_PORT = 0 is no port that 4 processes can meet at"),
    ],
)
def test_a_broken_environment_is_named(env, words):
    with pytest.raises(ValueError, match=words):
        kp.find_world(env)


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


def lonely(rank, world):
    import os

    os.environ["WORLD_SIZE"] = "2"  # the other one never comes
    with pytest.raises(RuntimeError, match=r"start-up: rank 0 of 2 \(torchrun\) did not find the others") as info:
        kp.launch(kp.ParallelConfig(init_timeout_s=1))
    return str(info.value)


def test_processes_that_never_come_are_named():
    assert "within 1 s" in run_ranks(lonely, 1, init=False)[0]
