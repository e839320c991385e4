"""How a model is spread over processes, as plain data. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The axes of the mesh, and what is done to the model on it."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    dp_shard: int = -1
    """Processes over which parameters, gradients and optimizer state are sharded (FSDP2). -1: all that are left."""
    dp_replicate: int = 1
    """Copies of each sharded group (HSDP). -1: all that are left."""
    tp: int = 1
    """Processes that split each matrix by heads or features (tensor parallelism). -1: all that are left."""
    sequence_parallel: bool = True
    """Between matrices, tensor-parallel processes hold a part of each row instead of the same whole row. False: the
    whole row on each of them, which costs activation memory. Without effect where tp is 1."""
    async_tp: bool = False
    """Overlap tensor-parallel transfers with the matrix products through symmetric memory; CUDA only, and not
    available in this version."""
    cp: int = 1
    """Processes that split each row of tokens (context parallelism). -1: all that are left."""
    cp_style: Literal["allgather", "ulysses", "ring"] = "allgather"
    """How attention reaches the tokens that other processes have, where cp is above 1. allgather: keys and values of
    the whole row are gathered. ulysses: each process gets whole rows of its part of the heads. ring: keys and values
    go round, so that no process holds those of a whole row."""
    pp: int = 1
    """Processes that split the blocks (pipeline parallelism). -1: all that are left."""
    pp_schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"] = "1f1b"
    """In which order the microbatches go through the stages. The interleaved ones, zbv and dualpipev give each process
    several stages, and wait less; the last three compute the gradients of weights apart, to fill what waiting is left,
    and keep gathered weights through a step. Without effect where pp is 1."""
    pp_stages: int = 0
    """Stages of each process, under the interleaved schedules. 0: as the schedule has it (2 for them; 1 for gpipe and
    1f1b, 2 for zbv and dualpipev, which take no other)."""
    pp_split: Literal["even", "cost"] = "even"
    """How blocks are dealt to stages. even: as many to each, one more to the first ones where that leaves some. cost:
    so that the most expensive stage is as cheap as can be, the head counted with the last."""
    pp_layers: tuple[int, ...] = ()
    """Number of blocks of each stage, from the first to the last, instead of pp_split."""
    ep: int = 1
    """Processes that split the experts (expert parallelism): laid over tp, then cp, then dp_shard, not beside them."""
    precision: Literal["bf16", "fp16", "tf32", "fp32", "fp64"] = "bf16"
    """Compute dtype; gradients are reduced in fp32. fp16 needs the loss scaled, which kforge-train does. tf32: fp32
    tensors, matrix products in TF32 where the device has it. fp64 also stores the weights in float64: for proofs, not
    for training."""
    storage: Literal["fp32", "split", "stochastic"] = "fp32"
    """How bf16 training keeps its fp32 weights. split: the parameter is the bf16 half and the optimizer holds the 16
    bits that are missing, together the same fp32 weight; no fp32 copy and no cast before the all-gather.
    stochastic: bf16 weights alone, rounded up or down at random after each step, so that they are right on average.
    Both go with bf16 only."""
    fp8: Literal["none", "tensorwise", "rowwise"] = "none"
    """Linear modules multiply in FP8. tensorwise: output and both gradients, one scale a tensor; the fastest, and
    weights travel in 8 bits. rowwise: one scale a row, the gradients of weights in bf16; more exact and slower. Needs a
    GPU of compute capability 8.9 or above; on the CPU it is computed exactly and slowly, for tests. Modules with a
    size that is no multiple of 16 stay as they are, and are logged."""
    fp8_skip: tuple[str, ...] = ("*head", "*router", "*.gate", "*.experts.*")
    """Modules that do not multiply in FP8: patterns of whole names, with * and ? (``fnmatch``)."""
    recompute: Literal["none", "full", "selective", "auto"] = "none"
    """Activations kept for backward: all of them (none), only each block's input (full), or its input and the outputs
    of some operations (selective); the block runs again in backward for the rest. auto: the one of these, of as few
    blocks, that is estimated to fit and computes the least again."""
    memory_gb: float = 0.0
    """Memory of a device in GB (10^9 bytes), of which recompute = auto fills up to 92 %. 0: what CUDA says that there
    is; on a CPU a number is wanted."""
    recompute_every: int = 1
    """Run the first of each so many blocks of a stage again in backward; the others keep all."""
    recompute_blocks: int = 0
    """Run so many blocks of each stage again in backward, spread evenly over it; the others keep all. 0: as
    recompute_every says."""
    recompute_keep: tuple[str, ...] = ("products", "attention", "transfers", "routing")
    """What a selective recomputation keeps: products (of matrices), attention (its cores), transfers (between
    processes, of tp, ep and cp; not those of a ring), routing (which experts a token goes to), or operations as torch
    names them, such as aten.mm."""
    offload_activations: bool = False
    """Keep what blocks save for backward in host memory: it is copied there beside the computation, and back before it
    is needed. Costs host memory and the bandwidth to it. On the CPU a copy, without use."""
    compile: bool = False
    """Compile each block with torch.compile. Names of parameters do not change, and further lengths of rows, numbers of
    rows and documents compile nothing anew after the second."""
    reshard_after_forward: bool = True
    """Free a block's gathered weights after its forward and gather them again in backward. False: faster, and one
    full copy of the weights stays in memory through backward."""
    accumulate: Literal["unsharded", "sharded"] = "unsharded"
    """How the microbatches of a step add up. unsharded: on each process, in fp32, reduced over processes once, after
    the last; costs a whole fp32 gradient on each. sharded: reduced after each; costs the transfer each time."""
    compress: Literal["none", "bf16", "int8", "powersgd"] = "none"
    """How gradients travel between replicas (dp_replicate). none: in fp32. bf16: rounded, twice. int8: blocks of 256
    values under one scale; what is lost is added to the next step's (error feedback). powersgd: the greatest part that
    a product of two thin matrices can hold, with error feedback too. Error feedback costs 8 bytes for each parameter
    of a process's shard."""
    compress_rank: int = 4
    """Columns of the matrices that powersgd sends."""
    prefetch: int = 0
    """How many blocks ahead weights are gathered, in forward and in backward. 0: torch's own order (the next block in
    backward, none ahead in forward)."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in host memory and compute on the device: slow, and the last resort
    where they do not fit. CUDA only."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs. auto: CUDA where a device is visible, else CPU."""
    init_timeout_s: float = 300.0
    """How long processes wait for each other at start-up, in seconds."""
    build_timeout_s: float = 1800.0
    """How long processes wait for each other while the model is built, restored and compiled, in seconds; also for
    the first transfer over the network, which proves that it carries any."""
    step_timeout_s: float = 1800.0
    """How long processes wait for each other in a transfer of training, in seconds: longer than the slowest step,
    evaluation or save of any of them."""

    @property
    def layout_exact(self) -> bool:
        """Whether losses are the same on any layout but for rounding. FP8 rounds the smallest values of a tensor by its
        largest, and which tokens are in one tensor depends on the layout. Compressed gradients differ by what each
        replica rounds away."""
        return self.fp8 == "none" and self.compress == "none"

    def run_again(self, blocks: int) -> list[bool]:
        """Which of so many blocks of a stage are run again in backward, where any is."""
        count = min(self.recompute_blocks, blocks)
        if self.recompute == "none":
            return [False] * blocks
        return [i * count % blocks < count if count else i % self.recompute_every == 0 for i in range(blocks)]

    def __post_init__(self) -> None:
        if isinstance(self.fp8, str) and self.fp8.lower() in ("mxfp8", "nvfp4"):
            raise ValueError(
                f"parallel.fp8 = {self.fp8} scales blocks of 16 or 32 values, which Blackwell GPUs multiply and this "
                "version does not; use tensorwise or rowwise"
            )
        kinds = _kinds()
        for field in fields(self):
            _check_kind(f"parallel.{field.name}", getattr(self, field.name), kinds[field.name])
        for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp"):
            value = getattr(self, name)
            if value != -1 and value < 1:
                raise ValueError(f"parallel.{name} = {value} must be at least 1, or -1 for all that are left")
        if self.ep < 1:
            raise ValueError(f"parallel.ep = {self.ep} must be at least 1; it is laid over other axes, so none is left")
        filled = [name for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp") if getattr(self, name) == -1]
        if len(filled) > 1:
            raise ValueError(
                f"{' and '.join(f'parallel.{name}' for name in filled)} are -1, but only one axis can take the "
                "processes that are left; give the others a number"
            )
        several = self.pp_schedule in ("interleaved_1f1b", "interleaved_zero_bubble")
        if self.pp_stages < 0 or (several and self.pp_stages == 1) or (self.pp_stages and not several):
            raise ValueError(
                f"parallel.pp_stages = {self.pp_stages} cannot be with parallel.pp_schedule = {self.pp_schedule}; "
                f"{'use 2 or more, or 0 for 2' if several else 'only the interleaved schedules take a number; use 0'}"
            )
        if any(type(count) is not int or count < 1 for count in self.pp_layers):
            raise ValueError(
                f"parallel.pp_layers = {self.pp_layers} must be whole numbers of at least 1, the blocks of each stage"
            )
        if self.pp_layers and self.pp_split != "even":
            raise ValueError(
                f"parallel.pp_layers = {self.pp_layers} and parallel.pp_split = {self.pp_split} both deal blocks to "
                "stages; give one of them"
            )
        if any(type(pattern) is not str or not pattern for pattern in self.fp8_skip):
            raise ValueError(f"parallel.fp8_skip = {self.fp8_skip} must be patterns of names, as in ('*head',)")
        if self.recompute_every < 1 or (self.recompute_every > 1 and self.recompute in ("none", "auto")):
            raise ValueError(
                f"parallel.recompute_every = {self.recompute_every} cannot be with parallel.recompute = "
                f"{self.recompute}; it must be at least 1, and 1 where nothing is run again, or auto chooses it"
            )
        if self.recompute_blocks and (
            self.recompute_blocks < 0 or self.recompute in ("none", "auto") or self.recompute_every > 1
        ):
            raise ValueError(
                f"parallel.recompute_blocks = {self.recompute_blocks} cannot be with parallel.recompute = "
                f"{self.recompute} and recompute_every = {self.recompute_every}; it must not be negative, and 0 where "
                "nothing is run again, where auto chooses it, and where recompute_every says how many"
            )
        if not 0 <= self.memory_gb < 1e6:
            raise ValueError(f"parallel.memory_gb = {self.memory_gb} must not be negative, and below 1e6")
        if self.memory_gb and self.recompute != "auto":
            raise ValueError(
                f"parallel.memory_gb = {self.memory_gb} says what parallel.recompute = auto fits into, and recompute "
                f"is {self.recompute}; set it to auto, or memory_gb to 0"
            )
        if not all(isinstance(word, str) and word for word in self.recompute_keep) or not self.recompute_keep:
            raise ValueError(
                f"parallel.recompute_keep = {self.recompute_keep} must name operations; to keep none, set recompute to "
                "full"
            )
        if self.recompute_keep != type(self).recompute_keep and self.recompute != "selective":
            raise ValueError(
                f"parallel.recompute_keep says what a selective recomputation keeps, and parallel.recompute = "
                f"{self.recompute}; set it to selective, or leave recompute_keep out"
            )
        if self.offload_activations and self.recompute == "selective":
            raise ValueError(
                "parallel.offload_activations = true moves what blocks save, and parallel.recompute = selective keeps "
                "outputs on the device beside that; set recompute to full or none, or offload_activations to false"
            )
        self._check_compression()
        if self.prefetch < 0:
            raise ValueError(f"parallel.prefetch = {self.prefetch} must be 0 (torch's order) or more blocks")
        if self.storage != "fp32" and self.precision != "bf16":
            raise ValueError(
                f"parallel.storage = {self.storage} keeps weights in bf16, but parallel.precision = "
                f"{self.precision}; use precision bf16, or storage fp32"
            )
        if self.storage != "fp32" and self.accumulate == "sharded":
            raise ValueError(
                f"parallel.accumulate = sharded would add microbatches up in bf16 under parallel.storage = "
                f"{self.storage}; use accumulate unsharded, or storage fp32"
            )
        for name in ("init_timeout_s", "build_timeout_s", "step_timeout_s"):
            if not 0 < getattr(self, name) <= 1e8:
                raise ValueError(f"parallel.{name} = {getattr(self, name)} must be above 0 and at most 1e8 seconds")

    def _check_compression(self) -> None:
        if self.compress_rank < 1 or (self.compress_rank != type(self).compress_rank and self.compress != "powersgd"):
            raise ValueError(
                f"parallel.compress_rank = {self.compress_rank} cannot be with parallel.compress = {self.compress}; it "
                "must be at least 1, and only powersgd has a rank"
            )
        if self.compress != "none" and self.dp_replicate == 1:
            raise ValueError(
                f"parallel.compress = {self.compress} is for what replicas send one another, and parallel.dp_replicate "
                "= 1; set dp_replicate to their number, or compress to none"
            )
        if self.compress in ("int8", "powersgd") and self.precision == "fp16":
            raise ValueError(
                f"parallel.compress = {self.compress} adds what it lost to the next step's gradients, which under "
                "parallel.precision = fp16 may be scaled by another number; use bf16 for either of them"
            )
        if self.compress != "none" and self.cpu_offload:
            raise ValueError(
                f"parallel.compress = {self.compress} keeps what it loses on the device, and parallel.cpu_offload = "
                "true is for weights that have no room there; set one of them back"
            )


@cache
def _kinds() -> dict[str, Any]:
    return get_type_hints(ParallelConfig)


def _check_kind(name: str, value: object, kind: Any) -> None:
    """Raise ValueError unless a value is of a field's type: bool, int, float, tuple or Literal words."""
    words = get_args(kind)
    if get_origin(kind) is tuple:
        if not isinstance(value, tuple):
            raise ValueError(f"{name} = {value!r} must be a tuple")
    elif words:
        if value not in words:
            raise ValueError(f"{name} = {value!r} is unknown; use one of {', '.join(words)}")
    elif kind is bool:
        if not isinstance(value, bool):
            raise ValueError(f"{name} = {value!r} must be true or false")
    elif isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
        raise ValueError(f"{name} = {value!r} must be {'an integer' if kind is int else 'a number'}")
