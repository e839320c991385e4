"""A local S3 with planted faults for the tests that ask for one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kforge_ckpt import retrying
from kforge_testing import preload
from kforge_testing.s3 import S3, served

sys.path.insert(0, str(Path(__file__).parent))  # stateful.py, under importlib import mode
preload("kforge_ckpt.checkpointer", "s3fs")


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3]:
    with served() as server:
        yield server


@pytest.fixture
def s3(s3_server: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    """An empty bucket, ``s3.bucket``; no pause between attempts."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(retrying, "pause", lambda seconds: None)
    s3_server.new_bucket()
    yield s3_server
    s3_server.clear()
