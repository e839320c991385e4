import re
from pathlib import Path

from kforge_testing import run_ranks

TEXT = (Path(__file__).parent.parent / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.S)


def run_example(rank, world):
    scope = {}
    exec(EXAMPLES[0], scope)
    return scope["loss"].item(), scope["weights"]["0.weight"]


def test_the_example_learns_and_ranks_agree():
    (first, weights), (_, other) = run_ranks(run_example, 2, init=False)
    assert first < 6.0  # the variance of a sum of eight unit normals is 8
    assert weights.equal(other)


def run_toy(rank, world):
    """Loss of the last step, and the sizes that a matrix is cut to."""
    source = EXAMPLES[1] if world > 1 else EXAMPLES[1].replace("tp=2", "tp=1")
    scope = {}
    exec(source, scope)
    up = scope["model"].layers[0][0].weight
    return scope["loss"].item(), tuple(up.to_local().shape)


def test_the_toy_runs_over_four_processes_and_on_one():
    toy = run_ranks(run_toy, 4, init=False)
    ((alone, whole),) = run_ranks(run_toy, 1, init=False)
    assert [shape for _, shape in toy] == [(16, 32)] * 4 and whole == (64, 32)
    assert toy[0][0] == toy[1][0] and toy[2][0] == toy[3][0]  # two ranks of one matrix, the same rows
    assert alone < 0.5 and max(loss for loss, _ in toy) < 0.5  # the logarithm of 16 is 2.8
    assert EXAMPLES[1].count("\n") < 40
