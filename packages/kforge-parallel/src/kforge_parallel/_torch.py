"""What differs between torch versions or has no public name, each with the public thing it stands in for."""

from __future__ import annotations

import inspect
import os
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # stands in for a public one
from torch.utils._pytree import tree_map_only as tree_map_only  # stands in for a public one, too

# torch 2.13 renames these two and warns of the old names, which are the only ones that 2.11 has.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def set_group_timeout(seconds: float, group: dist.ProcessGroup | None) -> None:
    """Stands in for ``new_group(timeout=...)``: meshes take none for their groups, and groups get no other later."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def keep_gloo_in_order() -> None:
    """Give each gloo group made from now on one thread for its collectives; torch gives two for each interface.

    Two threads write the name of the collective that has ended last into one string, and no lock keeps them apart. Of
    names that differ in length (DTensor's all-gathers have the long one), one thread may write into what the other has
    just freed, and the process dies of a corrupted heap: after 4,000 to 160,000 collectives of both kinds at once, in a
    job once in a long while. Stands in for ``init_process_group(pg_options=...)``, of which gloo takes no notice. Safe
    to call twice.
    """
    group: Any = dist.ProcessGroupGloo
    init = group.__init__
    if getattr(init, "in_order", False):
        return

    def __init__(self: Any, store: Any, rank: int, size: int, timeout: Any = dist.default_pg_timeout) -> None:
        options = timeout
        if isinstance(timeout, timedelta):
            interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
            options = group._Options()
            options._timeout, options._threads = timeout, 1
            options._devices = [group.create_device(interface=name) for name in interfaces] or [
                group.create_default_device()
            ]
        init(self, store, rank, size, options)

    __init__.in_order = True  # type: ignore[attr-defined]
    group.__init__ = __init__


def times_written(tensor: torch.Tensor) -> int:
    """How often a tensor has been changed in place. Autograd counts it to find saved tensors that were overwritten;
    stands in for a public ``Tensor.version``."""
    return int(tensor._version)


def persistent_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Name -> buffer, of those that a checkpoint holds. Stands in for a public ``named_buffers(persistent=True)``:
    ``state_dict`` would run the hooks of all modules."""
    return {
        f"{owner}.{name}".lstrip("."): buffer
        for owner, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends_q: Tensor,
    ends_k: Tensor,
    longest_q: int,
    longest_k: int,
    *,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Attention inside each segment: q [T,H,Dh], k and v [U,KV,Dh] -> [T,H,Dh]; a segment's last query is at its last
    key, and sees no key after itself. CUDA, bf16 or fp16 only.

    Stands in for ``torch.nn.attention.varlen.varlen_attn``, which takes fewer key/value heads without being told in
    torch 2.11, and from 2.12 on wants a flag. A right side of 0 in the window is what makes it causal.
    """
    from torch.nn.attention.varlen import varlen_attn

    more: dict[str, Any] = {}
    if q.shape[1] != k.shape[1] and "enable_gqa" in inspect.signature(varlen_attn).parameters:
        more["enable_gqa"] = True
    sides = (-1 if window is None else window - 1, 0)
    out = varlen_attn(q, k, v, ends_q, ends_k, longest_q, longest_k, scale=scale, window_size=sides, **more)
    assert isinstance(out, Tensor)
    return out


# Kernels that give the log-sum-exp of the scores, and whose backward takes it. Public attention has no backward of a
# part of the keys; torch's own `torch.distributed.tensor.experimental` uses these operators, too. On CUDA only; of one
# signature in torch 2.11 and 2.13 as far as they are used here.


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple[Tensor, Tensor, int, int], causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """q [T,H,Dh], k and v [U,KV,Dh] -> out [T,H,Dh], lse [H,T] fp32, document by document. lengths: cu_seqlens of
    queries and keys, and the greatest length of each."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *lengths, 0.0, causal, False, scale=scale)
    return out, lse


def flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    lengths: tuple[Tensor, Tensor, int, int],
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of `flash_forward` for this out and lse, be they of more keys than these."""
    state = torch.empty(2, dtype=torch.uint64, device=q.device)  # of the dropout that there is not
    unused = torch.empty(0, device=q.device)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, *lengths, 0.0, causal, state, unused, scale=scale
    )
    return dq, dk, dv


def scaled_mm(a: Tensor, a_unit: Tensor, b: Tensor, b_unit: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    """(a · a_unit) [M,K] @ (b · b_unit) [K,N] in ``dtype``, of 8-bit a, its rows contiguous, and b, its columns. Stands
    in for ``torch.nn.functional.scaled_mm``, which torch.compile of 2.11 cannot trace."""
    return torch._scaled_mm(a, b, a_unit, b_unit, out_dtype=dtype, use_fast_accum=fast)


def efficient_forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q [B,H,Q,Dh], k [B,H,K,Dh], v [B,H,K,Dv], bias [B,H,Q,K], whose rows begin at multiples of 16 -> out [B,H,Q,Dv],
    lse [B,H,Q] fp32."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, scale=scale)
    return out, lse[..., : q.shape[2]]


def efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of `efficient_forward` for this out and lse, be they of more keys than these."""
    # Of out the kernel takes all heads of a query to lie together, whatever its strides say.
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    # The length of an lse as the forward leaves it is a multiple of 32, filled up with inf.
    lse = torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32), value=float("inf")).contiguous()
    state = torch.zeros((), dtype=torch.int64, device=q.device)  # of the dropout that there is not
    dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, bias, out, lse, state, state, 0.0, [True, True, True, False], scale=scale
    )
    return dq, dk, dv


SPLITS_BACKWARD = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)
"""Whether torch's pipelines compute gradients of weights apart for every model. Before 2.13 they fail where a weight
enters a function of Python's own (`torch.autograd.Function`), and add up the gradients of its several outputs."""


def join_fake_world(rank: int, size: int) -> None:
    """Make this process rank ``rank`` of a group of ``size`` in which nothing is sent. Stands in for a public backend
    of that kind: torch's own is in its testing package, and registers itself when that is imported."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)


def begin_anew(unit: FSDPModule) -> None:
    """Free what an FSDP unit has gathered, and let its next forward gather again. Where a unit has several modules and
    one of them does not run (a tied embedding at the end of a pipeline), torch 2.11 waits for it: the unit stays in its
    forward, frees nothing, and the next forward computes with old weights. Later versions do not wait. Stands in for
    what ``FSDPModule.reshard`` does not do there."""
    state: Any = unit._get_fsdp_state()
    if state._modules_to_run_forward:
        from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

        state._modules_to_run_forward.clear()
        for part in (state, getattr(state, "_fsdp_param_group", None)):
            if part is not None:
                part._training_state = TrainingState.IDLE
    unit.reshard()


def allow_graphs(number: int) -> None:
    """Let one function have so many compiled graphs, at the least. Stands in for ``torch.compile(recompile_limit=…)``,
    which torch 2.11 does not have."""
    import torch._dynamo.config as dynamo

    dynamo.recompile_limit = max(dynamo.recompile_limit, number)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, 8 * number)


def constant_numbers() -> AbstractContextManager[Any]:
    """While it lasts, what is compiled has Python's whole numbers for constants, never for inputs; sizes of tensors may
    be inputs. Stands in for a public option of ``torch.compile``."""
    import torch._dynamo.config as dynamo

    patched: AbstractContextManager[Any] = dynamo.patch(specialize_int=True)  # type: ignore[attr-defined]
    return patched


def keep_donated_buffers() -> None:
    """Let a compiled backward leave its buffers as they are, so that it may run in two halves. Stands in for a public
    option of ``torch.compile``."""
    torch._functorch.config.donated_buffer = False  # type: ignore[attr-defined]


def no_greeting(stage: object) -> None:
    """Let a pipeline stage not greet its neighbours, which torch 2.11 does before the first step: on gloo a rank that
    is its own neighbour (V schedules) would send to itself. Groups connect at the first transfer all the same. Later
    versions greet in another way. Stands in for nothing public."""
    stage._get_init_p2p_neighbors_ops = list  # type: ignore[attr-defined]


def local_tensor(parameter: Any) -> Any:
    """The very tensor that a DTensor holds, or a plain tensor itself. Stands in for ``to_local``, which gives a wrapper
    of a parameter's from torch 2.13 on."""
    return getattr(parameter, "_local_tensor", parameter)


def extend_gather(root: torch.nn.Module, parameters: set[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Those of ``parameters`` whose all-gather may have extensions: FSDP2 shards them into parts of one size. Stands in
    for tensor subclasses, the one public way: FSDP2 looks for the methods when it gathers, but readies itself for them
    when it wraps, and between the two parameters are still on meta."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import ExtensionsData

    found: list[torch.nn.Parameter] = []
    for module in root.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            for parameter in (p for group in groups if group is not None for p in group.fsdp_params):
                even = parameter.sharded_size == parameter.padded_sharded_param_size
                whole = parameter.sharded_size.numel() * parameter.mesh_info.shard_mesh_size
                if parameter.sharded_param in parameters and even and whole == parameter._orig_size.numel():
                    parameter._extensions_data = ExtensionsData()
                    found.append(parameter.sharded_param)
    return found


def reduced_shapes(unit: FSDPModule) -> list[torch.Size]:
    """Shapes of the parts that a rank gets of an FSDP unit's gradients, filled up to those of the first rank, in the
    order in which the hook of `set_all_reduce_hook` finds them one after the other. Stands in for a hook that is told
    of them."""
    state: Any = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    parameters = [p for group in groups if group is not None for p in group.fsdp_params]
    return [p.padded_sharded_param_size for p in parameters if p.sharded_param.requires_grad]
