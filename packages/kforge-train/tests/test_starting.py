"""Where the weights of another run are looked for."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from torch import nn

from kforge_ckpt import Checkpointer
from kforge_train.starting import source_of


@pytest.mark.parametrize("kind", ["folder", "url"])
def test_a_run_and_a_folder_of_checkpoints_are_both_found(tmp_path: Path, kind: str) -> None:
    run = str(tmp_path / "run") if kind == "folder" else f"memory://{uuid.uuid4().hex}/run"
    ckpt = Checkpointer(f"{run}/checkpoints")
    ckpt.save(3, {"model": nn.Linear(2, 2)})
    ckpt.close()
    assert source_of(run).steps() == [3]
    assert source_of(f"{run}/checkpoints").steps() == [3]
    assert source_of(f"{run}-of-nobody").steps() == []
