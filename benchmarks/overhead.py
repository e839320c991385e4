"""What `parallelize` costs over fully_shard written by hand: forward and backward of the same model, in turns.

Both models live in the same processes and take turns of a few steps each, so that a slow minute hits both; the number
is the ratio of kforge's time to the other's, turn by turn. Two processes on the CPU (gloo), one process where there is
a GPU. `python benchmarks/overhead.py [--turns 15]`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import _results

LIMIT = 1.02
CPU = {"vocab_size": 2048, "dim": 256, "n_layers": 4, "n_heads": 4, "rows": 4, "tokens": 128, "steps": 2}
CUDA = {"vocab_size": 32768, "dim": 2048, "n_layers": 8, "n_heads": 16, "rows": 4, "tokens": 2048, "steps": 5}


def by_hand(build: Any, mesh: Any, precision: str) -> Any:
    """The same units as kforge's, the way torch's FSDP2 tutorial writes them."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    if precision == "bf16":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    with torch.device("meta"):
        model = build()
    for block in model.layers.values():
        fully_shard(block, mesh=mesh.fsdp, mp_policy=policy)
    fully_shard(model.embed, mesh=mesh.fsdp, mp_policy=policy)
    fully_shard([model.norm, model.head], mesh=mesh.fsdp, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh.fsdp, mp_policy=policy, reshard_after_forward=False)
    model.to_empty(device=mesh.device)
    model.init_weights(0)
    return model


def turns(rank: int, world: int, device: str, count: int) -> list[tuple[float, float]]:
    """Seconds a step of (kforge, by hand) in each turn."""
    import torch

    from kforge_model import ModelConfig, Transformer
    from kforge_parallel import ParallelConfig, launch, parallelize

    sizes = dict(CUDA if device == "cuda" else CPU)
    rows, tokens, steps = (sizes.pop(name) for name in ("rows", "tokens", "steps"))
    precision = "bf16" if device == "cuda" else "fp32"
    config = ParallelConfig(device=device, precision=precision)  # type: ignore[arg-type]
    mesh = launch(config)

    def build() -> Transformer:
        return Transformer(ModelConfig(**sizes))

    ours = parallelize(
        build, mesh, config, init=lambda model: model.init_weights(0), gradients="sum", cast_inputs=False
    )
    models = (ours, by_hand(build, mesh, precision))
    generator = torch.Generator().manual_seed(rank)
    ids, labels = torch.randint(sizes["vocab_size"], (2, rows, tokens), generator=generator).to(mesh.device)

    def seconds(model: Any) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            loss, _ = model(ids, None, labels, 1e-3)
            loss.backward()
            for parameter in model.parameters():
                parameter.grad = None
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / steps

    found = []
    for turn in range(count + 2):
        first, second = models if turn % 2 else models[::-1]
        a, b = seconds(first), seconds(second)
        found.append((a, b) if turn % 2 else (b, a))
    return found[2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15, help="timed turns (default 15)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, default=_results.RESULTS, help="folder of the result")
    options = parser.parse_args()
    if options.device == "cuda":
        import torch

        gpu, name = torch.cuda.get_device_name(), "1 process on a GPU"
        pairs = turns(0, 1, "cuda", options.turns)
    else:
        from kforge_testing import run_ranks

        gpu, name = None, "2 processes on a CPU"
        pairs = run_ranks(turns, 2, "cpu", options.turns, init=False, timeout_s=1200)[0]
    ratio, spread = _results.median_and_spread([ours / hand for ours, hand in pairs])
    seconds, _ = _results.median_and_spread([hand for _, hand in pairs])
    parts = {"turns": options.turns, "seconds a step by hand": seconds, "sizes": CUDA if gpu else CPU}
    line = _results.row(name, ratio, "ratio", better="lower", target=LIMIT, spread=spread, parts=parts)
    _results.write(f"overhead_{options.device}", [line], _results.environment(gpu), options.out)


if __name__ == "__main__":
    main()
