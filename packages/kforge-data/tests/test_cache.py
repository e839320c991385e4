"""A folder is built once, by one process, and one that dies leaves its half to the next."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from kforge_data.cache import build_once, cache_folder


def _build(folder: str) -> None:
    def build(path: Path) -> None:
        with open(path / "built", "a") as file:
            file.write("x")

    build_once(Path(folder), build)


def test_several_processes_build_it_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_build, args=(str(tmp_path / "a" / "f"),)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert (tmp_path / "a" / "f" / "built").read_text() == "x"


def test_a_failed_build_is_gone_on_with(tmp_path: Path) -> None:
    def dies(path: Path) -> None:
        (path / "half").write_text("1")
        raise RuntimeError("killed")

    def goes_on(path: Path) -> None:
        (path / "whole").write_text((path / "half").read_text() + "2")

    with pytest.raises(RuntimeError, match="killed"):
        build_once(tmp_path / "f", dies)
    assert not (tmp_path / "f").exists()
    assert (build_once(tmp_path / "f", goes_on) / "whole").read_text() == "12"


def test_waiting_has_an_end(tmp_path: Path) -> None:
    def waits(path: Path) -> None:
        with pytest.raises(TimeoutError, match="another process has been building"):
            build_once(tmp_path / "f", lambda inner: None, timeout_s=0.1)

    build_once(tmp_path / "f", waits)


def test_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("KFORGE_DATA_CACHE", raising=False)
    assert cache_folder() == tmp_path / "kforge-data"
    monkeypatch.setenv("KFORGE_DATA_CACHE", str(tmp_path / "x"))
    assert cache_folder() == tmp_path / "x" and cache_folder("y") == Path("y")
