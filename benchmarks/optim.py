"""A step of each optimizer on the same weights: seconds, and bytes on the device of the weights, beside torch's own.

The weights are those of a model of Llama's shape, with random gradients: 1.2 B on a GPU, few on the CPU. Each
is timed in turns with torch's fused AdamW. On a GPU also the target: AdamW over split weights with bf16 moments on the
8 B list, its bytes read and written over the time, beside the rate of a device copy in the same run.

    python benchmarks/optim.py [--device cuda] [--turns 10] [--rows 'adamw; adamw, split']
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _results

TARGET = 0.70
SMALL = {"layers": 2, "dim": 128, "ffn": 352, "kv": 64, "vocabulary": 512}
ONE = {"layers": 16, "dim": 2048, "ffn": 8192, "kv": 512, "vocabulary": 128256}
EIGHT = {"layers": 32, "dim": 4096, "ffn": 14336, "kv": 1024, "vocabulary": 128256}
# Row -> storage, and what its config sets.
OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("fp32", {}),
    "adamw, bf16 moments": ("fp32", {"moments": "bf16"}),
    "adamw, 8-bit moments": ("fp32", {"moments": "int8"}),
    "adamw, split": ("split", {}),
    "adamw, split, bf16 moments": ("split", {"moments": "bf16"}),
    "adamw, split, 8-bit moments": ("split", {"moments": "int8"}),
    "adamw, stochastic, bf16 moments": ("stochastic", {"moments": "bf16"}),
    "adamw, offload": ("fp32", {"offload": True}),
    "adamw, split, offload": ("split", {"offload": True}),
    "lion": ("fp32", {"name": "lion"}),
    "cautious_lion": ("fp32", {"name": "cautious_lion"}),
    "schedule_free": ("fp32", {"name": "schedule_free"}),
    "muon": ("fp32", {"name": "muon"}),
    "torch.optim.NAdam": ("fp32", {"name": "torch.optim.NAdam"}),
}


def weights_of(sizes: dict[str, int], dtype: Any, device: str) -> Any:
    """A module with the weights of such a model, and a gradient on each."""
    import torch
    from torch import nn

    def matrix(rows: int, columns: int) -> Any:
        weight = nn.Parameter(torch.empty(rows, columns, dtype=dtype, device=device).normal_(std=0.02))
        weight.grad = torch.empty_like(weight).normal_(std=1e-3)
        return weight

    dim, ffn, kv = sizes["dim"], sizes["ffn"], sizes["kv"]
    model = nn.Module()
    model.embed = nn.ParameterDict({"weight": matrix(sizes["vocabulary"], dim)})
    model.layers = nn.ModuleList()
    for _ in range(sizes["layers"]):
        shapes = {"q": (dim, dim), "k": (kv, dim), "v": (kv, dim), "o": (dim, dim)}
        shapes |= {"gate": (ffn, dim), "up": (ffn, dim), "down": (dim, ffn)}
        layer = nn.ParameterDict({name: matrix(*shape) for name, shape in shapes.items()})
        layer["norm"] = nn.Parameter(torch.ones(dim, dtype=dtype, device=device))
        layer["norm"].grad = torch.ones_like(layer["norm"])
        model.layers.append(layer)
    return model


def nbytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


class Timed:
    """One optimizer over weights of its own, or of torch's."""

    def __init__(self, step: Callable[[], Any], weights: Any, state: Callable[[], Any]) -> None:
        self.step, self.seconds = step, list[float]()
        step()
        count = sum(weight.numel() for weight in weights)
        self.bytes = (nbytes(weights) + nbytes(state())) / count


def ours(name: str, sizes: dict[str, int], device: str) -> Timed:
    import torch

    from kforge_optim import OptimConfig, build_optimizer

    storage, fields = OURS[name]
    model = weights_of(sizes, torch.float32 if storage == "fp32" else torch.bfloat16, device)
    config = OptimConfig(lr=1e-4, schedule="constant", **fields)
    optimizer = build_optimizer(model, config, 1000, storage=storage)  # type: ignore[arg-type]
    one = torch.ones((), device=device)

    def state() -> Any:
        kept = [tensor for kinds in optimizer.state_dict()["state"].values() for tensor in kinds.values()]
        return [tensor for tensor in kept if tensor.device.type == device]

    return Timed(lambda: optimizer.step(one, one), list(model.parameters()), state)


def of_torch(name: str, sizes: dict[str, int], device: str) -> Timed:
    import torch

    model = weights_of(sizes, torch.float32, device)
    weights = list(model.parameters())
    optimizer: Any
    if name == "torch.optim.Muon, hidden matrices":
        weights = [weight for key, weight in model.named_parameters() if key.startswith("layers.") and weight.ndim > 1]
        optimizer = torch.optim.Muon(weights, lr=1e-4, adjust_lr_fn="match_rms_adamw")
    else:
        optimizer = torch.optim.AdamW(weights, lr=1e-4, fused=True)
    return Timed(
        optimizer.step,
        weights,
        lambda: [t for kept in optimizer.state.values() for t in kept.values() if isinstance(t, torch.Tensor)],
    )


OF_TORCH = ("torch.optim.AdamW(fused=True)", "torch.optim.Muon, hidden matrices")


def measure(device: str, turns: int, chosen: list[str]) -> list[dict[str, Any]]:
    """The rows of the result. Optimizers are timed one after the other, each against torch's fused AdamW in turns, so
    that two sets of weights at most are there at a time."""
    import torch

    wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    sizes = ONE if device == "cuda" else SMALL

    def seconds(step: Callable[[], Any]) -> float:
        wait()
        start = time.perf_counter()
        step()
        wait()
        return time.perf_counter() - start

    base = of_torch(OF_TORCH[0], sizes, device)
    rows = []
    for name in chosen:
        timed = ours(name, sizes, device) if name in OURS else of_torch(name, sizes, device)
        pairs = [(seconds(timed.step), seconds(base.step)) for _ in range(turns + 2)][2:]
        value, spread = _results.median_and_spread([mine for mine, _ in pairs])
        reference, _ = _results.median_and_spread([other for _, other in pairs])
        more = {"bytes a parameter": round(timed.bytes, 3), "sizes": sizes}
        rows.append(_results.row(name, value, "s", better="lower", reference=reference, spread=spread, parts=more))
        rows.append(_results.row(f"{name}: bytes a parameter", timed.bytes, "bytes", better="lower"))
        del timed
    value, spread = _results.median_and_spread([seconds(base.step) for _ in range(turns)])
    rows.append(_results.row(OF_TORCH[0], value, "s", better="lower", spread=spread))
    del base
    if device == "cuda":
        rows.append(bandwidth(turns, seconds))
    return rows


def bandwidth(turns: int, seconds: Callable[[Callable[[], Any]], float]) -> dict[str, Any]:
    """The 8 B list: 18 bytes a parameter (gradient read; both halves and both moments read and written)."""
    import torch

    torch.cuda.empty_cache()
    name = "adamw, split, bf16 moments"
    timed = ours(name, EIGHT, "cuda")
    dim, ffn, kv = EIGHT["dim"], EIGHT["ffn"], EIGHT["kv"]
    count = EIGHT["vocabulary"] * dim + EIGHT["layers"] * (2 * dim * dim + 2 * kv * dim + 3 * ffn * dim + dim)
    source = torch.empty(2**32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    ratios = []
    for _ in range(turns + 2):
        rate = 18 * count / seconds(timed.step)
        copy = 2 * source.numel() / seconds(lambda: target.copy_(source))
        ratios.append(rate / copy)
    value, spread = _results.median_and_spread(ratios[2:])
    more = {"parameters": count, "bytes a parameter moved": 18, "sizes": EIGHT}
    return _results.row(f"{name}, 8B / copy rate", value, "ratio", target=TARGET, spread=spread, parts=more)


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--rows", default="", help="names, separated by ';' (default: all)")
    parser.add_argument("--out", type=Path, default=_results.RESULTS)
    arguments = parser.parse_args()
    known = [*OURS, OF_TORCH[1]]
    chosen = [name.strip() for name in arguments.rows.split(";") if name.strip()] or known
    if unknown := [name for name in chosen if name not in known]:
        parser.error(f"no row is called {unknown[0]}; there are {'; '.join(known)}")
    rows = measure(arguments.device, arguments.turns, chosen)
    gpu = torch.cuda.get_device_name() if arguments.device == "cuda" else None
    _results.write(
        f"optim_{arguments.device}", rows, _results.environment(gpu), arguments.out, keep=bool(arguments.rows)
    )


if __name__ == "__main__":
    main()
