"""Outputs of a model's modules over a whole data set, into one file.

Both formats say at the front of an array how long it is, which is known at the end only. So each point's numbers go to
a file of their own as they come, and are put together, a piece at a time, once all have been seen. Memory: the outputs
of one batch. Disk: while it is put together, twice the result.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import torch
from torch import Tensor

from kforge_model.modes import evaluating, run_for_hooks
from kforge_model.points import capture, find_points
from kforge_model.rows import Rows
from kforge_model.transformer import Transformer

# dtype -> its name in safetensors, and in NumPy, which has no bfloat16: that is widened.
_DTYPES = {
    torch.float64: ("F64", "<f8"),
    torch.float32: ("F32", "<f4"),
    torch.float16: ("F16", "<f2"),
    torch.bfloat16: ("BF16", None),
    torch.int64: ("I64", "<i8"),
    torch.int32: ("I32", "<i4"),
    torch.int16: ("I16", "<i2"),
    torch.int8: ("I8", "|i1"),
    torch.uint8: ("U8", "|u1"),
    torch.bool: ("BOOL", "|b1"),
}


@dataclass
class _Column:
    """What has been written of one point."""

    file: IO[bytes]
    path: Path
    dtype: torch.dtype
    rest: tuple[int, ...]
    """Shape behind the first dimension."""
    count: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.count, *self.rest)


def extract(
    model: Transformer,
    batches: Iterable[Tensor | tuple[Tensor, Rows | None]],
    points: str | Iterable[str],
    path: str | os.PathLike[str],
    *,
    reduce: Literal["tokens", "mean", "last"] | Callable[[Tensor], Tensor] = "tokens",
) -> dict[str, tuple[int, ...]]:
    """Run the model over ``batches`` and write what the modules at ``points`` return to ``path``.

    batches: ids [B,S] or (ids, rows), of any sizes, on any device. points: patterns of `find_points`. path ends in
    ``.npz`` or ``.safetensors``; the file appears under that name when it is whole. reduce says what is kept of an
    output [B,S,...]:

        tokens   [B*S, ...]: every token, row after row
        mean     [B, ...]: the mean over a row's tokens, documents or not, summed in float32 or wider
        last     [B, ...]: a row's last token
        f        f(output): a tensor of your own making

    and all batches are put behind one another along the first dimension, under the module's name. The dtype is the
    output's; bfloat16 becomes float32 in ``.npz``. Returns name -> shape. Runs in eval mode without gradients; under
    several ranks each writes what it has, so give each a path of its own.

    Raises ValueError for another ending, no batch at all, a pattern that matches nothing, a module whose output is not
    one tensor, and outputs whose shape (but for the first dimension) or dtype changes between batches, as "tokens" and
    "mean" never do.
    Raises ImportError without NumPy.
    """
    try:
        import numpy  # noqa: F401 - Tensor.numpy() wants it
    except ImportError as error:
        raise ImportError("extract needs NumPy: pip install 'kforge-model[extract]'") from error
    path = Path(path)
    if path.suffix not in (".npz", ".safetensors"):
        raise ValueError(f"{path.name} must end in .npz or .safetensors, which says the format")
    names = find_points(model, points)
    device = next(model.parameters()).device
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as scratch, ExitStack() as files:
        columns: dict[str, _Column] = {}
        for batch in batches:
            ids, rows = (batch, None) if isinstance(batch, Tensor) else batch
            for name, output in _outputs(model, ids.to(device), rows, names).items():
                part = _reduced(name, output, reduce)
                if path.suffix == ".npz" and part.dtype == torch.bfloat16:
                    part = part.to(torch.float32)
                if name not in columns:
                    if part.dtype not in _DTYPES:
                        raise ValueError(f"{name} gives {part.dtype}, which {path.suffix} does not hold")
                    own = Path(scratch) / str(len(columns))
                    file = files.enter_context(open(own, "wb"))
                    columns[name] = _Column(file, own, part.dtype, tuple(part.shape[1:]))
                _write(name, columns[name], part)
        if not columns:
            raise ValueError(f"there were no batches, and nothing was written to {path.name}; give at least one")
        for column in columns.values():
            column.file.close()
        whole = Path(scratch) / "whole"
        (_write_npz if path.suffix == ".npz" else _write_safetensors)(whole, columns)
        os.replace(whole, path)
    return {name: column.shape for name, column in columns.items()}


def _outputs(model: Transformer, ids: Tensor, rows: Rows | None, names: list[str]) -> dict[str, Any]:
    with capture(model, names, offload=True) as seen:
        if "head" in names:  # then the logits are wanted
            with evaluating(model), torch.no_grad():
                model(ids, rows)
        else:
            run_for_hooks(model, ids, rows)
    for name, calls in seen.items():
        if len(calls) != 1:
            raise ValueError(
                f"{name} was called {len(calls)} times in one forward pass, which leaves open what to keep"
            )
    return {name: calls[0] for name, calls in seen.items()}


def _reduced(name: str, output: Any, reduce: str | Callable[[Tensor], Tensor]) -> Tensor:
    if not isinstance(output, Tensor):
        raise ValueError(f"{name} returns {type(output).__name__}, not one tensor; choose a module inside it")
    if callable(reduce):
        part = reduce(output)
    elif output.ndim < 2:
        raise ValueError(f"{name} returns shape {tuple(output.shape)}, which has no rows of tokens")
    elif reduce == "tokens":
        part = output.flatten(0, 1)
    elif reduce == "mean":
        wide = torch.promote_types(output.dtype, torch.float32)
        part = output.mean(1, dtype=wide).to(output.dtype)
    elif reduce == "last":
        part = output[:, -1]
    else:
        raise ValueError(f"reduce = {reduce!r} must be 'tokens', 'mean', 'last' or a function")
    if part.ndim < 1:
        raise ValueError(f"reduce made a single number of {name}; keep at least one dimension to put batches behind")
    return part.detach().cpu().contiguous()


def _write(name: str, column: _Column, part: Tensor) -> None:
    if part.dtype != column.dtype or tuple(part.shape[1:]) != column.rest:
        raise ValueError(
            f"{name} gives {part.dtype} of shape {tuple(part.shape)}, and before it gave {column.dtype} of shape "
            f"{('N', *column.rest)}; all but the first dimension must stay"
        )
    column.file.write(part.flatten().view(torch.uint8).numpy().data)
    column.count += len(part)


def _write_npz(path: Path, columns: dict[str, _Column]) -> None:
    """A zip of .npy files, version 1.0 (numpy.lib.format), as numpy.savez writes."""
    with zipfile.ZipFile(path, "w", allowZip64=True) as archive:
        for name, column in columns.items():
            header = {"descr": _DTYPES[column.dtype][1], "fortran_order": False, "shape": column.shape}
            text = repr(header)
            text += (
                " " * (-(len(text) + 11) % 64) + "\n"
            )  # 10 bytes stand before it; the numbers begin at 64's multiple
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                member.write(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode())
                _copy(column, member)


def _write_safetensors(path: Path, columns: dict[str, _Column]) -> None:
    """Length of the header, header in JSON, numbers (https://github.com/huggingface/safetensors#format)."""
    header, at = {}, 0
    # Widest dtype first, as safetensors itself does: every array then begins at a multiple of its dtype's size.
    order = sorted(columns.items(), key=lambda item: -item[1].dtype.itemsize)
    for name, column in order:
        size = column.path.stat().st_size
        dtype = _DTYPES[column.dtype][0]
        header[name] = {"dtype": dtype, "shape": list(column.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, column in order:
            _copy(column, file)


def _copy(column: _Column, target: IO[bytes]) -> None:
    with open(column.path, "rb") as source:
        shutil.copyfileobj(source, target, 1 << 20)
