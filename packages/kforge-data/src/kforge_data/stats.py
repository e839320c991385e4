"""How long documents are, and how many tokens a byte of text takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kforge_data.text_files import needed

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from kforge_data.streams import TokenStream
    from kforge_data.tokenizer import Tokenizer

QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
_BINS_AN_OCTAVE = 4
_SAMPLE_DOCUMENTS = 1000


@dataclass(frozen=True)
class Stats:
    """Numbers of a set of tokens."""

    documents: int
    tokens: int
    shortest: int
    longest: int
    mean: float
    """Tokens of a document, as the three above and below."""
    quantiles: dict[str, float]
    tokens_per_byte: float | None
    """None where neither the set knows its bytes of text nor a tokenizer tells them."""
    tokens_per_byte_of: int
    """Documents that it was taken from."""
    edges: list[int]
    """[n+1]: bin i of the histogram has lengths from edges[i] up to, not including, edges[i+1]."""
    counts: list[int]
    """[n]: documents in each bin."""


def token_stats(stream: TokenStream, tokenizer: Tokenizer | None = None) -> Stats:
    """Numbers of a stream, from its document boundaries alone; four bins an octave.

    Where a stream does not know its bytes of text, up to 1,000 documents from all over it are decoded to count them.
    """
    if not stream.documents:
        raise ValueError(f"{stream.name} holds no documents, of which nothing can be said")
    stream.check_documents()
    lengths = np.concatenate([np.diff(docs) for docs in stream._docs])
    edges = _edges(int(lengths.max()))
    counts = np.histogram(lengths, edges)[0]
    per_byte, taken = None, 0
    if stream.text_bytes:
        per_byte, taken = stream.tokens / stream.text_bytes, stream.documents
    elif tokenizer is not None:
        stream.check_tokenizer(tokenizer)
        taken = min(_SAMPLE_DOCUMENTS, stream.documents)
        tokens = size = 0
        for number in (np.arange(taken) * stream.documents // taken).tolist():
            ids = stream.document(number)
            tokens += len(ids)
            size += len(tokenizer.decode(ids, skip_special=True).encode())
        per_byte = tokens / size if size else None
    return Stats(
        documents=stream.documents,
        tokens=stream.tokens,
        shortest=int(lengths.min()),
        longest=int(lengths.max()),
        mean=float(lengths.mean()),
        quantiles={f"{q:.0%}": float(np.quantile(lengths, q)) for q in QUANTILES},
        tokens_per_byte=per_byte,
        tokens_per_byte_of=taken,
        edges=edges.tolist(),
        counts=counts.tolist(),
    )


def _edges(longest: int) -> NDArray[np.int64]:
    """1, 2, 3, … and then four an octave, past the longest."""
    octaves = int(np.log2(longest)) + 1
    return np.unique(np.round(2.0 ** (np.arange(octaves * _BINS_AN_OCTAVE + 2) / _BINS_AN_OCTAVE)).astype(np.int64))


def draw_lengths(stats: Stats, path: str | Path, title: str) -> None:
    """A PNG of the histogram of lengths: share of the documents, and of the tokens, in each bin."""
    figure, axes = new_figure()
    edges, counts = np.array(stats.edges), np.array(stats.counts)
    middle = np.sqrt(edges[:-1] * (edges[1:] - 1).clip(1))
    for values, name, colour in ((counts, "documents", "#2563eb"), (counts * middle, "tokens", "#f59e0b")):
        axes.stairs(values / values.sum(), edges, label=f"of all {name}", color=colour, fill=True, alpha=0.45)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens of a document")
    axes.set_ylabel("share")
    axes.set_title(title)
    axes.axvline(stats.quantiles["50%"], color="#475569", linestyle="--", label=f"median {stats.quantiles['50%']:,.0f}")
    axes.legend()
    figure.savefig(path, format="png")


def new_figure() -> tuple[Any, Any]:
    """An empty figure of matplotlib, which needs no display."""
    figure = needed("matplotlib.figure", "plot", "a picture").Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    return figure, figure.subplots()
