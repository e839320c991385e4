"""The `kforge` command. What it runs is imported when it runs: help and `config` answer without torch."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kforge_train._version import __version__
from kforge_train.errors import ConfigError

if TYPE_CHECKING:
    from kforge_optim import Group

CONFIG_EXIT = 2
SILENT_S = 10.0

_OVERRIDES = """\
Any field of the job can be set as --section.key VALUE or --section.key=VALUE:
text as it is, a list as 0.9,0.95, `none` for no value; a field of true/false
may stand alone. Defaults < preset or file < command line."""
_TOPICS = """\
`kforge train --help optim` says what the fields of [optim] are, with types and
defaults; --help optim.lr: of one field; --help all: of all. They are:"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command of `argv` (default: of the process) and return its exit code.

    0: done. 2: the command line or the config cannot be used, told in one text. Others: those of `kforge_resilience`.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(argv)
    except ConfigError as error:
        # Every process of a job finds the same fault; each host tells it once. The others wait: were they to end first,
        # the launcher might end the one that is about to tell. When that one ends, it ends them.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            text = str(error).replace("\n", "\n  ")
            print(f"kforge: error:{chr(10) + '  ' if chr(10) in text else ' '}{text}", file=sys.stderr, flush=True)
        else:
            time.sleep(SILENT_S)
        return CONFIG_EXIT
    except KeyboardInterrupt:
        print("kforge: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `kforge config | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _dispatch(argv: list[str]) -> int:
    overrides: list[tuple[str, str]] = []
    if argv and argv[0] in ("train", "config", "schedule", "estimate"):
        from kforge_train.cli.overrides import split_overrides

        overrides, argv = split_overrides(argv, ("--help", "--json", "--out", "--gpus", "--rank"))
    args = _parser(argv).parse_args(argv)
    code: int = args.command(args, overrides)
    return code


def _parser(argv: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kforge", description="Trains language models on one machine or many.")
    parser.add_argument("--version", action="version", version=f"kforge-train {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[Any, list[tuple[str, str]]], int], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name, help=text, description=text, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        sub.set_defaults(command=run)
        return sub

    train = command("train", _train, "Train a model, or go on with a run that was stopped.")
    config = command("config", _config, "Print the resolved job, with where each value came from; starts nothing.")
    schedule = command("schedule", _schedule, "How the rates of a job move, as a table or a picture.")
    estimate = command("estimate", _estimate, "Memory that a job needs of a device, by part, and what it sends.")
    for sub in (train, config, schedule, estimate):
        sub.add_argument("source", nargs="?", metavar="PRESET_OR_FILE", help="a preset's name or a TOML file")
        sub.usage = f"{sub.prog} [PRESET_OR_FILE] [--section.key VALUE ...]"
        sub.epilog = _OVERRIDES
    config.add_argument("--json", action="store_true", help="as JSON")
    estimate.add_argument("--gpus", type=int, default=1, metavar="N", help="number of devices (default: 1)")
    estimate.add_argument("--rank", type=int, metavar="R", help="list what this one of the devices would hold")
    schedule.add_argument("--out", type=Path, metavar="FILE", help="draw it: a .png, .svg or .pdf (wants matplotlib)")
    if argv[:1] == ["train"] and {"-h", "--help"} & set(argv):
        train.epilog = _fields(argv)

    evaluate = command("eval", _eval, "Loss of a run's checkpoint on held-out text.")
    generate = command("generate", _generate, "Text from a run's checkpoint.")
    for sub in (evaluate, generate):
        sub.add_argument("run_dir", metavar="RUN_DIR", help="folder of the run, as train.run_dir named it")
        sub.add_argument("--step", type=int, help="step of the checkpoint (default: the newest)")
    evaluate.add_argument("--data", type=Path, metavar="FOLDER", help="token shards (default: data.heldout of the run)")
    generate.add_argument("--prompt", default="", metavar="TEXT", help="what the text begins with")
    generate.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default: 128")
    generate.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0: the likeliest (default: 0.8)")
    generate.add_argument("--top-k", type=int, default=0, metavar="K", help="only the K likeliest (default: 0, all)")
    generate.add_argument("--top-p", type=float, default=1.0, metavar="P", help="only the likeliest that make up P")
    generate.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")

    export = command("export", _export, "A run's weights as a folder of Hugging Face, with config and tokenizer.")
    export.add_argument("run_dir", metavar="RUN_DIR", help="folder of the run, as train.run_dir named it")
    export.add_argument("folder", type=Path, metavar="FOLDER", help="where to write to")
    export.add_argument("--step", type=int, help="step of the checkpoint (default: the newest)")
    export.add_argument("--dtype", metavar="DTYPE", help="of parameters: float32, bfloat16, … (default: as trained)")
    export.add_argument("--max-file-gb", type=float, default=5.0, metavar="GB", help="size of a file (default: 5)")
    export.add_argument("--raw", action="store_true", help="the weights in training, where there are averages of them")
    export.add_argument("--tokenizer", metavar="PATH", help="a tokenizer.json (default: the run's data.tokenizer)")
    imports = command("import", _import, "A folder of Hugging Face as a run of step 0, to evaluate or to start from.")
    imports.add_argument("folder", type=Path, metavar="FOLDER", help="config.json, *.safetensors, tokenizer.json")
    imports.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of the run to be made")
    imports.add_argument("--dtype", metavar="DTYPE", help="of tensors: float32, bfloat16, … (default: as they are)")

    quick = command("quickstart", _quickstart, "From text to a trained model and a report, on this machine.")
    quick.add_argument("--dir", type=Path, metavar="FOLDER", help="where (default: runs/quickstart)")
    quick.add_argument("--minutes", type=float, metavar="M", help="time to train (default: 3); 30 takes a larger model")
    return parser


def _fields(argv: Sequence[str]) -> str:
    """What `kforge train --help [SECTION | section.key | all]` says of the fields of a job."""
    from kforge_train.describe import describe_config, list_fields
    from kforge_train.resolve import preset_names

    topics = argv[[word in ("-h", "--help") for word in argv].index(True) + 1 :]
    if topics:
        return describe_config(topics)
    presets = textwrap.fill(f"Presets: {', '.join(preset_names())}.", 79, break_on_hyphens=False)
    return f"{presets}\n\n{_OVERRIDES}\n\n{_TOPICS}\n\n{list_fields()}"


def _train(args: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    from kforge_train.resolve import resolve_config

    config = resolve_config(args.source, overrides).config  # before torch: a typing error costs no waiting
    # Threads of OpenMP that wait by spinning take the cores from whoever has work: on a busy machine of two cores
    # training is 2.5 times as fast when they soon sleep, on an idle one as fast as ever. Read when torch is loaded.
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")
    from kforge_train import trainer

    return trainer.run(config)


def _config(args: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    from kforge_train.cli import show
    from kforge_train.resolve import resolve_config

    resolved = resolve_config(args.source, overrides)
    sys.stdout.write(show.as_json(resolved) + "\n" if args.json else show.as_text(resolved))
    sys.stdout.flush()
    return 0


def _schedule(args: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    from kforge_optim.schedules import plot
    from kforge_train.cli import show
    from kforge_train.config import optim_config
    from kforge_train.errors import config_errors
    from kforge_train.resolve import resolve_config

    config = resolve_config(args.source, overrides).config
    with config_errors():
        groups: list[Group] = []
        if config.optim.groups or config.optim.adamw_lr is not None or config.model.mup_base_dim is not None:
            from kforge_train.build import groups_of  # wants the names of parameters, and so torch

            groups = groups_of(config)
        sys.stdout.write(show.rates(config, groups))
        if args.out is not None:
            try:
                plot(optim_config(config), config.train.steps, args.out, groups)
            except (ImportError, OSError) as error:
                raise ConfigError(str(error)) from None
            print(args.out)
    sys.stdout.flush()
    return 0


def _estimate(args: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    from kforge_train.errors import config_errors
    from kforge_train.resolve import resolve_config

    config = resolve_config(args.source, overrides).config
    from kforge_train import estimate

    with config_errors():
        sys.stdout.write(estimate.main(config, args.gpus, args.rank))
    sys.stdout.flush()
    return 0


def _eval(args: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    from kforge_train import evaluate

    return evaluate.main(_run_dir(args.run_dir), args.step, args.data)


def _generate(args: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    run_dir = _run_dir(args.run_dir)
    from kforge_train import generate

    return generate.main(
        run_dir,
        prompt=args.prompt,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        step=args.step,
    )


def _export(args: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    run_dir = _run_dir(args.run_dir)
    if not 0 < args.max_file_gb < float("inf"):
        raise ConfigError(f"--max-file-gb {args.max_file_gb:g} must be above 0")
    from kforge_train import hf

    try:
        step = hf.export_folder(
            run_dir,
            args.folder,
            step=args.step,
            dtype=args.dtype,
            max_file_bytes=int(args.max_file_gb * 10**9),
            raw=args.raw,
            tokenizer=args.tokenizer,
        )
    except OSError as error:
        raise ConfigError(str(error)) from error
    print(f"step {step} of {run_dir} in {args.folder}")
    return 0


def _import(args: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    from kforge_train import hf

    try:
        hf.import_folder(args.folder, args.run_dir, dtype=args.dtype)
    except OSError as error:
        raise ConfigError(str(error)) from error
    print(f"{args.folder} as a run in {args.run_dir}; one that starts from it: --ckpt.init_from {args.run_dir}")
    return 0


def _quickstart(args: argparse.Namespace, overrides: list[tuple[str, str]]) -> int:
    from kforge_train import quickstart

    return quickstart.main(args.dir, args.minutes)


def _run_dir(text: str) -> Path:
    path = Path(text)
    if not (path / "config.toml").is_file():
        raise ConfigError(f"{path} is no run: it has no config.toml; name the folder that `kforge train` wrote to")
    return path
