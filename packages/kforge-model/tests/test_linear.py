"""Several matrices in one weight: each is a view of the part that a rank has, however the weight is cut."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from kforge_model import StackedLinear
from kforge_testing import run_ranks


@pytest.mark.parametrize("shape", [(6,), (2, 6), (2, 4, 3)])
@pytest.mark.parametrize("bias", [False, True])
def test_product(shape: tuple[int, ...], bias: bool) -> None:
    layer = StackedLinear(5, shape, bias).double()
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    right = torch.einsum("bsd,...d->bs...", x, layer.weight) + (0 if layer.bias is None else layer.bias)
    assert layer(x).shape == (2, 3, *shape)
    assert (layer(x) - right).abs().max() < 1e-14


def _parts(rank: int, world: int, shape: tuple[int, ...], dim: int) -> list[bool]:
    """Of every matrix of a weight that is cut along ``dim``: is this rank's part of it a view of its storage, and the
    part that the matrix alone would have had under the same cut?"""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    mesh = init_device_mesh("cpu", (world,))
    mine = distribute_tensor(whole, mesh, [Shard(dim)])
    assert isinstance(mine, DTensor)
    local = mine.to_local()
    lead = len(shape) - 2
    found = []
    for index in torch.cartesian_prod(*(torch.arange(n) for n in local.shape[:lead])).view(-1, lead).tolist():
        view = local[tuple(index)]
        at = list(index)
        if dim < lead:
            at[dim] += rank * local.shape[dim]
        alone = whole[tuple(at)]
        if dim >= lead:
            alone = alone.chunk(world, dim - lead)[rank]
        found.append(
            torch.equal(view, alone) and view.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
        )
    return found


@pytest.mark.parametrize(("shape", "dims"), [((2, 8, 6), (0, 1, 2)), ((2, 4, 6, 8), (0, 1, 2, 3))])
def test_a_matrix_is_a_view_of_any_shard(shape: tuple[int, ...], dims: tuple[int, ...]) -> None:
    for dim in dims:
        for found in run_ranks(_parts, 2, shape, dim):
            assert found and all(found)
