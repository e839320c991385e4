"""The same tokens in another format: token shards, .npy, raw .bin, Megatron's pair, or text again."""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from kforge_data.duplicates import begin_of, documents_of, text_tokens
from kforge_data.megatron import pair_of, write_megatron
from kforge_data.shard_writer import ShardWriter
from kforge_data.shards import TOKEN_DTYPES, token_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kforge_data.streams import TokenStream
    from kforge_data.tokenizer import Tokenizer

FORMATS = ("shards", "npy", "bin", "megatron", "jsonl", "txt")
_CHUNK = 1 << 24


def convert_tokens(
    stream: TokenStream,
    out: str | Path,
    to: str,
    *,
    tokenizer: Tokenizer | None = None,
    shard_tokens: int = 1 << 28,
    overwrite: bool = False,
) -> str:
    """Write a stream at ``out`` as ``to``; returns what it is now, in words.

    shards: a folder of token shards. npy, bin: one file of ids, uint16 where the vocabulary allows it and else uint32;
    documents are told apart by the end-of-text id alone. megatron: ``out``.bin and ``out``.idx. jsonl: a record
    ``{"text": …}`` a document. txt: a document a line. The last two need the tokenizer, and give the text without
    the token that ends a document.

    Files appear whole or not at all. ValueError for what would lose something: documents that end without the id that
    tells them apart, tokens that are no whole text, lines with line breaks in them.
    """
    if to not in FORMATS:
        raise ValueError(f"format {to!r} is not one of {', '.join(FORMATS)}")
    stream.check_documents()
    out = Path(out)
    exists = [path for path in (pair_of(out) if to == "megatron" else [out]) if path.is_file()]
    if to != "shards" and exists and not overwrite:
        raise ValueError(f"{exists[0]} is there already; remove it, or pass overwrite (--overwrite)")
    if to == "shards":
        _write_shards(stream, out, shard_tokens, overwrite)
        return f"token shards of {token_dtype(stream.vocab_size)}"
    if to == "megatron":
        write_megatron(stream, out)
        return "Megatron's .bin and .idx"
    if to in ("jsonl", "txt"):
        if tokenizer is None:
            raise ValueError(f"{to} is text, which takes the tokenizer that made the tokens; name it (--tokenizer)")
        stream.check_tokenizer(tokenizer)
        _write_text(stream, out, tokenizer, lines=to == "txt")
        return "a record a document" if to == "jsonl" else "a document a line"
    _check_ends(stream)
    kind = TOKEN_DTYPES[token_dtype(stream.vocab_size)]
    with _whole(out) as file:
        if to == "npy":
            np.lib.format.write_array_header_1_0(
                file, {"descr": kind.str, "fortran_order": False, "shape": (stream.tokens,)}
            )
        for at in range(0, stream.tokens, _CHUNK):
            file.write(stream.read(at, min(at + _CHUNK, stream.tokens)).astype(kind).tobytes())
    return f"ids of {kind.name}" + ("" if stream.eos_id is None else f", documents end with {stream.eos_id}")


@contextmanager
def _whole(out: Path) -> Iterator[IO[bytes]]:
    """A file that appears under its name when all of it is there."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(out.name + ".partial")
    try:
        with open(partial, "wb") as file:
            yield file
        os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)


def _check_ends(stream: TokenStream) -> None:
    """Documents can be told apart again: each ends with the end-of-text id, which is nowhere else."""
    if stream.documents == 1 and stream.eos_id is None:
        return
    if stream.eos_id is None:
        raise ValueError(
            f"{stream.name} has {stream.documents} documents and no id that ends them, so a bare file of ids would "
            "lose where they begin; write token shards or Megatron's pair"
        )
    for tokens, docs in zip(stream._bins, stream._docs, strict=True):
        at = 0
        while at < len(docs) - 1:
            to = max(at + 1, int(np.searchsorted(docs, docs[at] + _CHUNK, side="right")) - 1)
            ends = np.flatnonzero(tokens[docs[at] : docs[to]] == stream.eos_id) + docs[at] + 1
            if not np.array_equal(ends, docs[at + 1 : to + 1]):
                raise ValueError(
                    f"{stream.name} has documents without the end-of-text id {stream.eos_id} at their end, or with it "
                    "before; a bare file of ids would lose where they end. Write token shards or Megatron's pair"
                )
            at = to


def _write_shards(stream: TokenStream, out: Path, shard_tokens: int, overwrite: bool) -> None:
    index: Any = getattr(stream, "index", None)
    with ShardWriter(
        out,
        vocab_size=stream.vocab_size,
        tokenizer=stream.tokenizer,
        eos_id=stream.eos_id,
        bos_id=begin_of(stream),
        shard_tokens=shard_tokens,
        overwrite=overwrite,
        meta={"converted": stream.name},
    ) as writer:
        done = 0
        for tokens, docs in zip(stream._bins, stream._docs, strict=True):
            first = 0
            while first < len(docs) - 1:
                last = max(first + 1, int(np.searchsorted(docs, docs[first] + _CHUNK, side="right")) - 1)
                sizes = np.diff(docs[first : last + 1])
                # The bytes of text are known of all documents together; each gets its part by tokens.
                before = [done, *(done + np.cumsum(sizes)).tolist()]
                text_bytes = np.diff([stream.text_bytes * n // stream.tokens for n in before])
                writer.add_batch(tokens[docs[first] : docs[last]], sizes, text_bytes)
                done, first = before[-1], last
        if index:
            writer.skip(index.skipped_documents)


def _write_text(stream: TokenStream, out: Path, tokenizer: Tokenizer, *, lines: bool) -> None:
    with _whole(out) as file:
        for i, framed in enumerate(documents_of(stream)):
            tokens = text_tokens(stream, framed)
            text = tokenizer.decode(tokens)
            if "\ufffd" in text and tokenizer.encode(text) != tokens.tolist():
                raise ValueError(
                    f"document {i} of {stream.name} holds bytes that are no whole text; write another format, which "
                    "keeps its tokens"
                )
            if lines:
                if "\n" in text or "\r" in text:
                    raise ValueError(f"document {i} of {stream.name} has several lines; write jsonl, which keeps them")
                file.write(text.encode() + b"\n")
            else:
                file.write(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n")
