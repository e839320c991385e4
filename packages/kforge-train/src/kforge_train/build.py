"""From a JobConfig to everything that a run consists of, in the one order that works."""

from __future__ import annotations

import logging
import math
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import kforge_model
from kforge_ckpt import Checkpointer, CkptConfig, RngState
from kforge_data import (
    DataConfig,
    Loader,
    Mixture,
    Source,
    StreamedDocuments,
    Tokenizer,
    TokenStream,
    in_order,
    lanes_of,
    open_configured,
    pack_rows,
    row_transforms,
    training_phases,
    training_sources,
    training_streams,
)
from kforge_metrics import ConsoleSink, JsonlSink, Tracker, close_logger, get_logger, peak_flops
from kforge_model import check_parts, flops_per_token, model_shape
from kforge_optim import Group, LossScaler, Optimizer, build_optimizer
from kforge_optim.optimizer import Storage
from kforge_parallel import (
    Mesh,
    check_layout,
    check_model,
    find_world,
    launch,
    parallelize,
    phase,
    precision_of,
    shutdown,
)
from kforge_resilience import Guard, ResilienceConfig, StopRequest
from kforge_train._torch import default_compile_cache
from kforge_train.agree import check_agreement
from kforge_train.config import JobConfig, optim_config
from kforge_train.deterministic import be_deterministic, check_deterministic
from kforge_train.engine import PlainEngine, build_engine
from kforge_train.errors import ConfigError, config_errors
from kforge_train.estimate import check_rows, estimate_job, on_this_machine, work_of
from kforge_train.lock import RunLock


@dataclass
class Job:
    """The parts of a run, built and restored; `Trainer` is what moves them."""

    config: JobConfig
    mesh: Mesh
    model: nn.Module
    """What this rank has of it."""
    parameters: int
    """Of the whole model."""
    optimizer: Optimizer
    loader: Loader
    heldout: TokenStream | None
    engine: PlainEngine
    scaler: LossScaler
    guard: Guard
    stop: StopRequest
    checkpointer: Checkpointer
    rng: RngState
    tracker: Tracker
    log: logging.Logger


def checkpoint_dir(config: JobConfig) -> Path | str:
    """Where a run keeps its checkpoints: a folder, or a URL."""
    if "://" in config.ckpt.dir:
        return config.ckpt.dir
    return Path(config.ckpt.dir) if config.ckpt.dir else Path(config.train.run_dir) / "checkpoints"


def check_spread(config: JobConfig, world_size: int) -> dict[str, int]:
    """Refuse a model, a layout or an optimizer that do not go together; nothing is read. Returns the sizes of all axes.
    Raises ConfigError, and ValueError as `check_layout`."""
    check_parts(config.model)
    with torch.device("meta"):
        model = kforge_model.build_model(config.model)
    own = config.model.kind != "transformer"
    shape = getattr(model, "shape", None) if own else model_shape(config.model)
    for _, row_tokens in config.data.row_lengths():
        axes = check_layout(config.parallel, world_size, shape, row_tokens)
    check_model(model, config.parallel, axes)
    if config.parallel.storage == "split" and not hasattr(model, "init_value_"):
        raise ConfigError(
            f"parallel.storage = split starts from fp32 values by name, and {type(model).__name__} (model.kind = "
            f"{config.model.kind!r}) has no method init_value_(name, tensor, seed); set parallel.storage to fp32"
        )
    _optimizer(config, model, "fp32")  # knows the names, whether lengths fit, and what rules fit
    return axes


def check(config: JobConfig, world_size: int) -> None:
    """Refuse what cannot be run, before any process waits for another. Raises ConfigError."""
    if config.train.deterministic:
        check_deterministic(os.environ)
    axes = check_spread(config, world_size)
    ranks = axes["dp_replicate"] * axes["dp_shard"]
    data = config.data
    if not data.train and not data.mixture:
        raise ConfigError("data.train is empty; name a folder of token shards (kforge-data tokenize writes one)")
    check_rows(config, world_size)
    if config.parallel.recompute == "auto":
        estimate_job(on_this_machine(config), world_size)  # knows whether any way of keeping activations fits
    try:
        tokenizer = Tokenizer.load(data.tokenizer) if data.tokenizer else None
    except (OSError, ValueError) as error:
        raise ConfigError(f"data.tokenizer: {error}") from error
    try:
        streams = training_streams(data)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    try:
        heldout = {"heldout": open_heldout(data)} if data.heldout else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"data.heldout: {error}") from error
    for name, source in [*streams.items(), *heldout.items()]:
        place = f"data.mixture {name}" if data.mixture and name in streams else f"data.{name}"
        try:
            if tokenizer is not None:
                source.check_tokenizer(tokenizer)
            next(iter(streams.values())).check_alike(source)
        except ValueError as error:
            raise ConfigError(f"{place}: {error}") from error
        if isinstance(source, StreamedDocuments):
            if source.lanes % ranks:
                raise ConfigError(
                    f"data.lanes = {source.lanes} cannot be dealt to {ranks} data ranks, which read whole lanes; use a "
                    f"multiple of {ranks}, which is another order of rows"
                )
        elif source.tokens <= source.documents:  # a document's first token is not predicted
            raise ConfigError(
                f"{place} = {source.name} has {source.tokens} tokens in {source.documents} documents: nothing to "
                "score; name shards with a document of two tokens or more"
            )
        if source.vocab_size > config.model.vocab_size:
            raise ConfigError(
                f"{place} = {source.name} was made with a vocabulary of {source.vocab_size} tokens, more than "
                f"model.vocab_size = {config.model.vocab_size}; raise --model.vocab_size"
            )
    for name in ("answer_start", "answer_end"):
        if any(token >= config.model.vocab_size for token in getattr(data, name)):
            raise ConfigError(f"data.{name} = {list(getattr(data, name))} has ids past model.vocab_size")
    if data.mixture:
        with config_errors():  # knows which weights a phase leaves, and what is read by then
            sources = training_sources(data, streams)
        _check_epochs(data, sources, config.train.steps)
    if config.train.eval_every_steps and not data.heldout:
        raise ConfigError("train.eval_every_steps is set, but data.heldout names no folder to evaluate on")
    checkpoints = checkpoint_dir(config)
    for path in (Path(config.train.run_dir), *([checkpoints] if isinstance(checkpoints, Path) else [])):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"the run cannot be kept in {path}: {error}") from error
        if not os.access(path, os.W_OK):
            raise ConfigError(f"the run cannot be kept in {path}: no permission to write there")
    with config_errors():
        held = Checkpointer(checkpoints, remote=config.ckpt.remote)
        start_is_here = bool(config.ckpt.init_from) and "://" not in config.ckpt.init_from
        begun = (start_is_here or not config.ckpt.resume) and held.latest() is not None
        if start_is_here and not begun:
            from kforge_train.starting import find_start  # which reads this module

            find_start(config.ckpt)
    if begun and not config.ckpt.resume:
        places = " or ".join(str(place) for place in (held.dir, held.remote) if place is not None)
        raise ConfigError(
            f"ckpt.resume = false, but {places} holds checkpoints already; choose another --train.run_dir, "
            "or let it resume"
        )


def build_model(config: JobConfig, mesh: Mesh) -> nn.Module:
    """The model of a job, spread over ``mesh``, with its initial values: those of ``init_weights(seed)``, or, of a
    model without that method, those that it is built with on the CPU under the seed."""
    seed = config.train.seed
    with torch.device("meta"):
        fills = config.model.kind == "transformer" or hasattr(kforge_model.build_model(config.model), "init_weights")

    def built() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return kforge_model.build_model(config.model)

    return parallelize(
        built,
        mesh,
        config.parallel,
        init=(lambda model: model.init_weights(seed)) if fills else None,  # type: ignore[operator]
        gradients="sum",
        cast_inputs=False,
        work=work_of(config, mesh.size),
    )


def groups_of(config: JobConfig) -> list[Group]:
    """The groups of parameters of a job's optimizer, from shapes alone. Raises ValueError as `build_optimizer`."""
    with torch.device("meta"):
        model = kforge_model.build_model(config.model)
    return _optimizer(config, model, "fp32").groups


def build_job_optimizer(config: JobConfig, model: nn.Module, whole: nn.Module | None = None) -> Optimizer:
    """The optimizer of a job over its model, or the stages of ``whole`` that a rank has. Under split storage, weights
    start from the same fp32 bits as ever."""
    storage, seed = config.parallel.storage, config.train.seed
    optimizer = _optimizer(config, model, storage, whole)
    if storage == "split":
        optimizer.load_full_weights(
            (name, model.init_value_(name, torch.empty_like(parameter, dtype=torch.float32), seed))  # type: ignore[operator]
            for name, parameter in model.named_parameters()
        )
    return optimizer


def _optimizer(config: JobConfig, model: nn.Module, storage: Storage, whole: nn.Module | None = None) -> Optimizer:
    """What a job's model learns with. The model may say by what μP scales the rate of each parameter."""
    scales: Callable[[], dict[str, float]] = getattr(model, "lr_scales", dict)
    return build_optimizer(
        model,
        optim_config(config),
        config.train.steps,
        storage=storage,
        seed=config.train.seed,
        lr_scales=scales(),
        whole=whole,
    )


def guard_config(config: JobConfig) -> ResilienceConfig:
    """What the guard of a job allows. Under fp16 a skipped step halves the loss scale and may be all that was wrong, so
    the limit counts from where the scale, falling from ``optim.loss_scale_init``, has reached 1. 0 stays no limit."""
    limit = config.resilience.max_skipped_in_a_row
    if config.parallel.precision != "fp16" or limit == 0:
        return config.resilience
    halvings = int(math.log2(config.optim.loss_scale_init))
    return replace(config.resilience, max_skipped_in_a_row=limit + halvings)


def versions() -> dict[str, str]:
    """What produced a run: Python, torch and every kforge package."""
    from importlib.metadata import version

    names = ("model", "parallel", "data", "optim", "ckpt", "resilience", "metrics", "train")
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{f"kforge-{name}": version(f"kforge-{name}") for name in names},
    }


@contextmanager
def build(config: JobConfig) -> Iterator[Job]:
    """Build every part of a run; on leaving, files are closed, signal handlers restored and the group left.

    A process group that exists already is used and kept. Raises ConfigError for what cannot be run.
    """
    with config_errors():
        check(config, find_world().size)
        group_is_ours = not dist.is_initialized()
        if config.train.deterministic:
            be_deterministic(os.environ)
        mesh = launch(config.parallel)
    if config.parallel.compile:
        _keep_compiled(Path(config.train.run_dir).absolute() / "compiled")
    try:
        with _parts(config, mesh) as job:
            yield job
    finally:
        if group_is_ours:
            shutdown()


def _keep_compiled(folder: Path) -> None:
    """Let inductor keep what it compiles in ``folder``, unless the user has said where. torch writes its own default
    into the same variable as soon as any part of it asks for the place."""
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", default_compile_cache()) == default_compile_cache():
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def _check_epochs(data: DataConfig, sources: Sequence[Source], steps: int) -> None:
    """ConfigError where a mixture ends before the run does."""
    size, lengths = data.batch_size(), data.row_lengths()
    ends = [min(first, steps) for first, _ in lengths[1:]] + [steps]
    for source, (first, row_tokens), end in zip(sources, lengths, ends, strict=True):
        limit = source.position_limit(row_tokens) if isinstance(source, Mixture) else None
        if limit is not None and limit < (wanted := size.before(end) - size.before(first)):
            since = f" from step {first} on" if first else ""
            raise ConfigError(
                f"train.steps = {steps} want {wanted} rows{since}, and the mixture ends after {limit}, "
                "when every source has given its max_epochs; raise one of them, or lower train.steps"
            )


@contextmanager
def _parts(config: JobConfig, mesh: Mesh) -> Iterator[Job]:
    run_dir = Path(config.train.run_dir)
    log = get_logger(rank=mesh.rank, world=mesh.size, run_dir=run_dir)
    torch.manual_seed(config.train.seed + mesh.rank)  # nothing in the steady loop draws; a user's hook may
    sources = training_sources(config.data)
    facts = {f"config section {name}": fields for name, fields in asdict(config).items()}
    check_agreement({**facts, "version of a package": versions(), "training data": [s.fingerprint for s in sources]})

    with RunLock(run_dir, mesh.rank), StopRequest(config.resilience.stop_signals) as stop:
        with phase("build", config.parallel, mesh):
            model = build_model(config, mesh)
        with torch.device("meta"):
            whole = kforge_model.build_model(config.model)
        data = config.data
        loader = Loader(
            sources[0],
            row_tokens=data.row_tokens,
            global_rows=data.global_rows,
            microbatch_rows=data.microbatch_rows,
            batch_phases=data.batch_size().phases,
            phases=training_phases(data, sources),
            rank=mesh.data_rank,
            world=mesh.data_size,
            seed=data.seed,
            shuffle=data.shuffle,
            isolate_documents=data.isolate_documents,
            transforms=row_transforms(data),
            workers=data.workers,
            worker_kind=data.worker_kind,
            accept_changed_data=data.accept_changed_data,
            device=mesh.device,
        )
        tracker = _tracker(config, mesh, run_dir, sources)
        job = Job(
            config=config,
            mesh=mesh,
            model=model,
            parameters=sum(parameter.numel() for parameter in whole.parameters()),
            optimizer=build_job_optimizer(config, model, whole if mesh.pp_size > 1 else None),
            loader=loader,
            heldout=open_heldout(data) if data.heldout else None,
            engine=build_engine(model, mesh, reduce_each=config.parallel.accumulate == "sharded"),
            scaler=LossScaler(
                enabled=config.parallel.precision == "fp16",
                init_scale=config.optim.loss_scale_init,
                growth_interval=config.optim.loss_scale_growth_steps,
                device=mesh.device,
            ),
            guard=Guard(guard_config(config), mesh.device, on_event=tracker.on_event),
            stop=stop,
            checkpointer=Checkpointer(
                checkpoint_dir(config),
                keep_last=config.ckpt.keep_last,
                keep_every=config.ckpt.keep_every,
                keep_steps=config.ckpt.keep_steps,
                keep_doubling_from=config.ckpt.keep_doubling_from,
                keep_best=config.ckpt.keep_best,
                **background(config.ckpt),
                threads=config.ckpt.threads,
                remote=config.ckpt.remote,
                on_event=lambda kind, values: log.debug("%s %s", kind, values),  # the trainer tells of it
            ),
            rng=RngState(),
            tracker=tracker,
            log=log,
        )
        try:
            yield job
        finally:
            loader.close()
            tracker.close()
            job.checkpointer.close()
            close_logger()


def background(config: CkptConfig) -> dict[str, Any]:
    """How the checkpointer saves: the trainer waits, by `Checkpointer.staged`, before it changes what is saved."""
    if config.mode == "sync":
        return {"mode": "sync"}
    nbytes = None if config.staging_gib is None else int(config.staging_gib * 2**30)
    return {"mode": "async", "overlap": True, "writer": config.writer, "staging_bytes": nbytes}


def open_heldout(data: DataConfig, path: str | Path = "") -> TokenStream:
    """The tokens that a job is evaluated on, or those at ``path``."""
    return open_configured(str(path) or data.heldout, data)


def attended_lengths(source: Source, data: DataConfig, row_tokens: int | None = None, data_rank: int = 0) -> list[int]:
    """What attention works on, for `flops_per_token`: the lengths, in tokens, of the documents of up to 256 rows from
    all over the source, or the length of a row where its documents see one another. Of a source that is read in lanes,
    the first 16 rows of a lane of this data rank."""
    row = row_tokens or data.row_tokens
    if not data.isolate_documents:
        return [row]
    count = source.row_count(row)
    if isinstance(source, Mixture):
        count = min(count, source.position_limit(row) or count)
    positions = np.unique(np.linspace(0, count - 1, min(count, 256)).astype(np.int64))
    if lanes := lanes_of(source):
        positions, source = data_rank + lanes * np.arange(16), in_order(source, seed=data.seed, shuffle=False)
    rows = source.rows_at(positions, row_tokens=row, seed=data.seed, shuffle=False)
    packed = pack_rows(source.read_rows(rows, row))
    assert packed.cu_seqlens is not None
    lengths: list[int] = np.diff(packed.cu_seqlens).tolist()
    return lengths


def _flops(config: JobConfig, sources: Sequence[Source], data_rank: int) -> dict[str, Any]:
    """FLOPs of a token, forward and backward, as the tracker wants them: numbers, or functions of the step where rows
    change their length."""
    model, data, phases = config.model, config.data, config.data.row_lengths()
    pairs = list(zip(sources, phases, strict=True))
    causal = [
        flops_per_token(model, attended_lengths(source, data, length, data_rank)) for source, (_, length) in pairs
    ]
    palm = [flops_per_token(model, length, causal=False) for _, length in phases]

    def at(values: list[float | None]) -> float | Callable[[int], float | None] | None:
        if len(values) == 1:
            return values[0]
        return lambda step: values[sum(first <= step for first, _ in phases) - 1]

    return {"flops_per_token": at(causal), "flops_per_token_palm": at(palm)}


def _tracker(config: JobConfig, mesh: Mesh, run_dir: Path, sources: Sequence[Source]) -> Tracker:
    sinks: list[Any] = []
    if mesh.rank == 0 and config.metrics.jsonl:
        sinks.append(JsonlSink(run_dir / "events.jsonl"))
    if mesh.rank == 0 and config.metrics.console:
        sinks.append(ConsoleSink(config.train.steps))
    compute = precision_of(config.parallel.precision).compute
    name = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "cpu"
    return Tracker(
        sinks,
        every_steps=config.metrics.every_steps,
        **_flops(config, sources, mesh.data_rank),
        peak_flops=peak_flops(name, compute),
        world=mesh.size,
        rank=mesh.rank,
        device=mesh.device,
        total_steps=config.train.steps,
    )
