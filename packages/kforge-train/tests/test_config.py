"""The job as one value: no torch needed, no key ignored, no impossible combination accepted."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from kforge_train import JobConfig
from kforge_train.errors import ConfigError
from kforge_train.resolve import resolve_config
from kforge_train.schema import Leaf, field_kinds, leaves

PACKAGES = ["model", "parallel", "data", "optim", "ckpt", "resilience", "metrics", "train"]
LEAVES = list(leaves(JobConfig))

# Another value where the type and the default do not give one, and companions that it needs.
OTHER: dict[str, Any] = {
    "model.n_kv_heads": 2,
    "model.head_dim": 32,
    "model.n_heads": 8,
    "model.ffn_dim": 192,
    "model.options": {"slope": 0.5},
    "model.attention": "mla",
    "model.v_head_dim": 16,
    "model.kv_lora_rank": 48,
    "model.q_lora_rank": 40,
    "model.attn_scale": 0.1,
    "model.window": 64,
    "model.window_pattern": "WWF",
    "model.rope_dim": 32,
    "model.rope_theta_window": 1000.0,
    "model.rope_scaling": "linear",
    "model.rope_factor": 8.0,
    "model.rope_original_len": 1024,
    "model.rope_attn_factor": 1.5,
    "model.mup_base_dim": 64,
    "model.moe_pattern": "MD",
    "model.moe_top_k": 3,
    "model.expert_dim": 128,
    "model.router": "sigmoid",
    "model.router_groups": 2,
    "model.router_top_groups": 2,
    "model.router_bias_schedule": "cosine",
    "model.expert_capacity": 1.5,
    "parallel.dp_shard": 2,
    "parallel.pp_layers": [3, 5],
    "parallel.fp8_skip": ["*.wo"],
    "parallel.recompute_keep": ["aten.mm"],
    "parallel.memory_gb": 80.0,
    "data.microbatch_rows": 4,
    "data.mixture": [{"name": "web", "path": "web"}],
    "data.mixture_by": "documents",
    "data.phases": [{"step": 5, "weights": {"web": 2.0}}],
    "data.packing": "best_fit",
    "data.mask_repetition": 32,
    "data.answer_start": [5],
    "data.answer_end": [6],
    "data.worker_kind": "spawn",
    "data.eos_id": 3,
    "data.batch_phases": [{"steps": 7, "rows": 8}],
    "optim.name": "muon",
    "optim.muon_method": "polar_express",
    "optim.muon_scale": "original",
    "optim.muon_variance_beta": 0.9,
    "optim.muon_ns_dtype": "float32",
    "optim.schedule": "wsd",
    "optim.ema_device": "cpu",
    "optim.adamw_lr": 1e-3,
    "optim.moments": "bf16",
    "optim.betas": [0.8, 0.9],
    "optim.decay_steps": 7,
    "optim.decay_shape": "cosine",
    "optim.decay_from": 7,
    "optim.schedule_steps": 7,
    "optim.options": {"momentum": 0.9},
    "optim.groups": [{"name": "slow", "match": "embed", "lr_scale": 0.1}],
    "optim.phases": [{"steps": 7, "schedule": "rex"}],
    "optim.lr_scales": [{"step": 7, "scale": 0.5}],
    "optim.momentum_phases": [{"steps": 7, "schedule": "linear", "from": 0.85, "to": 0.95}],
    "optim.weight_decay_phases": [{"schedule": "linear", "to": 0.0}],
    "ckpt.remote": "s3://bucket/run",
    "ckpt.mode": "sync",
    "ckpt.keep_steps": [500],
    "ckpt.init_step": 4,
    "ckpt.init_exclude": ["head"],
    "ckpt.init_rename": {"a": "b"},
    "ckpt.writer": "process",
    "ckpt.threads": 4,
    "ckpt.staging_gib": 4.0,
    "resilience.stop_signals": ["SIGTERM"],
}
LATENT = {"model.attention": "mla", "model.kv_lora_rank": 32, "model.rope_dim": 16}
WINDOW = {"model.window": 32}
YARN = {"model.rope_scaling": "yarn", "model.rope_factor": 4.0, "model.rope_original_len": 2048}
LLAMA3 = {**YARN, "model.rope_scaling": "llama3"}
MOE = {"model.n_experts": 4}
BIAS = {**MOE, "model.router_bias": True}
EMA = {"optim.ema_decay": 0.9}
INIT = {"ckpt.init_from": "runs/other"}
WITH: dict[str, dict[str, Any]] = {
    "data.phases": {"data.mixture": [{"name": "web", "path": "web"}]},
    **dict.fromkeys(["optim.ema_every_steps", "optim.ema_device"], EMA),
    **dict.fromkeys(["ckpt.init_step", "ckpt.init_exclude", "ckpt.init_rename", "ckpt.init_partial"], INIT),
    **dict.fromkeys(["model.moe_pattern", "model.moe_top_k", "model.expert_dim", "model.shared_experts"], MOE),
    **dict.fromkeys(["model.router", "model.router_norm", "model.router_scale", "model.router_groups"], MOE),
    "model.router_top_groups": {**MOE, "model.router_groups": 2},
    **dict.fromkeys(["model.router_bias", "model.balance_loss", "model.router_z_loss", "model.expert_capacity"], MOE),
    "model.router_bias_rate": BIAS,
    "model.router_bias_schedule": BIAS,
    "model.router_bias_warmup_steps": {
        **BIAS,
        "model.router_bias_schedule": "warmup",
        "model.router_bias_warmup_steps": 5,
    },
    "model.balance_over": {**MOE, "model.balance_loss": 0.1},
    "optim.adamw_lr": {"optim.name": "muon"},
    **dict.fromkeys(["model.v_head_dim", "model.kv_lora_rank", "model.q_lora_rank"], LATENT),
    **dict.fromkeys(["model.window_pattern", "model.rope_theta_window"], WINDOW),
    **dict.fromkeys(["model.rope_factor", "model.rope_original_len", "model.rope_attn_factor"], YARN),
    **dict.fromkeys(["model.rope_low", "model.rope_high"], LLAMA3),
    "model.mtp_weight": {"model.mtp_depth": 1},
    "parallel.compress": {"parallel.dp_replicate": 2},
    "parallel.compress_rank": {"parallel.dp_replicate": 2, "parallel.compress": "powersgd"},
    "parallel.recompute_every": {"parallel.recompute": "full"},
    "parallel.recompute_blocks": {"parallel.recompute": "full"},
    "parallel.memory_gb": {"parallel.recompute": "auto"},
    "parallel.recompute_keep": {"parallel.recompute": "selective"},
    "parallel.pp_stages": {"parallel.pp_schedule": "interleaved_1f1b"},
}
# What can only change together with others.
TOGETHER: dict[str, dict[str, Any]] = {
    "model.attention": LATENT,
    "data.answer_start": {"data.answer_end": [6]},
    "data.answer_end": {"data.answer_start": [5]},
}


def other(leaf: Leaf) -> Any:
    """A valid value of the field that is not its default."""
    if leaf.path in OTHER:
        return OTHER[leaf.path]
    if get_origin(leaf.kind) is Literal:
        return next(value for value in get_args(leaf.kind) if value != leaf.default)
    if isinstance(leaf.default, bool):
        return not leaf.default
    if isinstance(leaf.default, int):
        return leaf.default * 2 or 3
    if isinstance(leaf.default, float):
        return leaf.default / 2 or 0.25
    if isinstance(leaf.default, str):
        return leaf.default + "other"
    raise AssertionError(f"say in OTHER what else {leaf.path} can be")


def get(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name)
    return config


@pytest.mark.parametrize("package", PACKAGES)
def test_config_modules_import_with_torch_blocked(package: str) -> None:
    blocked = ["torch", "numpy", "pydantic", "rich", "tokenizers", "safetensors"]
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); import kforge_{package}.config"
    code += f"; print(*sorted(n for n in dir(kforge_{package}.config) if n.endswith('Config')))"
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert f"{package.capitalize()}Config" in done.stdout.split()


@pytest.mark.parametrize("package", [name for name in PACKAGES if name != "train"])
def test_config_modules_of_leaves_import_the_standard_library_only(package: str) -> None:
    modules, imported = [f"kforge_{package}.config"], set()
    for module in modules:  # which grows by what they import of their own package
        path = importlib.import_module(module).__file__
        assert path is not None
        for node in ast.walk(ast.parse(Path(path).read_text("utf-8"))):
            names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            own = [name for name in names if name.startswith(f"kforge_{package}.")]
            imported |= {name.split(".")[0] for name in names if name not in own}
            modules += [name for name in own if name not in modules]
    assert imported <= set(sys.stdlib_module_names)


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.path)
def test_every_field_changes_what_is_resolved(leaf: Leaf) -> None:
    needs = WITH.get(leaf.path, {})
    together = TOGETHER.get(leaf.path, {})
    overrides = {**needs, **together, leaf.path: other(leaf)}
    base, changed = resolve_config(None, needs), resolve_config(None, overrides)
    differing = [one.path for one in LEAVES if get(base.config, one.path) != get(changed.config, one.path)]
    assert set(differing) == {leaf.path, *together}
    assert changed.origin[leaf.path] == "command line"
    assert base.origin[leaf.path] == ("command line" if leaf.path in needs else "default")


def test_each_section_is_frozen_and_refuses_unknown_keys_for_pydantic_users_too() -> None:
    for section, cls in field_kinds(JobConfig).items():
        assert cls.__pydantic_config__ == {"extra": "forbid"}, section
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(getattr(JobConfig(), section), dataclasses.fields(cls)[0].name, None)


def test_sections_are_checked_against_each_other() -> None:
    with pytest.raises(ConfigError, match=r"data\.row_tokens = 8192 is longer than model\.max_seq_len = 4096"):
        resolve_config(None, {"data.row_tokens": 8192})
    with pytest.raises(ConfigError, match=r"optim\.offload and parallel\.cpu_offload: .* set one of them"):
        resolve_config(None, {"optim.offload": True, "parallel.cpu_offload": True})
