"""The README's commands and its snippet run as they stand (on a small corpus in place of the whole library)."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kforge_data import DatasetStream, Loader, Mixture, StreamedDocuments, TokenFiles, Tokenizer, TokenShards
from kforge_data.cli import main

README = Path(__file__).parent.parent / "README.md"


def test_the_readme_runs(tmp_path: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "lib"
    library.mkdir()
    for i in range(400):
        (library / f"m{i:03d}.py").write_text(f"# {i}\n" + "".join(texts) * 4)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(library))
    monkeypatch.chdir(tmp_path)
    text = README.read_text(encoding="utf-8")
    commands = re.findall(r"^kforge-data (.*)$", text, re.MULTILINE)
    assert len(commands) == 9
    for command in commands:
        arguments = shlex.split(command.replace("4096", "300"), comments=True)
        assert main(arguments) == 0, command
    snippet, mixture, streamed = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(snippet.splitlines()) <= 15
    # In a process of its own, to which no other package of the house is there.
    others = ["model", "parallel", "optim", "ckpt", "resilience", "metrics", "train"]
    alone = f"import sys, sysconfig\nsys.modules.update({dict.fromkeys(f'kforge_{name}' for name in others)})\n"
    alone += f"sysconfig.get_path = lambda name: {str(library)!r}\n"
    command = [sys.executable, "-c", alone + snippet.replace("4096", "300")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in ("web", "code"):
        (tmp_path / name).symlink_to(tmp_path / "shards" / "train")
    np.save("books.npy", np.arange(50, dtype=np.uint16))
    monkeypatch.setenv("KFORGE_DATA_CACHE", str(tmp_path / "cache"))
    made: dict[str, Any] = {"Mixture": Mixture, "TokenShards": TokenShards, "TokenFiles": TokenFiles}
    exec(compile(mixture, str(README), "exec"), made)
    shares = made["source"].shares(16)
    assert shares["web"] == pytest.approx(4 * shares["code"])
    made = {each.__name__: each for each in (DatasetStream, StreamedDocuments, Tokenizer, Loader)}
    exec(compile(streamed, str(README), "exec"), made)
    assert (made["batch"]["row_ids"] % 64 % 2 == 0).all() and made["batch"]["input_ids"].shape == (16, 512)


def test_the_files_are_named_as_the_readme_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of files and of index entries."""
    library = tmp_path / "lib"
    library.mkdir()
    (library / "a.py").write_text("a = 1\n")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(library))
    monkeypatch.chdir(tmp_path)
    for command in (
        "corpus stdlib --out c.jsonl",
        "train-tokenizer c.jsonl --vocab-size 300 --out t.json",
        "tokenize c.jsonl --tokenizer t.json --out s",
    ):
        assert main(command.split()) == 0
    assert sorted(path.name for path in Path("s").iterdir()) == ["0-00000.bin", "0-00000.docs", "index.json"]
    index = json.loads(Path("s/index.json").read_text())
    assert {"dtype", "vocab_size", "eos_id", "tokenizer", "tokens", "documents", "text_bytes", "shards"} <= set(index)
