"""One model over many processes: launch, mesh, FSDP2, recomputation, compilation, precision.

Works with any ``nn.Module``: `launch` joins the process group, `parallelize` builds the model on it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kforge_parallel._version import __version__

if TYPE_CHECKING:
    from kforge_parallel.activation import recompute_blocks as recompute_blocks
    from kforge_parallel.axes import resolve_axes as resolve_axes
    from kforge_parallel.build import check_model as check_model
    from kforge_parallel.build import parallelize as parallelize
    from kforge_parallel.causal_lm import CausalLM as CausalLM
    from kforge_parallel.choice import choose_recompute as choose_recompute
    from kforge_parallel.compile import compile_blocks as compile_blocks
    from kforge_parallel.compress import Compression as Compression
    from kforge_parallel.compress import compression_of as compression_of
    from kforge_parallel.config import ParallelConfig as ParallelConfig
    from kforge_parallel.context import shard_rows as shard_rows
    from kforge_parallel.estimate import Estimate as Estimate
    from kforge_parallel.estimate import estimate_layout as estimate_layout
    from kforge_parallel.fake import RankCheck as RankCheck
    from kforge_parallel.fake import check_rank as check_rank
    from kforge_parallel.fsdp import full_parameters as full_parameters
    from kforge_parallel.fsdp import full_state as full_state
    from kforge_parallel.fsdp import set_last_microbatch as set_last_microbatch
    from kforge_parallel.hugging_face import tensor_plan as tensor_plan
    from kforge_parallel.layout import LAYOUT_CLASSES as LAYOUT_CLASSES
    from kforge_parallel.layout import check_layout as check_layout
    from kforge_parallel.mesh import Mesh as Mesh
    from kforge_parallel.offload import offload_blocks as offload_blocks
    from kforge_parallel.phases import phase as phase
    from kforge_parallel.picture import MeshTable as MeshTable
    from kforge_parallel.picture import mesh_table as mesh_table
    from kforge_parallel.pipeline import Pipeline as Pipeline
    from kforge_parallel.planner import Candidate as Candidate
    from kforge_parallel.planner import LayoutPlan as LayoutPlan
    from kforge_parallel.planner import Machine as Machine
    from kforge_parallel.planner import plan_layouts as plan_layouts
    from kforge_parallel.precision import Precision as Precision
    from kforge_parallel.precision import precision_of as precision_of
    from kforge_parallel.precision import precision_table as precision_table
    from kforge_parallel.replicas import check_replicas as check_replicas
    from kforge_parallel.shape import ModelShape as ModelShape
    from kforge_parallel.shape import Parameter as Parameter
    from kforge_parallel.shape import decoder_parameters as decoder_parameters
    from kforge_parallel.shape import parameters_of as parameters_of
    from kforge_parallel.work import Work as Work
    from kforge_parallel.world import World as World
    from kforge_parallel.world import choose_device as choose_device
    from kforge_parallel.world import expand_hosts as expand_hosts
    from kforge_parallel.world import find_world as find_world
    from kforge_parallel.world import launch as launch
    from kforge_parallel.world import shutdown as shutdown

# Public name -> the module it lives in. Nothing is imported until it is asked for. A module must not have the name
# of something public in it: importing the module would put it in that thing's place.
_HOME = {
    "LAYOUT_CLASSES": "layout",
    "Candidate": "planner",
    "CausalLM": "causal_lm",
    "Compression": "compress",
    "Estimate": "estimate",
    "LayoutPlan": "planner",
    "Machine": "planner",
    "Mesh": "mesh",
    "MeshTable": "picture",
    "ModelShape": "shape",
    "ParallelConfig": "config",
    "Parameter": "shape",
    "Pipeline": "pipeline",
    "Precision": "precision",
    "RankCheck": "fake",
    "Work": "work",
    "World": "world",
    "check_layout": "layout",
    "check_rank": "fake",
    "check_model": "build",
    "check_replicas": "replicas",
    "choose_device": "world",
    "choose_recompute": "choice",
    "compile_blocks": "compile",
    "compression_of": "compress",
    "decoder_parameters": "shape",
    "estimate_layout": "estimate",
    "expand_hosts": "world",
    "find_world": "world",
    "full_parameters": "fsdp",
    "full_state": "fsdp",
    "launch": "world",
    "mesh_table": "picture",
    "offload_blocks": "offload",
    "parallelize": "build",
    "parameters_of": "shape",
    "phase": "phases",
    "plan_layouts": "planner",
    "precision_of": "precision",
    "precision_table": "precision",
    "recompute_blocks": "activation",
    "resolve_axes": "axes",
    "set_last_microbatch": "fsdp",
    "shard_rows": "context",
    "shutdown": "world",
    "tensor_plan": "hugging_face",
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
