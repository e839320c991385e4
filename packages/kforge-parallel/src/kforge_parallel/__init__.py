"""One model over many processes: launch, mesh, FSDP2, recomputation, compilation, precision.

Works with any ``nn.Module``: `launch` joins the process group, `parallelize` builds the model on it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kforge_parallel._version import __version__

if TYPE_CHECKING:
    from kforge_parallel.activation import recompute_blocks as recompute_blocks
    from kforge_parallel.compile import compile_blocks as compile_blocks
    from kforge_parallel.config import ParallelConfig as ParallelConfig
    from kforge_parallel.fsdp import full_parameters as full_parameters
    from kforge_parallel.fsdp import set_last_microbatch as set_last_microbatch
    from kforge_parallel.launch import World as World
    from kforge_parallel.launch import expand_hosts as expand_hosts
    from kforge_parallel.launch import find_world as find_world
    from kforge_parallel.launch import launch as launch
    from kforge_parallel.launch import shutdown as shutdown
    from kforge_parallel.mesh import Mesh as Mesh
    from kforge_parallel.mesh import resolve_axes as resolve_axes
    from kforge_parallel.parallelize import parallelize as parallelize
    from kforge_parallel.precision import Precision as Precision
    from kforge_parallel.precision import precision_of as precision_of

# Public name -> the module it lives in. Nothing is imported until it is asked for.
_HOME = {
    "Mesh": "mesh",
    "ParallelConfig": "config",
    "Precision": "precision",
    "World": "launch",
    "compile_blocks": "compile",
    "expand_hosts": "launch",
    "find_world": "launch",
    "full_parameters": "fsdp",
    "launch": "launch",
    "parallelize": "parallelize",
    "precision_of": "precision",
    "recompute_blocks": "activation",
    "resolve_axes": "mesh",
    "set_last_microbatch": "fsdp",
    "shutdown": "launch",
}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
