"""Text that is on every machine: the sources of the running Python's standard library."""

from __future__ import annotations

import json
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# Packages that were installed beside the library, compiled copies, and nothing else.
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class CorpusReport:
    """What a corpus holds."""

    documents: int
    text_bytes: int
    skipped: int
    """Files that are not UTF-8 (tests of other encodings), or empty."""


def stdlib_documents(root: str | Path | None = None) -> Iterator[tuple[str, str | None]]:
    """(relative path, text) of each .py file of the standard library, in order of path; None for undecodable text.

    `root` is another folder to gather from. ValueError if there are no sources, as where the library is a zip file.
    """
    folder = Path(root) if root is not None else Path(sysconfig.get_path("stdlib"))
    names: list[str] = []
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _NOT_LIBRARY]
        names += [Path(place, name).relative_to(folder).as_posix() for name in files if name.endswith(".py")]
    if not names:
        raise ValueError(f"{folder} holds no Python sources; gather text elsewhere and tokenize that")
    for name in sorted(names):
        try:
            yield name, (folder / name).read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError:
            yield name, None


def write_stdlib_corpus(path: str | Path, root: str | Path | None = None) -> CorpusReport:
    """Write `stdlib_documents` to a JSONL file of {"path", "text"}, whole or not at all."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(file.name + ".partial")
    documents = text_bytes = skipped = 0
    try:
        with open(temporary, "w", encoding="utf-8", newline="\n") as out:
            for name, text in stdlib_documents(root):
                if not text:
                    skipped += 1
                    continue
                out.write(json.dumps({"path": name, "text": text}, ensure_ascii=False) + "\n")
                documents += 1
                text_bytes += len(text.encode())
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
    return CorpusReport(documents, text_bytes, skipped)
