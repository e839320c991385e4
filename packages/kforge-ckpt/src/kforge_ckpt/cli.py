"""The command `kforge-ckpt`. Heavy imports happen inside the commands, so that --help is quick."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kforge_ckpt._version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kforge_ckpt.files import Place

FOUND = 1
USER_ERROR = 2
WHICH = "a folder of checkpoints (its newest), FOLDER@STEP, or the folder of one step"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns 0, 1 when `verify` finds damage or `diff` a difference, or 2 with one line on stderr."""
    arguments = parser().parse_args(argv)
    from kforge_ckpt.errors import CheckpointError

    try:
        return int(arguments.run(arguments))
    except (CheckpointError, OSError) as error:
        print(f"kforge-ckpt {arguments.command}: error: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print(f"kforge-ckpt {arguments.command}: interrupted", file=sys.stderr)
        return 130


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="kforge-ckpt",
        description="Look at checkpoints, check, compare and copy them.",
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"kforge-ckpt {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="command")

    ls = _command(commands, "ls", _ls, "the checkpoints of a folder")
    ls.add_argument("folder", type=_place)

    show = _command(commands, "show", _show, "what a checkpoint holds")
    show.add_argument("checkpoint", help=WHICH)
    show.add_argument(
        "--tensors",
        metavar="PATTERN",
        nargs="?",
        const=re.compile(""),
        type=_pattern,
        help="list tensors, those that match",
    )

    verify = _command(commands, "verify", _verify, "read checkpoints whole, and compare each byte with its checksum")
    verify.add_argument("checkpoint", nargs="+", help=WHICH)
    verify.add_argument("--all", action="store_true", help="all checkpoints of the folders")

    diff = _command(commands, "diff", _diff, "in which tensors and values two checkpoints differ, and by how much")
    diff.add_argument("first", help=WHICH)
    diff.add_argument("second", help=WHICH)

    cp = _command(commands, "cp", _cp, "copy a checkpoint to another folder of checkpoints")
    cp.add_argument("checkpoint", help=WHICH)
    cp.add_argument("folder", type=_place)

    rm = _command(commands, "rm", _rm, "delete checkpoints")
    rm.add_argument("folder", type=_place)
    rm.add_argument("steps", nargs="+", type=int, metavar="STEP")
    rm.add_argument("--all", action="store_true", help="also the last ones of the folder")

    export = _command(commands, "export", _export, "write the tensors of one state as safetensors files with an index")
    export.add_argument("checkpoint", help=WHICH)
    export.add_argument("folder", type=Path)
    export.add_argument("--state", default="model", metavar="NAME", help="which state (default: model)")
    export.add_argument("--dtype", metavar="DTYPE", help="convert floating-point tensors, to bfloat16, say")
    export.add_argument("--max-file-gb", type=float, default=5.0, metavar="GB", help="size of a file (default: 5)")

    merge = _command(commands, "merge", _merge, "the mean of several checkpoints, as a checkpoint")
    merge.add_argument("checkpoint", nargs="+", help=WHICH)
    merge.add_argument(
        "--out", type=_place, required=True, metavar="FOLDER", help="the folder of checkpoints to write to"
    )
    merge.add_argument("--weights", type=float, nargs="+", metavar="W", help="one a checkpoint (default: alike)")
    merge.add_argument("--state", nargs="+", default=["model"], metavar="NAME", help="which states (default: model)")
    return top


def _command(commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
    added: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    added.set_defaults(run=run)
    return added


def _place(text: str) -> Place:
    from kforge_ckpt.errors import CheckpointError
    from kforge_ckpt.files import place

    try:
        return place(text)
    except CheckpointError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None


def _ls(arguments: argparse.Namespace) -> int:
    from kforge_ckpt.errors import CheckpointError
    from kforge_ckpt.tools import listing

    rows = listing(arguments.folder)
    if not rows:
        raise CheckpointError(f"{arguments.folder} holds no committed checkpoint")
    print(f"{'step':>10}  {'size':>10}  {'ranks':>5}  {'saved':20}  notes")
    for row in rows:
        notes = ["score lost"] if row.scores is None else [f"{name} {value:g}" for name, value in row.scores.items()]
        notes += ["temporary"] if row.temporary else []
        notes += [f"DAMAGED: {row.fault}"] if row.fault else []
        print(
            f"{row.step:>10}  {_size(row.nbytes):>10}  {row.world:>5}  {row.saved_at:20}  {', '.join(notes)}".rstrip()
        )
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from kforge_ckpt.safetensors import DTYPES
    from kforge_ckpt.saving import META
    from kforge_ckpt.tools import open_checkpoint

    saved = open_checkpoint(arguments.checkpoint)
    if arguments.tensors is not None:
        for name, stored in sorted(saved.index.items()):
            if arguments.tensors.search(name):
                print(f"{name}  {stored.dtype}  {list(stored.shape)}  in {len(stored.chunks)}")
        return 0
    about = saved.contents.json(META)
    print(f"folder     {saved.folder}")
    ranks = f"{saved.world} ranks on {about.get('hosts', '?')} hosts"
    print(f"step       {saved.contents.step}, by {ranks}, {about.get('saved_at', '')}")
    print(f"versions   {', '.join(f'{name} {version}' for name, version in about.get('versions', {}).items())}")
    print(f"size       {_size(sum(record.size for record in saved.contents.files.values()))}")
    for name in saved.tree:
        tensors = [saved.index[tensor] for tensor in saved.tensors_of(name)]
        elements = sum(_elements(stored.shape) for stored in tensors)
        nbytes = sum(_elements(stored.shape) * DTYPES[stored.dtype].itemsize for stored in tensors)
        print(f"{name:10} {len(tensors)} tensors, {elements:,} elements, {_size(nbytes)}")
    print("meta       " + json.dumps(about.get("meta", {}), indent=2).replace("\n", "\n           "))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from kforge_ckpt.commit import Contents, committed
    from kforge_ckpt.errors import CheckpointError
    from kforge_ckpt.tools import find

    folders: list[Place] = []
    for where in arguments.checkpoint:
        found = committed(_place(where)).values() if arguments.all else [find(where)]
        if not found:
            raise CheckpointError(f"{where} holds no committed checkpoint to verify")
        folders += found
    damaged = 0
    for folder in folders:
        try:
            contents = Contents(folder)
            contents.check(full=True)
        except CheckpointError as error:
            print(f"DAMAGED  {error}")
            damaged += 1
        else:
            print(f"whole    {folder}: {len(contents.files)} files")
    return FOUND if damaged else 0


def _diff(arguments: argparse.Namespace) -> int:
    from kforge_ckpt.tools import differences, open_checkpoint

    one, other = open_checkpoint(arguments.first), open_checkpoint(arguments.second)
    count = 0
    for difference in differences(one, other):
        print(f"{difference.name}: {difference.text}")
        count += 1
    same = len(one.index.keys() & other.index.keys())
    print(f"{count} differences; {same} tensors are in both")
    return FOUND if count else 0


def _cp(arguments: argparse.Namespace) -> int:
    from kforge_ckpt.tools import copy

    print(copy(arguments.checkpoint, arguments.folder))
    return 0


def _rm(arguments: argparse.Namespace) -> int:
    from kforge_ckpt.tools import remove

    remove(arguments.folder, arguments.steps, all_of_them=arguments.all)
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from kforge_ckpt.errors import CheckpointError
    from kforge_ckpt.export import dtype_of, write_folder
    from kforge_ckpt.safetensors import DTYPES, Spec
    from kforge_ckpt.tools import open_checkpoint, read_tensor

    saved, name = open_checkpoint(arguments.checkpoint), arguments.state
    if name not in saved.tree:
        raise CheckpointError(f"{saved.folder} holds no state {name!r}; there are {', '.join(saved.tree)}")
    if not 0 < arguments.max_file_gb < math.inf:
        raise CheckpointError(f"--max-file-gb {arguments.max_file_gb} must be above 0, and a number")
    prefix = len(name) + 1
    stored = {tensor[prefix:]: saved.index[tensor] for tensor in sorted(saved.tensors_of(name))}
    specs = [Spec(tensor, DTYPES[one.dtype], one.shape) for tensor, one in stored.items()]
    nbytes = write_folder(
        arguments.folder,
        specs,
        lambda tensor: read_tensor(saved, f"{name}.{tensor}"),
        dtype=None if arguments.dtype is None else dtype_of(arguments.dtype),
        max_file_bytes=int(arguments.max_file_gb * 10**9),
    )
    print(f"{len(specs)} tensors, {_size(nbytes)}, in {arguments.folder}")
    return 0


def _merge(arguments: argparse.Namespace) -> int:
    from kforge_ckpt.tools import average

    print(average(arguments.checkpoint, arguments.out, weights=arguments.weights, names=arguments.state))
    return 0


def _elements(shape: tuple[int, ...]) -> int:
    return math.prod(shape)


def _size(nbytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} TB"


if __name__ == "__main__":
    sys.exit(main())
