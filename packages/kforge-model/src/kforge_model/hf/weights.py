"""State dicts of Hugging Face <-> ours, by the names of a family (`families`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from kforge_model.config import ModelConfig
from kforge_model.exchange import fuse, separate
from kforge_model.hf import experts
from kforge_model.hf.configs import find_family
from kforge_model.hf.families import BUFFERS, FAMILIES, Family


def from_hf(state: Mapping[str, Tensor], config: ModelConfig, family: str | None = None) -> dict[str, Tensor]:
    """A Hugging Face state dict -> the one that ``Transformer(config).load_state_dict`` takes.

    ``family``: a key of FAMILIES; None: the first that can say the config. Tensors are plain and whole and keep their
    dtype; they are views of the given ones but for fused weights, a padded vocabulary, and the norms of Gemma, whose
    stored weight w means 1 + w: in bfloat16 that sum loses digits, so convert to float32 first where they matter.
    Rows of the vocabulary up to vocab_rows are zeros. The head of a tied model may be there, equal to the embedding.
    Experts may have the names of files, or those of transformers' modules (`experts`): then weights are views of them
    too. Layers of DeepSeek-V3 that predict further tokens are read as far as the config has them (mtp_depth); their
    embedding and head have to be the model's.
    ``state`` may be a mapping that reads what it is asked for; each tensor is, once (`HfTensors` has one at a time).
    Raises ValueError for names that are missing or not known, and for other shapes than the config's.
    """
    tensors = HfTensors(config, family, joined_experts=experts.are_joined(state))
    tensors.check(state)
    return {name: tensors.from_hf(name, state) for name in tensors.parts}


def to_hf(
    state: Mapping[str, Tensor], config: ModelConfig, family: str | None = None, *, joined_experts: bool = False
) -> dict[str, Tensor]:
    """The state dict of a Transformer -> the one of Hugging Face's model of a family. The inverse of `from_hf`.

    A tied head is left out, and experts have the names of files, each by itself, as transformers does when it saves.
    ``joined_experts``: they have those of transformers' modules, for its ``load_state_dict``. Layers that predict
    further tokens (mtp_depth) are written with copies of embedding and head, as files of the hub have them;
    transformers reads them into a model of their own.
    Raises ValueError for names that are missing or not known, for other shapes than the config's, and for parts that
    the family has no name for.
    """
    tensors, given = HfTensors(config, family, joined_experts=joined_experts), dict(state)
    if config.tie_embeddings:
        _drop_copy(given, "head.weight", "embed.weight")
    _check_names(given, tensors.parts, "state dict")
    return {key: made for name, tensor in given.items() for key, made in tensors.to_hf(name, tensor).items()}


class HfTensors:
    """What `to_hf` and `from_hf` do, one of our tensors at a time: for models that no memory holds twice.

        for name in tensors.parts:                          # each of theirs is read once
            parameter = tensors.from_hf(name, folder)       # folder: Mapping of their names, read when asked for
            written |= tensors.to_hf(name, parameter)

    Arguments are those of the two functions. Raises ValueError for a family that cannot say the config.
    """

    parts: dict[str, dict[str, torch.Size]]
    """Name of ours -> the names of theirs that hold it, and their shapes."""

    def __init__(self, config: ModelConfig, family: str | None = None, *, joined_experts: bool = False) -> None:
        self.config = config
        self._family = find_family(config) if family is None else family
        self._names = _Names(self._family, config)
        self._joined = joined_experts
        meta = _meta_state(config)
        self.shapes = {name: tensor.shape for name, tensor in meta.items()}
        """Name of ours -> its shape."""
        embed, head = self._names.theirs("embed.weight"), self._names.theirs("head.weight")
        top = embed if config.tie_embeddings else head
        self._copies = _copies(config, embed, top)
        self._allowed = self._copies | ({head: embed} if config.tie_embeddings else {})
        self.parts = {
            name: {key: made.shape for key, made in self.to_hf(name, tensor).items()} for name, tensor in meta.items()
        }

    def to_hf(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """One of ours, whole -> what of theirs it makes, most of it views of it."""
        _check_shape(name, tensor, self.shapes[name])
        names, parts = self._names, separate({name: tensor}, self.config)
        result = {names.theirs(o): CHANGES[names.change(o)].to_hf(part, self.config) for o, part in parts.items()}
        # safetensors refuses files in which two names share memory
        result |= {copy: result[of].clone() for copy, of in self._copies.items() if of in result}
        return result if self._joined else experts.split(result, FAMILIES[self._family])

    def from_hf(self, name: str, state: Mapping[str, Tensor]) -> Tensor:
        """One of ours from those of theirs that ``parts`` names. Raises ValueError for another shape than the config's,
        and for a weight that should be a copy of this one and is not."""
        family, parts = FAMILIES[self._family], {}
        meta = torch.empty(self.shapes[name], device="meta")
        for ours, part in separate({name: meta}, self.config).items():
            theirs, change = self._names.theirs(ours), CHANGES[self._names.change(ours)]
            made = {theirs: change.to_hf(part, self.config)}
            files = made if self._joined else experts.split(made, family)
            read = (_checked(key, state[key], expected.shape) for key, expected in files.items())
            apart = experts.holds_all(theirs) and not self._joined
            tensor = experts.join(read, made[theirs].shape) if apart else next(read)
            for copy, of in self._allowed.items():
                if of == theirs and copy in state and not torch.equal(tensor, state[copy]):
                    raise _not_a_copy(copy, of, _FURTHER if copy in self._copies else _TIED)
            parts[ours] = change.from_hf(tensor, self.config)
        return fuse(parts, self.config)[name]

    def check(self, keys: Iterable[str]) -> None:
        """Whether ``keys`` are the names of a whole model. Raises ValueError that names those missing or not known."""
        given = {key for key in keys if not re.fullmatch(BUFFERS, key)}
        if FAMILIES[self._family].further_layers:
            given = _checked_further_layers(given, self.config)
        wanted = {key for parts in self.parts.values() for key in parts} - self._copies.keys()
        _check_names(given - self._allowed.keys(), wanted, f"state dict of {self._family}")


class Change(NamedTuple):
    """What becomes of a weight on the way in and out."""

    from_hf: Callable[[Tensor, ModelConfig], Tensor]
    to_hf: Callable[[Tensor, ModelConfig], Tensor]


def _plus(tensor: Tensor, number: float) -> Tensor:
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return (tensor.to(wide) + number).to(tensor.dtype)


def _pad(tensor: Tensor, config: ModelConfig) -> Tensor:
    missing = config.vocab_rows - config.vocab_size
    return torch.cat((tensor, tensor.new_zeros(missing, *tensor.shape[1:]))) if missing else tensor


def _halves(tensor: Tensor, config: ModelConfig) -> Tensor:
    """Rows of what is rotated, neighbours in pairs (2i, 2i + 1) -> in pairs (i, i + R/2), R = rope_size."""
    return tensor.unflatten(-2, (-1, 2)).transpose(-3, -2).flatten(-3, -2)


def _neighbours(tensor: Tensor, config: ModelConfig) -> Tensor:
    """The inverse of `_halves`."""
    return tensor.unflatten(-2, (2, -1)).transpose(-3, -2).flatten(-3, -2)


def _of_key(change: Callable[[Tensor, ModelConfig], Tensor]) -> Callable[[Tensor, ModelConfig], Tensor]:
    """Only the last rope_size rows are rotated."""

    def changed(tensor: Tensor, config: ModelConfig) -> Tensor:
        plain = tensor.shape[-2] - config.rope_size
        return torch.cat((tensor[..., :plain, :], change(tensor[..., plain:, :], config)), dim=-2)

    return changed


def _of_heads(change: Callable[[Tensor, ModelConfig], Tensor]) -> Callable[[Tensor, ModelConfig], Tensor]:
    """Of each head, only the last rope_size rows are rotated."""
    of_head = _of_key(change)
    return lambda tensor, config: of_head(tensor.unflatten(0, (config.n_heads, -1)), config).flatten(0, 1)


CHANGES: Mapping[str, Change] = {
    "same": Change(lambda tensor, config: tensor, lambda tensor, config: tensor),
    "one_more": Change(lambda tensor, config: _plus(tensor, 1), lambda tensor, config: _plus(tensor, -1)),
    "vocabulary": Change(
        _pad,
        lambda tensor, config: tensor[: config.vocab_size],
    ),
    "rotated_heads": Change(_of_heads(_halves), _of_heads(_neighbours)),
    "rotated_key": Change(_of_key(_halves), _of_key(_neighbours)),
    "halves_swapped": Change(
        lambda tensor, config: torch.cat(tensor.chunk(2, dim=1)[::-1], dim=1),
        lambda tensor, config: torch.cat(tensor.chunk(2, dim=1)[::-1], dim=1),
    ),
    "gate_up": Change(
        lambda tensor, config: tensor.unflatten(1, (2, -1)),
        lambda tensor, config: tensor.flatten(1, 2),
    ),
}


class _Names:
    """The names of a family: of a module, its parameters' ends added, or of a parameter itself."""

    def __init__(self, family: str, config: ModelConfig) -> None:
        if family not in FAMILIES:
            raise ValueError(f"unknown Hugging Face family {family!r}; known are {', '.join(FAMILIES)}")
        self.family = family
        self.n_layers = config.n_layers
        family_: Family = FAMILIES[family]
        self.rows = {row.ours: row for row in family_.names}

    def theirs(self, name: str) -> str:
        """Our name of a parameter -> theirs. Raises ValueError when the family has no such part."""
        indices = re.findall(r"(?<=\.)\d+(?=\.)", name)
        pattern = _pattern(name)
        owner, leaf = pattern.rsplit(".", 1)
        if pattern in self.rows:
            template = self.rows[pattern].theirs
        elif owner in self.rows:
            template = f"{self.rows[owner].theirs}.{leaf}"
        else:
            raise ValueError(f"{self.family} has no name for {name}")
        if name.startswith("mtp."):
            indices[0] = str(self.n_layers + int(indices[0]))
        for index in indices:
            template = template.replace("*", index, 1)
        return template

    def change(self, name: str) -> str:
        """The key of CHANGES for our name of a parameter; weights change, biases do not."""
        pattern = _pattern(name)
        owner, leaf = pattern.rsplit(".", 1)
        if pattern in self.rows:
            return self.rows[pattern].change
        return self.rows[owner].change if leaf == "weight" else "same"


def _pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def _meta_state(config: ModelConfig) -> dict[str, Tensor]:
    """The names and shapes of the model, without its storage."""
    from kforge_model.transformer import Transformer

    with torch.device("meta"):
        return dict(Transformer(config).state_dict())


def _checked_further_layers(keys: set[str], config: ModelConfig) -> set[str]:
    """The same without layers that predict more tokens than the config has: those past its last one that begin with a
    projection of hidden state and embedding. Raises ValueError where the config has such layers, and the state none."""
    found = [int(match[1]) for key in keys if (match := re.fullmatch(r"model\.layers\.(\d+)\.eh_proj\.weight", key))]
    if config.mtp_depth and not found:
        raise ValueError(
            f"model.mtp_depth = {config.mtp_depth}, and the state dict has no layer that predicts a further token "
            f"(model.layers.{config.n_layers}.eh_proj.weight): transformers leaves them out when it saves. Take "
            "dataclasses.replace(config, mtp_depth=0)"
        )
    further = tuple(f"model.layers.{layer}." for layer in found if layer >= config.n_layers + config.mtp_depth)
    return {key for key in keys if not key.startswith(further)}


def _copies(config: ModelConfig, embed: str, head: str) -> dict[str, str]:
    """Names in layers that predict further tokens -> those of the model's weights that they are copies of."""
    layers = [f"model.layers.{config.n_layers + k}" for k in range(config.mtp_depth)]
    return {
        **{f"{layer}.embed_tokens.weight": embed for layer in layers},
        **{f"{layer}.shared_head.head.weight": head for layer in layers},
    }


_FURTHER = "the layers of mtp_depth have the model's"
_TIED = "the config ties them; set tie_embeddings = False"


def _drop_copy(state: dict[str, Tensor], copy: str, of: str) -> None:
    """Take out the head of a tied model, which must be the embedding."""
    weight = state.pop(copy, None)
    if weight is not None and of in state and not torch.equal(weight, state[of]):
        raise _not_a_copy(copy, of, _TIED)


def _not_a_copy(copy: str, of: str, why: str) -> ValueError:
    return ValueError(f"{copy} is not {of}, and {why}")


def _check_names(given: Iterable[str], wanted: Iterable[str], what: str) -> None:
    given, wanted = set(given), set(wanted)
    said = [
        f"{why}: {', '.join(names[:8])}{f' and {len(names) - 8} more' if len(names) > 8 else ''}"
        for why, names in (
            ("missing", sorted(wanted - given)),
            ("not known", sorted(given - wanted)),
        )
        if names
    ]
    if said:
        raise ValueError(f"{what}: {'; '.join(said)}")


def _check_shape(name: str, tensor: Tensor, wanted: torch.Size) -> None:
    if tensor.shape != wanted:
        raise ValueError(f"{name} is {list(tensor.shape)}, and the config wants {list(wanted)}")


def _checked(name: str, tensor: Tensor, wanted: torch.Size) -> Tensor:
    _check_shape(name, tensor, wanted)
    return tensor
