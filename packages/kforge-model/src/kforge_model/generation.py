"""Text from a model, one token at a time, with a key/value cache; and how likely a model finds a text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack, overload

import torch
from torch import Tensor, nn

from kforge_model.cache import KVCache
from kforge_model.core import document_ids
from kforge_model.losses import IGNORE
from kforge_model.modes import evaluating
from kforge_model.rows import Rows
from kforge_model.sampling import check_sampling, sample
from kforge_model.transformer import Transformer

NO_TOKEN = -1
"""Stands where a row has ended and no token is."""


class Options(TypedDict, total=False):
    """The keyword arguments of `stream`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    stop_tokens: Sequence[int]
    seed: int | None
    prefill_chunk: int | None


@dataclass(frozen=True)
class _Prompts:
    ids: Tensor
    """[B,P] int64, padded on the left with 0."""
    padding: Tensor | None
    """[B] int64; None where all are of one length."""
    lengths: list[int]


def stream(
    model: Transformer,
    prompts: Tensor | Sequence[Tensor | Sequence[int]],
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    stop_tokens: Sequence[int] = (),
    seed: int | None = None,
    prefill_chunk: int | None = None,
) -> Iterator[Tensor]:
    """Continue each prompt, yielding [B] int64 after each step: a token a row, or -1 where a row has ended before.

    prompts: [B,P] int64, or a list of rows of any lengths (1-D tensors or lists of ids). Rows of different lengths go
    through the model padded on the left, and each gets what it would get alone. temperature to repetition_penalty:
    see `sample`; the penalty counts prompt and new tokens. A row ends with the first of stop_tokens that it produces.
    seed: None draws from the device's default generator; ranks that share a model want one seed. prefill_chunk feeds
    the prompt that many tokens at a time (None: at once): less memory, the same result.

    Ends after max_new_tokens steps, or when every row has ended. Runs in eval mode without gradients, and restores
    the mode of every submodule when it ends or is closed. Waits for the device once a token if there are stop_tokens,
    and otherwise in no step.

    Raises ValueError when the longest prompt and the new tokens exceed the model's max_seq_len, a prompt is empty, a
    setting means nothing, or an attention core of the user's own has no ``cached``.
    """
    given = _read(prompts, _device_of(model))
    longest = given.ids.shape[1]
    for name, value in (("max_new_tokens", max_new_tokens), ("top_k", top_k)):
        if type(value) is not int or value < 0:
            raise ValueError(f"{name} = {value!r} must be a whole number, 0 or above")
    vocabulary = model.config.vocab_size
    if strange := [token for token in stop_tokens if type(token) is not int or not 0 <= token < vocabulary]:
        raise ValueError(
            f"stop_tokens has {strange[0]!r}, which no row can end with: token ids are whole numbers from 0 to "
            f"{vocabulary - 1}"
        )
    if longest + max_new_tokens > model.config.max_seq_len:
        raise ValueError(
            f"{longest} prompt and {max_new_tokens} new tokens exceed max_seq_len = {model.config.max_seq_len}; ask "
            "for fewer, or shorten the prompt"
        )
    if prefill_chunk is not None and (type(prefill_chunk) is not int or prefill_chunk < 1):
        raise ValueError(f"prefill_chunk = {prefill_chunk!r} must be at least 1 token, or None")
    settings: dict[str, Any] = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }
    check_sampling(**settings)
    for name, block in model.layers.items():
        core = block.attn.core  # type: ignore[union-attr]
        if not hasattr(core, "cached"):
            raise ValueError(
                f"the attention core of layers.{name}, {type(core).__name__}, has no method "
                "cached(q, k, v, mask, sinks), which attends over what a cache holds; give it one"
            )
    chunk = longest if prefill_chunk is None else prefill_chunk
    return _steps(model, given, max_new_tokens, settings, tuple(stop_tokens), seed, chunk)


@torch.no_grad()
def _steps(
    model: Transformer,
    given: _Prompts,
    max_new_tokens: int,
    settings: dict[str, Any],
    stop_tokens: tuple[int, ...],
    seed: int | None,
    chunk: int,
) -> Iterator[Tensor]:
    batch, longest = given.ids.shape
    device, total = given.ids.device, longest + max_new_tokens
    stops = torch.tensor(stop_tokens, dtype=torch.int64, device=device)
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    cache = KVCache(model.config, total, padding=given.padding, chunk=chunk)
    ids = torch.cat((given.ids, given.ids.new_zeros(batch, max_new_tokens)), dim=1)
    real = torch.ones_like(ids, dtype=torch.bool)
    if given.padding is not None:
        real = torch.arange(total, device=device) >= given.padding[:, None]
    ended = torch.zeros(batch, dtype=torch.bool, device=device)
    with evaluating(model):
        fed = 0
        for end in range(longest, total):
            while fed < end:
                part = slice(fed, min(fed + chunk, end))
                logits = model(ids[:, part], cache=cache)[:, -1]
                fed = part.stop
            token = sample(logits, **settings, seen=ids[:, :end], seen_mask=real[:, :end], generator=generator)
            ids[:, end] = token  # an ended row goes on unseen: the batch keeps its shape
            yield token.masked_fill(ended, NO_TOKEN)
            if stop_tokens:
                ended = ended | torch.isin(token, stops)
                if bool(ended.all()):
                    return


@overload
def generate(
    model: Transformer,
    prompts: Tensor,
    max_new_tokens: int,
    *,
    on_token: Callable[[Tensor], None] | None = None,
    **options: Unpack[Options],
) -> Tensor: ...
@overload
def generate(
    model: Transformer,
    prompts: Sequence[Tensor | Sequence[int]],
    max_new_tokens: int,
    *,
    on_token: Callable[[Tensor], None] | None = None,
    **options: Unpack[Options],
) -> list[Tensor]: ...
def generate(
    model: Transformer,
    prompts: Tensor | Sequence[Tensor | Sequence[int]],
    max_new_tokens: int,
    *,
    on_token: Callable[[Tensor], None] | None = None,
    **options: Unpack[Options],
) -> Tensor | list[Tensor]:
    """All of `stream` (its arguments and errors) at once, behind the prompts.

    A list of prompts gives a list of 1-D int64 tensors, each its prompt and what came after, the token that stopped it
    included. Prompts [B,P] give [B,P+n] with n <= max_new_tokens, -1 where a row had ended before the others.
    on_token is called with each step's [B] tokens as they come.
    """
    given = _read(prompts, _device_of(model))
    new = []
    for tokens in stream(model, prompts, max_new_tokens, **options):
        new.append(tokens)
        if on_token is not None:
            on_token(tokens)
    rows = torch.cat((given.ids, *(tokens[:, None] for tokens in new)), dim=1)
    if isinstance(prompts, Tensor):
        return rows
    longest = given.ids.shape[1]
    counts = (rows[:, longest:] != NO_TOKEN).sum(1).tolist()
    return [
        row[longest - length : longest + count].clone()
        for row, length, count in zip(rows, given.lengths, counts, strict=True)
    ]


@torch.no_grad()
def score(model: Transformer, ids: Tensor, rows: Rows | None = None) -> Tensor:
    """Log-probability, in nats, of each token of ids [B,S] given those before it in its document: [B,S] in float32 or
    wider; 0 for the first token of each document, which nothing precedes.

    rows: as of the model, packed ones too. All logits never exist at once if the model's loss is
    linear_cross_entropy. Temperature and the like play no part. Runs in eval mode and restores the modes.
    """
    labels = torch.full_like(ids, IGNORE)
    labels[:, :-1] = ids[:, 1:]
    docs = None if rows is None else document_ids(rows)
    if docs is not None:
        labels[:, :-1].masked_fill_(docs[:, 1:] != docs[:, :-1], IGNORE)
    with evaluating(model):
        _, nll = model(ids, rows, labels, scale=1.0)
    scores = torch.zeros_like(nll)
    scores[:, 1:] = -nll[:, :-1]
    return scores


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _read(prompts: Tensor | Sequence[Tensor | Sequence[int]], device: torch.device) -> _Prompts:
    if isinstance(prompts, Tensor):
        if prompts.ndim != 2 or prompts.shape[1] < 1:
            raise ValueError(
                f"a prompt of shape {tuple(prompts.shape)} must be [rows, tokens] with at least one token; rows of "
                "different lengths come as a list"
            )
        batch, longest = prompts.shape
        return _Prompts(_whole(prompts).to(device), None, [longest] * batch)
    found = [torch.as_tensor(prompt) for prompt in prompts]
    for row in found:
        if row.ndim != 1 or len(row) < 1:
            raise ValueError(f"a prompt of shape {tuple(row.shape)} must be one row with at least one token")
    if not found:
        raise ValueError("there are no prompts; give at least one")
    rows = [_whole(row).to(device) for row in found]
    lengths = [len(row) for row in rows]
    longest = max(lengths)
    ids = torch.stack([nn.functional.pad(row, (longest - len(row), 0)) for row in rows])
    if min(lengths) == longest:
        return _Prompts(ids, None, lengths)
    return _Prompts(ids, torch.tensor([longest - n for n in lengths], device=device), lengths)


def _whole(ids: Tensor) -> Tensor:
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"a prompt of {ids.dtype} holds no token ids, which are whole numbers; encode the text first")
    return ids.long()
