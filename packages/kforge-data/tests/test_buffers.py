"""Memory that is used again: never while anything looks at it, and at once when nothing does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kforge_data import Loader, TokenShards
from kforge_data.buffers import Blocks, Cutter

Make = Callable[..., TokenShards]


def test_a_cutter_lays_arrays_side_by_side() -> None:
    block = np.zeros(400, np.uint8)
    cutter = Cutter(block)
    one, two, far = cutter((3, 5), np.int64), cutter((7,), np.int16), cutter((100,), np.int64)
    assert cutter.offsets == [0, 128, -1] and far.shape == (100,)  # 120 bytes, and on at a multiple of 64
    one[:], two[:], far[:] = 1, 2, 3
    assert block[:120].view(np.int64).tolist() == [1] * 15 and block[128:142].view(np.int16).tolist() == [2] * 7
    assert one.base is block and two.base is block


@pytest.mark.parametrize(
    "view",
    [
        lambda array: array,
        lambda array: array[1:2],
        lambda array: torch.from_numpy(array),
        lambda array: torch.from_numpy(array)[0, :1],
        lambda array: torch.from_numpy(array).view(-1).numpy()[3:],
        lambda array: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(torch.from_numpy(array))),
    ],
)
@pytest.mark.parametrize("shared", [False, True])
def test_a_block_is_free_when_nothing_looks_at_it(view: Callable[[Any], Any], shared: bool) -> None:
    tensor = torch.empty(256, dtype=torch.uint8)
    blocks = Blocks([(tensor.share_memory_() if shared else tensor).numpy()]) if shared else Blocks(size=256, most=1)
    made = blocks.cutter()
    assert isinstance(made, Cutter) and blocks.take() is None  # while there is something that cuts
    held = view(made((2, 8), np.int64))
    del made
    assert blocks.take() is None and blocks.cutter() is np.empty
    del held
    assert blocks.take() == 0 and blocks.take(reserved=[0]) is None


def test_no_more_blocks_than_allowed() -> None:
    blocks = Blocks(size=64, most=2)
    held = [blocks.cutter()((8,), np.int64) for _ in range(3)]
    assert len({array.ctypes.data for array in held}) == 3 and held[2].base is None
    place = held[1].ctypes.data
    del held[1]
    assert blocks.cutter()((8,), np.int64).ctypes.data == place


@pytest.mark.parametrize("kind", ["none", "thread", "fork"])
def test_batches_that_somebody_keeps_stay_what_they_are(numbered: Make, kind: str) -> None:
    """More of them than there are blocks, and parts of some for long after."""
    options: dict[str, Any] = {"row_tokens": 8, "global_rows": 4, "microbatch_rows": 2}
    workers = {"workers": 0} if kind == "none" else {"workers": 2, "worker_kind": kind}
    source = numbered(64)

    def rows(batch: dict[str, Any]) -> list[Any]:
        return [value.tolist() if hasattr(value, "tolist") else value for value in batch.values()]

    with Loader(source, **options, **workers) as loader:
        kept, copies, parts = [], [], []
        for step in range(60):
            for batch in loader.next():
                if step < 20:
                    kept.append(batch)
                    copies.append(rows(batch))
                parts.append((batch["labels"][1], batch["labels"][1].tolist()))
                del batch
            parts = parts[-30:]
            assert all(part.tolist() == values for part, values in parts)
        assert [rows(batch) for batch in kept] == copies
    with Loader(source, **options, workers=0) as loader:
        assert copies == [rows(batch) for _ in range(20) for batch in loader.next()]
    assert [rows(batch) for batch in kept] == copies  # after the loader is closed, too


def test_memory_is_used_again(numbered: Make) -> None:
    with Loader(numbered(64), row_tokens=8, global_rows=4, workers=0) as loader:
        places = set()
        for _ in range(50):
            (batch,) = loader.next()
            places.add(batch["input_ids"].data_ptr())
            del batch
    assert len(places) == 1
