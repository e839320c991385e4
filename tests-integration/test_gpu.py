"""Whole jobs on a device: what only a device has, and the same losses as fp32 within what half precision costs."""

import pytest
from jobs import job, train, values

from kforge_testing import run_ranks

OPTIONS = {
    "split": {"parallel__precision": "bf16", "parallel__storage": "split"},
    "fp16": {"parallel__precision": "fp16"},
    "tf32": {"parallel__precision": "tf32"},
    "offload": {"parallel__precision": "bf16", "parallel__cpu_offload": True},
    "offload-muon": {"parallel__precision": "fp32", "parallel__cpu_offload": True, "optim__name": "muon"},
    "optim-offload": {"parallel__precision": "bf16", "parallel__storage": "split", "optim__offload": True},
    "prefetch": {"parallel__precision": "bf16", "parallel__prefetch": 1},
}


@pytest.fixture(scope="module")
def reference(tokens, tmp_path_factory):
    made = {}

    def losses(optimizer):
        if optimizer not in made:
            folder = tmp_path_factory.mktemp("fp32")
            config = job(tokens, folder, **common(optimizer), parallel__precision="fp32")
            assert run_ranks(train, 1, config, init=False) == [0]
            made[optimizer] = values(folder, "loss")
        return made[optimizer]

    return losses


def common(optimizer="adamw"):
    sizes = {"model__vocab_size": 64, "model__dim": 64, "train__steps": 12, "ckpt__every_steps": 6}
    return {**sizes, "optim__name": optimizer, "parallel__device": "cuda"}


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
def test_a_job_on_a_device(tokens, tmp_path, reference, name):
    optimizer = OPTIONS[name].get("optim__name", "adamw")
    config = job(tokens, tmp_path, **{**common(optimizer), **OPTIONS[name]})
    assert run_ranks(train, 1, config, init=False, timeout_s=180) == [0]
    got, expected = values(tmp_path, "loss"), reference(optimizer)
    assert list(got) == list(range(1, 13)) and got[12] < got[1] - 0.3
    for step, loss in expected.items():
        assert got[step] == pytest.approx(loss, rel=1e-2), step


@pytest.mark.gpu
def test_experts_whose_weights_are_on_the_host(tokens, tmp_path):
    """Tokens are counted on the device, and biases move there."""
    changes = {**common(), "parallel__precision": "fp32", "model__n_experts": 4, "model__router_bias": True}
    for name, offload in (("device", False), ("host", True)):
        config = job(tokens, tmp_path / name, **changes, parallel__cpu_offload=offload)
        assert run_ranks(train, 1, config, init=False, timeout_s=180) == [0]
    there, here = (values(tmp_path / name, "loss") for name in ("device", "host"))
    assert list(here) == list(range(1, 13)) and list(here.values()) == pytest.approx(list(there.values()), rel=1e-3)


def clips_without_waiting(rank, world, config):
    """Whether QK-clip changed the weights; waiting for the device raises."""
    import torch
    from torch.distributed.tensor import DTensor

    from kforge_train.build import build
    from kforge_train.qk_clip import clip_scores

    with build(config) as parts:
        window, gate = parts.loader.next(), torch.ones((), device="cuda")
        weight = parts.model.layers["0"].attn.wqkv.weight.detach()
        weight = (
            weight.to_local() if isinstance(weight, DTensor) else weight
        )  # split storage of one rank is not sharded
        clip_scores(parts.model, parts.optimizer, config.optim, parts.mesh, window, gate, 1)  # the first one allocates
        weight.mul_(2)
        torch.cuda.set_sync_debug_mode("error")
        try:
            before = weight.clone()
            clip_scores(parts.model, parts.optimizer, config.optim, parts.mesh, window, gate, 1)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return not torch.equal(weight, before)


@pytest.mark.gpu
@pytest.mark.parametrize("storage", ["fp32", "split"])
def test_qk_clip_does_not_wait(tokens, tmp_path, storage):
    clip = {"optim__qk_clip": 1e-3, "optim__qk_clip_every_steps": 1, "parallel__storage": storage}
    config = job(tokens, tmp_path, **common("muon"), **clip, parallel__precision="bf16")
    assert run_ranks(clips_without_waiting, 1, config, init=False, timeout_s=180) == [True]


def packed_lengths(rank, world, options):
    """Losses and gradients of plain and compiled blocks over packed rows of many lengths; graphs before and after."""
    import torch
    import torch._dynamo

    import kforge_model
    from kforge_model import ModelConfig, Rows
    from kforge_parallel import ParallelConfig, launch, parallelize

    sizes = {"vocab_size": 128, "dim": 256, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "max_seq_len": 4096}
    mesh = launch(ParallelConfig(device="cuda"))
    plain, compiled = (
        parallelize(
            lambda: kforge_model.build_model(ModelConfig(**sizes, **options.get("model", {}))),
            mesh,
            init=lambda model: model.init_weights(1),
            gradients="sum",
            cast_inputs=False,
            compile=compile_,
            **options.get("parallel", {}),
        )
        for compile_ in (False, True)
    )

    def run(model, rows, tokens, first, train=True):
        ids = torch.randint(0, 128, (rows, tokens), generator=torch.Generator().manual_seed(first)).cuda()
        packed = Rows.packed([[first, tokens - first]] * rows, device="cuda")
        scale = torch.tensor(1.0 / ids.numel(), device="cuda")
        model.zero_grad()
        with torch.set_grad_enabled(train):
            loss, nll = model(ids, packed, labels=ids, scale=scale)
        if train:
            loss.backward()
        norms = [p.grad.full_tensor().norm() for p in model.parameters() if train]
        return nll.mean(), torch.stack(norms).norm() if train else nll.mean()

    def both(*what):
        for a, b in zip(run(plain, *what), run(compiled, *what), strict=True):
            torch.testing.assert_close(a, b, rtol=5e-2, atol=0)

    for what in ((4, 1024, 100), (4, 1024, 300), (4, 1536, 200), (3, 1024, 100)):
        both(*what)
        both(*what, False)
    warm = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with torch.compiler.set_stance("fail_on_recompile"):
        for first in range(128, 1024, 64):
            both(4, 1024, first)
            both(2 + first // 64 % 2, 1024 + first // 64 * 128, first)
            both(3, 1024, first, False)
    return warm, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [{}, {"model": {"n_experts": 4}}, {"parallel": {"fp8": "tensorwise"}}, {"parallel": {"recompute": "full"}}],
    ids=["dense", "experts", "fp8", "recompute"],
)
def test_packed_rows_of_any_length_compile_nothing_anew(options):
    ((warm, end),) = run_ranks(packed_lengths, 1, options, init=False, timeout_s=400)
    assert 0 < warm == end


REPEATED = {
    "packed": {},
    "plain": {"data__isolate_documents": False},
    "float32": {"parallel__precision": "fp32"},  # the masked kernel
    "experts": {"model__n_experts": 4, "model__balance_loss": 0.1, "model__router_bias": True},
    "compiled": {"parallel__compile": True},
    "compiled-experts": {"parallel__compile": True, "model__n_experts": 4},
    "fp8": {"parallel__fp8": "tensorwise"},
    "fp8-rowwise-compiled": {"parallel__fp8": "rowwise", "parallel__compile": True},
    "windows": {"model__window": 16, "model__attn_softcap": 30.0},  # flex
    "split": {"parallel__storage": "split", "parallel__recompute": "full"},
    "muon": {"optim__name": "muon"},
}


def trained_bits(rank, world, config):
    """A number for each weight that any of its bits changes, after training."""
    from kforge_parallel.replicas import bits_digest
    from kforge_train.build import build
    from kforge_train.trainer import Trainer

    with build(config) as parts:
        assert Trainer(parts).run() == 0
        weights = {name: getattr(p, "to_local", lambda p=p: p)() for name, p in parts.model.named_parameters()}
        return {name: bits_digest(weight).item() for name, weight in weights.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", REPEATED)
def test_two_deterministic_runs_have_the_same_bits(tokens, tmp_path, kind):
    """Losses, norms of gradients and every weight; compiled code is made in each run anew."""
    changes = {
        **common(),
        "train__deterministic": True,
        "data__row_tokens": 128,
        "model__n_heads": 4,
        "train__steps": 8,
    }
    changes |= {"parallel__precision": "bf16", "ckpt__every_steps": 0, **REPEATED[kind]}
    seen = []
    for name in ("one", "other"):
        config = job(tokens, tmp_path / name, **changes)
        (bits,) = run_ranks(trained_bits, 1, config, init=False, timeout_s=300)
        seen.append([bits, *(values(tmp_path / name, what) for what in ("loss", "grad_norm"))])
    assert seen[0] == seen[1] and len(seen[0][1]) == 8


STEADY = {
    "plain": {"data__isolate_documents": False},
    "packed": {},
    "split": {"parallel__storage": "split", "optim__moments": "bf16"},
    "fp8-split": {"parallel__storage": "split", "parallel__fp8": "tensorwise"},
    "fp8-rowwise": {"parallel__fp8": "rowwise"},
    "experts": {"model__n_experts": 4, "model__router_bias": True},
    "experts-compiled": {"model__n_experts": 4, "parallel__compile": True},
    "compiled": {"parallel__compile": True, "data__microbatch_rows": 4},
    "recompute": {"parallel__recompute": "full", "data__microbatch_rows": 2},
    "muon": {"optim__name": "muon"},
    "lion": {"optim__name": "lion", "optim__clip_value": 1.0},
    "schedule-free": {"optim__name": "schedule_free"},
    "averages": {"optim__ema_decay": 0.9},
}


def steps_without_waiting(rank, world, config, warm):
    """The exit code of a run in which, after ``warm`` steps, waiting for the device raises."""
    import torch

    from kforge_train.build import build
    from kforge_train.trainer import Trainer

    class Steady(Trainer):
        def step(self):
            torch.cuda.set_sync_debug_mode("error" if self.next_step >= warm else "default")
            try:
                return super().step()
            finally:
                torch.cuda.set_sync_debug_mode("default")

    with build(config) as parts:
        return Steady(parts).run()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", STEADY)
def test_a_steady_step_waits_for_nothing(tokens, tmp_path, kind):
    changes = {**common(), "data__row_tokens": 128, "train__steps": 12, "parallel__precision": "bf16", **STEADY[kind]}
    config = job(tokens, tmp_path, **changes)
    assert run_ranks(steps_without_waiting, 1, config, 5, init=False, timeout_s=300) == [0]
    assert len(values(tmp_path, "loss")) == 12
