"""No accepted key is ignored. Each field of a job, changed alone, changes what is built or is an error."""

import dataclasses
import multiprocessing
import os
import signal
import threading
from pathlib import Path

import pytest
from jobs import job, values

from kforge_testing import RankFailure, run_ranks
from kforge_train import ConfigError, JobConfig

# A second value for every field; the first is that of jobs.job and BASE below.
CHANGES = {
    "model.vocab_size": 64,
    "model.dim": 32,
    "model.n_layers": 3,
    "model.n_heads": 2,
    "model.n_kv_heads": 4,
    "model.head_dim": 8,
    "model.ffn_dim": 48,
    "model.rope_theta": 100.0,
    "model.norm_eps": 1e-2,
    "model.tie_embeddings": True,
    "model.init_std": 0.1,
    "model.qk_norm": "per_head",
    "model.qkv_bias": True,
    "model.out_bias": True,
    "model.mlp_bias": True,
    "model.attn_gate": True,
    "model.attn_scale": 0.1,
    "model.attn_softcap": 0.5,
    "model.sinks": True,
    "model.window": 3,
    "model.attention_core": "masked",
    "model.rope_dim": 2,
    "model.norm": "layernorm",
    "model.norm_placement": "post",
    "model.mlp": "gelu",
    "model.embed_scale": 3.0,
    "model.logit_softcap": 0.5,
    "model.vocab_multiple": 128,
    "model.mtp_depth": 1,
    "model.loss": "cross_entropy",
    "model.label_smoothing": 0.2,
    "model.z_loss": 0.1,
    "model.init": "truncated_normal",
    "model.mup_base_dim": 4,
    "model.loss_chunk_tokens": 7,
    "model.n_experts": 4,
    "parallel.precision": "fp32",
    "parallel.fp8": "rowwise",
    "parallel.recompute": "full",
    "parallel.reshard_after_forward": False,
    "parallel.prefetch": 1,
    "data.heldout": "",
    "data.row_tokens": 16,
    "data.global_rows": 4,
    "data.batch_phases": '[{"steps": 1, "rows": 4}]',
    "data.microbatch_rows": 2,
    "data.seed": 2,
    "data.shuffle": False,
    "data.isolate_documents": False,
    "data.packing": "best_fit",
    "data.mask_short": 30,
    "data.mask_repetition": 2,
    "data.workers": 2,
    "optim.name": "muon",
    "optim.lr": 2e-2,
    "optim.weight_decay": 0.5,
    "optim.betas": (0.5, 0.5),
    "optim.eps": 1e-2,
    "optim.moments": "bf16",
    "optim.cautious_decay": True,
    "optim.schedule": "constant",
    "optim.schedule_steps": 3,
    "optim.warmup_steps": 1,
    "optim.decay_steps": 1,
    "optim.min_lr_ratio": 0.5,
    "optim.groups": '[{"name": "slow", "match": "^layers", "lr_scale": 0.1}]',
    "optim.lr_scales": '[{"step": 1, "scale": 0.5}]',
    "optim.momentum_phases": '[{"from": 0.5}]',
    "optim.weight_decay_phases": '[{"from": 0.5}]',
    "optim.clip_norm": 0.01,
    "optim.ema_decay": 0.5,
    "optim.clip_value": 1e-3,
    "ckpt.dir": "elsewhere",
    "ckpt.remote": "memory://witness",
    "ckpt.every_steps": 2,
    "ckpt.keep_last": 1,
    "ckpt.keep_every": 1,
    "ckpt.mode": "sync",
    "ckpt.writer": "process",
    "ckpt.staging_gib": 1.0,
    "ckpt.threads": 2,
    "resilience.stop_signals": ("SIGUSR2",),
    "metrics.every_steps": 2,
    "metrics.console": True,
    "metrics.jsonl": False,
    "train.run_dir": "other",
    "train.steps": 5,
    "train.max_minutes": 1e-6,
    "train.seed": 2,
    "train.eval_every_steps": 2,
    "train.eval_rows": 8,
    "train.deterministic": True,
}
# Fields of Muon show under Muon only; retention only where there is something to delete.
LATENT = {"model__attention": "mla", "model__n_kv_heads": None, "model__rope_dim": 2, "model__kv_lora_rank": 4}
YARN = {
    "model__rope_scaling": "yarn", "model__rope_factor": 4.0, "model__rope_original_len": 64, "model__head_dim": 16,
    "model__rope_theta": 100.0,
}  # fmt: skip
ONE = '[{"name": "a", "path": "TOKENS/train"}]'
TWO = '[{"name": "a", "path": "TOKENS/train", "weight": 4}, {"name": "b", "path": "TOKENS/heldout"}]'
MOE = {"model__n_experts": 4}
BIAS = {**MOE, "model__router_bias": True, "model__router_bias_rate": 0.3}
WARMUP = {**BIAS, "model__router_bias_schedule": "warmup", "model__router_bias_warmup_steps": 2}
WSD = {"optim__schedule": "wsd", "optim__decay_steps": 2}
PHASES = {"optim__schedule": "phases", "optim__phases": '[{"schedule": "linear"}]'}
BASE = {
    "model.moe_pattern": (MOE, "MD"),
    "model.moe_top_k": (MOE, 1),
    "model.expert_dim": (MOE, 16),
    "model.shared_experts": (MOE, 1),
    "model.router": (MOE, "sigmoid"),
    "model.router_norm": (MOE, False),
    "model.router_scale": (MOE, 2.0),
    "model.router_groups": (MOE, 2),
    "model.router_top_groups": ({**MOE, "model__router_groups": 2}, 2),
    "model.router_bias": (MOE, True),
    "model.router_bias_rate": (BIAS, 0.5),
    "model.router_bias_schedule": (BIAS, "cosine"),
    "model.router_bias_warmup_steps": (WARMUP, 4),
    "model.balance_loss": (MOE, 0.5),
    "model.balance_over": ({**MOE, "model__balance_loss": 0.5}, "batch"),
    "model.router_z_loss": (MOE, 0.5),
    "model.expert_capacity": (MOE, 0.5),
    "model.v_head_dim": (LATENT, 3),
    "model.q_lora_rank": (LATENT, 4),
    "model.kv_lora_rank": (LATENT, 5),
    "model.window_pattern": ({"model__window": 3}, "WF"),
    "model.rope_theta_window": ({"model__window": 3}, 100.0),
    "model.rope_scaling": ({"model__rope_scaling": "linear", "model__rope_factor": 4.0}, "ntk"),
    "model.rope_factor": ({"model__rope_scaling": "linear"}, 4.0),
    "model.rope_original_len": (YARN, 128),
    "model.rope_low": (YARN, 0.5),
    "model.rope_high": (YARN, 2.0),
    "model.rope_attn_factor": (YARN, 2.0),
    "model.mtp_weight": ({"model__mtp_depth": 1}, 0.9),
    "optim.options": ({"optim__name": "torch.optim.SGD"}, '{"momentum": 0.5}'),
    "optim.muon_momentum": ({"optim__name": "muon"}, 0.5),
    "optim.qk_clip": ({"optim__qk_clip_every_steps": 1}, 1e-3),
    "optim.qk_clip_every_steps": ({"optim__qk_clip": 1e-3}, 2),
    "optim.muon_method": ({"optim__name": "muon"}, "polar_express"),
    "optim.muon_scale": ({"optim__name": "muon"}, "original"),
    "optim.muon_variance_beta": ({"optim__name": "muon"}, 0.9),
    "optim.muon_ns_steps": ({"optim__name": "muon"}, 2),
    "optim.muon_ns_dtype": ({"optim__name": "muon", "parallel__precision": "fp32"}, "bfloat16"),
    "optim.adamw_lr": ({"optim__name": "muon"}, 1e-3),
    "optim.ema_every_steps": ({"optim__ema_decay": 0.5}, 2),
    "optim.warmup_tokens": ({"optim__warmup_steps": 0}, 600),
    "optim.decay_shape": (WSD, "1-sqrt"),
    "optim.decay_power": ({"optim__schedule": "polynomial"}, 1.0),
    "optim.decay_from": ({**WSD, "optim__decay_steps": 1}, 2),
    "optim.phases": (PHASES, '[{"schedule": "rex"}]'),
    "optim.loss_scale_init": ({"parallel__precision": "fp16"}, 2.0),
    "optim.loss_scale_growth_steps": ({"parallel__precision": "fp16"}, 2),
    "parallel.fp8_skip": ({"parallel__fp8": "tensorwise"}, ("*.wo", "*head")),
    "parallel.storage": ({"parallel__precision": "bf16"}, "split"),
    "parallel.accumulate": ({"data__microbatch_rows": 4}, "sharded"),
    "ckpt.keep_last": ({"ckpt__every_steps": 1}, 1),
    "ckpt.keep_every": ({"ckpt__every_steps": 1, "ckpt__keep_last": 1}, 2),
    "ckpt.keep_steps": ({"ckpt__every_steps": 1, "ckpt__keep_last": 1}, (1,)),
    "ckpt.keep_doubling_from": ({"ckpt__every_steps": 1, "ckpt__keep_last": 1}, 1),
    "ckpt.keep_best": ({"ckpt__every_steps": 1, "ckpt__keep_last": 1, "train__eval_every_steps": 1}, 4),
    "ckpt.every_minutes": ({}, 1e-9),
    "data.mixture": ({"data__mixture": ONE, "data__train": ""}, TWO),
    "data.mixture_by": ({"data__mixture": TWO, "data__train": "", "data__packing": "best_fit"}, "documents"),
    "data.mixture_temperature": ({"data__mixture": TWO, "data__train": ""}, 3.0),
    "data.phases": (
        {"data__mixture": TWO, "data__train": ""},
        '[{"step": 1, "weights": {"a": 0}}, {"step": 2, "weights": {"a": 1, "b": 9}}]',
    ),
    "data.repetition_period": ({"data__mask_repetition": 2}, 2),
    "data.answer_start": ({"data__answer_start": (5,), "data__answer_end": (9,)}, (7,)),
    "data.answer_end": ({"data__answer_start": (5,), "data__answer_end": (9,)}, (0,)),
    "data.worker_kind": ({"data__workers": 1}, "fork"),
    "data.cache": ({"data__packing": "best_fit"}, "HERE/plans"),
}
# What the error says, where a value other than the first cannot be had here.
ERRORS = {
    "model.kind": ("nothing", "unknown model 'nothing'; known are transformer"),
    "model.options": ({"width": 3}, "model.options has width, which no part of this model takes"),
    "model.attention": ("mla", "wants model.kv_lora_rank"),
    "model.max_seq_len": (16, "longer than model.max_seq_len = 16"),
    "parallel.dp_shard": (2, "wants 2 processes"),
    "parallel.dp_replicate": (2, "cannot be divided"),
    "parallel.tp": (2, "cannot be divided"),
    "parallel.async_tp": (True, "works on CUDA only"),
    "parallel.cpu_offload": (True, "works on CUDA only"),
    "parallel.cp": (2, "cannot be divided"),
    "parallel.pp": (2, "cannot be divided"),
    "parallel.ep": (2, "expert parallelism is laid over dp_shard, cp and tp, and each of them is 1"),
    "parallel.compress": ("int8", "is for what replicas send one another"),
    "parallel.compress_rank": (2, "only powersgd has a rank"),
    "parallel.device": ("cuda", "sees no CUDA device"),
    "data.train": ("nowhere", "no such folder"),
    "data.tokenizer": ("nowhere.json", "data.tokenizer"),
}
ELSEWHERE = {
    "parallel.compile": "test_compile_compiles_and_keeps_what_it_made_in_the_run",
    **dict.fromkeys(
        [
            f"parallel.{name}"
            for name in ("recompute_every", "recompute_blocks", "recompute_keep", "offload_activations", "memory_gb")
        ],
        "test_blocks_keep_activations_as_told",
    ),
    "parallel.init_timeout_s": "test_time_outs_reach_the_group",
    "parallel.step_timeout_s": "test_time_outs_reach_the_group",
    "parallel.build_timeout_s": "test_time_outs_reach_the_group",
    "parallel.sequence_parallel": "test_sequence_parallel_cuts_rows",
    "parallel.cp_style": "test_cp_style_chooses_the_tokens_of_a_rank_and_the_core",
    **dict.fromkeys(
        ["parallel.pp_schedule", "parallel.pp_stages", "parallel.pp_split", "parallel.pp_layers"],
        "test_blocks_are_dealt_to_stages_as_told",
    ),
    "resilience.nonfinite": "test_abort_ends_all_ranks_with_its_own_code (test_signals.py)",
    "resilience.max_skipped_in_a_row": "test_too_many_skipped_steps_end_the_run",
    "ckpt.resume": "test_starting_afresh_over_checkpoints_is_refused",
    "data.dtype": "test_every_kind_of_source_trains_alike (test_sources.py)",
    "data.eos_id": "test_every_kind_of_source_trains_alike (test_sources.py)",
    "data.lanes": "test_a_stream_trains_on_any_number_of_ranks (test_sources.py)",
    "data.stream_block": "test_a_stream_trains_on_any_number_of_ranks (test_sources.py)",
    "data.text_field": "test_text_trains_as_its_tokens_do (test_sources.py)",
    "data.cache_wait_s": "test_one_builds_while_others_wait (test_cached.py)",
    "data.mask_duplicates": "test_a_document_that_is_there_twice_is_scored_once (test_sources.py)",
    "data.accept_changed_data": "test_a_changed_mixture_is_refused_or_accepted (test_sources.py)",
    "optim.offload": "test_what_is_stepped_are_copies_and_the_model_gets_them_back (test_offload.py)",
    "optim.ema_device": "test_it_follows_the_formula_after_accepted_steps (test_ema.py)",
    "ckpt.verify": "test_a_flipped_bit_is_found_by_full_verification (test_faults.py)",
    **dict.fromkeys(
        ["ckpt.init_from", "ckpt.init_step", "ckpt.init_exclude", "ckpt.init_rename", "ckpt.init_partial"],
        "test_starting.py",
    ),
}


def all_fields(cls=JobConfig, prefix=""):
    import typing

    kinds = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(kinds[field.name]):
            yield from all_fields(kinds[field.name], f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def test_every_field_has_a_witness():
    assert set(all_fields()) == set(CHANGES) | set(BASE) | set(ERRORS) | set(ELSEWHERE)


def facets(config, run_dir):
    """Everything that a field of a job may show in: a short run, watched."""
    import io
    from contextlib import redirect_stderr, redirect_stdout

    import torch
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    from kforge_parallel import full_parameters
    from kforge_train.build import build
    from kforge_train.trainer import Trainer

    seen = {"block calls": 0, "reduced before": False}
    console = io.StringIO()
    with redirect_stderr(console), redirect_stdout(console), build(config) as parts:
        block = parts.model.layers["0"]

        sharded = list(parts.model.parameters())

        def look(module, *_):
            seen["block calls"] += 1
            seen["reduced before"] |= sharded[-1].grad is not None
            seen["compute dtype"] = module.wo.weight.dtype

        block.attn.register_forward_pre_hook(look)
        step = parts.loader.next

        def next_window():
            window = step()
            seen["processes"] = len(multiprocessing.active_children())
            seen["readers"] = sum("kforge" in thread.name for thread in threading.enumerate())
            return window

        parts.loader.next = next_window
        trainer = Trainer(parts)

        def between(*_):
            seen["gathered after forward"] = not isinstance(block.attn.wo.weight, DTensor)

        parts.model.head.register_forward_hook(between)
        seen["handlers"] = [signal.getsignal(s) is signal.SIG_DFL for s in (signal.SIGTERM, signal.SIGUSR2)]
        seen["deterministic"] = torch.are_deterministic_algorithms_enabled()
        seen["chunk"], seen["loss function"] = parts.model.head.chunk_tokens, parts.model.head.loss
        seen["attention core"] = block.attn.core.choice
        if isinstance(block, FSDPModule):
            seen["prefetched"] = len(block._get_fsdp_state()._states_to_forward_prefetch)
        seen["code"] = trainer.run()
        seen["loss scale"] = parts.scaler.scale.item()
        seen["states"] = sorted({kind for state in parts.optimizer.state_dict()["state"].values() for kind in state})
        weights = full_parameters(parts.model)
        seen["weights"] = {n: (tuple(p.shape), p.dtype, p.sum().item()) for n, p in weights.items()}
        memory = parts.checkpointer._memory
        seen["staging"] = memory and (memory.limit_bytes == 2**30, memory.handle is not None)
        seen["tensor files"] = {path.name for path in Path(parts.checkpointer.dir).glob("step_*/tensors-*.safetensors")}
        seen["remote"] = str(parts.checkpointer.remote)
        seen["steps"], seen["checkpoints"] = trainer.next_step, parts.checkpointer.steps()
    seen["plans"] = config.data.cache and [path.name for path in Path(config.data.cache).iterdir()]
    seen["console"] = "loss" in console.getvalue()
    places = [Path(config.train.run_dir), Path(config.ckpt.dir or ".")]
    seen["files"] = [str(p) for p in places]
    events = Path(config.train.run_dir) / "events.jsonl"
    seen["events"] = events.exists()
    if events.exists():
        seen["losses"], seen["rates"] = values(config.train.run_dir, "loss"), values(config.train.run_dir, "lr")
        if config.model.n_experts:
            names = ("load_max", "entropy", *(["bias_range"] if config.model.router_bias else []))
            seen["load"] = [values(config.train.run_dir, f"moe/0/{name}") for name in names]
        seen["saves"] = list(values(config.train.run_dir, "seconds", "checkpoint"))
        seen["evaluations"] = values(config.train.run_dir, "loss", "eval")
        seen["scored"] = values(config.train.run_dir, "tokens", "eval")
    return seen


def watch(rank, world, config):
    multiprocessing.current_process()._config["daemon"] = False  # it may have workers of its own
    return facets(config, config.train.run_dir)


def base_job(tokens, folder, **overrides):
    def place(value):
        return value.replace("TOKENS", str(tokens)).replace("HERE", str(folder)) if isinstance(value, str) else value

    overrides = {name: place(value) for name, value in overrides.items()}
    return job(tokens, folder / "run", **{"train__steps": 4, **overrides})


@pytest.fixture(scope="module")
def base_facets(tokens, tmp_path_factory):
    made = {}

    def of(common):
        key = tuple(sorted(common.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp("base")
            made[key] = without_place(run_ranks(watch, 1, base_job(tokens, folder, **common))[0])
        return made[key]

    return of


def without_place(seen):
    return {**seen, "files": [Path(p).name for p in seen["files"]]}


@pytest.mark.parametrize("path", [*sorted(CHANGES.keys() - BASE.keys()), *BASE])
def test_a_field_changed_alone_shows(tokens, tmp_path, base_facets, path):
    common, value = BASE.get(path) or ({}, CHANGES[path])
    if path in ("ckpt.dir", "train.run_dir"):
        value = str(tmp_path / value)
    changed = base_job(tokens, tmp_path, **{**common, path.replace(".", "__"): value})
    assert without_place(run_ranks(watch, 1, changed)[0]) != base_facets(common)


def test_a_run_repeated_shows_nothing(tokens, tmp_path, base_facets):
    """The control: what `facets` sees is the same when nothing is changed."""
    assert without_place(run_ranks(watch, 1, base_job(tokens, tmp_path))[0]) == base_facets({})


def error_of(rank, world, config):
    from kforge_train.build import build

    try:
        with build(config):
            return "built"
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("path", ERRORS)
def test_what_cannot_be_had_is_an_error(tokens, tmp_path, path):
    value, words = ERRORS[path]
    try:
        config = base_job(tokens, tmp_path, **{path.replace(".", "__"): value})
    except ConfigError as error:
        assert words in str(error)
        return
    assert words in run_ranks(error_of, 1, config, init=False)[0]


def compiled_blocks(rank, world, config):
    from kforge_train.build import build

    with build(config) as parts:
        compiled = [hasattr(block.forward, "_torchdynamo_orig_callable") for block in parts.model.layers.values()]
        return compiled, os.environ.get("TORCHINDUCTOR_CACHE_DIR"), os.environ.get("CUBLAS_WORKSPACE_CONFIG")


def test_compile_compiles_and_keeps_what_it_made_in_the_run(tokens, tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    plain = base_job(tokens, tmp_path / "plain")
    compiled, cache, workspace = run_ranks(compiled_blocks, 1, plain, init=False)[0]
    assert compiled == [False, False] and workspace is None and str(tmp_path) not in (cache or "")
    config = base_job(tokens, tmp_path / "run", parallel__compile=True, train__deterministic=True)
    cache = config.train.run_dir + "/compiled"
    assert run_ranks(compiled_blocks, 1, config, init=False)[0] == ([True, True], cache, ":4096:8")


def told_to_keep(rank, world, config):
    """What is asked of the blocks."""
    import kforge_parallel.build as parallel
    from kforge_train.build import build

    told = []
    parallel.recompute_blocks = lambda blocks, mode, **options: told.append((mode, options["again"], options["keep"]))
    parallel.offload_blocks = lambda blocks: told.append(len(blocks))
    with build(config):
        return told


def test_blocks_keep_activations_as_told(tokens, tmp_path):
    keep = ("products", "attention", "transfers", "routing")
    for i, (options, expected) in enumerate(
        [
            ({}, [("none", [False, False], keep)]),
            ({"recompute": "selective", "recompute_keep": ("aten.mm",)}, [("selective", [True, True], ("aten.mm",))]),
            (
                {"recompute": "full", "recompute_every": 2, "offload_activations": True},
                [("full", [True, False], keep), 2],
            ),
            ({"recompute": "full", "recompute_blocks": 1}, [("full", [True, False], keep)]),
            ({"recompute": "auto", "memory_gb": 1.0}, [("none", [False, False], keep)]),
            ({"recompute": "auto", "memory_gb": 0.00194}, [("full", [True, True], keep)]),
        ]
    ):
        config = base_job(tokens, tmp_path / str(i), **{f"parallel__{name}": value for name, value in options.items()})
        assert run_ranks(told_to_keep, 1, config)[0] == expected


def group_options(rank, world, config):
    import torch.distributed as dist

    from kforge_parallel import phases
    from kforge_train.build import build
    from kforge_train.trainer import Trainer

    asked = {"build": [], "step": []}
    init, wait = dist.init_process_group, phases.set_group_timeout

    def init_process_group(*args, **kwargs):
        asked["init group"] = kwargs["timeout"].total_seconds()
        return init(*args, **kwargs)

    def set_group_timeout(seconds, group):
        asked["groups"] = seconds
        return wait(seconds, group)

    dist.init_process_group = init_process_group
    phases.set_group_timeout = set_group_timeout

    class Looks(Trainer):
        def restore(self):
            asked["build"] = asked["groups"]
            super().restore()

        def step(self):
            asked["step"] = asked.pop("groups", asked["step"])
            return super().step()

    with build(config) as parts:
        Looks(parts).run()
    return asked


def test_time_outs_reach_the_group(tokens, tmp_path):
    options = {"parallel__init_timeout_s": 41, "parallel__build_timeout_s": 43, "parallel__step_timeout_s": 42}
    config = base_job(tokens, tmp_path, **options)
    expected = {"init group": 41, "build": 43, "step": 42}
    assert run_ranks(group_options, 2, config, init=False) == [expected] * 2


def rows_between_matrices(rank, world, config):
    from kforge_train.build import build
    from kforge_train.engine import rows_of

    with build(config) as parts:
        shapes = []
        parts.model.layers["0"].register_forward_hook(lambda module, inputs, output: shapes.append(output.shape[1]))
        (batch,) = parts.loader.next()
        parts.model(batch["input_ids"], rows_of(batch))
        return shapes


def test_sequence_parallel_cuts_rows(tokens, tmp_path):
    for sequence_parallel, tokens_held in ((True, 16), (False, 32)):
        options = {"parallel__tp": 2, "model__vocab_size": 64, "parallel__sequence_parallel": sequence_parallel}
        config = base_job(tokens, tmp_path / str(sequence_parallel), **options)
        assert run_ranks(rows_between_matrices, 2, config, init=False) == [[tokens_held]] * 2


def tokens_and_core(rank, world, config):
    from kforge_parallel import shard_rows
    from kforge_train.build import build

    with build(config) as parts:
        (batch,) = parts.loader.next()
        core = parts.model.layers["0"].attn.core
        return shard_rows(batch, parts.mesh)["columns"].tolist(), type(core).__name__


def test_cp_style_chooses_the_tokens_of_a_rank_and_the_core(tokens, tmp_path):
    found = {}
    for style in ("allgather", "ulysses", "ring"):
        config = base_job(tokens, tmp_path / style, parallel__cp=2, parallel__cp_style=style)
        found[style] = run_ranks(tokens_and_core, 2, config, init=False)[0]
    assert found["allgather"] == ([*range(8), *range(24, 32)], "AllGatherCore")
    assert found["ulysses"] == ([*range(16)], "UlyssesCore")
    assert found["ring"] == (found["allgather"][0], "RingCore")


def blocks_of_stages(rank, world, config):
    from kforge_train.build import build

    with build(config) as parts:
        parts.engine.forward_backward(parts.loader.next(), 1.0)
        return [sorted(map(int, call.stage.layers)) for call in parts.engine.pipeline.stages.calls]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [[[0, 1, 2]], [[3, 4, 5]]]),
        ({"pp_schedule": "zbv"}, [[[0, 1], [5]], [[2, 3], [4]]]),
        ({"pp_schedule": "interleaved_1f1b"}, [[[0, 1], [4]], [[2, 3], [5]]]),
        ({"pp_schedule": "interleaved_1f1b", "pp_stages": 3}, [[[0], [2], [4]], [[1], [3], [5]]]),
        ({"pp_split": "cost"}, [[[0, 1, 2, 3]], [[4, 5]]]),
        ({"pp_layers": (1, 5)}, [[[0]], [[1, 2, 3, 4, 5]]]),
    ],
    ids=str,
)
def test_blocks_are_dealt_to_stages_as_told(tokens, tmp_path, options, expected):
    options = {f"parallel__{name}": value for name, value in options.items()}
    shape = {"model__n_layers": 6, "model__vocab_size": 400, "data__microbatch_rows": 2}  # the head costs two blocks
    config = base_job(tokens, tmp_path, parallel__pp=2, parallel__dp_shard=1, **shape, **options)
    assert run_ranks(blocks_of_stages, 2, config, init=False) == expected


def all_bad(rank, world, config):
    from kforge_train.build import build
    from kforge_train.trainer import Trainer

    with build(config) as parts:
        forward_backward = parts.engine.forward_backward
        parts.engine.forward_backward = lambda window, scale: forward_backward(window, scale) * float("nan")
        trainer = Trainer(parts)
        return trainer.run(), trainer.next_step, parts.checkpointer.latest()


def test_too_many_skipped_steps_end_the_run(tokens, tmp_path):
    for limit, expected in ((2, (76, 3, None)), (0, (76, 6, None))):
        config = base_job(tokens, tmp_path / str(limit), train__steps=6, resilience__max_skipped_in_a_row=limit)
        assert run_ranks(all_bad, 1, config)[0] == expected


def test_starting_afresh_over_checkpoints_is_refused(tokens, tmp_path):
    run_ranks(watch, 1, base_job(tokens, tmp_path))
    again = base_job(tokens, tmp_path, ckpt__resume=False)
    with pytest.raises(RankFailure, match=r"ckpt\.resume = false, but .* holds checkpoints already"):
        run_ranks(watch, 1, again)
