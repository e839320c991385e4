"""``kforge-parallel``: what a layout looks like, what it costs, and who this process would be. Nothing is started."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import re
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kforge_parallel import __version__
from kforge_parallel.axes import AXES
from kforge_parallel.config import ParallelConfig
from kforge_parallel.estimate import gb
from kforge_parallel.layout import check_keys
from kforge_parallel.picture import mesh_table
from kforge_parallel.planner import FREE, MOST, LayoutPlan, Machine, plan_layouts
from kforge_parallel.remedies import remedies
from kforge_parallel.stages import SCHEDULES
from kforge_parallel.work import MOMENTS, OPTIMIZERS, Work
from kforge_parallel.world import expand_hosts, find_world

if TYPE_CHECKING:
    from kforge_parallel.fake import RankCheck

_AXES = {
    "pp": "stages of blocks",
    "dp_replicate": "copies of each sharded group",
    "dp_shard": "ranks that share weights, gradients and optimizer state",
    "cp": "ranks that split rows of tokens",
    "tp": "ranks that split each matrix",
    "ep": "ranks that split the experts, laid over tp, cp and dp_shard",
}


_WORDS = {
    "precision": (("bf16", "fp16", "tf32", "fp32"), "compute dtype"),
    "storage": (("fp32", "split", "stochastic"), "how weights are kept"),
    "fp8": (("none", "tensorwise", "rowwise"), "whether linear modules multiply in 8 bits"),
    "schedule": (("1f1b", *(word for word in SCHEDULES if word != "1f1b")), "of pipelines"),
    "optimizer": (OPTIMIZERS, "whose state is counted"),
    "moments": (MOMENTS, "how AdamW keeps its moments"),
}
_RATES = (
    ("peak_flops", 1e12, "operations of a device in that dtype, in 10^12 a second"),
    ("efficiency", 1.0, "share of it that a block reaches where nothing is sent"),
    ("host_bytes_per_s", 1e9, "what a device sends inside a host, in 10^9 bytes a second"),
    ("network_bytes_per_s", 1e9, "what a device sends between hosts, in 10^9 bytes a second"),
)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="kforge-parallel", description=__doc__.split(": ", 1)[1])
    top.add_argument("--version", action="version", version=f"kforge-parallel {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="mesh|plan|check|world|hosts")

    mesh = commands.add_parser("mesh", help="draw which rank stands where, and which groups cross hosts")
    check = commands.add_parser("check", help="build what one rank would hold, in this process and without its memory")
    for command in (mesh, check):
        command.add_argument("--world", type=int, required=True, metavar="N", help="number of processes")
        for axis in (*AXES, "ep"):
            default = -1 if axis == "dp_shard" else 1
            left = "" if axis == "ep" else "; -1: all that are left"
            command.add_argument(
                f"--{axis.replace('_', '-')}",
                type=int,
                metavar="N",
                default=None,
                help=f"{_AXES[axis]}{left} (default {default})",
            )
    check.add_argument("--model", required=True, metavar="MODULE:FUNCTION", help="builds the model, without arguments")
    check.add_argument("--rank", type=int, required=True, metavar="R", help="which of the processes")
    check.add_argument("--schedule", choices=tuple(SCHEDULES), default="1f1b", help="of pipelines (default 1f1b)")
    check.add_argument("--no-sequence-parallel", action="store_true", help="whole rows on tensor-parallel ranks")
    mesh.add_argument("--ranks-per-host", type=int, default=8, metavar="N", help="processes a host (default 8)")
    mesh.add_argument("--json", action="store_true", help="positions and groups as JSON")

    plan = commands.add_parser("plan", help="rank the layouts of a model that fit, by predicted MFU")
    plan.add_argument("--shape", required=True, metavar="FILE", help="sizes of the model, as JSON or TOML")
    plan.add_argument("--gpus", type=int, required=True, metavar="N", help="number of devices")
    plan.add_argument("--memory", required=True, metavar="SIZE", help="of a device, such as 141GB or 80GiB")
    plan.add_argument("--row-tokens", type=int, metavar="N", default=4096, help="tokens of a row (default 4096)")
    plan.add_argument("--global-rows", type=int, metavar="N", help="rows of a step (default: 8 for each device)")
    for name, (words, text) in _WORDS.items():
        plan.add_argument(f"--{name}", choices=words, default=words[0], help=f"{text} (default {words[0]})")
    for name, unit, text in _RATES:
        default = getattr(Machine, name) / unit
        plan.add_argument(_option(name), type=float, metavar="X", default=default, help=f"{text} (default {default:g})")
    plan.add_argument("--gpus-per-host", type=int, metavar="N", default=8, help="devices of a host (default 8)")
    plan.add_argument("--json", action="store_true", help="as JSON: all that fit, and all that do not")

    world = commands.add_parser("world", help="say who this process is, as torchrun or SLURM started it")
    world.add_argument("--json", action="store_true", help="as JSON")

    hosts = commands.add_parser("hosts", help="expand a SLURM host list, one host a line; the first is the master")
    hosts.add_argument("list", help="such as gpu[001-004,007]")
    return top


def read_shape(path: str) -> dict[str, int | bool]:
    """The sizes in a file: a table of JSON, or of TOML, alone or below ``shape``. Raises ValueError."""
    try:
        text = Path(path).read_text("utf-8-sig")
        as_json = path.endswith(".json") or text.lstrip().startswith("{")
        table = json.loads(text, object_pairs_hook=_each_once) if as_json else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON (a name in .json, or {{ first) or TOML: {error}") from None
    found = table.get("shape", table) if isinstance(table, dict) else table
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no table of sizes, such as dim = 4096, but {found!r:.60}")
    if theirs := [f"{name} is {ours} here" for name, ours in _TRANSFORMERS.items() if name in found]:
        raise ValueError(f"{path} looks like a config of transformers; write its sizes anew: {', '.join(theirs)}")
    if tables := [name for name, value in found.items() if isinstance(value, dict)]:
        raise ValueError(f"{path}: sizes stand alone or below `shape`, and it has them below {', '.join(tables)}")
    check_keys(found)
    return found


_TRANSFORMERS = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "intermediate_size": "ffn_dim",
    "num_experts": "n_experts",
    "num_local_experts": "n_experts",
    "num_experts_per_tok": "moe_top_k",
    "moe_intermediate_size": "expert_dim",
    "tie_word_embeddings": "tie_embeddings",
}
"""Sizes as Hugging Face's configs call them -> as a shape does."""


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for i, (name, _) in enumerate(pairs) if name in dict(pairs[:i]))
        raise ValueError(f"{twice} is there twice")
    return found


def bytes_of(text: str) -> float:
    """``141GB`` or ``80GiB`` or ``8e10`` -> bytes. Raises ValueError."""
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?) *(?:([KMGT])(i?)B)?", text.strip(), re.I)
    try:
        number = float(match[1]) if match else 0.0
    except ValueError:
        number = 0.0
    if not match or not number:
        raise ValueError(f"--memory {text} is no size; write 141GB or 80GiB")
    power = " KMGT".index((match[2] or " ").upper())
    size = number * (1024.0 if match[3] else 1000.0) ** power
    if size < 1e6:
        raise ValueError(f"--memory {text} is {size:g} bytes, less than any device has; write {text}GB for 10⁹ bytes")
    return size


def _plan(options: argparse.Namespace) -> int:
    rates = {}
    for name, unit, text in _RATES:
        given = getattr(options, _option(name)[2:].replace("-", "_"))
        rates[name] = given * unit
        if MOST.get(name, math.inf) < rates[name] < math.inf:
            raise ValueError(f"{_option(name)} {given:g} is more than any device has; it is {text}")
    shape, memory = read_shape(options.shape), bytes_of(options.memory)
    machine = Machine(gpus_per_host=options.gpus_per_host, **rates)
    config = ParallelConfig(
        compile=True,
        precision=options.precision,
        storage=options.storage,
        fp8=options.fp8,
        pp_schedule=options.schedule,
    )
    work = Work(row_tokens=options.row_tokens, optimizer=options.optimizer, moments=options.moments)

    def plan(gpus: int = options.gpus, config: ParallelConfig = config, work: Work = work) -> LayoutPlan:
        rows = 8 * gpus if options.global_rows is None else options.global_rows
        return plan_layouts(
            shape,
            gpus,
            memory,
            row_tokens=options.row_tokens,
            global_rows=rows,
            config=config,
            work=work,
            machine=machine,
        )

    found = plan()
    print(json.dumps(asdict(found)) if options.json else found)
    if found.fitting:
        return 0
    sys.stdout.flush()
    why = f"fits into {1 - FREE:.0%} of {gb(memory)}"
    if not found.beyond:
        why = f"can be: {max(found.refused, key=lambda text: found.refused[text], default='none was found')}"
    devices = f"{options.gpus} device{'s' if options.gpus > 1 else ''}"
    print(f"kforge-parallel: no layout of {devices} {_own_words(why)}", file=sys.stderr)
    helps = [f"  {line}" for line in remedies(found, plan, options.gpus, config, work)]
    if helps:
        print("what would fit:", *helps, sep="\n", file=sys.stderr)
    return 1


def _check(options: argparse.Namespace, sizes: dict[str, int]) -> RankCheck:
    from kforge_parallel.fake import check_rank

    module, _, function = options.model.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        build = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--model {options.model} names no function that can be imported: {error}") from None
    if not callable(build):
        raise ValueError(f"--model {options.model} names {build!r}, which builds nothing; name a function or a class")
    rest: dict[str, Any] = {"pp_schedule": options.schedule, "sequence_parallel": not options.no_sequence_parallel}
    config = ParallelConfig(**sizes, **rest, device="cpu")  # type: ignore[arg-type]
    return check_rank(build, config, options.world, options.rank)


def _option(name: str) -> str:
    """``host_bytes_per_s`` -> ``--host-gb-s``."""
    return "--" + name.replace("bytes_per_s", "gb_s").replace("peak_flops", "peak_tflops").replace("_", "-")


_FLAGS = (
    (r"set (?:parallel\.)?sequence_parallel to false", "give --no-sequence-parallel"),
    (r"set (?:parallel\.)?sequence_parallel to true", "leave --no-sequence-parallel out"),
    (r"parallel\.sequence_parallel = false", "--no-sequence-parallel"),
)
"""What is an option without a value."""


def _own_words(message: str) -> str:
    """What a layout's error says of a job's options and start, said of the options of ``mesh``."""
    message = re.sub(
        r"start (?:(a multiple of) )?([0-9]+)(?: with torchrun .* or srun --ntasks [0-9]+)?", _world, message
    )
    message = re.sub(r"but ([0-9]+) (?:is|are) running", r"but --world is \1", message)
    message = message.replace("parallel.pp_schedule", "parallel.schedule").replace("or pp_schedule", "or --schedule")
    for text, option in _FLAGS:
        message = re.sub(text, option, message)
    names = r"ranks per host|world|gpus(?:_per_host)?|memory|global_rows|row_tokens|optimizer|moments"
    names = rf"\b(?:data\.)?({names}|{'|'.join(name for name, _, _ in _RATES)}) = "
    message = re.sub(names, lambda found: f"{_option(found[1].replace(' ', '_'))} ", message)
    return re.sub(r"parallel\.(\w+)( = )?", lambda m: f"--{m[1].replace('_', '-')}{' ' if m[2] else ''}", message)


def _world(found: re.Match[str]) -> str:
    return f"set --world to {found[1] + ' ' if found[1] else ''}{found[2]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0, 1 for a plan in which no layout fits, or 2 for what cannot be."""
    options, code = parser().parse_args(arguments), 0
    try:
        if options.command in ("mesh", "check"):
            asked = {axis: getattr(options, axis) for axis in (*AXES, "ep")}
            sizes = {axis: size for axis, size in asked.items() if size is not None}
            if -1 in sizes.values():
                sizes.setdefault("dp_shard", 1)  # another axis takes what is left
            try:
                shown: Any = _check(options, sizes) if options.command == "check" else None
                shown = shown or mesh_table(sizes, options.world, options.ranks_per_host)
            except ValueError as error:
                raise ValueError(_own_words(str(error))) from None
            print(json.dumps(asdict(shown)) if getattr(options, "json", False) else shown)
        elif options.command == "plan":
            try:
                code = _plan(options)
            except ValueError as error:
                raise ValueError(_own_words(str(error))) from None
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
    return code
