"""Models of Hugging Face transformers under tensor parallelism, by the plan that each family brings.

A family says in its config (``base_model_tp_plan``), and its head in its class, which word each matrix goes by; a model
has both, by full names, as ``model.tp_plan``. `tensor_plan` says the same in the words of `plan`:

    theirs                          ours            why
    ------------------------------- --------------- -----------------------------------------------------------------
    colwise, rowwise                the same
    colwise_gather_output           colwise_join    what follows wants all features: a norm of all heads, logits
    colwise_rep                     colwise_join    its older name
    rowwise_split_input             rowwise_part
    rowwise_rep                     rowwise_part    its older name
    embedding_rowwise               vocab_embedding
    replicated_with_grad_allreduce  replicate       a norm of heads
    replicate                       sequence
    mla_kv_a_proj                   gather          on the attention around it: part of its output goes by other
                                                    matrices to each rank's own heads, and so do its gradients
    moe_tp_experts                  experts_sum     with what is said of the parameters inside: whole experts are dealt
                                                    out, instead of a part of each

Everything else of the model is computed by every rank alike, on whole rows.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

WORDS = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "colwise_gather_output": "colwise_join",
    "colwise_rep": "colwise_join",
    "rowwise_split_input": "rowwise_part",
    "rowwise_rep": "rowwise_part",
    "embedding_rowwise": "vocab_embedding",
    "replicated_with_grad_allreduce": "replicate",
    "replicate": "sequence",
    "mla_kv_a_proj": "gather",
    "moe_tp_experts": "experts_sum",
}
"""Word of a Hugging Face plan -> ours."""

_OF_EXPERTS = ("packed_colwise", "packed_rowwise", "colwise", "rowwise")


def tensor_plan(model: nn.Module, plan: Mapping[str, str] | None = None) -> dict[str, str]:
    """The plan of a Hugging Face model in our words, to be given to `parallelize`, which else asks for it itself.

    plan: in Hugging Face's words; None: the model's own ``tp_plan``. A family's plan is written for all its configs, so
    an entry of it may name what this model does not have, if others are next to where it would be; of a plan that is
    given, every entry must be used.

    Raises ValueError for a model without a plan, a word that has no translation, and an entry that names nothing.
    """
    own = plan is None
    if plan is None:
        plan = getattr(model, "tp_plan", None)
    if not plan:
        raise ValueError(
            f"{type(model).__name__} has no tensor-parallel plan (`tp_plan` is empty: its config has no "
            "base_model_tp_plan); pass plan={'model.layers.*.mlp.up_proj': 'colwise', …}, or set parallel.tp to 1"
        )
    modules = {_general(name) for name, _ in model.named_modules(remove_duplicate=False) if name}
    parameters = {_general(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    used = {name: word for name, word in plan.items() if name in modules | parameters}
    for name, word in plan.items():
        if name not in used:
            _check_unused(name, word, used, modules, lenient=own)
    dealt = [name for name, word in used.items() if word == "moe_tp_experts"]
    made: dict[str, str] = {}
    for name, word in used.items():
        if word in _OF_EXPERTS and name in parameters and name.rpartition(".")[0] in dealt:
            continue  # of the experts, of which each rank has whole ones
        if word not in WORDS:
            known = ", ".join(sorted(WORDS))
            raise ValueError(
                f"the plan of {type(model).__name__} calls {name} {word!r}, which has no translation here (those of "
                f"{known} have); pass plan=…, in which tensor_plan(model, {{…}}) may help, or set parallel.tp to 1"
            )
        made[name.rpartition(".")[0] if word == "mla_kv_a_proj" else name] = WORDS[word]
    covered = {*made} - {name for name, word in made.items() if word == "gather"}
    rest = sorted(name for name in parameters if name not in covered and name.rpartition(".")[0] not in covered)
    return {**made, **dict.fromkeys(rest, "sequence")}


def check_heads(model: nn.Module, tp: int) -> None:
    """Raise ValueError for attention heads that ``tp`` ranks cannot share evenly: the attention of a family reads what
    a rank has as whole heads."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % tp:
            raise ValueError(
                f"{type(model).__name__} has {name} = {heads}, which parallel.tp = {tp} does not divide, and attention "
                f"of Hugging Face models knows no part of a head; set tp to a divisor of {heads}"
            )


def _general(name: str) -> str:
    """A name with ``*`` for each number in it."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _check_unused(name: str, word: str, used: Iterable[str], modules: set[str], *, lenient: bool) -> None:
    """Raise ValueError for an entry that matches nothing, unless the plan speaks of others at the same place."""
    place, _, leaf = name.rpartition(".")
    here = [other.rpartition(".")[2] for other in modules if other.rpartition(".")[0] == place and other not in used]
    near = difflib.get_close_matches(leaf, here, n=1, cutoff=0.9)
    while place and place not in modules:
        place = place.rpartition(".")[0]
    beside = [other for other in used if re.match(re.escape(place) + r"\.", other)]
    if lenient and "*" in place and beside and not near:
        return
    hint = f"; did you mean {near[0]}?" if near else ";"
    raise ValueError(
        f"the Hugging Face plan's entry {name!r} ({word}) names no module and no parameter of the model{hint} "
        "correct the name, which starts at the model that is spread, or leave the entry out"
    )
