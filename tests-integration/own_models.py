"""Models of a user's own and of Hugging Face, by the names that jobs of test_own_models.py call them. Other processes
import it."""

from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from kforge_model import MODELS
from kforge_parallel import CausalLM


class Mixer(nn.Module):
    """Each token, and the mean of what its document has said so far."""

    def __init__(self, dim):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x, seen):
        return x + self.down(F.gelu(self.up(seen @ self.norm(x))))


@MODELS.register("own-mixer")
class Model(nn.Module):
    plan: ClassVar = {
        "embed": "vocab_embedding",
        "layers.*.norm": "sequence",
        "layers.*.up": "colwise",
        "layers.*.down": "rowwise",
        "head": "sequence",
    }

    def __init__(self, config):
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size + config.vocab_size % 2, config.dim)
        self.layers = nn.ModuleList(Mixer(config.dim) for _ in range(config.n_layers))
        self.head = nn.Linear(config.dim, config.vocab_size)

    def forward(self, ids, rows, labels=None, scale=None):
        x = self.embed(ids)
        seen = (rows.doc_ids[:, :, None] == rows.doc_ids[:, None]).tril().to(x.dtype)
        seen = seen / seen.sum(-1, keepdim=True)
        for layer in self.layers:
            x = layer(x, seen)
        nll = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
        return (nll * scale).sum(), nll.detach()


@MODELS.register("own-counting")
class Counting(Model):
    """As Model; what it has been called for is a part of its state."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, *args, **more):
        if self.training:
            self.calls += 1
        return super().forward(*args, **more)


def hugging_face(kind, config, **more):
    import transformers

    made = getattr(transformers, f"{kind}Config")(
        vocab_size=config.vocab_size + config.vocab_size % 2,
        hidden_size=config.dim,
        intermediate_size=4 * config.dim,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.dim // config.n_heads,
        max_position_embeddings=config.max_seq_len,
        tie_word_embeddings=False,
        experts_implementation="eager",
        **more,
    )
    return CausalLM(getattr(transformers, f"{kind}ForCausalLM")(made))


@MODELS.register("hf-qwen3")
def qwen3(config):
    return hugging_face("Qwen3", config)


@MODELS.register("hf-qwen3-moe")
def qwen3_moe(config):
    return hugging_face("Qwen3Moe", config, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=2 * config.dim)


def train(rank, world, *configs):
    """Exit codes of jobs, one after the other."""
    from kforge_train import run

    return [run(config) for config in configs]


def saved_before_a_step(rank, world, config):
    """The calls that a job's model has in the checkpoint of step 3, and after a step that came before it was copied,
    unless the save was waited for."""
    import threading

    from kforge_ckpt import Checkpointer
    from kforge_ckpt.staging import Staging
    from kforge_train.build import build, checkpoint_dir
    from kforge_train.trainer import Trainer

    may_copy, copy = threading.Event(), Staging._copy

    def slowly(self, stream):
        may_copy.wait()
        copy(self, stream)

    def before_a_change():
        if parts.checkpointer._staging is not None:
            may_copy.set()
        staged()

    Staging._copy = slowly
    with build(config) as parts:
        staged, parts.checkpointer.staged = parts.checkpointer.staged, before_a_change
        trainer = Trainer(parts)
        for _ in range(3):
            trainer.step()
        trainer.save()
        trainer.step()
        parts.checkpointer.wait()
        after = parts.model.calls.item()
        Checkpointer(checkpoint_dir(config)).restore({"model": parts.model}, step=3)
        return parts.model.calls.item(), after
