import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kforge_parallel import mesh_table
from kforge_parallel.cli import main


def test_the_picture_shows_groups_and_hosts(capsys):
    assert main(["mesh", "--world", "16", "--tp", "2", "--dp-replicate", "2"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("16 processes on 2 hosts of 8: dp_replicate 2 × dp_shard 4 × tp 2\n")
    assert "  host 0  dp_replicate 0  dp_shard 0  tp [ 0  1]\n" in shown
    assert "  host 1  dp_replicate 1  dp_shard 0  tp [ 8  9]\n" in shown
    lines = {line.split("  ")[0]: line for line in shown.splitlines()}
    assert "0 2 4 6    no" in lines["dp_shard (FSDP)"]
    assert "0 8        all" in lines["dp_replicate"]
    assert "warning" not in shown


def test_the_picture_of_the_readme_is_what_is_drawn(capsys):
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    command, picture = re.search(r"\$ kforge-parallel (mesh [^\n]*)\n(.*?)```", readme, re.S).groups()
    assert main(command.split()) == 0
    assert capsys.readouterr().out == picture


def test_tp_over_hosts_is_marked_and_warned_of(capsys):
    assert main(["mesh", "--world", "12", "--tp", "3", "--ranks-per-host", "4"]) == 0
    shown = capsys.readouterr().out
    assert "tp [ 3 |  4  5]" in shown
    assert "warning: 2 of 4 tp groups cross hosts" in shown


def test_stages_are_drawn_as_the_slowest_axis(capsys):
    assert main(["mesh", "--world", "8", "--pp", "2", "--tp", "2", "--ep", "4"]) == 0
    shown = capsys.readouterr().out
    assert "ep [0 1 2 3]" in shown and "pp 1" in shown


def test_parts_of_rows_are_drawn_inside_of_what_shards(capsys):
    assert main(["mesh", "--world", "8", "--cp", "2", "--tp", "2", "--ep", "4"]) == 0
    shown = capsys.readouterr().out
    assert "dp_shard × cp (FSDP)" in shown and "cp 1" in shown


def test_experts_have_a_picture_of_their_own(capsys):
    assert main(["mesh", "--world", "8", "--tp", "2", "--ep", "4"]) == 0
    shown = capsys.readouterr().out
    assert "experts (expert_shard 2 × ep 4):" in shown
    assert "expert_shard 1  ep [4 5 6 7]" in shown


def test_many_ranks_are_abbreviated(capsys):
    assert main(["mesh", "--world", "4096", "--tp", "8", "--dp-replicate", "4"]) == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) < 25
    assert "502 more such lines" in shown
    assert "4095" in shown


def test_json_is_the_table(capsys):
    assert main(["mesh", "--world", "8", "--tp", "-1", "--dp-replicate", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    table = mesh_table({"dp_replicate": 2, "tp": 4, "dp_shard": 1}, 8)
    assert told["axes"] == table.axes
    assert told["groups"] == table.groups
    assert told["ranks"][5] == {
        "rank": 5,
        "host": 0,
        "pp": 0,
        "dp_replicate": 1,
        "dp_shard": 0,
        "cp": 0,
        "tp": 1,
        "expert_shard": 1,
        "ep": 0,
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--world", "6", "--tp", "4"], "6 processes cannot be divided"),
        (["--world", "0"], "at least one process"),
        (["--world", "1", "--tp", "2"], "product is 2 (tp 2); set --world to a multiple of 2, or make an axis smaller"),
        (["--world", "1", "--dp-shard", "2"], "--world is 1; set --world to 2, or set --dp-shard -1 to take"),
        (["--world", "4", "--dp-shard", "2"], "--world is 4; set --world to 2, or set --dp-shard -1 to take"),
        (["--world", "4", "--tp", "0"], "--tp 0 must"),
        (["--world", "4", "--dp-replicate", "-2"], "--dp-replicate -2 must"),
        (["--world", "4", "--ep", "3"], "--ep 3 does not divide"),
        (["--world", "4", "--ranks-per-host", "0"], "--ranks-per-host 0"),
        (["--world", "4", "--tp", "-1", "--dp-replicate", "-1"], "--dp-replicate and --tp are -1, but only one axis"),
        (["--world", "1000001"], "--world 1000001 is more than the 1,000,000 processes"),
    ],
)
def test_what_cannot_be_is_an_error_of_one_line(arguments, words, capsys):
    assert main(["mesh", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert "parallel." not in error
    assert "torchrun" not in error


def test_a_reader_that_stops_reading_is_no_error():
    command = [sys.executable, "-m", "kforge_parallel", "mesh", "--world", "2000", "--json"]
    done = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert done.stdout.read(10)  # the rest, more than a pipe holds, is not taken
    done.stdout.close()
    assert done.stderr.read() == b""
    assert done.wait(timeout=60) == 0


def test_unknown_axes_are_named():
    with pytest.raises(ValueError, match="sp: no such axis; axes are pp"):
        mesh_table({"sp": 2}, 2)


def test_it_starts_without_torch():
    code = "import sys; sys.modules.update(torch=None, numpy=None); from kforge_parallel.cli import main; "
    code += "sys.exit(main(['mesh', '--world', '8', '--tp', '2']) or main(['world']) or main(['hosts', 'a[1-2]']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "tp [0 1]" in done.stdout
    assert "source: single" in done.stdout
    assert done.stdout.endswith("a1\na2\n")


def test_module_and_command_are_one():
    done = subprocess.run(
        [sys.executable, "-m", "kforge_parallel", "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith("kforge-parallel ")
