import pytest
import torch
from torch import nn

from kforge_parallel import ParallelConfig, precision_of, precision_table
from kforge_testing import run_ranks


@pytest.mark.parametrize(
    ("words", "storage", "compute", "reduce", "matmul"),
    [
        (("bf16",), torch.float32, torch.bfloat16, torch.float32, "high"),
        (("bf16", "split"), torch.bfloat16, torch.bfloat16, torch.float32, "high"),
        (("fp16",), torch.float32, torch.float16, torch.float32, "high"),
        (("tf32",), torch.float32, torch.float32, torch.float32, "high"),
        (("fp32",), torch.float32, torch.float32, torch.float32, "highest"),
        (("fp64",), torch.float64, torch.float64, torch.float64, "highest"),
    ],
)
def test_the_dtypes_of_each_word(words, storage, compute, reduce, matmul):
    precision = precision_of(*words)
    assert (precision.storage, precision.compute, precision.reduce) == (storage, compute, reduce)
    assert precision.matmul == matmul
    policy = precision.policy(cast_inputs=False)
    assert policy.param_dtype == compute
    assert policy.reduce_dtype == reduce and policy.cast_forward_inputs is False


@pytest.mark.parametrize("storage", ["split", "stochastic"])
def test_weights_in_bf16_go_with_bf16_only(storage):
    assert precision_of("bf16", storage).storage == torch.bfloat16
    with pytest.raises(ValueError, match="split and stochastic go with bf16"):
        precision_of("fp16", storage)
    with pytest.raises(ValueError, match=rf"parallel.storage = {storage} keeps weights in bf16.*precision = fp32"):
        ParallelConfig(precision="fp32", storage=storage)
    with pytest.raises(ValueError, match="would add microbatches up in bf16"):
        ParallelConfig(storage=storage, accumulate="sharded")


def test_the_table_says_where_gradients_are_rounded():
    split = ParallelConfig(storage="split")
    assert precision_table(split, 1)["gradients over ranks"] == "one rank"
    assert precision_table(split, 2)["gradients over ranks"] == "fp32, then rounded to bf16 once"
    assert precision_table(ParallelConfig(), 2)["gradients over ranks"] == "fp32"
    assert precision_table(ParallelConfig(storage="stochastic"), 2)["weights"] == "bf16, rounded stochastically"
    assert precision_table(ParallelConfig(accumulate="sharded"), 2)["gradients over microbatches"] == "fp32, sharded"
    assert precision_table(ParallelConfig(precision="fp64"), 2)["weights"] == "fp64"


SPLIT = ("zbv", "dualpipev", "interleaved_zero_bubble")
TRAVELS = "fp8 tensorwise, weights gathered in 8 bits, those of unequal parts in bf16"
IN_8_BITS = [
    ({"fp8": "tensorwise"}, TRAVELS),
    ({"fp8": "rowwise"}, "fp8 rowwise, weights gathered in bf16 and cast after"),
    ({"fp8": "tensorwise", "pp": 2, "pp_schedule": "interleaved_1f1b"}, TRAVELS),
    *(
        (
            {"fp8": "tensorwise", "pp": 2, "pp_schedule": word},
            f"fp8 tensorwise, weights gathered in bf16 and cast after, as parallel.pp_schedule = {word} asks",
        )
        for word in SPLIT
    ),
]


class Even(nn.Module):
    block_list = "layers"

    def __init__(self, layers=range(4)):
        super().__init__()
        self.layers = nn.ModuleDict({str(i): nn.Linear(32, 64, bias=False) for i in layers})

    def stage(self, first, layers, last):
        part = Even(())
        part.layers.update({str(i): self.layers[str(i)] for i in layers})
        return part


def in_8_bits(rank, world):
    """Of each layout, how many parameters a rank gathers in 8 bits, and what is said of them."""
    from kforge_parallel import launch, parallelize
    from kforge_parallel.pipeline import stages_of

    found = []
    for options, _ in IN_8_BITS:
        config = ParallelConfig(device="cpu", **options)
        mesh = launch(config)
        model = parallelize(Even, mesh)
        roots = stages_of(model).calls if mesh.pp_size > 1 else [model]
        parts = [len(vars(root)["fp8_weights"].parts) for root in roots if "fp8_weights" in vars(root)]
        found.append((sum(parts), precision_table(config, world)["linear modules"]))
    return found


def test_what_is_said_of_weights_in_8_bits_is_what_they_do():
    for rank in run_ranks(in_8_bits, 2, init=False):
        for (parts, told), (_, said) in zip(rank, IN_8_BITS, strict=True):
            assert told == said
            assert (parts > 0) == ("in 8 bits" in said), told


def test_what_multiplies_in_8_bits_alone():
    assert "linear modules" not in precision_table(ParallelConfig(), 2)
    alone = precision_table(ParallelConfig(fp8="tensorwise"), 1)
    assert alone["linear modules"] == "fp8 tensorwise, weights cast on their rank"
    offloaded = precision_table(ParallelConfig(fp8="tensorwise", cpu_offload=True), 2)["linear modules"]
    assert offloaded.endswith("gathered in bf16 and cast after, as parallel.cpu_offload asks")


def accumulated(rank, world, storage):
    """Gradient of one weight over microbatches of 256, 1, 1 and 1 on each rank, and the dtypes."""
    from kforge_parallel import launch, parallelize, set_last_microbatch

    config = ParallelConfig(storage=storage, dp_shard=-1)
    mesh = launch(config)
    model = parallelize(lambda: nn.Linear(1, 1, bias=False), mesh, config, gradients="sum")
    parts = [256.0, 1.0, 1.0, 1.0]
    for i, part in enumerate(parts):
        set_last_microbatch(model, i == len(parts) - 1)
        model(torch.full((1, 1), part, dtype=torch.bfloat16)).sum().backward()
    gradient = model.weight.grad
    full = gradient.full_tensor() if world > 1 or storage == "fp32" else gradient
    return full.item(), str(gradient.dtype), str(model.weight.dtype)


@pytest.mark.parametrize(
    ("world", "storage", "expected"),
    [
        (1, "fp32", (259.0, "torch.float32", "torch.float32")),
        (1, "split", (259.0, "torch.float32", "torch.bfloat16")),  # not wrapped: gradients stay fp32
        (2, "fp32", (518.0, "torch.float32", "torch.float32")),
        (2, "split", (520.0, "torch.bfloat16", "torch.bfloat16")),  # 518 rounded once; added in bf16 it were 512
    ],
)
def test_microbatches_and_ranks_are_added_up_in_fp32(world, storage, expected):
    """In bf16, 256 + 1 is 256: added up there, three of the four microbatches would leave no trace."""
    assert run_ranks(accumulated, world, storage, init=False) == [expected] * world
