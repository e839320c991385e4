"""Each transfer against its definition on one process: values, and gradients by autograd through the definition."""

import pytest
import torch

from kforge_testing import run_ranks

SHAPE, DIMS = (2, 6, 3), (0, 1, -2, -1)


def inputs(world, cut=None, seed=0):
    """One tensor a rank, float64, the same list on every rank; ``cut`` divides that dimension by the world."""
    generator = torch.Generator().manual_seed(seed)
    shape = list(SHAPE)
    if cut is not None:
        shape[cut] = SHAPE[cut] * world if SHAPE[cut] % world else SHAPE[cut]
    return [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(world)]


def definitions(name, xs, dim):
    """What every rank gets, from what all put in."""
    world = len(xs)
    total = torch.stack(list(xs)).sum(0)
    if name in ("copy", "summed"):
        return list(xs)
    if name == "reduce":
        return [total] * world
    if name == "gather":
        return [torch.cat(list(xs), dim)] * world
    return list(total.chunk(world, dim))  # scatter


def transposes(name, xs, gs, dim):
    """The gradient that every rank gets, from the gradients of all results."""
    world = len(xs)
    total = torch.stack(gs).sum(0)
    if name in ("copy", "summed"):
        return [total] * world
    if name == "reduce":
        return gs
    if name == "gather":
        return list(total.chunk(world, dim))
    return [torch.cat(gs, dim)] * world  # scatter


def every_transfer(rank, world):
    import torch.distributed as dist

    from kforge_parallel import collectives

    wrong = []
    for name in ("copy", "summed", "reduce", "gather", "scatter"):
        for dim in DIMS if name in ("gather", "scatter") else (None,):
            cut = dim if name == "scatter" else None
            xs = inputs(world, cut)
            args = (dist.group.WORLD,) if dim is None else (dist.group.WORLD, dim)
            # A transposed view comes in as well as a contiguous tensor.
            for x in (xs[rank], xs[rank].detach().mT.contiguous().mT.requires_grad_()):
                y = getattr(collectives, name)(x, *args)
                expected = definitions(name, xs, dim)
                gs = [
                    torch.randn(e.shape, generator=torch.Generator().manual_seed(r + 9), dtype=torch.float64)
                    for r, e in enumerate(expected)
                ]
                (grad,) = torch.autograd.grad(y, x, gs[rank])
                same = torch.allclose(y, expected[rank], rtol=1e-14, atol=1e-14)
                back = torch.allclose(grad, transposes(name, xs, gs, dim)[rank], rtol=1e-14, atol=1e-14)
                if not (same and back and (dim is None or y.is_contiguous())):
                    wrong.append((name, dim, same, back))
    return wrong


@pytest.mark.parametrize("world", [2, 3])
def test_values_and_gradients_are_those_of_the_definitions(world):
    assert run_ranks(every_transfer, world) == [[]] * world


def summed_in_half_precision(rank, world):
    import torch.distributed as dist

    from kforge_parallel.collectives import summed

    weight = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
    part = [256.0, 1.0, 1.0, 1.0][rank]
    (summed(weight, dist.group.WORLD) * part).sum().backward()
    return weight.grad.item()


def test_gradients_of_whole_weights_are_summed_wide_and_rounded_once():
    """In bf16, 256 + 1 is 256: three ones would vanish one after the other. 259 rounds to 260."""
    assert run_ranks(summed_in_half_precision, 4) == [260.0] * 4


def compiled_transfers(rank, world):
    """Transfers inside a compiled graph whose gradients differ from those outside of it."""
    import torch.distributed as dist

    from kforge_parallel import collectives

    wrong = []
    for name, more in [
        ("copy", ()),
        ("reduce", ()),
        ("gather", (-2,)),
        ("scatter", (-2,)),
    ]:

        def product(x, w, name=name, more=more):
            return getattr(collectives, name)(torch.tanh(x @ w), dist.group.WORLD, *more) * 2

        seen = []
        for function in (product, torch.compile(product, backend="aot_eager")):
            x, w = torch.linspace(-1, 1, 24).view(2, 4, 3), torch.linspace(0, 1, 12).view(3, 4) + rank
            x.requires_grad_(), w.requires_grad_()
            y = function(x, w)
            seen.append((y, *torch.autograd.grad(y.square().sum(), (x, w))))
        if not all(torch.allclose(a, b, rtol=1e-5) and bool(b.any()) for a, b in zip(*seen, strict=True)):
            wrong.append(name)
    return wrong


def test_gradients_go_through_compiled_transfers():
    assert run_ranks(compiled_transfers, 2, timeout_s=120) == [[], []]
