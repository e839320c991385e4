"""Is a folder of token shards what its index says, and are tokens and documents of any kind what they can be?"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kforge_data.shards import TokenShards

if TYPE_CHECKING:
    from kforge_data.streams import TokenStream

_CHUNK = 1 << 24


def verify_shards(path: str | Path) -> list[str]:
    """Read everything and compare: checksums, document boundaries, range of ids, end-of-text at document ends.

    Returns one sentence a fault, naming the file; an empty list means that all is well. ValueError if the folder
    cannot be opened at all (no index, a file missing or of the wrong size).
    """
    shards = TokenShards(path)
    faults: list[str] = []
    for shard in shards.index.shards:
        for kind, expected in (("bin", shard.sha256_bin), ("docs", shard.sha256_docs)):
            file = shards.path / f"{shard.name}.{kind}"
            with open(file, "rb") as handle:
                found = hashlib.file_digest(handle, "sha256").hexdigest()
            if found != expected:
                faults.append(f"{file}: sha256 is {found[:16]}…, the index says {expected[:16]}…")
    names = [str(shards.path / shard.name) for shard in shards.index.shards]
    return faults + _check(shards, names, bos_id=shards.index.bos_id)


def verify_tokens(stream: TokenStream) -> list[str]:
    """The same of tokens that have no checksums: document boundaries, range of ids, end-of-text at document ends."""
    return _check(stream, [f"{stream.name} (file {i})" for i in range(len(stream._bins))])


def _check(stream: TokenStream, names: list[str], bos_id: int | None = None) -> list[str]:
    faults: list[str] = []
    for name, tokens, docs in zip(names, stream._bins, stream._docs, strict=True):
        if docs[0] != 0 or docs[-1] != len(tokens) or (np.diff(docs) < 1).any():
            faults.append(f"{name}.docs: document boundaries do not run from 0 to {len(tokens)} in ascending order")
            continue
        for at in range(0, len(tokens), _CHUNK):
            highest = int(tokens[at : at + _CHUNK].max())
            if highest >= stream.vocab_size:
                faults.append(f"{name}.bin: id {highest} is outside of a vocabulary of {stream.vocab_size}")
                break
        for word, places, wanted in (("end", docs[1:] - 1, stream.eos_id), ("begin", docs[:-1], bos_id)):
            if wanted is not None and (missing := np.flatnonzero(tokens[places] != wanted)).size:
                faults.append(
                    f"{name}.bin: {missing.size} documents {word} without id {wanted}, number {missing[0]} is one"
                )
    return faults
