import re
from pathlib import Path

from kforge_testing import run_ranks


def run_example(rank, world):
    text = (Path(__file__).parent.parent / "README.md").read_text()
    scope = {}
    exec(re.search(r"```python\n(.*?)```", text, re.S)[1], scope)
    return scope["loss"].item(), scope["weights"]["0.weight"]


def test_the_example_learns_and_ranks_agree():
    (first, weights), (_, other) = run_ranks(run_example, 2, init=False)
    assert first < 6.0  # the variance of a sum of eight unit normals is 8
    assert weights.equal(other)
