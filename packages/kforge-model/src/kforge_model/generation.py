"""Text from a model, one token at a time, with a key/value cache."""

from __future__ import annotations

import torch
from torch import Tensor

from kforge_model.cache import KVCache
from kforge_model.transformer import Transformer


def sample(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw one token id for each row of logits [B,V] -> [B] int64.

    temperature divides the logits; 0 takes the most likely token. top_k keeps the k most likely (0: all); then top_p
    keeps the fewest whose probabilities reach it (nucleus sampling, Holtzman et al. 2020, arXiv:1904.09751; 1: all).
    The generator lives on the logits' device; None: the default one.

    Raises ValueError for a negative temperature or top_k, or a top_p outside (0, 1].
    """
    if not temperature >= 0:
        raise ValueError(f"temperature = {temperature} must be 0 (most likely token) or above")
    if top_k < 0:
        raise ValueError(f"top_k = {top_k} must be 0 (off) or above")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p = {top_p} must lie in (0, 1]; 1 turns it off")
    if temperature == 0:
        return logits.argmax(-1)
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = (scores - scores.amax(-1, keepdim=True)) / temperature  # the largest is 0, however low the temperature
    scores, ids = scores.sort(dim=-1, descending=True, stable=True)
    if top_k:
        scores, ids = scores[:, :top_k], ids[:, :top_k]
    p = scores.softmax(-1)
    if top_p < 1:
        p = p.masked_fill(p.cumsum(-1) - p >= top_p, 0.0)  # the first token always stays: nothing comes before it
    return ids.gather(1, torch.multinomial(p, 1, generator=generator)).squeeze(1)


@torch.no_grad()
def generate(
    model: Transformer,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    eos_id: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue prompt [B,P] int64 (rows of one length) -> [B, P+n] int64 with n <= max_new_tokens.

    Sampling as ``sample`` says. A row that has produced eos_id goes on with it; all rows done ends early. Runs in eval
    mode and restores the mode of every submodule. Waits for the device once a token when eos_id is given.

    Raises ValueError when prompt and new tokens exceed the model's max_seq_len, or the prompt is empty.
    """
    if prompt.ndim != 2 or prompt.shape[1] < 1:
        raise ValueError(f"prompt of shape {tuple(prompt.shape)} must be [rows, tokens] with at least one token")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens = {max_new_tokens} must be 0 or above")
    total = prompt.shape[1] + max_new_tokens
    if total > model.config.max_seq_len:
        raise ValueError(
            f"{prompt.shape[1]} prompt and {max_new_tokens} new tokens exceed max_seq_len = "
            f"{model.config.max_seq_len}; ask for fewer, or shorten the prompt"
        )
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        out, cache = [prompt], KVCache(total)
        done = torch.zeros(prompt.shape[0], dtype=torch.bool, device=prompt.device)
        for _ in range(max_new_tokens):
            logits = model(out[-1], cache=cache)[:, -1]
            token = sample(logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
            if eos_id is not None:
                token = token.masked_fill(done, eos_id)
                done |= token == eos_id
            out.append(token[:, None])
            if eos_id is not None and bool(done.all()):
                break
        return torch.cat(out, dim=1)
    finally:
        for module, training in modes:
            module.training = training
