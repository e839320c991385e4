"""How much memory the run needs: the peak of each interval on a GPU, the process's resident size on a CPU."""

from __future__ import annotations

import os
import sys

import torch


class PeakMemory:
    """The most memory that was in use since the last reading.

    On CUDA: the caching allocator's peak of allocated bytes on ``device``, started anew by each reading, so that a
    spike is seen in its interval and not for ever after. It is kept by the host: reading waits for nothing.
    Elsewhere: the resident set of this process at the moment of reading.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.read()

    def read(self) -> int | None:
        """Bytes, or None where the system does not say."""
        if self.device.type != "cuda":
            return process_rss()
        peak = int(torch.cuda.max_memory_allocated(self.device))
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak


def process_rss() -> int | None:
    """Resident bytes of this process; None where the system does not say.

    Linux counts the pages now; elsewhere it is the largest size so far.
    """
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        pass
    try:
        import resource
    except ImportError:
        return None
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024
