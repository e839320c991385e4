"""A model with experts made of a dense one computes what that computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kforge_model import ModelConfig, Transformer, to_hf, upcycle

DENSE = ModelConfig(vocab_size=53, dim=16, n_layers=3, n_heads=2, ffn_dim=24, init_std=0.3, max_seq_len=64)
IDS = torch.randint(53, (2, 12), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize(
    ("dense", "changes"),
    [
        ({}, {"n_experts": 4}),
        ({}, {"n_experts": 6, "moe_top_k": 3, "router": "sigmoid", "router_bias": True, "moe_pattern": "DM"}),
        ({}, {"n_experts": 4, "shared_experts": 2}),
        ({"mlp": "relu2", "tie_embeddings": True}, {"n_experts": 4, "shared_experts": 1}),
        ({"mtp_depth": 1, "norm_placement": "sandwich"}, {"n_experts": 4, "moe_top_k": 1}),
    ],
)
def test_the_function_is_that_of_the_dense_model(
    dense: dict[str, Any], changes: dict[str, Any], seed: int | None
) -> None:
    before, after = replace(DENSE, **dense), replace(DENSE, **dense, **changes)
    model = Transformer(before).double()
    model.init_weights(1)
    made = Transformer(after).double()
    made.load_state_dict(upcycle(model.state_dict(), before, after, seed=seed))
    right = model(IDS)
    assert (made(IDS) - right).abs().max() <= 1e-12 * right.abs().max()
    loss, wanted = (m(IDS, labels=IDS, scale=0.1)[0] for m in (made, model))
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-12)
    moe = made.layers["1"].moe
    assert moe.router.weight.any().item() == (seed is not None)
    if seed is not None:
        started = Transformer(after).double()
        started.init_weights(seed)
        assert torch.equal(moe.router.weight, started.layers["1"].moe.router.weight)
    loss.backward()
    assert moe.shared is None or moe.shared.w_down.weight.grad.any()


def test_what_is_kept_and_what_is_copied() -> None:
    after = replace(DENSE, n_experts=4, moe_pattern="DM", router_bias=True)
    model = Transformer(DENSE).bfloat16()
    state = model.state_dict()
    result = upcycle(state, DENSE, after)
    assert result.keys() == Transformer(after).state_dict().keys()
    assert result["layers.0.mlp.w_down.weight"].data_ptr() == state["layers.0.mlp.w_down.weight"].data_ptr()
    assert (
        result["layers.1.moe.experts.w_gate_up"].dtype == result["layers.1.moe.router.weight"].dtype == torch.bfloat16
    )
    assert result["layers.1.moe.router.bias"].dtype == torch.float32
    for expert in result["layers.1.moe.experts.w_gate_up"]:
        assert torch.equal(expert, state["layers.1.mlp.w_gate_up.weight"])


@pytest.mark.parametrize(
    ("dense", "changes", "words"),
    [
        ({}, {"n_experts": 4, "expert_dim": 12}, r"expert_dim = 12 is not dense.ffn_dim = 24.*leave expert_dim out"),
        ({}, {}, r"moe.n_experts = 0 above 0"),
        ({"n_experts": 4}, {"n_experts": 4}, r"dense.n_experts = 4 must be 0"),
        ({}, {"n_experts": 4, "dim": 32, "n_layers": 2}, r"have dim = 16 and 32, n_layers = 3 and 2; make them equal"),
    ],
)
def test_configs_that_do_not_fit(dense: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        upcycle({}, replace(DENSE, **dense), replace(DENSE, **changes))


class Spread(torch.Tensor):
    """Says of itself what a DTensor says."""

    def full_tensor(self) -> torch.Tensor:
        return torch.Tensor(self)


def test_parts_of_tensors_are_refused() -> None:
    state = dict(Transformer(DENSE).state_dict())
    state["norm.weight"] = state["norm.weight"].as_subclass(Spread)
    for refuse in (lambda: upcycle(state, DENSE, replace(DENSE, n_experts=4)), lambda: to_hf(state, DENSE)):
        with pytest.raises(ValueError, match=r"norm.weight is a Spread, spread over ranks.*tensor.full_tensor\(\)"):
            refuse()


def test_states_that_do_not_fit() -> None:
    after = replace(DENSE, n_experts=4)
    state = dict(Transformer(DENSE).state_dict())
    with pytest.raises(ValueError, match=r"missing are norm\.weight, not known are final\.weight"):
        upcycle({("final.weight" if n == "norm.weight" else n): t for n, t in state.items()}, DENSE, after)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.w_down\.weight is \[16, 23\].*wants \[16, 24\]"):
        upcycle({**state, "layers.0.mlp.w_down.weight": torch.zeros(16, 23)}, DENSE, after)
