"""What is handed to a model, looked at before anything is computed of it.

Shapes and dtypes are always looked at. Values are where they can be read without waiting for a device: on the CPU, and
not while torch traces. Elsewhere a value that cannot be is a device's own error, or none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kforge_model._torch import is_transformed

INDEX_DTYPES = (torch.int64, torch.int32)


def at_hand(tensor: Tensor) -> bool:
    """Whether its values can be read now, without waiting for a device."""
    plain = type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.numel() > 0
    return plain and not torch.compiler.is_compiling() and not is_transformed(tensor)


def check_indices(name: str, ids: Tensor, vocab_size: int, ignore: int | None = None) -> None:
    """Raise ValueError unless ``ids`` are tokens of the vocabulary, int64 or int32, or ``ignore``."""
    if ids.dtype not in INDEX_DTYPES:
        raise ValueError(f"{name} came as {ids.dtype}, and must be int64 (or int32): cast with {name}.long()")
    if not at_hand(ids):
        return
    wrong = (ids < 0) | (ids >= vocab_size)
    if ignore is not None:
        wrong &= ids != ignore
    if bool(wrong.any()):
        also = "" if ignore is None else f", or {ignore} where nothing is scored"
        raise ValueError(
            f"{name} hold {ids[wrong][0].item()}, which is no token: they must lie in 0 .. {vocab_size - 1}{also}; was "
            "the text tokenized for another vocabulary?"
        )
