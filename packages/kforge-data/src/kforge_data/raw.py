"""Token files without an index: `.npy` arrays and raw `.bin` files.

A .npy file says its integer type itself; of a .bin the type must be stated, as bytes do not tell it (an even number of
16-bit ids is also a number of 32-bit ids). Documents end with an end-of-text id, found in one pass over the files that
is kept in the cache; without one, each file is a document.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kforge_data.cache import build_once, cache_folder
from kforge_data.streams import TokenStream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

logger = logging.getLogger("kforge_data")

_SCAN = 1 << 24
_SAMPLES, _SAMPLE_BYTES = 256, 4096
_DTYPES = ("uint8", "uint16", "uint32", "uint64", "int16", "int32", "int64")


class TokenFiles(TokenStream):
    """`.npy` arrays of one dimension and raw `.bin` files of token ids, laid end to end.

    Args:
        paths: a file, several, or a folder, whose .npy and .bin files are taken in order of name.
        dtype: integer type of .bin files, little-endian. A .npy file of another type is refused.
        eos_id: the id that ends each document. None: each file is one document.
        vocab_size: ids are 0..vocab_size-1; larger ones are refused at opening. None: one more than the largest id.
        cache: folder for what the first pass found (default: `cache_folder`).

    Opening the same files again costs no pass. The fingerprint is of names of types, sizes and a sample of 256 pages of
    each file, so it does not read them whole. ValueError for what cannot be; a warning where no file has the
    ``eos_id``, so that each is one document.
    """

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        *,
        dtype: str | None = None,
        eos_id: int | None = None,
        vocab_size: int | None = None,
        cache: str | Path | None = None,
    ) -> None:
        self._arguments = (paths, dtype, eos_id, vocab_size, cache)
        if dtype is not None and dtype not in _DTYPES:
            raise ValueError(f"dtype = {dtype!r} is not one of {', '.join(_DTYPES)}")
        files = _files([paths] if isinstance(paths, str | Path) else paths)
        opened = [_open(file, dtype) for file in files]
        kinds = {array.dtype for array in opened}
        if len(kinds) > 1:
            raise ValueError(f"{files[0]} and others differ in type ({', '.join(map(str, kinds))}); open them apart")
        bins = [_unsigned(array) for array in opened if array.size]
        if not bins:
            raise ValueError(f"{', '.join(map(str, files))}: no tokens in there")
        content = [[str(array.dtype), len(array), _sample(array)] for array in bins]
        key = hashlib.sha256(json.dumps([content, eos_id]).encode()).hexdigest()
        found = build_once(cache_folder(cache) / "boundaries" / key, lambda folder: _scan(bins, eos_id, folder))
        largest = int(json.loads((found / "found.json").read_text())["largest"])
        check_sign(opened[0].dtype, largest, str(files[0]))
        if vocab_size is None:
            vocab_size = largest + 1
        if largest >= vocab_size:
            raise ValueError(f"{files[0]}: id {largest} is outside of a vocabulary of {vocab_size}; wrong dtype?")
        if eos_id is not None and not 0 <= eos_id < vocab_size:
            raise ValueError(f"eos_id = {eos_id} is not an id of a vocabulary of {vocab_size}")
        super().__init__(
            bins,
            [np.asarray(np.load(found / f"{i}.npy", mmap_mode="r")) for i in range(len(bins))],
            dtype=bins[0].dtype,
            vocab_size=vocab_size,
            eos_id=eos_id,
            fingerprint="sha256:" + key,
            name=str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more",
        )
        if eos_id is not None and self.documents == len(bins) and all(ids[-1] != eos_id for ids in bins):
            logger.warning(
                "%s: eos_id = %d does not occur in its %d tokens, so each of %d files is one document, which attention "
                "and labels run through. If its documents end with another id (the last one is %d), give that as "
                "eos_id (data.eos_id, --eos-id); if each file is a document, leave eos_id out",
                *(self.name, eos_id, self.tokens, len(bins), bins[-1][-1]),
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, self._arguments


def _reopen(paths: Any, dtype: str | None, eos_id: int | None, vocab_size: int | None, cache: Any) -> TokenFiles:
    return TokenFiles(paths, dtype=dtype, eos_id=eos_id, vocab_size=vocab_size, cache=cache)


def _files(paths: Sequence[str | Path]) -> list[Path]:
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            files += sorted(file for file in path.iterdir() if file.suffix in (".npy", ".bin"))
        elif path.suffix not in (".npy", ".bin"):
            raise ValueError(f"{path} is neither .npy nor .bin, and its format is not guessed; rename it")
        elif not path.is_file():
            raise ValueError(f"{path} does not exist")
        else:
            files.append(path)
    if not files:
        raise ValueError(f"{', '.join(map(str, paths)) or 'no path'}: no .npy or .bin file there")
    return files


def _open(file: Path, dtype: str | None) -> NDArray[Any]:
    if file.suffix == ".npy":
        try:
            array = np.load(file, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            raise ValueError(f"{file} is no .npy file: {error}") from error
        if not isinstance(array, np.ndarray):
            raise ValueError(f"{file} is no .npy file: it is an archive of several; save the ids alone")
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError(f"{file} is an array of {array.dtype} {list(array.shape)}; token ids are integers [n]")
        if dtype is not None and array.dtype != np.dtype(dtype).newbyteorder("<"):
            raise ValueError(
                f"{file} says that it is {array.dtype}, and dtype = {dtype} was asked for; leave dtype out"
            )
        return np.asarray(array)
    if dtype is None:
        raise ValueError(f"{file}: the integer type of a .bin cannot be told from its bytes; give dtype, e.g. uint16")
    kind, size = np.dtype(dtype).newbyteorder("<"), file.stat().st_size
    if size % kind.itemsize:
        raise ValueError(f"{file} has {size} bytes, which is no whole number of {dtype}; its dtype is another")
    return np.asarray(np.memmap(file, kind, mode="r")) if size else np.empty(0, kind)


def _unsigned(array: NDArray[Any]) -> NDArray[Any]:
    """The same bytes as unsigned integers: a negative id becomes one that `check_sign` refuses."""
    return array.view(array.dtype.str.replace("i", "u"))


def check_sign(kind: np.dtype[Any], largest: int, name: str) -> None:
    """ValueError if the largest id, read as `_unsigned`, was a negative one of a signed type."""
    if kind.kind == "i" and largest > np.iinfo(kind).max:
        raise ValueError(
            f"{name}: id {largest - (1 << 8 * kind.itemsize)} of {kind.name} is negative; were larger ids put into a "
            "type that cannot hold them, or is it padding? Write the ids of text alone, unsigned"
        )


def _sample(array: NDArray[Any]) -> str:
    digest = hashlib.sha256()
    width = _SAMPLE_BYTES // array.itemsize
    for start in np.unique(np.linspace(0, max(len(array) - width, 0), _SAMPLES).astype(np.int64)).tolist():
        digest.update(np.ascontiguousarray(array[start : start + width]).tobytes())
    return digest.hexdigest()


def _scan(bins: Sequence[NDArray[Any]], eos_id: int | None, folder: Path) -> None:
    """Write where documents begin in each file, and the largest id."""
    largest = 0
    for i, array in enumerate(bins):
        ends = [np.zeros(1, np.int64)]
        for at in range(0, len(array), _SCAN):
            part = array[at : at + _SCAN]
            largest = max(largest, int(part.max()))
            if eos_id is not None:
                ends.append(np.flatnonzero(part == eos_id) + (at + 1))
        docs = np.concatenate(ends)
        np.save(folder / f"{i}.npy", docs if docs[-1] == len(array) else np.append(docs, len(array)))
    (folder / "found.json").write_text(json.dumps({"largest": largest}))


def largest_id(bins: Sequence[NDArray[Any]], key: str, cache: str | Path | None) -> int:
    """The largest id in these arrays, from the cache where they have been looked through already."""

    def build(folder: Path) -> None:
        _scan(bins, None, folder)

    found = build_once(cache_folder(cache) / "boundaries" / f"{key}-largest", build)
    return int(json.loads((found / "found.json").read_text())["largest"])
