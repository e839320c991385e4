"""Documents that are there twice, by an exact hash of their tokens.

Text and tokens say the same: one tokenizer makes the same tokens of the same text, and its tokens give the text back.
"""

from __future__ import annotations

import hashlib
import itertools
from typing import TYPE_CHECKING

import numpy as np

from kforge_data.shard_writer import ShardWriter

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from kforge_data.shards import TokenShards
    from kforge_data.streams import TokenStream
    from kforge_data.tokenizer import Tokenizer

_DIGEST_BYTES = 16
_CHUNK_DOCUMENTS = 1 << 16


def documents_of(stream: TokenStream) -> Iterator[NDArray[np.unsignedinteger]]:
    """The tokens of each document, in order; views of the files. ValueError where boundaries are damaged."""
    stream.check_documents()
    for tokens, docs in zip(stream._bins, stream._docs, strict=True):
        for at in range(0, len(docs) - 1, _CHUNK_DOCUMENTS):
            bounds = docs[at : at + _CHUNK_DOCUMENTS + 1].tolist()
            for begin, end in itertools.pairwise(bounds):
                yield tokens[begin:end]


def begin_of(stream: TokenStream) -> int | None:
    """The id that begins each document; None if none does, or nobody wrote it down."""
    found: int | None = getattr(getattr(stream, "index", None), "bos_id", None)
    return found


def text_tokens(stream: TokenStream, tokens: NDArray[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
    """Those of the tokens of a document that stand for its text: without what begins and ends it."""
    bos_id = begin_of(stream)
    begin = int(bos_id is not None and len(tokens) > 0 and tokens[0] == bos_id)
    end = len(tokens) - int(len(tokens) > begin and tokens[-1] == stream.eos_id)
    return tokens[begin:end]


def duplicate_documents(streams: Sequence[TokenStream]) -> NDArray[np.bool_]:
    """Which documents of these streams, one after the other [D], equal an earlier one. 16 bytes of memory a document.

    By 128 bits of BLAKE2b: of 10^10 documents two different ones are taken for equal with a chance below 10^-18.
    """
    count = sum(stream.documents for stream in streams)
    digests = np.empty((count, 2), np.uint64)
    raw = digests.view(np.uint8)
    number = 0
    for stream in streams:
        for tokens in documents_of(stream):
            content = np.ascontiguousarray(tokens, np.uint32)  # alike whatever integer type the files have
            raw[number] = np.frombuffer(hashlib.blake2b(content.data, digest_size=_DIGEST_BYTES).digest(), np.uint8)
            number += 1
    order = np.lexsort((digests[:, 1], digests[:, 0]))  # stable: the first of equals stays first
    ordered = digests[order]
    result = np.zeros(count, np.bool_)
    result[order[1:]] = (ordered[1:] == ordered[:-1]).all(axis=1)
    return result


def write_deduplicated(
    streams: Sequence[TokenStream],
    out: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    shard_tokens: int = 1 << 28,
    overwrite: bool = False,
) -> TokenShards:
    """Write the documents of these streams as token shards, in order, each of equal ones once.

    Bytes of text are counted with the tokenizer that made the tokens; without one they are not known afterwards.
    ValueError for streams of different vocabularies, tokenizers, or tokens that begin and end documents.
    """
    first = streams[0]
    for other in streams[1:]:
        pairs = {what: (getattr(other, what), getattr(first, what)) for what in ("vocab_size", "tokenizer", "eos_id")}
        pairs["bos_id"] = begin_of(other), begin_of(first)
        for what, (here, there) in pairs.items():
            if here != there:
                raise ValueError(
                    f"{other.name} has {what} {here}, {first.name} has {there}; they cannot lie in one set"
                )
    keep = ~duplicate_documents(streams)
    with ShardWriter(
        out,
        vocab_size=first.vocab_size,
        tokenizer=first.tokenizer,
        eos_id=first.eos_id,
        bos_id=begin_of(first),
        shard_tokens=shard_tokens,
        overwrite=overwrite,
        meta={"deduplicated": [stream.name for stream in streams]},
    ) as writer:
        number = 0
        for stream in streams:
            for tokens in documents_of(stream):
                if keep[number]:
                    size = 0
                    if tokenizer is not None:
                        size = len(tokenizer.decode(text_tokens(stream, tokens)).encode())
                    writer.add(tokens, size)
                number += 1
        return writer.finish()
