from __future__ import annotations

import pytest
import torch.distributed.checkpoint as dcp

from kforge_ckpt import CheckpointError, DamagedCheckpointError, StateMismatchError
from kforge_ckpt.ranks import Ranks, combine, plain_errors
from kforge_testing import run_ranks


def together(rank: int, world: int) -> list[str]:
    ranks = Ranks()
    assert ranks.all("sum", lambda: rank) == rank
    assert ranks.first("chosen", lambda: {"rank": rank}) == {"rank": 0}
    assert ranks.gather(rank * 10) == [0, 10, 20]
    errors = []

    def fail_on(*where: int, kind: type[Exception]) -> None:
        if rank in where:
            raise kind("no")

    for call in (
        lambda: ranks.all("a", lambda: fail_on(1, kind=OSError)),
        lambda: ranks.all("b", lambda: fail_on(0, 2, kind=DamagedCheckpointError)),
        lambda: ranks.first("c", lambda: fail_on(0, 1, kind=KeyError)),
    ):
        with pytest.raises(CheckpointError) as error:
            call()
        errors.append(f"{type(error.value).__name__}: {error.value}")
    assert ranks.all("none is left waiting", lambda: 1) == 1
    return errors


def test_a_failure_of_one_is_the_same_error_of_all() -> None:
    expected = [
        "CheckpointError: a: rank 1: OSError: no",
        "DamagedCheckpointError: b: rank 0, 2: no",
        "CheckpointError: c: rank 0: KeyError: 'no'",
    ]
    assert run_ranks(together, 3) == [expected] * 3


def test_alone() -> None:
    ranks = Ranks()
    assert (ranks.rank, ranks.world, ranks.group, ranks.stale) == (0, 1, None, False)
    assert ranks.gather(3) == [3] and ranks.broadcast(4) == 4
    with pytest.raises(CheckpointError, match=r"it: ZeroDivisionError: .*zero") as error:
        ranks.all("it", lambda: 1 // 0)
    assert isinstance(error.value.__cause__, ZeroDivisionError)


def test_the_most_telling_kind_wins() -> None:
    failed = {0: ("OSError", "x"), 1: ("StateMismatchError", "y"), 2: ("DamagedCheckpointError", "z")}
    assert type(combine("w", failed, 3)) is StateMismatchError


def test_torchs_exception_becomes_one_that_handlers_see() -> None:
    with pytest.raises(CheckpointError, match="rank 1: OSError: full") as error, plain_errors("saving", 2):
        raise dcp.CheckpointException("write", {1: (OSError("full"), None)})  # type: ignore[dict-item]
    assert isinstance(error.value, Exception) and isinstance(error.value.__cause__, OSError)
    with pytest.raises(KeyboardInterrupt), plain_errors("saving", 2):
        raise dcp.CheckpointException("write", {0: (KeyboardInterrupt(), None)})  # type: ignore[dict-item]
