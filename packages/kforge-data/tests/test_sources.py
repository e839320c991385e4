"""The protocol: token shards fulfil it, and the loader takes anything that does."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kforge_data import Loader, RowBlock, Source, TokenShards


class Alternating:
    """Two sources in turn, as a mixture would do it: row ids carry the source in their lowest bit."""

    def __init__(self, *parts: TokenShards) -> None:
        self.parts = parts
        self.fingerprint = "+".join(part.fingerprint for part in parts)

    def row_count(self, row_tokens: int) -> int:
        return 2 * min(part.row_count(row_tokens) for part in self.parts)

    def rows_at(self, positions: np.ndarray, *, row_tokens: int, seed: int, shuffle: bool) -> np.ndarray:
        rows = np.empty(len(positions), np.int64)
        for which, part in enumerate(self.parts):
            mine = positions % 2 == which
            inner = part.rows_at(positions[mine] // 2, row_tokens=row_tokens, seed=seed, shuffle=shuffle)
            rows[mine] = inner * 2 + which
        return rows

    def read_rows(self, row_ids: np.ndarray, row_tokens: int) -> RowBlock:
        tokens = np.zeros((len(row_ids), row_tokens + 1), np.uint32)
        valid = np.zeros(len(row_ids), np.int64)
        for i, row in enumerate(row_ids.tolist()):
            one = self.parts[row % 2].read_rows(np.array([row // 2]), row_tokens)
            tokens[i], valid[i] = one.tokens[0], one.valid[0]
        none = np.empty(0, np.int64)
        return RowBlock(tokens, valid, none, none, (row_ids % 2).astype(np.int16))

    def max_documents(self, row_tokens: int) -> int:
        return 2


def test_another_source_takes_the_place_of_shards(make_shards: Callable[..., TokenShards]) -> None:
    small = make_shards([list(range(10))], name="a")
    large = make_shards([list(range(100_000, 100_010))], name="b", vocab_size=200_000)
    mixture = Alternating(small, large)
    assert isinstance(mixture, Source) and isinstance(small, Source)
    (batch,) = Loader(mixture, row_tokens=5, global_rows=4, shuffle=False).next()
    assert batch["source_ids"][:, 0].tolist() == [0, 1, 0, 1]
    assert batch["input_ids"].tolist() == [
        [0, 1, 2, 3, 4],
        [100_000, 100_001, 100_002, 100_003, 100_004],
        [5, 6, 7, 8, 9],
        [100_005, 100_006, 100_007, 100_008, 100_009],
    ]


def test_padding_appends_empty_rows(make_shards: Callable[..., TokenShards]) -> None:
    block = make_shards([[1, 2, 3, 4]]).read_rows(np.array([0]), 2)
    assert block.padded(1) is block
    padded = block.padded(3)
    assert padded.tokens.tolist() == [[1, 2, 3], [0, 0, 0], [0, 0, 0]] and padded.valid.tolist() == [3, 0, 0]
