from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from kforge_optim.rounding import WEIGHT, Box, noise, noise_key, sixteen, to_bfloat16
from kforge_testing import run_ranks


def splitmix64(index: int, key: int) -> int:
    """In Python's integers, which do not wrap around by themselves."""
    mask = 2**64 - 1
    z = (key + (index + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_noise_is_splitmix64_of_index_and_key() -> None:
    indices = [0, 1, 2, 12345, 2**31, 2**40 + 7, 2**62]
    for key in (0, 1, -1, noise_key(1, 2, "layers.0.attn.wo.weight")):
        found = noise(torch.tensor(indices), key)
        assert [value % 2**64 for value in found.tolist()] == [splitmix64(index, key) for index in indices]


def test_keys_depend_on_seed_step_and_name() -> None:
    keys = {noise_key(*of) for of in itertools.product((0, 1), (0, 1, 11), ("a", "b", "1/a"))}
    assert len(keys) == 18
    assert all(-(2**63) <= key < 2**63 for key in keys)


def test_the_bits_are_even_and_independent() -> None:
    bits = noise(torch.arange(2**16), noise_key(0, 0, "w"))
    next_step = noise(torch.arange(2**16), noise_key(0, 1, "w"))
    parts = [sixteen(bits, lowest).double() / 65536 for lowest in (0, 16, 32)] + [sixteen(next_step, 0) / 65536]
    error = 1 / 256  # standard deviation of a mean of 2**16, in units of the values' own
    for part in parts:
        assert abs(float(part.mean()) - 0.5) < 4 * error * 12**-0.5
        assert 0 <= part.min() < 1e-3 and 0.999 < part.max() < 1
        neighbours = torch.corrcoef(torch.stack([part[1:], part[:-1]]))[0, 1]
        assert abs(float(neighbours)) < 4 * error
    correlations = torch.corrcoef(torch.stack(parts)).fill_diagonal_(0)
    assert float(correlations.abs().max()) < 4 * error


def test_rounding_is_right_on_average_and_exact_where_it_can_be() -> None:
    random = torch.arange(2**16, dtype=torch.int32)
    for value in (1.0 + 3e-4, -1.0 - 3e-4, 0.1, -7.7e20, 1e-40, 1.0 + 2**-8):
        full = torch.full((2**16,), value)
        rounded = to_bfloat16(full, random)
        assert rounded.unique().numel() == 2  # the two neighbours
        assert float(rounded.double().mean()) == pytest.approx(float(full[0].double()), rel=1e-7)
    whole = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    finite = whole[whole.isfinite()]
    for number in (0, 1, 40000, 65535):
        random = torch.full(finite.shape, number, dtype=torch.int32)
        assert torch.equal(to_bfloat16(finite.float(), random).view(torch.int16), finite.view(torch.int16))
    for value in (float("inf"), -float("inf"), float("nan")):
        result = to_bfloat16(torch.tensor([value]), torch.tensor([65535], dtype=torch.int32))
        np.testing.assert_array_equal(result.double().numpy(), [value])


LAYOUTS = [  # placements over (2, 2) ranks; None: local indices are in no runs
    ((Shard(0), Shard(0)), True),
    ((Shard(0), Shard(1)), True),
    ((Shard(1), Replicate()), True),
    ((Shard(2), Replicate()), True),
    ((Shard(0), Shard(2)), True),
    ((Shard(1), Shard(2)), False),
    ((Replicate(), Replicate()), True),
]


def _boxes(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for shape in ((5, 6, 7), (3, 4, 2), (1, 3, 9)):  # the first two cut 3 rows into 2, 1, 0 and none
        whole = torch.arange(shape[0] * shape[1] * shape[2]).view(shape)
        for placements, in_runs in LAYOUTS:
            tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            box, here = Box.of(tensor), tensor.to_local().reshape(-1)
            assert box.whole == shape and box.local == tuple(tensor.to_local().shape)
            assert torch.equal(box.index(0, here.numel(), here.device), here), (shape, placements)
            assert torch.equal(box.index(here.numel() // 2, here.numel(), here.device), here[here.numel() // 2 :])
            runs = box.runs()
            if runs is not None and here.numel():
                base, length, stride = runs
                at = torch.arange(here.numel())
                assert torch.equal(base + at // length * stride + at % length, here), (shape, placements, runs)
            assert in_runs == (runs is not None) or shape[0] == 1 or not here.numel(), (shape, placements)


def test_indices_of_shards() -> None:
    run_ranks(_boxes, 4)
    assert Box.of(torch.zeros(3, 4)).runs() == (0, 12, 12)
    assert WEIGHT == 32
