from pathlib import Path

import pytest

from kforge_parallel import ParallelConfig
from kforge_train import ConfigError, resolve_config
from kforge_train.saved import fit_layout, load_run, save_config


def test_a_run_is_found_again_from_anywhere_and_after_a_move(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    config = resolve_config("tiny", {"data.train": "shards", "train.run_dir": "runs", "optim.lr": 1e-2}).config
    save_config(config)
    monkeypatch.chdir("/")
    found = load_run(tmp_path / "runs")
    assert found.data.train == str(tmp_path / "shards")
    assert found.data.heldout == ""
    assert found.train.run_dir == str(tmp_path / "runs")
    assert found.optim == config.optim and found.model == config.model
    (tmp_path / "runs").rename(tmp_path / "moved")
    assert load_run(tmp_path / "moved").train.run_dir == str(tmp_path / "moved")
    assert [path.name for path in (tmp_path / "moved").iterdir()] == ["config.toml"]


def test_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(ConfigError, match=r"is no run: it has no config\.toml"):
        load_run(Path(tmp_path))


@pytest.mark.parametrize(
    ("saved", "world", "axes"),
    [
        ({"tp": 2, "dp_shard": 2}, 4, (1, 2, 2)),
        ({"tp": 2, "dp_shard": 2}, 1, (1, -1, 1)),
        ({"tp": 2}, 6, (1, -1, 2)),
        ({"tp": 2, "dp_replicate": 2}, 3, (1, -1, 1)),
    ],
)
def test_a_layout_that_does_not_fit_gives_way_to_shards(saved, world, axes):
    fitted = fit_layout(ParallelConfig(device="cpu", **saved), world)
    assert (fitted.dp_replicate, fitted.dp_shard, fitted.tp) == axes
