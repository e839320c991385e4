"""Rules for parameters in a job: from a TOML file, on any number of processes, over a resume, and refused in time."""

import pytest
from jobs import job, train, values

from kforge_testing import run_ranks
from kforge_train import ConfigError
from kforge_train.build import check
from kforge_train.resolve import load_config
from kforge_train.toml import to_toml

RULES = """
[
    {"name": "tables", "role": "embeddings", "optimizer": "torch.optim.Adamax", "weight_decay": 0.0},
    {"name": "first", "match": "^layers[.]0[.]", "role": "matrices", "optimizer": "muon", "lr_scale": 0.5},
    {"name": "flat", "role": "norms_and_biases", "schedule": "constant"}
]
"""
MIXED = {"optim__name": "lion", "optim__lr": 1e-3, "optim__groups": RULES}


def test_mixed_optimizers_over_a_resume_and_any_number_of_processes(tokens, tmp_path):
    straight = job(tokens, tmp_path / "straight", **MIXED)
    (tmp_path / "job.toml").write_text(to_toml(straight))
    assert load_config(tmp_path / "job.toml") == straight
    assert "[[optim.groups]]" not in to_toml(straight) and 'name = "tables", role = "embeddings"' in to_toml(straight)
    assert run_ranks(train, 1, straight) == [0]
    resumed = job(tokens, tmp_path / "resumed", **MIXED, train__max_minutes=1e-6)
    assert run_ranks(train, 2, resumed) == [75, 75]
    assert run_ranks(train, 2, job(tokens, tmp_path / "resumed", **MIXED)) == [0, 0]
    losses, expected = (values(tmp_path / name, "loss") for name in ("resumed", "straight"))
    assert losses.keys() == expected.keys() == set(range(1, 7))
    assert losses == pytest.approx(expected, rel=1e-10)


def test_rules_that_fit_nothing_are_refused_before_any_process_group(tokens, tmp_path):
    rules = '[{"name": "lost", "match": "blocks", "lr_scale": 0.5}]'
    with pytest.raises(ValueError, match=r"group rule 'lost' .* fits no trainable parameter; their names are as embed"):
        check(job(tokens, tmp_path, optim__groups=rules), 1)
    with pytest.raises(
        ConfigError, match=r"optim\.groups = .*key 'lr_scal', which there is not; did you mean lr_scale"
    ):
        job(tokens, tmp_path, optim__groups='[{"name": "x", "match": "", "lr_scal": 0.5}]')


def grouped(rank, world, config):
    from kforge_train.build import build

    with build(config) as parts:
        return {name: rates.lr for name, rates in parts.optimizer.rates().items()}


def test_a_model_scales_its_rates(tokens, tmp_path):
    """mup_base_dim is a quarter of the width, so hidden matrices learn at a quarter of the rate."""
    plain = run_ranks(grouped, 1, job(tokens, tmp_path / "plain"))[0]
    scaled = run_ranks(grouped, 1, job(tokens, tmp_path / "scaled", model__mup_base_dim=4))[0]
    assert scaled.pop("matrices x0.25") == pytest.approx(0.25 * plain.pop("matrices"))
    assert scaled == plain


def test_a_resume_takes_other_rates_and_refuses_another_optimizer(tokens, tmp_path, caplog):
    first = job(tokens, tmp_path / "run", **MIXED, train__max_minutes=1e-6)
    assert run_ranks(train, 1, first) == [75]
    slower = RULES.replace("0.5", "0.25")
    with caplog.at_level("INFO", "kforge"):
        assert run_ranks(train, 1, job(tokens, tmp_path / "run", **{**MIXED, "optim__groups": slower})) == [0]
    other = RULES.replace("torch.optim.Adamax", "adamw")
    again = job(tokens, tmp_path / "run", **{**MIXED, "optim__groups": other, "train__steps": 8})
    with pytest.raises(AssertionError, match=r"only in the checkpoint: optim\.state\.embed\.weight\.exp_inf"):
        run_ranks(train, 1, again)
