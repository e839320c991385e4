"""What only a CUDA device can show of experts: the grouped kernels, no waiting, one result run after run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kforge_model import Experts, ModelConfig, Rows, Transformer
from kforge_model.moe import experts as module
from kforge_model.moe.experts import groups_can

pytestmark = pytest.mark.gpu

CONFIG = ModelConfig(
    vocab_size=1000, dim=256, n_layers=2, n_heads=4, n_kv_heads=2, max_seq_len=512, init_std=0.05, n_experts=8,
    expert_dim=128, shared_experts=1, router="sigmoid", router_bias=True, balance_loss=0.1, router_z_loss=1e-3,
)  # fmt: skip


@pytest.mark.parametrize("mlp", ["swiglu", "relu2"])
def test_grouped_products_are_those_of_the_experts_one_by_one(mlp: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = torch.tensor([300, 0, 17, 1, 0, 706], device="cuda")
    experts = Experts(6, 256, 192, mlp)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.1)
    experts = experts.to("cuda", torch.bfloat16)
    x = torch.randn(1024, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    assert groups_can(x, *experts.parameters())
    out = torch.randn_like(x)

    def results() -> list[Tensor]:
        y = experts(x, counts)
        return [y, *torch.autograd.grad(y, [x, *experts.parameters()], out)]

    grouped = results()
    monkeypatch.setattr(module, "groups_can", lambda *tensors: False)
    for one, two in zip(grouped, results(), strict=True):
        assert (one.double() - two.double()).norm() <= 1e-2 * two.double().norm()
    for gradient in grouped[2:]:
        assert [bool(part.any()) for part in gradient] == (counts > 0).tolist()


def test_widths_that_the_kernels_cannot_take_go_one_by_one() -> None:
    experts = Experts(4, 256, 100).to("cuda", torch.bfloat16)
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    assert not groups_can(x, *experts.parameters())
    assert experts(x, torch.tensor([64, 0, 0, 0], device="cuda")).shape == x.shape


@pytest.mark.parametrize("options", [{}, {"expert_capacity": 1.25}], ids=["dropless", "capacity"])
def test_a_training_step_never_waits_for_the_device(options: dict[str, Any]) -> None:
    model = Transformer(ModelConfig(**{**CONFIG.__dict__, **options})).to("cuda", torch.bfloat16)
    ids, labels = torch.randint(1000, (2, 9, 512), device="cuda")
    rows, scale = Rows.plain(9, 512, "cuda"), torch.tensor(1 / labels.numel(), device="cuda")
    gate = torch.ones((), device="cuda")

    def step() -> dict[str, Tensor]:
        model.zero_grad()
        model(ids, rows, labels, scale)[0].backward()
        return model.update_balance(lambda totals: totals.mul_(2), gate=gate)

    step()  # first calls set up libraries
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        stats = step()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert stats["moe/0/load_max"].is_cuda and stats["moe/0/load_max"] >= 1


def test_a_step_has_the_same_bits_again() -> None:
    model = Transformer(CONFIG).to("cuda", torch.bfloat16)
    ids, labels = torch.randint(1000, (2, 4, 512), device="cuda")

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(ids, None, labels, 1 / labels.numel())[0].backward()
        return [p.grad.clone() for n, p in model.named_parameters() if ".moe." in n and p.grad is not None]

    first = gradients()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(), strict=True))


def test_model_equals_the_float64_model_on_cpu() -> None:
    on_cpu, model = Transformer(CONFIG).double(), Transformer(CONFIG).to("cuda").double()
    ids, labels = torch.randint(1000, (2, 2, 128))
    right, _ = on_cpu(ids, None, labels, 1 / labels.numel())
    right.backward()
    loss, _ = model(ids.cuda(), None, labels.cuda(), 1 / labels.numel())
    loss.backward()
    assert loss.item() == pytest.approx(right.item(), rel=1e-12)
    for (name, one), two in zip(model.named_parameters(), on_cpu.parameters(), strict=True):
        assert one.grad is not None and two.grad is not None
        assert (one.grad.cpu() - two.grad).norm() <= 1e-10 * two.grad.norm(), name
    model.update_balance()
    on_cpu.update_balance()
    for name, bias in on_cpu.named_buffers():
        assert torch.equal(model.get_buffer(name).cpu(), bias)


def test_a_compiled_block_is_the_block() -> None:
    plain = Transformer(CONFIG).to("cuda", torch.bfloat16)
    compiled = Transformer(CONFIG).to("cuda", torch.bfloat16)
    for block in compiled.layers.values():
        block.compile()
    ids, labels = torch.randint(1000, (2, 4, 512), device="cuda")
    for model in (plain, compiled):
        model(ids, None, labels, 1 / labels.numel())[0].backward()
    for (name, one), two in zip(compiled.named_parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and two.grad is not None
        # Rounding sends a few tokens to other experts.
        assert (one.grad.double() - two.grad.double()).norm() <= 0.2 * two.grad.double().norm(), name
