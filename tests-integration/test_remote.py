"""Runs whose checkpoints lie in S3: moto's, on a port that the system picks."""

import os
import shutil

import pytest
from jobs import job, train, train_and_die, values

from kforge_ckpt import Checkpointer
from kforge_testing import RankFailure, run_ranks
from kforge_testing.s3 import served


@pytest.fixture(scope="module")
def bucket():
    with served() as server, pytest.MonkeyPatch.context() as monkeypatch:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield f"s3://{server.new_bucket()}"


def environment():
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


@pytest.mark.parametrize("tier", [False, True], ids=["in S3", "copied to S3"])
def test_a_run_killed_on_a_node_that_is_lost_ends_bit_equal(tokens, tmp_path, bucket, tier):
    common = {"train__steps": 12, "optim__schedule_steps": 12, "ckpt__every_steps": 4, "model__vocab_size": 64}
    assert run_ranks(train, 1, job(tokens, tmp_path / "whole", **common), init=False) == [0]
    place = {"ckpt__remote": f"{bucket}/tier"} if tier else {"ckpt__dir": f"{bucket}/direct"}
    if tier:  # as a preempted run does, it ends in order and copies what it has
        first = job(tokens, tmp_path / "moved", **{**common, "train__steps": 8}, **place)
        assert run_ranks(train, 1, first, init=False, env=environment()) == [0]
    else:
        with pytest.raises(RankFailure):
            config = job(tokens, tmp_path / "moved", **common, **place)
            run_ranks(train_and_die, 1, config, 10, 0, init=False, env=environment())
    before = values(tmp_path / "moved", "loss")
    shutil.rmtree(tmp_path / "moved")
    again = job(tokens, tmp_path / "moved", **common, **place)
    assert run_ranks(train, 1, again, init=False, env=environment()) == [0]
    expected, got = values(tmp_path / "whole", "loss"), values(tmp_path / "moved", "loss")
    assert list(got) in ([9, 10, 11, 12], [5, 6, 7, 8, 9, 10, 11, 12])  # a kill may have come before the second save
    assert {**before, **got} == expected
    url = next(iter(place.values()))
    assert Checkpointer(url).steps() == [4, 8, 12]
    assert b"witness-of-a-secret" not in b"".join(
        path.read_bytes() for path in (tmp_path / "moved").rglob("*") if path.is_file()
    )
