import mixture
import pytest
import torch
import toy
from comparable import Split

from kforge_parallel.shape import decoder_parameters, parameters_of, sizes_of

SHAPE = {"vocab_size": 40, "dim": 12, "n_layers": 3, "n_heads": 4}


def test_what_is_left_out_has_a_default():
    s = sizes_of(SHAPE)
    assert (s.kv_heads, s.head_dim, s.ffn, s.matrices, s.chunk, s.tied) == (4, 3, 64, 3, 2048, False)
    s = sizes_of({**SHAPE, "n_experts": 8, "n_kv_heads": 2, "ffn_dim": 20, "moe_layers": 1})
    assert (s.top_k, s.expert_ffn, s.kv_heads) == (2, 20, 2)
    assert [s.mixed(layer) for layer in range(3)] == [False, False, True]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"dim": 0}, "shape.dim = 0 must be a whole number of at least 1"),
        ({"n_kv_heads": 3}, "n_heads = 4 must be a multiple of shape.n_kv_heads = 3"),
        ({"dim": 14}, "shape.dim = 14 must be a multiple of shape.n_heads = 4, or head_dim be given"),
        ({"n_experts": 4, "moe_top_k": 5}, "shape.moe_top_k = 5 must be from 1 to shape.n_experts = 4"),
        ({"n_experts": 4, "moe_layers": 4}, "shape.moe_layers = 4 must be at most shape.n_layers = 3"),
        ({"mlp_matrices": 4}, "3 \\(gated\\) or 2"),
        ({"parameters": 5}, "the shape says 5"),
    ],
)
def test_sizes_that_cannot_be_are_refused(changed, told):
    with pytest.raises(ValueError, match=told):
        decoder_parameters({**SHAPE, **changed})
    with pytest.raises(ValueError, match="no n_heads"):
        sizes_of({key: SHAPE[key] for key in ("vocab_size", "dim", "n_layers")})


def test_a_decoder_has_as_many_parameters_as_its_matrices():
    # embedding and head, per block qkv, wo, three of the feed-forward half, two norms; the last norm
    whole = 2 * 40 * 12 + 3 * (4 * 3 * 3 * 12 + 12 * 12 + 3 * 12 * 64 + 2 * 12) + 12
    assert sum(p.count for p in decoder_parameters(SHAPE)) == whole
    tied = decoder_parameters({**SHAPE, "tie_embeddings": True, "parameters": whole - 40 * 12})
    (embed,) = (p for p in tied if p.name == "embed.weight")
    assert embed.first and embed.last and embed.unit == "ends"


@pytest.mark.parametrize("build", [toy.Toy, lambda: toy.Toy(tied=True), toy.Staged, Split, mixture.Model])
def test_any_model_is_listed_as_it_is(build):
    with torch.device("meta"):
        model = build()
    listed = parameters_of(model)
    assert [(p.name, p.shape) for p in listed] == [(n, tuple(p.shape)) for n, p in model.named_parameters()]
    for p in listed:
        in_block = p.name.startswith("layers.")
        assert p.layer == (int(p.name.split(".")[1]) if in_block else None)
        assert p.expert == (".experts." in p.name)
        assert (p.word is None) == (not hasattr(model, "plan"))


def test_ends_are_those_of_the_stages():
    ends = {p.name: (p.first, p.last) for p in parameters_of(toy.Staged(tied=True)) if p.layer is None}
    assert ends["embed.weight"] == (True, True)
    untied = {p.name: (p.first, p.last) for p in parameters_of(toy.Staged(tied=False)) if p.layer is None}
    assert untied["embed.weight"] == (True, False)
    assert untied["head.weight"] == (False, True)
