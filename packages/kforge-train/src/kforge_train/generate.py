"""`kforge generate`: text from a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kforge_train.errors import ConfigError, config_errors


def sample(
    run_dir: Path,
    prompt: str,
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    step: int | None = None,
) -> str:
    """The prompt and what the run's newest weights (or those of ``step``) make of it, on one device."""
    from kforge_data import Tokenizer
    from kforge_model import Transformer, build_model, generate
    from kforge_parallel import choose_device, find_world
    from kforge_train.saved import fill_model, load_run

    config = load_run(run_dir)
    with torch.device("meta"):
        model = build_model(config.model)
    if not isinstance(model, Transformer):
        raise ConfigError(f"model.kind = {config.model.kind!r} is no Transformer, whose cache `kforge generate` uses")
    if not config.data.tokenizer:
        raise ConfigError(f"the run {run_dir} names no tokenizer (data.tokenizer), so its tokens are no text")
    tokenizer = Tokenizer.load(config.data.tokenizer)
    device = choose_device(config.parallel, replace(find_world({}), local_rank=0))
    model.to_empty(device=device)
    model.init_weights(config.train.seed)  # ties, and what no checkpoint holds
    fill_model(config, model, step)
    if tokenizer.vocab_size < config.model.vocab_size:  # rows of the head that no token belongs to

        def only_tokens(module: nn.Module, _: Any, logits: torch.Tensor) -> torch.Tensor:
            return logits.index_fill(-1, unused, -torch.inf)

        unused = torch.arange(tokenizer.vocab_size, config.model.vocab_size, device=device)
        assert model.head is not None
        model.head.register_forward_hook(only_tokens)
    ids = tokenizer.encode(prompt) or [tokenizer.eos_id]
    out = generate(
        model,
        torch.tensor([ids], device=device),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop_tokens=(tokenizer.eos_id,),
        seed=seed,
    )
    return tokenizer.decode(out[0].tolist(), skip_special=True)


def main(run_dir: Path, prompt: str, **options: Any) -> int:
    """Print a `sample` (``options`` are its own), once a job. Returns the exit code."""
    from kforge_parallel import find_world

    if find_world().rank != 0:
        return 0
    # Bytes of the command line that are no UTF-8 come as lone surrogates, which no tokenizer takes.
    prompt = prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    with config_errors():
        text = sample(run_dir, prompt, **options)
    print(text)
    return 0
