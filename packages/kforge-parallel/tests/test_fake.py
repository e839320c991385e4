"""One rank of any world, looked at from one process, on models that are not kforge's."""

from typing import ClassVar

import mixture
import pytest
import torch
import torch.distributed as dist
import toy
from comparable import Split

from kforge_parallel import ParallelConfig, build, check_rank, expert, fake
from kforge_parallel.cli import main
from kforge_parallel.weight_bytes import hold
from kforge_testing import run_ranks


def parts(rank, world, build, options):
    from kforge_parallel import launch, parallelize
    from kforge_parallel._torch import local_tensor

    mesh = launch(ParallelConfig(precision="fp32", device="cpu", **options))
    model = parallelize(build, mesh, gradients="sum")
    return {name: tuple(local_tensor(p.detach()).shape) for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (toy.Toy, {"dp_shard": 4}),
        (Split, {"dp_shard": 2, "tp": 2}),
        (mixture.Model, {"dp_shard": 2, "tp": 2, "ep": 4}),
        (toy.tied_stages, {"pp": 2, "dp_shard": 2}),
    ],
    ids=["shards", "tp", "experts", "stages"],
)
def test_it_sees_what_processes_hold(build, options):
    for rank, found in enumerate(run_ranks(parts, 4, build, options, init=False)):
        seen = check_rank(build, ParallelConfig(precision="fp32", **options), 4, rank)
        assert seen.shapes == found
        assert seen.parameters == 4 * sum(torch.Size(shape).numel() for shape in found.values())


def test_a_rank_far_out_has_parts_that_are_empty():
    seen = check_rank(toy.Toy, ParallelConfig(), 1024, 1000)
    assert seen.place["dp_shard"] == 1000 and seen.parameters == 0
    assert {*seen.shapes.values()} == {(0, 6), (0,)}
    assert str(seen).startswith("rank 1000 of dp_shard 1024 (dp_shard 1000): 0.00 MB of weights in 11 parameters\n")
    assert "embed.weight                  0 × 6 of 11 × 6" in " ".join(
        str(seen).split("  ")
    ) or "0 × 6 of 11 × 6" in str(seen)


def test_what_cannot_be_is_refused_and_no_group_is_left():
    with pytest.raises(ValueError, match="rank 8 does not exist in a world of 8"):
        check_rank(toy.Toy, ParallelConfig(), 8, 8)
    with pytest.raises(ValueError, match="needs to know how to cut Toy"):
        check_rank(toy.Toy, ParallelConfig(tp=2), 8, 0)
    with pytest.raises(ValueError, match="which tp = 8 does not divide"):
        check_rank(Split, ParallelConfig(tp=8), 8, 0)
    with pytest.raises(ValueError, match="build made int 3, and no module"):
        check_rank(lambda: 3, ParallelConfig(), 8, 0)
    assert not dist.is_initialized()


def test_a_model_may_say_some_of_its_sizes():
    class Grouped(toy.Toy):
        shape: ClassVar = {"n_kv_heads": 1}  # all that tensor parallelism asks for

    assert check_rank(Grouped, ParallelConfig(), 4, 3).shapes == check_rank(toy.Toy, ParallelConfig(), 4, 3).shapes


def not_dealt_out(monkeypatch):
    """Every rank of ep keeps all experts."""
    monkeypatch.setattr(expert, "cut", lambda parameter, mesh, placement: parameter)


def not_sharded(monkeypatch):
    monkeypatch.setattr(build, "shard", lambda *args, **kw: None)


class Sized(toy.Staged):
    shape: ClassVar = {"vocab_size": 11, "dim": 6, "n_layers": 5, "n_heads": 2}


def counted_on_the_other_stage(monkeypatch):
    monkeypatch.setattr(fake, "hold", lambda model, config, axes, work, rank: hold(model, config, axes, work, rank ^ 2))


@pytest.mark.parametrize(
    ("plant", "model", "options", "told"),
    [
        (not_dealt_out, mixture.Model, {"dp_shard": 4, "ep": 2}, r"holds layers\.0\.moe\.experts"),
        (not_sharded, toy.Toy, {"dp_shard": 4}, r"holds embed\.weight as \(11, 6\), and estimates count \(3, 6\)"),
        (counted_on_the_other_stage, Sized, {"pp": 2, "dp_shard": 2}, "bytes of weights, and estimates count"),
    ],
)
def test_a_rank_that_holds_something_else_is_found(monkeypatch, plant, model, options, told):
    config = ParallelConfig(precision="fp32", **options)
    check_rank(model, config, 4, 1)
    plant(monkeypatch)
    with pytest.raises(RuntimeError, match=told):
        check_rank(model, config, 4, 1)
    assert not dist.is_initialized()


def test_the_command(capsys):
    words = ["check", "--model", "mixture:Model", "--world", "1024", "--rank", "7", "--ep", "8", "--tp", "2"]
    assert main(words) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith("rank 7 of dp_shard 512 × tp 2 × ep 8 (dp_shard 3, tp 1, expert_shard 0, ep 7)")
    (experts,) = (line for line in lines if "layers.0.moe.experts.w_down" in line)
    assert experts.endswith(" of 8 × 6 × 8")
    assert main([*words[:2], "mixture:Modle", *words[3:]]) == 2
    assert "names no function that can be imported" in capsys.readouterr().err
    assert main([*words[:2], "mixture:__name__", *words[3:]]) == 2
    assert "names 'mixture', which builds nothing" in capsys.readouterr().err
    assert main([*words, "--pp", "3"]) == 2
    assert "--world" in capsys.readouterr().err
