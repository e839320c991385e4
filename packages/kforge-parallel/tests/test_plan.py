"""A plan is laid over a model completely, or refused by name."""

import pytest
from torch import nn

from kforge_parallel.plan import resolve_plan


def model():
    def block():
        return nn.ModuleDict({"norm": nn.LayerNorm(4), "up": nn.Linear(4, 8), "down": nn.Linear(8, 4)})

    return nn.ModuleDict({"embed": nn.Embedding(6, 4), "layers": nn.ModuleDict({"0": block(), "1": block()})})


PLAN = {
    "embed": "vocab_embedding",
    "layers.*.norm": "sequence",
    "layers.*": "gather",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
}


def test_entries_reach_modules_and_their_own_parameters():
    resolved = resolve_plan(model(), PLAN)
    assert resolved.modules["layers.1.up"] == "colwise" and resolved.modules["layers.0"] == "gather"
    assert resolved.parameters == {
        "embed.weight": "vocab_embedding",
        **{
            f"layers.{i}.{module}.{leaf}": word
            for i in (0, 1)
            for module, word in (("norm", "sequence"), ("up", "colwise"), ("down", "rowwise"))
            for leaf in ("weight", "bias")
        },
    }


def test_an_entry_may_name_a_parameter():
    resolved = resolve_plan(model(), {**PLAN, "layers.*.up.bias": "replicate"})
    assert resolved.parameters["layers.0.up.bias"] == "replicate"
    assert resolved.parameters["layers.0.up.weight"] == "colwise"


def test_a_star_is_one_part_of_a_name():
    with pytest.raises(ValueError, match=r"'\*.up' \(colwise\) matches no module"):
        resolve_plan(model(), {**PLAN, "*.up": "colwise"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers.*.upp": "colwise"}, r"'layers.\*.upp' \(colwise\) matches no module and no parameter.*near it are"),
        ({"embed": "vocab_embeding"}, "'vocab_embeding' is no word; did you mean 'vocab_embedding'"),
        ({"embed": 3}, "plan entry 'embed': 3 is no word; known are gather"),
        ({"layers.0.up": "rowwise"}, "gives layers.0.up two words, colwise and rowwise"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        resolve_plan(model(), {**PLAN, **changes})


def test_a_parameter_that_no_entry_covers_is_refused():
    plan = {pattern: word for pattern, word in PLAN.items() if word != "sequence"}
    with pytest.raises(ValueError, match=r"says nothing of layers.0.norm.bias, layers.0.norm.weight"):
        resolve_plan(model(), plan)
