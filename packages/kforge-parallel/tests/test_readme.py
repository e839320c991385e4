import contextlib
import importlib
import io
import re
import subprocess
import sys
import warnings
from pathlib import Path

import torch
from toy import worst

from kforge_parallel import ParallelConfig
from kforge_parallel.testing import compare
from kforge_testing import run_ranks

TEXT = (Path(__file__).parent.parent / "README.md").read_text("utf-8")
FIRST, OWN, SIZES, TOY, ATTENTION, HEAD, MIXTURE, ROW, STAGES, CHECK = re.findall(r"```python\n(.*?)```", TEXT, re.S)


def run(source, views="error"):
    """The names that an example leaves, and what it prints. FSDP2's warning of a view that is returned is an error."""
    scope, printed = {}, io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.filterwarnings(views, message=".*returned a view")
        exec(source, scope)
    return scope, printed.getvalue()


def run_first(rank, world):
    scope, printed = run(FIRST)
    return scope["loss"].item(), scope["weights"]["0.weight"], printed


def test_the_example_learns_and_ranks_agree():
    (first, weights, printed), (_, other, nothing) = run_ranks(run_first, 2, init=False)
    assert first < 6.0  # the variance of a sum of eight unit normals is 8
    assert weights.equal(other)
    assert printed == f"dp_shard 2 on cpu (torchrun): loss {first:.2f}\n" and not nothing


def run_own(rank, world):
    """Weights after three steps of the user's model, how many blocks were compiled, and those of plain torch."""
    import kforge_parallel.build
    from kforge_parallel import compile_blocks, full_parameters

    compiled = []

    def quickly(blocks):
        compiled.extend(blocks)
        compile_blocks(blocks, backend="aot_eager")

    kforge_parallel.build.compile_blocks = quickly
    torch.manual_seed(0)  # rank 0's values are everyone's
    torch.set_default_dtype(torch.float64)
    scope, _ = run(OWN.replace('"fp32"', '"fp64"'), views="ignore")
    torch.manual_seed(0)
    plain, batch = scope["Model"](), scope["batch"]
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    for _ in range(3):
        (plain(batch) - batch.roll(1, -1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    cut = tuple(scope["model"].layers[0][1].weight.to_local().shape)
    return full_parameters(scope["model"]), {n: p.detach() for n, p in plain.named_parameters()}, len(compiled), cut


def test_a_users_model_has_the_weights_of_one_process():
    for got, want, compiled, cut in run_ranks(run_own, 4, init=False):
        assert worst(got, want) < 1e-10
        assert (compiled, cut) == (3, (16, 32))
    lines = [line for line in OWN.splitlines() if line]
    (end,) = (i for i, line in enumerate(lines, 1) if "parallelize(" in line)
    assert end == 16 and len(lines) < 24


def test_the_estimate_is_what_is_printed():
    assert f"```\n{run(SIZES)[1]}```" in TEXT


def run_toy(rank, world):
    """Loss of the last step, the sizes that a matrix is cut to, and what is printed."""
    scope, printed = run(TOY) if world > 1 else run(TOY.replace("tp=2", "tp=1"), views="ignore")
    up = scope["model"].layers[0][0].weight
    return scope["loss"].item(), tuple(up.to_local().shape), printed


def test_the_toy_runs_over_two_and_four_processes_and_on_one():
    toy = run_ranks(run_toy, 4, init=False)
    pair = run_ranks(run_toy, 2, init=False)
    ((alone, whole, _),) = run_ranks(run_toy, 1, init=False)
    assert [shape for _, shape, _ in (*toy, *pair)] == [(16, 32)] * 4 + [(32, 32)] * 2
    assert whole == (64, 32)
    assert toy[0][0] == toy[1][0] and toy[2][0] == toy[3][0]  # two ranks of one matrix, the same rows
    assert max(alone, *(loss for loss, _, _ in (*toy, *pair))) < 0.5  # the logarithm of 16 is 2.8
    assert toy[0][2].startswith("dp_shard 2 × tp 2 on cpu") and not any(printed for _, _, printed in toy[1:])
    assert TOY.count("\n") < 40


def run_stages(rank, world):
    scope, printed = run(STAGES, views="ignore")
    return sorted(scope["model"].layers), [loss.item() for loss in scope["losses"]], printed


def test_the_pipeline_learns_and_its_loss_is_at_the_end():
    first, last = run_ranks(run_stages, 2, init=False)
    assert (first[0], last[0]) == (["0", "1"], ["2", "3"])
    assert first[1:] == ([], "")
    assert sum(last[1]) < 0.5 and len(last[1]) == 4
    assert last[2] == f"pp 2 on cpu (torchrun): loss {sum(last[1]):.2f}\n"


def test_the_comparison_is_a_script_that_runs(tmp_path):
    (tmp_path / "attention.py").write_text(ATTENTION, "utf-8")
    (tmp_path / "check.py").write_text(CHECK, "utf-8")
    done = subprocess.run([sys.executable, "check.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("dp_shard 2 × tp 2 against one plain process\n")


def test_the_head_computes_what_one_process_computes(tmp_path, monkeypatch):
    """With what the README says that changes in the model, over two ranks and over more than there are heads."""
    source = CHECK
    for old, new in {
        "from attention": "from readme_head import Head\nfrom readme_attention",
        "nn.Linear(32, 64)": "Head(32, 64)",
        '"head": "sequence"': '"head": "vocab_loss"',
        "forward(self, ids)": "forward(self, ids, labels)",
        "self.head(x.flatten(0, 1))": "self.head(x, labels)",
        'cross_entropy(model(batch["ids"]), batch["labels"].flatten(), reduction="sum")': (
            'model(batch["ids"], batch["labels"])'
        ),
    }.items():
        assert source.count(old) == 1
        source = source.replace(old, new)
    for name, text in {"attention": ATTENTION, "head": HEAD, "check": source}.items():
        (tmp_path / f"readme_{name}.py").write_text(text, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)  # the other processes get it too
    check = importlib.import_module("readme_check")
    ids = check.torch.randint(64, (4, 8))
    labels = ids.roll(-1, 1).masked_fill(ids % 4 == 0, -100)
    for layout in (ParallelConfig(dp_shard=2, tp=2), ParallelConfig(dp_shard=1, tp=4)):
        result = compare(layout, check.Model, batch={"ids": ids, "labels": labels}, loss=check.loss, run=run_ranks)
        result.check()
    for line in ('"head": "vocab_loss"', "self.head(x, labels)", 'scale * model(batch["ids"], batch["labels"])'):
        assert f"{line}`" in re.sub(r"\s+", " ", TEXT)


SPREAD = """
from torch import nn
from readme_vocabulary import Head
from readme_mixture import PLAN, Mixture


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.moe = Mixture(16, 8, n=4, k=2)

    def forward(self, x):
        return x + self.moe(x)


class Model(nn.Module):
    plan = {"embed": "vocab_embedding", **PLAN, "head": "vocab_loss"}

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = Head(16, 64)

    def forward(self, ids, labels):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x, labels)


def loss(model, batch, scale):
    return scale * model(batch["ids"], batch["labels"])
"""


def test_the_mixture_computes_what_one_process_computes(tmp_path, monkeypatch):
    for name, text in {"vocabulary": HEAD, "mixture": MIXTURE, "spread": SPREAD}.items():
        (tmp_path / f"readme_{name}.py").write_text(text, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    spread = importlib.import_module("readme_spread")
    ids = torch.randint(64, (4, 8))
    batch = {"ids": ids, "labels": ids.roll(-1, 1).masked_fill(ids % 4 == 0, -100)}
    for layout in (ParallelConfig(dp_shard=2, ep=2), ParallelConfig(dp_shard=1, tp=2, ep=2)):
        compare(layout, spread.Model, batch=batch, loss=spread.loss, run=run_ranks, steps=2).check()


CUT = """
from torch import nn
from readme_whole_head import Head
from readme_row import PLAN, Attention, rows_of


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(16), Attention(16, 4)

    def forward(self, x, rows):
        return x + self.attention(self.norm(x), rows)


class Model(nn.Module):
    plan = {"embed": "vocab_embedding", **PLAN, "head": "vocab_loss"}

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = Head(16, 64)

    def forward(self, ids, labels, rows):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, rows)
        return self.head(x, labels)


def loss(model, batch, scale):
    return scale * model(batch["ids"], batch["labels"], rows_of(batch))
"""


def test_attention_over_parts_of_rows_computes_what_one_process_computes(tmp_path, monkeypatch):
    for name, text in {"whole_head": HEAD, "row": ROW, "cut": CUT}.items():
        (tmp_path / f"readme_{name}.py").write_text(text, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    cut = importlib.import_module("readme_cut")
    ids = torch.randint(64, (4, 8))
    batch = {"ids": ids, "labels": ids.roll(-1, 1).masked_fill(ids % 4 == 0, -100)}
    for layout in ({"cp": 2}, {"cp": 2, "tp": 2, "cp_style": "ulysses"}):
        config = ParallelConfig(dp_shard=1, **layout)
        compare(config, cut.Model, batch=batch, loss=cut.loss, run=run_ranks, steps=2).check()
