"""Random number streams as state: Python's, NumPy's, torch's on the CPU and on this process's CUDA device."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from kforge_ckpt.errors import StateMismatchError
from kforge_ckpt.state import PerRank


class RngState:
    """Stateful: the random streams of every rank, so that each continues where it was.

    Saved are ``random``, ``numpy.random`` if NumPy is imported (its global generator), torch's CPU generator and, if
    CUDA is there, that of ``device`` (default: the current one). A generator object of your own is not among them.

    Restored on more ranks than saved, the ranks that did not exist seed all their streams with the first 8 bytes of
    ``sha256(seed, rank, torch streams of old rank 0, of the CPU and of CUDA)``. They are different at every step of a
    run that draws from one of them; ``seed`` (give the run's) sets runs apart. The same restore
    always gives the same streams.
    """

    def __init__(self, seed: int = 0, device: torch.device | str | int | None = None) -> None:
        self.seed = seed
        self.device = device

    def state_dict(self) -> dict[str, Any]:
        """``{"streams": PerRank({"python": ..., "torch": uint8 tensor, ...})}``"""
        streams: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if "numpy" in sys.modules:
            streams["numpy"] = _numpy_state()
        if torch.cuda.is_available():
            streams["cuda"] = torch.cuda.get_rng_state(self._cuda())
        return {"streams": PerRank(streams)}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """StateMismatchError, and nothing is changed, for streams that cannot be taken up."""
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        saved = state.get("streams")
        if not isinstance(saved, list) or not saved:
            raise StateMismatchError("the checkpoint holds no streams of ranks; was it an RngState that was saved?")
        whose = rank if rank < len(saved) else 0
        streams = saved[whose]
        if not isinstance(streams, dict) or not {"python", "torch"} <= streams.keys():
            raise StateMismatchError(f"the checkpoint holds no streams of rank {whose}; restore without the RngState")
        takes: dict[str, Callable[[Any], Any]] = {
            "python": random.Random().setstate,
            "torch": torch.Generator().set_state,
            "numpy": lambda value: _set_numpy_state(value, trial=True),
        }
        if torch.cuda.is_available():
            takes["cuda"] = torch.Generator(self._cuda()).set_state
        for kind in takes.keys() & streams.keys():
            try:
                takes[kind](streams[kind])
            except Exception as error:
                raise StateMismatchError(
                    f"the saved {kind} stream of rank {whose} cannot be taken up ({type(error).__name__}: {error}); "
                    "restore without the RngState, or with the versions that meta.json names"
                ) from error

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up the streams saved by this rank, or derived ones. ``state["streams"]`` is the list over ranks."""
        saved: list[dict[str, Any]] = state["streams"]
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        if rank >= len(saved):
            self._derive(rank, saved[0])
            return
        streams = saved[rank]
        random.setstate(streams["python"])
        torch.set_rng_state(streams["torch"])
        if "numpy" in streams:
            _set_numpy_state(streams["numpy"])
        if torch.cuda.is_available():
            if "cuda" in streams:
                torch.cuda.set_rng_state(streams["cuda"], self._cuda())
            else:  # saved by a process without CUDA: no such stream to continue
                with torch.cuda.device(self._cuda()):
                    torch.cuda.manual_seed(self._seed(rank, streams))

    def _derive(self, rank: int, streams: dict[str, Any]) -> None:
        seed = self._seed(rank, streams)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
        torch.manual_seed(seed)  # the CPU's and every CUDA device's

    def _seed(self, rank: int, streams: dict[str, Any]) -> int:
        stream = b"".join(bytes(streams[kind].numpy()) for kind in ("torch", "cuda") if kind in streams)
        text = f"kforge-rng:{self.seed}:{rank}:".encode() + stream
        return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")

    def _cuda(self) -> torch.device:
        if self.device is None or torch.device(self.device).index is None:
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device(self.device)


def _numpy_state() -> dict[str, Any]:
    import numpy

    state: dict[str, Any] = numpy.random.get_state(legacy=False)  # type: ignore[assignment]
    # Words of 32 bits, as int64: a dtype that every version of every library can hold.
    key = torch.from_numpy(state["state"]["key"].astype("int64"))
    return {**state, "state": {"key": key, "pos": state["state"]["pos"]}}


def _set_numpy_state(state: dict[str, Any], *, trial: bool = False) -> None:
    """trial: of a generator that nobody uses."""
    import numpy

    key = state["state"]["key"].numpy().astype("uint32")
    into = numpy.random.RandomState() if trial else numpy.random
    into.set_state({**state, "state": {"key": key, "pos": state["state"]["pos"]}})
