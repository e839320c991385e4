"""What each way of keeping activations computes, runs and keeps."""

import gc
import weakref
from functools import partial

import mixture
import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from kforge_parallel import activation, offload_blocks, recompute_blocks
from kforge_parallel.activation import operations_of
from kforge_parallel.kept import Kept, keep

WIDTH = 32


class Block(nn.Module):
    """Products, an attention core, a norm, random numbers, and a saved view of a larger tensor."""

    def __init__(self):
        super().__init__()
        self.runs = 0
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, angles):
        self.runs += 1
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q * angles, k, v, is_causal=True)
        x = x + nn.functional.dropout(self.out(attended.transpose(1, 2).flatten(2)), 0.25)
        return x + self.down(nn.functional.gelu(self.up(x)))


MODES = {
    "none": lambda blocks: None,
    "full": partial(recompute_blocks, mode="full"),
    "every": partial(recompute_blocks, mode="full", again=[True, False, True, False]),
    "selective": partial(recompute_blocks, mode="selective"),
    "attention": partial(recompute_blocks, mode="selective", keep=("attention",)),
    "products": partial(recompute_blocks, mode="selective", keep=("aten.addmm", "aten.mm")),
    "every-selective": partial(recompute_blocks, mode="selective", again=[True, False, False, True]),
    "offload": offload_blocks,
    "full-offload": lambda blocks: (recompute_blocks(blocks, "full"), offload_blocks(blocks)),
}


class Living(TorchDispatchMode):
    """Bytes of what was made inside and is still there."""

    def __init__(self):
        super().__init__()
        self.made = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def bytes(self, without):
        gc.collect()
        return sum(size for at, (ref, size) in self.made.items() if at not in without and not ref.expired())


def measure(mode):
    """Gradients, forward runs of each block, FLOPs of backward over those of forward, and bytes kept between them."""
    torch.manual_seed(1)
    blocks = [Block().double() for _ in range(4)]
    MODES[mode](blocks)
    x = torch.randn(2, 16, WIDTH, dtype=torch.float64, requires_grad=True)
    angles = torch.randn(16, 8, dtype=torch.float64)
    torch.manual_seed(2)
    with FlopCounterMode(display=False) as forward, Living() as living:
        y = x
        for block in blocks:
            y = block(y, angles)
    weights = {p.untyped_storage()._cdata for block in blocks for p in block.parameters()}
    kept = living.bytes(weights)
    with FlopCounterMode(display=False) as backward:
        y.square().sum().backward()
    after = torch.rand(())  # the generator is where a run without recomputation leaves it
    gradients = [x.grad, *(p.grad for block in blocks for p in block.parameters()), after]
    return gradients, [b.runs for b in blocks], backward.get_total_flops() / forward.get_total_flops(), kept


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_same_bits(mode):
    wanted, got = measure("none")[0], measure(mode)[0]
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_each_mode_runs_and_keeps_what_it_says():
    found = {mode: measure(mode) for mode in MODES}
    runs = {mode: values[1] for mode, values in found.items()}
    again = {"full": [2] * 4, "every": [2, 1, 2, 1], "selective": [2] * 4, "every-selective": [2, 1, 1, 2]}
    again |= {"full-offload": [2] * 4, "products": [2] * 4, "attention": [2] * 4}
    assert runs == {mode: again.get(mode, [1] * 4) for mode in MODES}
    flops = {mode: values[2] for mode, values in found.items()}
    plain = flops["none"]
    assert flops["selective"] == flops["products"] == flops["every-selective"] == flops["offload"] == plain
    assert plain < flops["every"] < flops["full"] == flops["attention"] == pytest.approx(plain + 1, abs=0.4)
    assert flops["every"] == pytest.approx((plain + flops["full"]) / 2, rel=0.05)
    kept = {mode: values[3] for mode, values in found.items()}
    assert kept["full"] < kept["attention"] < kept["products"] < kept["selective"] < kept["none"]
    assert kept["full"] < kept["every"] < kept["none"]
    inputs = 4 * 2 * 16 * WIDTH * 8  # and what y is
    assert inputs <= kept["full"] < 1.3 * inputs


def test_what_is_offloaded_leaves_its_memory():
    def left(mode):
        block = Block().double()
        MODES[mode]([block])
        held = []
        block.up.register_forward_hook(lambda *args: held.append(weakref.ref(args[2].untyped_storage())))
        made = []
        block.up.register_forward_hook(lambda *args: made.append(StorageWeakRef(args[2].untyped_storage())))
        y = block(torch.randn(2, 16, WIDTH, dtype=torch.float64, requires_grad=True), torch.ones(()).double())
        gc.collect()
        assert y.requires_grad
        return not made[0].expired()

    assert left("none") and not left("offload") and not left("full")


def test_weights_and_shared_arguments_are_not_offloaded(monkeypatch):
    import kforge_parallel.offload as offload

    gone = []
    away = offload._Away.__init__

    def watched(self, trip, tensor):
        gone.append(tensor.untyped_storage().data_ptr())
        away(self, trip, tensor)

    monkeypatch.setattr(offload._Away, "__init__", watched)
    monkeypatch.setattr(offload, "SMALL", 0)
    block = Block().double()
    offload_blocks([block])
    angles = torch.randn(16, 8, dtype=torch.float64)
    x = torch.randn(2, 16, WIDTH, dtype=torch.float64, requires_grad=True)
    block(x, {"angles": [angles]}["angles"][0]).sum().backward()
    stays = {p.untyped_storage().data_ptr() for p in block.parameters()} | {angles.untyped_storage().data_ptr()}
    assert gone and not stays & set(gone)
    assert x.untyped_storage().data_ptr() in gone
    assert len(gone) == len(set(gone))  # once, also what several operations save


class Counting(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x, angles):
        self.steps += 1
        return super().forward(x, angles)


def test_a_block_that_changes_its_state_is_refused_and_no_gradient_runs_it_once():
    block = Counting().double()
    recompute_blocks([block], "full")
    x = torch.randn(2, 16, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        block(x, torch.ones(()))
    assert block.runs == 1
    with pytest.raises(ValueError, match=r"Counting\.forward changes its buffer steps, and .* would change it twice"):
        block(x.requires_grad_(), torch.ones(()))


def test_words_for_operations():
    assert torch.ops.aten.mm.default in operations_of(["products"])
    assert operations_of(["aten.mm"]) >= {torch.ops.aten.mm.default}
    assert torch.ops.higher_order.flex_attention in operations_of(["attention"])
    with pytest.raises(ValueError, match=r"recompute_keep has 'matmuls', which is neither one of products, attention"):
        recompute_blocks([Block()], "selective", keep=["matmuls"])
    with pytest.raises(ValueError, match=r"'aten\.bernoulli_', .* that changes nothing in place"):
        operations_of(["aten.bernoulli_"])


class Drawing(nn.Module):
    """Draws by an operation that is kept, then by one that is not."""

    def forward(self, x):
        return nn.functional.dropout((x * torch.rand_like(x)).tanh(), 0.5).sin()


def test_random_numbers_after_a_kept_operation_are_the_same():
    gradients = []
    for mode in ("none", "full", "selective"):
        block = Drawing()
        recompute_blocks([block], mode, keep=["aten.rand_like"])
        torch.manual_seed(0)
        x = torch.ones(64, dtype=torch.float64, requires_grad=True)
        block(x).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(gradients[1], gradients[0]) and torch.equal(gradients[2], gradients[0])


class Wavering(nn.Module):
    """A router whose sums come out a last bit different each time, as where threads add up in the order in which they
    come. Between equal experts, that bit decides."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(mixture.EXPERTS, mixture.DIM, dtype=torch.float64))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        order = torch.arange(mixture.EXPERTS, dtype=x.dtype)
        return x @ self.weight.T + order * (1e-12 if self.calls % 2 else -1e-12)


def gradients_of_wavering(mode, keep=("routing",)):
    """Of a block with experts, and how often its router decided."""
    block = mixture.Block(mixture.EXPERTS, range(mixture.EXPERTS)).double()
    mixture.fill(block)
    block.moe.router = Wavering()
    recompute_blocks([block], mode, keep=keep)
    x = torch.randn(2, 8, mixture.DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x.requires_grad_()
    block(x, torch.ones((), dtype=torch.float64)).square().sum().backward()
    return [x.grad, *(p.grad for p in block.parameters())], block.moe.router.calls


@pytest.mark.parametrize(("mode", "keep"), [("full", ("routing",)), ("selective", ("attention",))])
def test_a_token_goes_to_the_experts_that_it_went_to(mode, keep, monkeypatch):
    wanted, once = gradients_of_wavering("none")
    got, twice = gradients_of_wavering(mode, keep)
    assert (once, twice) == (1, 2)
    assert off(got, wanted) < 1e-9
    monkeypatch.setattr(activation, "has_experts", lambda block: False)  # planted: decisions are made again
    assert off(gradients_of_wavering(mode, keep)[0], wanted) > 0.1


def off(got, wanted):
    """The largest difference of a tensor, of its largest value."""
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("mode", ["full", "every", "selective", "attention"])
def test_numbers_that_are_drawn_anew_are_found(mode, monkeypatch):
    """The planted fault of `test_every_mode_gives_the_same_bits`."""
    monkeypatch.setattr(activation, "checkpoint", partial(activation.checkpoint, preserve_rng_state=False))
    wanted, got = measure("none")[0], measure(mode)[0]
    assert not all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_kept_results_come_once_and_a_changed_one_is_found():
    kept, made = Kept("transfers"), []

    def make():
        made.append(1)
        return torch.ones(3) * len(made)

    with kept.recording():
        first, second = keep("transfers", make), keep("transfers", make)
        keep("routes", make)  # not of those that are kept
    for _ in range(2):
        with kept.replaying():
            assert torch.equal(keep("transfers", make), first) and torch.equal(keep("transfers", make), second)
    assert len(made) == 3
    second.add_(1)
    with kept.replaying(), pytest.raises(RuntimeError, match="was changed in place after it was kept"):
        keep("transfers", make), keep("transfers", make)
    assert torch.equal(keep("transfers", make), torch.full((3,), 4.0))  # outside of a block
