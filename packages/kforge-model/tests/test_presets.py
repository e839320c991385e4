"""Presets are the sizes they say, and need no torch."""

from __future__ import annotations

import subprocess
import sys

import torch

from kforge_model import PRESETS, ModelConfig, Transformer, num_parameters

SIZES = {"tiny": 360_768, "llama3-1b": 1_235_814_400, "llama3-8b": 8_030_261_248}


def test_sizes() -> None:
    assert {name: num_parameters(ModelConfig(**preset)) for name, preset in PRESETS.items()} == SIZES
    for preset in PRESETS.values():
        with torch.device("meta"):
            model = Transformer(ModelConfig(**preset))
        assert sum(p.numel() for p in model.parameters()) == num_parameters(model.config)


def test_plain_data_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import kforge_model, kforge_model.config, kforge_model.presets\n"
        "config = kforge_model.ModelConfig(**kforge_model.PRESETS['tiny'])\n"
        "kforge_model.flops_per_token(config, 128), kforge_model.model_shape(config)\n"
        "print('well')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "well\n", done.stderr
