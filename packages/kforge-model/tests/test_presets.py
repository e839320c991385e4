"""Presets are the sizes they say, and need no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from kforge_model import PRESETS, ModelConfig, Transformer, num_parameters
from kforge_model.presets import depth_config, preset, preset_values

# Where a model has been published: the number of its weights' elements there, a tied head not counted.
SIZES = {
    "tiny": 360_768,
    "tiny-moe": 484_672,
    "llama3-1b": 1_235_814_400,
    "llama3-8b": 8_030_261_248,
    "llama3-13b": 14_840_386_560,
    "llama3-29b": 28_705_462_272,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v3": 671_026_404_352,
    "olmo2-1b": 1_484_916_736,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "olmo2-32b": 32_234_279_936,
    "mistral-7b": 7_241_732_096,
    "moe-9b-a3b": 9_233_205_248,
    "mixtral-8x7b": 46_702_792_704,
    "gemma2-2b": 2_614_341_888,
    "gemma3-1b": 999_885_952,
}
# What a token meets, with embedding and head.
ACTIVE = {
    "tiny-moe": 337_216,
    "qwen3-30b-a3b": 3_353_032_704,
    "qwen3-235b-a22b": 22_190_763_520,
    "deepseek-v3": 37_552_282_624,
    "moe-9b-a3b": 2_891_417_600,
    "mixtral-8x7b": 12_879_925_248,
}
# In thousand millions: all, and what a token meets. Some are cut off there, not rounded.
PUBLISHED = {
    "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-235b-a22b": (235, 22),
    "deepseek-v3": (671, 37),
    "mixtral-8x7b": (46.7, 12.9),
}
DEPTHS = [f"depth-{depth}" for depth in (1, 2, 3, 5, 12, 20, 26)]


def test_sizes() -> None:
    assert {name: num_parameters(preset(name)) for name in PRESETS} == SIZES
    active = {name: num_parameters(preset(name), active=True) for name in PRESETS}
    assert active == {**SIZES, **ACTIVE}
    for name, (everything, met) in PUBLISHED.items():
        assert SIZES[name] == pytest.approx(everything * 1e9, rel=0.01)
        assert ACTIVE[name] == pytest.approx(met * 1e9, rel=0.02)


@pytest.mark.parametrize("name", [*PRESETS, *DEPTHS])
def test_each_is_built_on_meta(name: str) -> None:
    config = preset(name)
    assert config == ModelConfig(**preset_values(name))
    with torch.device("meta"):
        model = Transformer(config)
    assert sum(p.numel() for p in model.parameters()) == num_parameters(config)


def test_siblings() -> None:
    one, stretched = preset_values("llama3-1b"), preset_values("llama3.2-1b")
    differ = {key: value for key, value in stretched.items() if one.get(key) != value}
    scaling = {"rope_scaling": "llama3", "rope_factor": 32.0, "rope_original_len": 8192}
    assert differ == {"max_seq_len": 131_072, **scaling}
    assert preset("llama3.1-8b").rope_factor == 8
    gemma = preset("gemma3-1b")
    assert [gemma.window_of(layer) for layer in range(7)] == [512] * 5 + [None, 512]
    assert [preset("gemma2-2b").window_of(layer) for layer in range(3)] == [4096, None, 4096]


def test_no_value_is_the_default() -> None:
    for name in [*PRESETS, *DEPTHS]:
        values = preset_values(name)
        assert not {key for key, value in values.items() if getattr(ModelConfig(), key) == value} - {
            "vocab_size",  # sizes are said even where the default is the same
            "n_layers",
            "n_heads",
            "dim",
            "window_pattern",
        }, name


@pytest.mark.parametrize("depth", range(1, 33))
def test_one_dial(depth: int) -> None:
    config = depth_config(depth, vocab_size=1000)
    assert config.n_layers == depth and config.vocab_size == 1000
    assert config.head_size == 128 and 0 <= config.dim - 64 * depth < 128
    windows = [config.window_of(layer) for layer in range(depth)]
    assert windows == [None if layer % 4 == 3 or layer == depth - 1 else 1024 for layer in range(depth)]
    assert depth_config(depth) == preset(f"depth-{depth}")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("qwen3-4", "did you mean qwen3-4b"),
        ("llama-8b", "did you mean llama3-8b"),
        ("depth12", "did you mean depth-12"),
        ("depth-0", "did you mean depth-12"),
        ("xyz", "known are tiny, .*gemma3-1b and depth-N, as depth-12"),
    ],
)
def test_unknown_names_name_the_near_ones(name: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"no model preset '{name}'; .*{near}"):
        preset(name)
    with pytest.raises(ValueError, match="depth = 0 must be at least 1"):
        depth_config(0)


def test_a_preset_can_be_changed_without_changing_it() -> None:
    preset_values("tiny")["dim"] = 8
    assert preset("tiny").dim == 64


def test_plain_data_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import kforge_model, kforge_model.config, kforge_model.presets\n"
        "config = kforge_model.ModelConfig(**kforge_model.PRESETS['tiny'])\n"
        "kforge_model.flops_per_token(config, 128), kforge_model.model_shape(config)\n"
        "kforge_model.presets.depth_config(4)\n"
        "print('well')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "well\n", done.stderr
