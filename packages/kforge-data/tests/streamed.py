"""Texts in shards that count what is read of them, for tests of sources in lanes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence


class CountedTexts:
    """A `TextShards` of lists; `read` counts (shard, document) as they are handed out."""

    def __init__(self, shards: Sequence[Sequence[str | None]]) -> None:
        self.lists = [list(shard) for shard in shards]
        self.read: Counter[tuple[int, int]] = Counter()
        self.fails_at: tuple[int, int] | None = None

    @property
    def fingerprint(self) -> str:
        return repr(self.lists)

    @property
    def shards(self) -> int:
        return len(self.lists)

    def texts(self, shard: int, first: int = 0) -> Iterator[str | None]:
        for document in range(first, len(self.lists[shard])):
            if (shard, document) == self.fails_at:
                self.fails_at = None
                raise OSError("the line was cut")
            self.read[shard, document] += 1
            yield self.lists[shard][document]


def numbered_texts(documents: int, shards: int = 1) -> CountedTexts:
    """Documents whose text is their number, dealt to shards in turn."""
    return CountedTexts([[str(i) for i in range(shard, documents, shards)] for shard in range(shards)])
