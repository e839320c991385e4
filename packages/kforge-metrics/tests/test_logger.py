from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from kforge_metrics import close_logger, get_logger, read_log


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    close_logger()


def speak() -> None:
    logging.getLogger("kforge_ckpt").info("saved")
    logging.getLogger("kforge_data").warning("slow disk")
    logging.getLogger("somelib").info("chatter")
    logging.getLogger("somelib").warning("old option")


def test_rank_0_speaks_on_the_console_and_in_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = get_logger(0, 2, tmp_path)
    logger.info("hello %s", "world")
    speak()
    err = capsys.readouterr().err.splitlines()
    assert [line.split(" ", 1)[1] for line in err] == [
        "INFO kforge: hello world",
        "INFO kforge_ckpt: saved",
        "WARNING kforge_data: slow disk",
        "WARNING somelib: old option",
    ]
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["message"] for line in lines] == ["hello world", "saved", "slow disk", "old option"]
    assert lines[2] == {
        "time": lines[2]["time"],
        "rank": 0,
        "level": "WARNING",
        "logger": "kforge_data",
        "message": "slow disk",
    }


def test_warnings_of_other_ranks_go_into_the_log_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    get_logger(3, 4, tmp_path)
    assert list(tmp_path.iterdir()) == []
    speak()
    try:
        raise KeyError("gone")
    except KeyError:
        logging.getLogger("kforge").exception("failed")
    assert capsys.readouterr().err == ""
    assert [path.name for path in tmp_path.iterdir()] == ["log.rank_00003.jsonl"]
    lines = read_log(tmp_path)
    assert [(line["rank"], line["message"]) for line in lines] == [(3, "slow disk"), (3, "old option"), (3, "failed")]
    assert "KeyError: 'gone'" in lines[2]["exception"]


def test_without_a_folder_warnings_of_other_ranks_are_not_lost(capsys: pytest.CaptureFixture[str]) -> None:
    get_logger(3, 4)
    speak()
    err = capsys.readouterr().err
    assert "saved" not in err and "[rank 3] WARNING kforge_data: slow disk" in err


def test_decided_per_call_without_duplicates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    level, handlers = root.level, len(root.handlers)
    get_logger(1, 2, tmp_path / "a")
    logging.getLogger("kforge").info("unheard")
    for _ in range(3):
        get_logger(0, 2, tmp_path / "b")
    logging.getLogger("kforge").info("once")
    assert capsys.readouterr().err.count("once") == 1
    assert [line["message"] for line in read_log(tmp_path / "b")] == ["once"] and not (tmp_path / "a").exists()
    close_logger()
    assert (root.level, len(root.handlers)) == (level, handlers)
    logging.getLogger("kforge").info("silence")
    assert "silence" not in capsys.readouterr().err


def test_console_is_the_standard_error_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    get_logger()
    later = io.StringIO()
    monkeypatch.setattr("sys.stderr", later)  # as a live progress bar does
    logging.getLogger("kforge").info("above the bar")
    assert "above the bar" in later.getvalue()


def test_logs_of_all_ranks_are_one_in_order_of_time(tmp_path: Path) -> None:
    for rank in (1, 0, 2):
        get_logger(rank, 3, tmp_path)
        logging.getLogger("kforge").warning("from %d", rank)
    with open(tmp_path / "log.jsonl", "a") as file:
        file.write('{"time": 1, "ra')  # killed here
    assert [line["message"] for line in read_log(tmp_path)] == ["from 1", "from 0", "from 2"]


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match="rank = 2 is none of a world of 2"):
        get_logger(2, 2)
