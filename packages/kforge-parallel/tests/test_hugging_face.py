"""Models of Hugging Face's families by their own plans, against one process, in float64."""

import families
import pytest
import torch
import torch.distributed as dist
from torch import nn

from kforge_parallel import ParallelConfig, launch, parallelize
from kforge_parallel.hugging_face import WORDS, tensor_plan
from kforge_parallel.plan import resolve_plan
from kforge_testing import run_ranks


def errors(got, want):
    """The largest error of a dict of tensors, each by its own size or a millionth of the largest one's."""
    assert got.keys() == want.keys()
    least = 1e-6 * max(tensor.abs().max() for tensor in want.values())
    return max(((got[n] - want[n]).abs().max() / max(want[n].abs().max(), least)).item() for n in want)


def run_families(rank, world, layout, names):
    """Family -> worst error of loss, gradients and weights after one step."""
    mesh = launch(ParallelConfig(precision="fp64", sequence_parallel=False, **layout))
    worst = {}
    for name in names:
        whole, gradients, weights = families.step(families.build(name), families.IDS)
        model = parallelize(lambda name=name: families.build(name), mesh, gradients="sum")
        rows = families.IDS.chunk(mesh.data_size)[mesh.data_rank]
        total, other_gradients, other_weights = families.step(model, rows)
        dist.all_reduce(total)
        error = (total / mesh.tp_size / whole - 1).abs().item()
        worst[name] = (error, errors(other_gradients, gradients), errors(other_weights, weights))
    return worst


@pytest.mark.parametrize(
    ("layout", "world", "names"),
    [
        ({"tp": 2}, 2, [*families.FAMILIES]),
        ({"dp_shard": 2}, 2, [*families.FAMILIES]),
        ({"tp": 2, "dp_shard": 2}, 4, ["Qwen2", "Qwen3Moe", "Olmo2", "Glm4"]),
    ],
    ids=["tp", "fsdp", "tp and fsdp"],
)
def test_a_family_computes_what_it_computes_on_one_process(layout, world, names):
    found = run_ranks(run_families, world, layout, names, init=False, timeout_s=120)
    assert len(names) >= 4
    for worst in found:
        for name, (loss, gradients, weights) in worst.items():
            casts = name in families.CASTS  # AdamW makes the most of a small difference
            assert max(loss, gradients) < (1e-6 if casts else 1e-10), (name, loss, gradients)
            assert weights < (1e-4 if casts else 1e-10), (name, weights)


def test_a_plan_says_what_is_cut_and_what_every_rank_computes():
    plan = tensor_plan(families.build("Qwen3Moe"))
    assert plan["model.layers.*.self_attn.q_norm"] == "replicate"
    assert plan["model.layers.*.mlp.experts"] == "experts_sum"
    assert plan["lm_head"] == "colwise_join" and plan["model.embed_tokens"] == "vocab_embedding"
    assert plan["model.layers.*.mlp.gate.weight"] == plan["model.norm.weight"] == "sequence"
    latent = tensor_plan(families.build("DeepseekV2"))
    assert latent["model.layers.*.self_attn"] == "gather"
    assert latent["model.layers.*.self_attn.kv_a_proj_with_mqa.weight"] == "sequence"
    assert "model.layers.*.self_attn.q_proj" not in latent  # of configs without a latent of the queries


def test_every_family_resolves_without_values():
    for name in families.FAMILIES:
        with torch.device("meta"):
            model = families.build(name)
        words = {*resolve_plan(model, tensor_plan(model)).parameters.values()}
        assert "vocab_embedding" in words and words & {"colwise", "colwise_join"}, name
        assert all(parameter.is_meta for parameter in model.parameters())


def test_a_word_or_an_entry_that_means_nothing_is_an_error():
    model = families.build("Llama")
    own = dict(model.tp_plan)
    with pytest.raises(
        ValueError, match=r"calls model\.layers\.\*\.mlp\.up_proj 'packed_diagonal', which has no trans"
    ):
        tensor_plan(model, {**own, "model.layers.*.mlp.up_proj": "packed_diagonal"})
    with pytest.raises(ValueError, match=r"entry 'layers\.\*\.mlp\.up_proj' \(colwise\) names no module"):
        tensor_plan(model, {**own, "layers.*.mlp.up_proj": "colwise"})
    with pytest.raises(ValueError, match="leave the entry out"):
        tensor_plan(model, {**own, "model.layers.*.mlp.experts": "moe_tp_experts"})  # given, so every entry counts
    model.tp_plan = {**own, "language_model.layers.*.self_attn.q_proj": "colwise"}  # a prefix that is not the model's
    with pytest.raises(ValueError, match=r"'language_model\.layers"):
        tensor_plan(model)
    del own["model.layers.*.mlp.up_proj"]
    model.tp_plan = {**own, "model.layers.*.mlp.up_prj": "colwise"}
    with pytest.raises(ValueError, match=r"up_prj' \(colwise\) names no .*; did you mean up_proj\? correct the name"):
        tensor_plan(model)
    with pytest.raises(ValueError, match=r"Linear has no tensor-parallel plan .* or set parallel\.tp to 1"):
        tensor_plan(nn.Linear(2, 2))


def test_every_word_with_a_translation_is_one_of_transformers():
    from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

    older = {"colwise_rep", "rowwise_rep"}
    assert WORDS.keys() - older <= {*ALL_PARALLEL_STYLES.keys()}


def refused(rank, world):
    """What is said of families that two ranks cannot share so."""
    said = []
    mesh = launch(ParallelConfig(precision="fp64", tp=2))
    for family, options, sequence_parallel in (
        ("Llama", {}, True),
        ("Llama", {"num_key_value_heads": 1}, False),
        ("Mixtral", {"num_local_experts": 3}, False),
    ):
        with pytest.raises(ValueError) as caught:
            parallelize(
                lambda family=family, options=options: families.build(family, **options),
                mesh,
                sequence_parallel=sequence_parallel,
            )
        said.append(str(caught.value))
    return said


def test_what_a_family_cannot_is_refused():
    rows, heads, experts = run_ranks(refused, 2, init=False)[0]
    assert "every rank of tp = 2 has whole rows; set parallel.sequence_parallel to false" in rows
    assert "num_key_value_heads = 1, which parallel.tp = 2 does not divide" in heads
    assert "has 3 entries along dimension 0, which tp = 2 does not divide (experts_sum)" in experts


LAYER = "model.layers.*."
PLANTED = [
    ("Qwen3", {f"{LAYER}self_attn.q_norm": "sequence"}),  # a rank's own heads, taken for what all compute alike
    ("Llama", {f"{LAYER}post_attention_layernorm.weight": "replicate"}),  # and the other way: summed once more
    ("Qwen3Moe", {f"{LAYER}mlp.gate.weight": "replicate"}),
    ("Llama", {f"{LAYER}mlp.up_proj": "rowwise", f"{LAYER}mlp.down_proj": "colwise"}),  # swapped
    ("Llama", {f"{LAYER}self_attn.q_proj": "rowwise", f"{LAYER}self_attn.o_proj": "colwise"}),
    ("Llama", {f"{LAYER}self_attn.v_proj": "colwise_join"}),
    ("Llama", {f"{LAYER}mlp.gate_proj": "sequence"}),
]
"""A family, and entries of its plan that are wrong: some give other gradients, others products that do not fit."""


def run_planted(rank, world):
    mesh = launch(ParallelConfig(precision="fp64", tp=2))
    found = []
    for family, changes in PLANTED:
        plan = tensor_plan(families.build(family))
        assert plan.keys() >= changes.keys()
        _, want, _ = families.step(families.build(family), families.IDS)
        wrong = parallelize(
            lambda family=family: families.build(family),
            mesh,
            sequence_parallel=False,
            plan=plan | changes,
            gradients="sum",
        )
        try:
            found.append(errors(families.step(wrong, families.IDS)[1], want))
        except RuntimeError as error:
            found.append(str(error))
    return found


def test_a_wrong_word_in_a_plan_is_seen():
    for found in run_ranks(run_planted, 2, init=False):
        for (family, changes), error in zip(PLANTED, found, strict=True):
            seen = error > 0.1 if isinstance(error, float) else "shape" in error or "size" in error
            assert seen, (family, changes, error)
