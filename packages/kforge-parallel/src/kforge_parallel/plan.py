"""The plan of a model: which word of tensor parallelism each module or parameter goes by, as plain data.

``{"layers.*.attn.wo": "rowwise"}``: a dotted name, in which ``*`` stands for one part, and a word. With n ranks:

    word             weights                          what it computes
    ---------------- -------------------------------- ------------------------------------------------------------
    gather           -                                its input is made whole once, for all that it holds
    colwise          [out, …] cut along dim 0         its own features of the output, from the whole input
    colwise_kv       as colwise, or whole where       its own key/value heads; with fewer heads than ranks each
                     there are fewer heads than n     takes the rows of the one head that its queries need
    colwise_qkv      [KV, R + 2, …] cut along dim 0,  as colwise_kv, for a weight that has the R queries, the key and
                     or whole                         the value of each of KV heads in one
    packed_colwise   [parts, out, …] cut along dim 1  as colwise, for several matrices of one shape in one weight
    colwise_join     as colwise                       its own features of the output, then joined with all others
    rowwise          [out, in] cut along dim 1        a part of the sum, which is then summed over ranks
    rowwise_part     as rowwise                       the same, of its own part of an input that every rank has whole
    sequence         whole                            one part of the row (the whole row without sequence_parallel)
    replicate        whole                            the same function on other heads or features than other ranks
    experts          whole; [E/ep, …] where ep > 1    experts that get other tokens on each rank
    experts_sum      [E, …] cut along dim 0           its own experts, of tokens that all ranks have; summed over ranks
    vocab_embedding  [vocab, …] cut along dim 0       rows of its own part of the vocabulary, zeros for others
    vocab_loss       [vocab, …] cut along dim 0       logits and loss over its own part of the vocabulary

colwise_join, rowwise_part and experts_sum are for ranks that all have the whole row: sequence_parallel = false.

A parameter that no entry covers and an entry that covers nothing are errors: either would be silently wrong.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

WORDS = (
    "gather",
    "colwise",
    "colwise_kv",
    "colwise_qkv",
    "packed_colwise",
    "colwise_join",
    "rowwise",
    "rowwise_part",
    "sequence",
    "replicate",
    "experts",
    "experts_sum",
    "vocab_embedding",
    "vocab_loss",
)


@dataclass(frozen=True)
class Resolved:
    """A plan laid over one model."""

    modules: dict[str, str]
    """Module name -> word, for every module that computes by one."""
    parameters: dict[str, str]
    """Parameter name (all names of a tied one) -> word."""

    def of(self, part: nn.Module) -> Resolved:
        """What of it concerns a part of the model in which names are as in the whole."""
        modules = {name for name, _ in part.named_modules(remove_duplicate=False)}
        parameters = {name for name, _ in part.named_parameters(remove_duplicate=False)}
        return Resolved(
            {name: word for name, word in self.modules.items() if name in modules},
            {name: word for name, word in self.parameters.items() if name in parameters},
        )


def resolve_plan(model: nn.Module, plan: Mapping[str, str]) -> Resolved:
    """Lay ``plan`` over ``model``.

    An entry names modules, or parameters that their module uses in its own forward. Raises ValueError for an unknown
    word, an entry that matches nothing, two words for one module, and a parameter that no entry covers.
    """
    if not isinstance(plan, Mapping):
        raise ValueError(f"a plan is a dict of names and words, not a {type(plan).__name__}")
    modules = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    by_module: dict[str, str] = {}
    by_parameter: dict[str, str] = {}
    for pattern, word in plan.items():
        if word not in WORDS:
            near = difflib.get_close_matches(str(word), WORDS, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"plan entry {pattern!r}: {word!r} is no word; {hint}known are {', '.join(WORDS)}")
        glob = re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
        found = [[name for name in names if glob.fullmatch(name)] for names in (modules, parameters)]
        if not any(found):
            near = difflib.get_close_matches(pattern, modules + parameters, n=2, cutoff=0.5)
            hint = f"; near it are {', '.join(near)}" if near else ""
            raise ValueError(f"plan entry {pattern!r} ({word}) matches no module and no parameter of the model{hint}")
        for name in found[0]:
            if by_module.setdefault(name, word) != word:
                raise ValueError(f"the plan gives {name} two words, {by_module[name]} and {word}")
        for name in found[1]:
            if by_parameter.setdefault(name, word) != word:
                raise ValueError(f"the plan gives {name} two words, {by_parameter[name]} and {word}")
    for name in parameters:
        owned = by_module.get(name.rpartition(".")[0], "gather")
        if owned != "gather":
            by_parameter.setdefault(name, owned)
    if missing := sorted(set(parameters) - by_parameter.keys()):
        raise ValueError(
            f"the plan says nothing of {', '.join(missing[:6])}{' …' if len(missing) > 6 else ''}, so its gradient "
            "might not be summed; name each: 'sequence' for what works on the residual stream, 'replicate' for what "
            "works on heads"
        )
    return Resolved(by_module, by_parameter)
