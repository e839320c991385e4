"""A folder is built once, by one process; one that dies leaves its half to the next; damage is seen and mended."""

from __future__ import annotations

import json
import multiprocessing
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kforge_data import (
    MegatronTokens,
    PackedDocuments,
    TokenFiles,
    Tokenizer,
    TokenShards,
    cached_tokens,
    mask_documents,
    write_megatron,
)
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


DAMAGE: dict[str, Callable[[bytes], bytes | None]] = {
    "cut": lambda whole: whole[:-1],
    "empty": lambda whole: b"",
    "longer": lambda whole: whole + b"\0" * 8,
    "other": lambda whole: whole[:-8] + bytes(byte ^ 85 for byte in whole[-8:]),
    "gone": lambda whole: None,
}


def contents(stream: Any) -> list[Any]:
    """All that a source says: rows, where documents begin in them, and what is masked."""
    block = stream.read_rows(np.arange(stream.row_count(8)), 8)
    masked = None if block.masked is None else block.masked.tolist()
    begins = [block.start_rows.tolist(), block.start_columns.tolist()]
    return [block.tokens.tolist(), *begins, masked, getattr(stream, "vocab_size", 0)]


@pytest.mark.parametrize("kind", ["plans", "boundaries", "largest", "masks", "tokens"])
def test_whatever_is_damaged_in_a_cache_is_made_anew(
    kind: str,
    make_shards: Callable[..., TokenShards],
    tokenizer: Tokenizer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each file of it in turn cut, emptied, made longer, changed and removed: the same rows, and a warning."""
    shards = make_shards([[*range(i + 1, 2 * i + 3), 0] for i in range(12)], eos_id=0, vocab_size=60)
    np.save(tmp_path / "t.npy", shards.read(0, shards.tokens))
    write_megatron(shards, tmp_path / "m")
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(30)))
    cache = tmp_path / "cache"
    opened: dict[str, Callable[[], Any]] = {
        "plans": lambda: PackedDocuments(shards, cache=cache),
        "boundaries": lambda: TokenFiles(tmp_path / "t.npy", eos_id=0, cache=cache),
        "largest": lambda: MegatronTokens(tmp_path / "m", cache=cache),
        "masks": lambda: mask_documents(shards, 6, cache=cache),
        "tokens": lambda: cached_tokens([tmp_path / "c.jsonl"], tokenizer=tokenizer, cache=cache),
    }
    right = contents(opened[kind]())
    (folder,) = (path for path in cache.glob("*/*") if path.is_dir())
    shutil.copytree(folder, tmp_path / "whole")
    seen = 0
    for file in sorted((tmp_path / "whole").iterdir()):
        for name, damage in DAMAGE.items():
            if kind == "tokens" and name == "other" and file.suffix != ".json":
                continue  # which only `verify` reads
            changed = damage(file.read_bytes())
            (folder / file.name).unlink()
            if changed is not None:
                (folder / file.name).write_bytes(changed)
            caplog.clear()
            assert contents(opened[kind]()) == right, (file.name, name)
            assert f"{folder} is damaged and made anew" in caplog.text, (file.name, name)
            assert contents(opened[kind]()) == right and caplog.text.count("made anew") == 1
            seen += 1
    assert seen >= 13
