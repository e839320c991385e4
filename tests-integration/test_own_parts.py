"""Parts of a user's own, in a package of theirs that names them by entry points, trained by `kforge train`."""

import os
import subprocess
import sys

import pytest
from jobs import values

KFORGE = [sys.executable, "-m", "kforge_train"]
TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    "-m",
    "kforge_train",
]

MODULE = '''
import torch
from torch import nn
from torch.nn import functional as F

from kforge_model import Routing


class Bilinear(nn.Module):
    options = ("power",)
    plan = {"": "gather", "a": "colwise", "b": "colwise", "w_down": "rowwise"}
    init = {"a.weight": "matrix", "b.weight": "matrix", "w_down.weight": "residual"}

    def __init__(self, config):
        super().__init__()
        self.power = config.options["power"]
        self.a = nn.Linear(config.dim, config.ffn_size, bias=False)
        self.b = nn.Linear(config.dim, config.ffn_size, bias=False)
        self.w_down = nn.Linear(config.ffn_size, config.dim, bias=False)

    def forward(self, x):
        return self.w_down(self.a(x) ** self.power * self.b(x))


class Unit(nn.Module):
    def __init__(self, dim, eps):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()


class Sharper(nn.Module):
    def __init__(self, config, window):
        super().__init__()
        self.scale = 2 * config.score_scale

    def forward(self, q, k, v, rows):
        seen = (rows.doc_ids[:, :, None] == rows.doc_ids[:, None, :]).tril()[:, None]
        return F.scaled_dot_product_attention(q, k, v, seen, scale=self.scale, enable_gqa=True)

    def cached(self, q, k, v, mask, sinks=None):
        return F.scaled_dot_product_attention(q, k, v, mask, scale=self.scale, enable_gqa=True)


class Cosine(nn.Module):
    """Experts by the angle between a token and each of them."""

    options = {"sharpness": 4.0}
    init = {"weight": "matrix", "bias": "zeros"}

    def __init__(self, config):
        super().__init__()
        self.top_k = config.moe_top_k
        self.sharpness = config.options.get("sharpness", 4.0)
        self.weight = nn.Parameter(torch.zeros(config.n_experts, config.dim))
        self.register_buffer("bias", torch.zeros(config.n_experts))

    def forward(self, x):
        x, w = (F.normalize(y.to(torch.promote_types(y.dtype, torch.float32)), dim=-1) for y in (x, self.weight))
        logits = self.sharpness * x @ w.T
        scores = logits.softmax(-1)
        ids = (scores.detach() + self.bias).topk(self.top_k).indices
        return Routing(ids, scores.gather(1, ids), scores, logits)


def focal(hidden, weight, labels, scale, *, options):
    """Tokens that are sure already count less."""
    logits = hidden @ weight.t()
    nll = F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), reduction="none").view(labels.shape)
    return ((1 - (-nll).exp()) * nll * scale).sum(), nll.detach()


class Bigram(nn.Module):
    """A table of the next token's logits."""

    def __init__(self, config):
        super().__init__()
        self.table = nn.Embedding(config.vocab_size, config.vocab_size)

    def init_weights(self, seed):
        with torch.no_grad():
            self.table.weight.zero_()

    def forward(self, ids, rows=None, labels=None, scale=None):
        logits = self.table(ids)
        if labels is None:
            return logits
        nll = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
        return (nll * scale).sum(), nll.detach()
'''
ENTRY_POINTS = """
[kforge.models]
bigram = own_parts:Bigram
[kforge.mlps]
bilinear = own_parts:Bilinear
[kforge.norms]
unit = own_parts:Unit
[kforge.attention_cores]
sharper = own_parts:Sharper
[kforge.routers]
cosine = own_parts:Cosine
[kforge.losses]
focal = own_parts:focal
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A folder that holds an installed package."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "own_parts.py").write_text(MODULE)
    info = folder / "own_parts-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-parts\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


def typed(package, words, code=0):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(package)}
    done = subprocess.run([str(w) for w in words], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


def job(tokens, run_dir, *more):
    return [
        *("train", "tiny", "--train.run_dir", run_dir, "--train.steps", "12", "--metrics.every_steps", "1"),
        *("--data.train", f"{tokens}/train", "--data.heldout", f"{tokens}/heldout", "--data.row_tokens", "32"),
        *("--model.vocab_size", "64", "--train.eval_rows", "0", "--optim.lr", "1e-2", "--data.tokenizer", "", *more),
    ]


OWN = ("--model.mlp", "bilinear", "--model.norm", "unit", "--model.attention_core", "sharper")
OPTIONS = ("--model.options", '{"power": 2}')


def test_parts_are_trained_and_evaluated_alike_in_two_layouts(tokens, tmp_path, package):
    alone, cut = tmp_path / "alone", tmp_path / "cut"
    own = (*OWN, *OPTIONS, "--parallel.precision", "fp32")
    typed(package, [*KFORGE, *job(tokens, alone, *own)])
    typed(package, [*TORCHRUN, *job(tokens, cut, *own, "--parallel.tp", 2, "--parallel.dp_shard", 1)])
    losses = values(alone, "loss")
    assert losses[12] < losses[1] - 0.3
    assert values(cut, "loss") == pytest.approx(losses, rel=1e-4)
    (trained,) = values(alone, "loss", "eval").values()
    assert f"{trained:.4f} nats/token" in typed(package, [*KFORGE, "eval", alone])


def test_a_loss_and_a_model_are_trained(tokens, tmp_path, package):
    typed(package, [*KFORGE, *job(tokens, tmp_path / "focal", "--model.loss", "focal")])
    typed(package, [*KFORGE, *job(tokens, tmp_path / "kind", "--model.kind", "bigram", "--optim.lr", 0.3)])
    for name in ("focal", "kind"):
        losses = values(tmp_path / name, "loss")
        assert losses[12] < losses[1] - 0.3, name
    (trained,) = values(tmp_path / "kind", "loss", "eval").values()
    assert f"{trained:.4f} nats/token" in typed(package, [*KFORGE, "eval", tmp_path / "kind"])
    said = typed(package, [*KFORGE, "generate", tmp_path / "kind", "--prompt", "x"], code=2)
    assert "model.kind = 'bigram' is no Transformer" in said


def test_a_router_is_trained_alike_over_experts_and_rows(tokens, tmp_path, package):
    """Its own option, its bias moved by the load, its experts dealt out over ranks that share rows."""
    own = ("--model.router", "cosine", "--model.n_experts", 4, "--model.balance_loss", 0.1, "--model.router_bias")
    options = ("--model.options", '{"sharpness": 8.0}', "--parallel.precision", "fp64")
    alone, cut, other = tmp_path / "alone", tmp_path / "cut", tmp_path / "other"
    typed(package, [*KFORGE, *job(tokens, alone, *own, *options)])
    over = ("--parallel.ep", 2, "--parallel.tp", 2, "--parallel.dp_shard", 1)
    typed(package, [*TORCHRUN, *job(tokens, cut, *own, *options, *over)])
    losses = values(alone, "loss")
    assert losses[12] < losses[1] - 0.3
    for name in ("loss", "moe/1/load_max", "moe/1/entropy", "moe/1/bias_range"):
        assert values(cut, name) == pytest.approx(values(alone, name), rel=1e-9), name
    assert values(alone, "moe/1/bias_range")[12] > 0
    typed(package, [*KFORGE, *job(tokens, other, *own, *options[2:], "--train.steps", 2, "--optim.warmup_steps", 1)])
    assert values(other, "loss")[1] != losses[1]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (OWN, "power"),
        ((*OWN, "--model.options", '{"powr": 2}'), "model.options has powr, which no part of this model takes"),
        (("--model.mlp", "bilinar"), "unknown mlp 'bilinar'; known are bilinear,"),
        (("--model.kind", "trigram"), "unknown model 'trigram'; known are bigram, transformer"),
    ],
)
def test_what_is_wrong_with_a_part_is_said(tokens, tmp_path, package, more, said):
    out = typed(package, [*KFORGE, *job(tokens, tmp_path / "run", *more)], code=1 if more == OWN else 2)
    assert said in out
