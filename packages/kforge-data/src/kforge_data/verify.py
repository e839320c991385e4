"""Is a folder of token shards what its index says?"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from kforge_data.shards import TokenShards

_CHUNK = 1 << 24


def verify_shards(path: str | Path) -> list[str]:
    """Read everything and compare: checksums, document boundaries, range of ids, end-of-text at document ends.

    Returns one sentence a fault, naming the file; an empty list means that all is well. ValueError if the folder
    cannot be opened at all (no index, a file missing or of the wrong size).
    """
    shards = TokenShards(path)
    faults: list[str] = []
    for shard, tokens, docs in zip(shards.index.shards, shards._bins, shards._docs, strict=True):
        for kind, expected in (("bin", shard.sha256_bin), ("docs", shard.sha256_docs)):
            file = shards.path / f"{shard.name}.{kind}"
            with open(file, "rb") as handle:
                found = hashlib.file_digest(handle, "sha256").hexdigest()
            if found != expected:
                faults.append(f"{file}: sha256 is {found[:16]}…, the index says {expected[:16]}…")
        name = shards.path / shard.name
        if docs[0] != 0 or docs[-1] != shard.tokens or (np.diff(docs) < 1).any():
            faults.append(f"{name}.docs: document boundaries do not run from 0 to {shard.tokens} in ascending order")
            continue
        for at in range(0, shard.tokens, _CHUNK):
            highest = int(tokens[at : at + _CHUNK].max())
            if highest >= shards.vocab_size:
                faults.append(f"{name}.bin: id {highest} is outside of a vocabulary of {shards.vocab_size}")
                break
        for word, places, wanted in (
            ("end", docs[1:] - 1, shards.eos_id),
            ("begin", docs[:-1], shards.index.bos_id),
        ):
            if wanted is not None and (missing := np.flatnonzero(tokens[places] != wanted)).size:
                faults.append(
                    f"{name}.bin: {missing.size} documents {word} without id {wanted}, number {missing[0]} is one"
                )
    return faults
