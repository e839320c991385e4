"""Random number streams as state: Python's, NumPy's, torch's on the CPU and on this process's CUDA device."""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch
import torch.distributed as dist

from kforge_ckpt.state import PerRank


class RngState:
    """Stateful: the random streams of every rank, so that each continues where it was.

    Saved are ``random``, ``numpy.random`` if NumPy is imported (its global generator), torch's CPU generator and, if
    CUDA is there, that of ``device`` (default: the current one). A generator object of your own is not among them.

    Restored on more ranks than saved, the ranks that did not exist seed all their streams with the first 8 bytes of
    ``sha256(seed, rank, torch CPU stream of old rank 0)``. That stream is different at every step of a run that
    draws from it; ``seed`` (give the run's) sets runs apart. The same restore always gives the same streams.
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

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up the streams saved by this rank, or derived ones. ``state["streams"]`` is the list over ranks."""
        saved: list[dict[str, Any]] = state["streams"]
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        if rank >= len(saved):
            self._derive(rank, saved[0]["torch"])
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
                    torch.cuda.manual_seed(self._seed(rank, streams["torch"]))

    def _derive(self, rank: int, stream: torch.Tensor) -> None:
        seed = self._seed(rank, stream)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
        torch.manual_seed(seed)  # the CPU's and every CUDA device's

    def _seed(self, rank: int, stream: torch.Tensor) -> int:
        text = f"kforge-rng:{self.seed}:{rank}:".encode() + bytes(stream.numpy())
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


def _set_numpy_state(state: dict[str, Any]) -> None:
    import numpy

    key = state["state"]["key"].numpy().astype("uint32")
    numpy.random.set_state({**state, "state": {"key": key, "pos": state["state"]["pos"]}})
