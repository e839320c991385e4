"""What Muon costs over AdamW: a whole training step, and the optimizer's part of it, in turns on the same weights.

On a GPU the model is Llama 3.2's 1B shape and a step has 131,072 tokens; the target is a whole step of at most 1.05
times AdamW's. One number is the ratio of whole steps, turn by turn, for each way of orthogonalising; the others are
seconds of the optimizer alone, beside torch.optim.Muon's on the same matrices. On the CPU the model is small and the
numbers say that it runs. `python benchmarks/muon.py [--device cuda] [--turns 10]`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _results

LIMIT = 1.05
CPU = {"vocab_size": 256, "dim": 64, "n_layers": 2, "n_heads": 4, "rows": 2, "tokens": 32, "microbatches": 2}
CUDA = {
    "vocab_size": 128256,
    "dim": 2048,
    "n_layers": 16,
    "n_heads": 32,
    "n_kv_heads": 8,
    "head_dim": 64,
    "ffn_dim": 8192,
    "tie_embeddings": True,
    "max_seq_len": 4096,
    "rows": 4,
    "tokens": 4096,
    "microbatches": 8,
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw"},
    "muon": {"name": "muon"},
    "muon, polar express": {"name": "muon", "muon_method": "polar_express"},
    "muon, row variance": {"name": "muon", "muon_variance_beta": 0.95},
}


class Bench:
    """One model, and a window of microbatches that is the same in every step."""

    def __init__(self, device: str) -> None:
        import torch

        from kforge_model import ModelConfig, Transformer
        from kforge_parallel import ParallelConfig, launch, parallelize

        sizes = dict(CUDA if device == "cuda" else CPU)
        rows, tokens, self.microbatches = (sizes.pop(name) for name in ("rows", "tokens", "microbatches"))
        precision = "bf16" if device == "cuda" else "fp32"
        config = ParallelConfig(device=device, precision=precision, compile=device == "cuda")  # type: ignore[arg-type]
        mesh = launch(config)
        self.model = parallelize(
            lambda: Transformer(ModelConfig(**sizes)),
            mesh,
            config,
            init=lambda model: model.init_weights(0),
            gradients="sum",
            cast_inputs=False,
        )
        ids = torch.randint(sizes["vocab_size"], (2, rows, tokens), generator=torch.Generator().manual_seed(0))
        self.ids, self.labels = ids.to(mesh.device)
        self.scale = 1 / (rows * tokens * self.microbatches)
        self.wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
        self.torch = torch

    def gradients(self) -> None:
        for _ in range(self.microbatches):
            loss, _ = self.model(self.ids, None, self.labels, self.scale)
            loss.backward()

    def step(self, optimizer: Any) -> tuple[float, float]:
        """Seconds of a whole step, and of the optimizer in it."""
        from kforge_optim import clip

        self.wait()
        start = time.perf_counter()
        self.gradients()
        self.wait()
        middle = time.perf_counter()
        norm = clip.total_norm(self.model)
        optimizer.step(scale=clip.clip_factor(norm, 1.0), gate=self.torch.isfinite(norm))
        self.wait()
        end = time.perf_counter()
        optimizer.zero_grad()
        return end - start, end - middle

    def of_torch(self) -> float:
        """Seconds of a step of torch.optim.Muon on the hidden matrices, each whole and as it is stored."""
        matrices = [
            self.torch.nn.Parameter(parameter.detach().to_local().flatten(0, -2).clone())
            for name, parameter in self.model.named_parameters()
            if name.startswith("layers.") and parameter.ndim > 1
        ]
        for matrix in matrices:
            matrix.grad = self.torch.randn_like(matrix)
        optimizer = self.torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw")
        found = []
        for _ in range(5):
            self.wait()
            start = time.perf_counter()
            optimizer.step()
            self.wait()
            found.append(time.perf_counter() - start)
        return statistics.median(found[2:])


def measure(device: str, turns: int) -> list[dict[str, Any]]:
    """The rows of the result."""
    from kforge_optim import OptimConfig, build_optimizer

    bench = Bench(device)
    whole: dict[str, list[float]] = {name: [] for name in OPTIMIZERS}
    alone: dict[str, list[float]] = {name: [] for name in OPTIMIZERS}
    optimizers = {
        name: build_optimizer(bench.model, OptimConfig(lr=1e-5, schedule="none", **fields), 1000)
        for name, fields in OPTIMIZERS.items()
    }
    for turn in range(turns + 2):  # two to warm up
        for name, optimizer in optimizers.items():
            seconds = bench.step(optimizer)
            if turn > 1:
                whole[name].append(seconds[0])
                alone[name].append(seconds[1])
    sizes = CUDA if device == "cuda" else CPU
    parts = {"turns": turns, "sizes": sizes, "tokens a step": sizes["rows"] * sizes["tokens"] * sizes["microbatches"]}  # type: ignore[operator]
    rows = []
    for name in OPTIMIZERS:
        seconds, spread = _results.median_and_spread(alone[name])
        rows.append(_results.row(f"{name}: optimizer", seconds, "s", better="lower", spread=spread, parts=parts))
        if name != "adamw":
            ratios = [mine / base for mine, base in zip(whole[name], whole["adamw"], strict=True)]
            ratio, spread = _results.median_and_spread(ratios)
            base = statistics.median(whole["adamw"])
            target = LIMIT if name == "muon" else None
            more = {"target": target, "spread": spread, "parts": {**parts, "seconds a step with adamw": base}}
            rows.append(_results.row(f"{name}: step / adamw's", ratio, "ratio", better="lower", **more))
    del optimizers
    rows.append(_results.row("torch.optim.Muon: hidden matrices", bench.of_torch(), "s", better="lower", parts=parts))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=10, help="timed turns (default 10)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, default=_results.RESULTS, help="folder of the result")
    options = parser.parse_args()
    rows = measure(options.device, options.turns)
    gpu = None
    if options.device == "cuda":
        import torch

        gpu = torch.cuda.get_device_name()
    _results.write(f"muon_{options.device}", rows, _results.environment(gpu), options.out)


if __name__ == "__main__":
    main()
