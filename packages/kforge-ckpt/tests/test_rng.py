from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from kforge_ckpt import Checkpointer, RngState
from kforge_testing import run_ranks


def draw() -> list[float]:
    return [random.gauss(0, 1), random.random(), *np.random.randn(3).tolist(), *torch.randn(5).tolist()]


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def test_streams_continue(tmp_path: Path) -> None:
    seed_all(3)
    draw()  # an odd number of normal draws: the second half of a pair is kept back
    Checkpointer(tmp_path).save(1, {"rng": RngState()})
    expected = draw()
    seed_all(0)
    Checkpointer(tmp_path).restore({"rng": RngState()})
    assert draw() == expected


def own_streams(rank: int, world: int, folder: str, first: bool) -> list[float]:
    seed_all(100 + rank if first else 0)
    ckpt = Checkpointer(folder)
    if first:
        draw()
        ckpt.save(1, {"rng": RngState(seed=7)})
    else:
        ckpt.restore({"rng": RngState(seed=7)})
    return draw()


def test_every_rank_has_its_own_and_a_new_rank_derives_one(tmp_path: Path) -> None:
    saved = run_ranks(own_streams, 2, str(tmp_path), True)
    four = run_ranks(own_streams, 4, str(tmp_path), False)
    assert four[:2] == saved
    assert len({tuple(stream) for stream in four}) == 4
    assert run_ranks(own_streams, 4, str(tmp_path), False) == four
    assert run_ranks(own_streams, 1, str(tmp_path), False) == saved[:1]


def test_derived_streams_depend_on_seed_rank_and_what_was_saved() -> None:
    streams = [torch.Generator().manual_seed(s).get_state() for s in (1, 2)]
    saved = [{"torch": cpu, "cuda": cuda} for cpu in streams for cuda in streams]  # one of them draws
    saved += [{"torch": cpu} for cpu in streams]
    seeds = {RngState(seed)._seed(rank, one) for seed in (0, 1) for rank in (2, 3) for one in saved}
    assert len(seeds) == 24 and all(0 <= seed < 2**64 for seed in seeds)


def test_numpy_is_left_out_where_it_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "numpy" in RngState().state_dict()["streams"].value
    monkeypatch.delitem(sys.modules, "numpy")
    assert "numpy" not in RngState().state_dict()["streams"].value
