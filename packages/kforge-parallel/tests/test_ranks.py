"""`kforge_testing.run_ranks`, on which all tests of several processes stand."""

import errno
import os
import socket

import pytest
import torch.distributed as dist

from kforge_testing import run_ranks


def open_port(rank, world):
    """What a stranger hears who binds the job's port, and what rank 0 reads from the store that it opens there."""
    port = int(os.environ["MASTER_PORT"])
    with socket.socket() as stranger, pytest.raises(OSError) as heard:
        stranger.bind(("127.0.0.1", port))
    store = dist.TCPStore("127.0.0.1", port, 1, is_master=True, wait_for_workers=False)
    store.set("rank", "0")
    return heard.value.errno, store.get("rank")


def test_the_port_of_a_job_is_free_for_it_and_for_nobody_else():
    assert run_ranks(open_port, 1, init=False) == [(errno.EADDRINUSE, b"0")]
