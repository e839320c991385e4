"""What a store does to a run: each fault with its outcome. S3 is moto's, in this process; see conftest.py."""

from __future__ import annotations

import itertools
import logging
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from stateful import Box
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from kforge_ckpt import Checkpointer, CheckpointError, PerRank, commit, files, remote, retrying
from kforge_ckpt.files import entries, place
from kforge_ckpt.retrying import Patience
from kforge_testing import RankFailure, run_ranks


def box(step: int, rows: int = 64) -> Box:
    """Everything in it says which step it is."""
    return Box(t=torch.full((rows, 8), float(step)), n=step, r=PerRank({"t": torch.full((4,), float(step))}))


def save(url: str, *steps: int, **options: Any) -> None:
    ckpt = Checkpointer(url, **options)
    try:
        for step in steps:
            ckpt.save(step, {"box": box(step)})
    finally:
        ckpt.close()


def restored(url: str) -> int | None:
    """The step that a restore comes to, all of it looked at."""
    found = box(0)
    step = Checkpointer(url).restore({"box": found}, verify="full")
    if step is not None:
        assert found.values["n"] == step and found.values["t"].equal(torch.full((64, 8), float(step)))
        assert found.values["r"][0]["t"].equal(torch.full((4,), float(step)))
    return step


def nth(number: int, answer: Any, times: int = 1) -> Callable[[Any], Any]:
    """A fault at request ``number``, from 0 on, and those after it, ``times`` in all."""
    count = iter(range(10**9))
    return lambda request: answer if number <= next(count) < number + times else None


def a_round(url: str, step: int) -> None:
    """Another run over what is there: it saves ``step``, deletes the one before, and goes on from it."""
    save(url, step, keep_last=1)
    found = box(0)
    assert Checkpointer(url).restore({"box": found}) == step and found.values["t"].equal(box(step).values["t"])


def nameless(key: str) -> str:
    """A key, or the path of a request, without what differs by save."""
    return re.sub("step_[0-9]{8}-[0-9a-f]{8}", "step", key)


def test_a_500_at_each_request_in_turn_changes_nothing(s3: Any) -> None:
    """Outcome: asked again; saved, pruned and restored as without it. In a round several requests fail that did not
    before, some way apart, until there is none left in a round."""
    url = f"s3://{s3.bucket}/run"
    a_round(url, 1)
    left = [nameless(key) for key in s3.names()]
    failed: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    since = 0

    def fault(request: Any) -> Any:
        nonlocal since
        key = nameless(repr(request))
        seen[key] += 1
        since += 1
        if since <= 8 or failed[key] >= seen[key]:
            return None
        failed[key] += 1
        since = 0
        return s3.error(500, "InternalError")

    for step in itertools.count(2):
        seen.clear()
        before, since = failed.total(), 8
        s3.fault = fault
        a_round(url, step)
        assert [nameless(key) for key in s3.names()] == left
        if failed.total() == before:
            break
    assert seen <= failed and seen.total() > 40


def test_each_request_failing_in_all_ways_before_it_succeeds(s3: Any) -> None:
    """Outcome: the same."""
    url = f"s3://{s3.bucket}/run"
    a_round(url, 1)
    left = [nameless(key) for key in s3.names()]
    ways = (s3.error(500, "InternalError"), s3.error(503, "SlowDown"), s3.hang_up)
    met: dict[str, int] = {}

    def fault(request: Any) -> Any:
        count = met[repr(request)] = met.get(repr(request), -1) + 1
        if count < len(ways) and request.method in ("PUT", "POST"):
            return ways[count % 2]
        return ways[count] if count < len(ways) else None

    s3.fault = fault
    a_round(url, 2)
    assert min(met.values()) >= len(ways) and [nameless(key) for key in s3.names()] == left


def test_an_outage_from_any_request_on_leaves_the_one_before(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outcome: an error that names the object, after so many attempts; what was committed is there, nothing in part;
    what is left behind is no hindrance to the next save, and swept by it."""
    monkeypatch.setattr(retrying, "PATIENCE", Patience(attempts=2))
    url = f"s3://{s3.bucket}/run"
    save(url, 1)
    step, outcomes = 1, []
    for number in range(0, 100, 3):
        s3.clear()
        s3.fault = nth(number, s3.error(503, "SlowDown"), 10**6)
        try:
            save(url, step + 1, keep_last=1)
            committed = True  # what fails behind the marker is told, and no error
        except CheckpointError as error:
            assert re.search(r"s3://bucket\d+/run.*: HTTP 503: .*; given up after 2 attempts", str(error))
            committed = False
        reached = len(s3.requests) > number
        s3.clear()
        found = box(0)
        assert Checkpointer(url).restore({"box": found}) == step + committed == found.values["n"]
        step += committed
        if not reached:
            break
        outcomes.append(committed)
        if committed:  # the old ones are still there: an undisturbed save deletes them
            step += 1
            save(url, step, keep_last=1)
    assert outcomes.count(False) > 4 and True in outcomes
    save(url, step + 1)
    steps = Checkpointer(url).steps()
    assert restored(url) == step + 1 == steps[-1]
    assert sum(name.startswith("step_") for name in entries(place(url))) == len(steps)


def test_access_denied_in_the_middle_of_a_run(s3: Any) -> None:
    """Outcome: an error at once, without another attempt, that says what to check; the one before is there."""
    url = f"s3://{s3.bucket}/run"
    ckpt = Checkpointer(url, mode="async")
    ckpt.save(1, {"box": box(1)})
    ckpt.wait()
    s3.requests.clear()
    s3.fault = lambda request: s3.error(403, "AccessDenied", "Access Denied")
    with pytest.raises(CheckpointError, match=r"denied: HTTP 403: .*Check that the credentials .* have not expired"):
        ckpt.save(2, {"box": box(2)})
    assert len(s3.requests) == 1
    s3.fault = lambda request: (
        s3.error(400, "ExpiredToken", "The provided token has expired") if request.method == "PUT" else None
    )
    ckpt.save(2, {"box": box(2)})
    with pytest.raises(CheckpointError, match=r"denied: HTTP 400: The provided token has expired\. Check that"):
        ckpt.wait()
    s3.clear()
    ckpt.save(3, {"box": box(3)})  # the same one goes on, once it may
    ckpt.close()
    assert ckpt.steps() == [1, 3] and restored(url) == 3


def test_a_body_that_does_not_come_is_given_up_in_time(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outcome: the attempt ends at the time-out, the next one has the answer."""
    url = f"s3://{s3.bucket}/run"
    save(url, 1)
    never, slow = threading.Event(), []

    def held_back(headers: Any, body: bytes) -> Iterable[bytes]:
        yield body[: len(body) // 2]
        slow.append(len(body))
        never.wait(60)

    def fault(request: Any) -> Any:
        return s3.moto(held_back) if request.method == "GET" and "tensors-" in request.path and not slow else None

    s3.fault = fault
    monkeypatch.setattr(retrying, "PATIENCE", Patience(timeout=0.5))
    try:
        assert restored(url) == 1 and len(slow) == 1
    finally:
        never.set()


@pytest.mark.parametrize("honest", [True, False], ids=["shorter than asked", "shorter than said"])
def test_a_truncated_body_is_asked_for_again(s3: Any, honest: bool) -> None:
    """Outcome: no byte of it is used."""
    url = f"s3://{s3.bucket}/run"
    save(url, 1)
    cut: list[int] = []

    def half(headers: list[tuple[str, str]], body: bytes) -> Iterable[bytes]:
        cut.append(len(body))
        return [body[: len(body) // 2]]

    def shorter(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        def begin(status: str, headers: list[tuple[str, str]], *_: Any) -> None:
            lengths = {name: str(int(value) // 2) for name, value in headers if name == "Content-Length"}
            start(status, [(name, lengths.get(name, value)) for name, value in headers])

        return s3.moto(half)(environ, begin if honest else start)

    s3.fault = lambda request: (
        shorter if request.method == "GET" and "tensors-" in request.path and len(cut) < 3 else None
    )
    assert restored(url) == 1 and len(cut) == 3


def test_a_connection_that_is_refused_is_told_after_all_attempts(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outcome: an error; nothing older is taken in the place of what cannot be read."""
    url = f"s3://{s3.bucket}/run"
    save(url, 1, 2)
    monkeypatch.setattr(retrying, "PATIENCE", Patience(attempts=3))
    s3.fault = lambda request: s3.error(500, "InternalError") if "step_00000002" in request.path else None
    with pytest.raises(CheckpointError, match="given up after 3 attempts"):
        restored(url)
    s3.clear()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    forget_the_end_point()
    try:
        with pytest.raises(CheckpointError, match=r"listing s3://.*/run: .*given up after 3 attempts"):
            restored(url)
    finally:
        forget_the_end_point()


def forget_the_end_point() -> None:
    import s3fs

    remote._store.cache_clear()
    s3fs.S3FileSystem.clear_instance_cache()


def test_a_bucket_that_does_not_exist(s3: Any) -> None:
    """Outcome: nothing to restore, and an error at the first save."""
    url = "s3://no-such-bucket-here/run"
    assert restored(url) is None
    with pytest.raises(CheckpointError, match="there is no such bucket or container; make it first"):
        save(url, 1)


def test_listings_of_more_than_a_thousand_keys(s3: Any) -> None:
    """Outcome: all pages are read, wherever the checkpoint is among them, and all keys are deleted."""
    root = place(f"s3://{s3.bucket}/run")
    save(str(root), 1, 2)
    folder = commit.committed(root)[1]
    backend = s3.backend()
    for number in range(1010):
        backend.put_object(s3.bucket, f"run/a{number:04}", b"x")
        backend.put_object(s3.bucket, f"run/{folder.name}/more-{number:04}", b"x")
    s3.requests.clear()
    assert list(commit.committed(root)) == [1, 2]
    assert sum("list-type=2" in request.path for request in s3.requests) > 1
    assert restored(str(root)) == 2
    assert len(entries(folder)) > 1010
    commit.remove(commit.put_aside(root, folder))
    assert not [key for key in s3.names() if folder.name in key]
    assert len(entries(root)) == 1010 + 2


def test_a_part_of_a_large_object_is_sent_again_alone(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outcome: one part more than without the fault, and the same object; a completion whose answer was lost counts."""
    monkeypatch.setattr(remote, "PART_BYTES", 5 * 2**20)
    data = torch.randint(0, 255, (12 * 2**20,), dtype=torch.uint8).numpy().tobytes()
    failed: list[str] = []

    def fault(request: Any) -> Any:
        if "partNumber=2" in request.path and not failed:
            failed.append(request.path)
            return s3.error(500, "InternalError")
        if request.method == "POST" and "uploadId" in request.path and len(failed) == 1:
            failed.append(request.path)

            def lost(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
                list(s3.pass_on(environ))
                return s3.error(503, "SlowDown")(environ, start)

            return lost
        return None

    s3.fault = fault
    path = place(f"s3://{s3.bucket}/big")
    files.write_file(path, [data])
    assert len(failed) == 2 and path.read_bytes() == data
    assert sum("partNumber=" in request.path for request in s3.requests) == 3 + 1


def test_nothing_told_holds_a_secret(
    s3: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outcome: an error's text, its traceback and the log name the URL and the fault, and no credential."""
    import traceback

    monkeypatch.setattr(retrying, "PATIENCE", Patience(attempts=2))
    url = f"s3://{s3.bucket}/run"
    save(url, 1)
    answer = "key AKIAWITNESS00000, secret witness-of-a-secret, https://me:pass@host/x?X-Amz-Signature=feed"
    told = []
    with caplog.at_level(logging.DEBUG, "kforge_ckpt"):
        for status, code in ((500, "InternalError"), (403, "SignatureDoesNotMatch"), (400, "InvalidRequest")):
            s3.fault = lambda request, status=status, code=code: s3.error(status, code, answer)
            with pytest.raises(CheckpointError) as error:
                save(url, 2)
            told.append("".join(traceback.format_exception(error.value)))
    for text in (*told, caplog.text):
        assert "planted" not in text and "/run" in text
        for secret in ("AKIAWITNESS", "witness-of", "me:pass", "feed"):
            assert secret not in text


# Kills.


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save_and_die(rank: int, world: int, url: str, point: str, options: dict[str, Any]) -> None:
    remote.PART_BYTES = 5 * 2**20
    ckpt = Checkpointer(url, **options)
    ckpt.save(1, {"box": box(1)})
    ckpt.wait()
    if point == "tensor bytes":
        files.write_block = die  # type: ignore[method-assign, assignment]
    elif point == "a part":
        before = remote.MultipartUpload._part

        def part(self: Any, number: int, data: bytes) -> Any:
            if number == 2:
                die()
            return before(self, number, data)

        remote.MultipartUpload._part = part  # type: ignore[method-assign]
    else:
        commit.reached = lambda at: die() if at == point else None  # type: ignore[assignment]
    in_parts = point in ("a part", "tensor bytes")
    ckpt.save(2, {"box": Box(t=torch.zeros(3 * 2**20 if in_parts else 100))})
    ckpt.close()


@pytest.mark.parametrize(
    ("point", "options"),
    [
        *((point, {}) for point in ("tensor bytes", "a part", "tensors written", "manifest written", "marker written")),
        *((point, {"mode": "async", "overlap": True}) for point in ("a part", "all ranks written")),
    ],
)
def test_kill_9_in_the_middle_of_an_upload(s3: Any, point: str, options: dict[str, Any]) -> None:
    """Outcome: the checkpoint before it, until the marker is there; what is left is swept by the next save, and the
    lease of the dead process is taken over."""
    url = f"s3://{s3.bucket}/run"
    with pytest.raises(RankFailure):
        run_ranks(save_and_die, 1, url, point, options, init=False, env=s3.environment)
    assert Checkpointer(url).steps() == ([1, 2] if point == "marker written" else [1])
    if point != "marker written":
        assert restored(url) == 1
    save(url, 3)
    assert restored(url) == 3
    assert len(entries(place(url))) == (4 if point == "marker written" else 3)
    assert s3.backend().get_bucket(s3.bucket).multiparts == {}


# Several ranks.


def sharded(rank: int, world: int, url: str, step: int) -> None:
    whole = torch.arange(2**21, dtype=torch.float32).reshape(2**11, 2**10)  # 8 MiB
    tensor = distribute_tensor(whole if step else whole * 0, init_device_mesh("cpu", (world,)), [Shard(0)])
    ckpt = Checkpointer(url, mode="async")
    state = Box(t=tensor, other=torch.zeros(2**20), r=PerRank(rank))
    if step:
        ckpt.save(step, {"box": state, "more": Box(t=torch.zeros(2**20))})
        ckpt.close()
    else:
        assert ckpt.restore({"box": state}) == 5
        assert tensor.full_tensor().equal(whole)


def test_ranks_send_their_own_files_and_read_their_own_ranges(s3: Any) -> None:
    url = f"s3://{s3.bucket}/run"
    run_ranks(sharded, 2, url, 5, env=s3.environment)
    assert sum("tensors-0000" in key for key in s3.names()) == 2
    s3.requests.clear()
    run_ranks(sharded, 4, url, 0, env=s3.environment)
    read = 0
    for request in s3.requests:
        if request.method == "GET" and "tensors-0000" in request.path:
            first, last = re.fullmatch(r"bytes=(\d+)-(\d+)", request.range).groups()  # type: ignore[union-attr]
            read += int(last) - int(first) + 1
    needed = (8 + 4 * 4) * 2**20
    assert needed <= read < needed + 4 * 3 * remote.WINDOW_BYTES < 4 * 16 * 2**20


def denied_rank(rank: int, world: int, url: str) -> str:
    ckpt = Checkpointer(url)
    with pytest.raises(CheckpointError) as error:
        ckpt.save(1, {"box": box(1)})
    return str(error.value)


def test_one_rank_that_is_denied_fails_all(s3: Any) -> None:
    """Outcome: the same error on all ranks, nothing of the step is left."""
    url = f"s3://{s3.bucket}/run"
    s3.fault = lambda request: (
        s3.error(403, "AccessDenied") if request.method == "PUT" and "rank-00001.json" in request.path else None
    )
    texts = run_ranks(denied_rank, 2, url, env=s3.environment)
    assert texts[0] == texts[1] and re.search(r"rank 1: writing .*rank-00001.json was denied", texts[0])
    assert [name for name in entries(place(url)) if name.startswith("step_")] == []
