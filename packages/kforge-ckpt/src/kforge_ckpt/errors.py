"""What can go wrong with a checkpoint. Every rank of a job raises the same error, whichever rank met it."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, found or read; the message says which and why."""


class DamagedCheckpointError(CheckpointError):
    """A file of a committed checkpoint is not what was written: missing, cut short, altered, or of another format."""


class StateMismatchError(CheckpointError, ValueError):
    """The checkpoint and the objects to restore do not fit: names, shapes or dtypes differ. Nothing was changed."""


class UnsupportedStateError(CheckpointError, ValueError):
    """A state holds a value that cannot be written without pickle, or that the ranks disagree about."""
