"""``kforge-parallel``: what a layout looks like, and who this process would be. Nothing is started."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict

from kforge_parallel import __version__
from kforge_parallel.axes import AXES
from kforge_parallel.picture import mesh_table
from kforge_parallel.world import expand_hosts, find_world

_AXES = {
    "pp": "stages of blocks",
    "dp_replicate": "copies of each sharded group",
    "dp_shard": "ranks that share weights, gradients and optimizer state",
    "cp": "ranks that split rows of tokens",
    "tp": "ranks that split each matrix",
    "ep": "ranks that split the experts, laid over tp, cp and dp_shard",
}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="kforge-parallel", description=__doc__.split(": ", 1)[1])
    top.add_argument("--version", action="version", version=f"kforge-parallel {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="mesh|world|hosts")

    mesh = commands.add_parser("mesh", help="draw which rank stands where, and which groups cross hosts")
    mesh.add_argument("--world", type=int, required=True, metavar="N", help="number of processes")
    for axis in (*AXES, "ep"):
        default = -1 if axis == "dp_shard" else 1
        left = "" if axis == "ep" else "; -1: all that are left"
        mesh.add_argument(
            f"--{axis.replace('_', '-')}",
            type=int,
            metavar="N",
            default=None,
            help=f"{_AXES[axis]}{left} (default {default})",
        )
    mesh.add_argument("--ranks-per-host", type=int, default=8, metavar="N", help="processes a host (default 8)")
    mesh.add_argument("--json", action="store_true", help="positions and groups as JSON")

    world = commands.add_parser("world", help="say who this process is, as torchrun or SLURM started it")
    world.add_argument("--json", action="store_true", help="as JSON")

    hosts = commands.add_parser("hosts", help="expand a SLURM host list, one host a line; the first is the master")
    hosts.add_argument("list", help="such as gpu[001-004,007]")
    return top


def _own_words(message: str) -> str:
    """What a layout's error says of a job's options and start, said of the options of ``mesh``."""
    message = re.sub(
        r"start (?:(a multiple of) )?([0-9]+)(?: with torchrun .* or srun --ntasks [0-9]+)?", _world, message
    )
    message = re.sub(r"but ([0-9]+) (?:is|are) running", r"but --world is \1", message)
    message = re.sub(r"\b(ranks per host|world) = ", lambda found: f"--{found[1].replace(' ', '-')} ", message)
    return re.sub(r"parallel\.(\w+)( = )?", lambda m: f"--{m[1].replace('_', '-')}{' ' if m[2] else ''}", message)


def _world(found: re.Match[str]) -> str:
    return f"set --world to {found[1] + ' ' if found[1] else ''}{found[2]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0, or 2 for what cannot be."""
    options = parser().parse_args(arguments)
    try:
        if options.command == "mesh":
            asked = {axis: getattr(options, axis) for axis in (*AXES, "ep")}
            sizes = {axis: size for axis, size in asked.items() if size is not None}
            if -1 in sizes.values():
                sizes.setdefault("dp_shard", 1)  # another axis takes what is left
            try:
                table = mesh_table(sizes, options.world, options.ranks_per_host)
            except ValueError as error:
                raise ValueError(_own_words(str(error))) from None
            print(json.dumps(asdict(table)) if options.json else table)
        elif options.command == "world":
            world = find_world()
            print(json.dumps(asdict(world)) if options.json else "\n".join(f"{k}: {v}" for k, v in vars(world).items()))
        else:
            print("\n".join(expand_hosts(options.list)))
        sys.stdout.flush()
    except BrokenPipeError:  # `kforge-parallel mesh --json | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except ValueError as error:
        print(f"kforge-parallel: {error}", file=sys.stderr)
        return 2
    return 0
