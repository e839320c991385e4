"""What is told where no layout fits is what fits when it is asked for."""

import json
import re

from kforge_parallel.cli import main

LLAMA_8B = {"vocab_size": 128_256, "dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "ffn_dim": 14_336}


def test_where_nothing_fits_the_command_fails_and_says_what_would(tmp_path, capsys):
    file = tmp_path / "shape.json"
    file.write_text(json.dumps(LLAMA_8B))

    def run(*words):
        code = main(["plan", "--shape", str(file), *words])
        return code, *capsys.readouterr()

    code, out, error = run("--gpus", "1", "--memory", "80GB")
    assert code == 1 and out.startswith("0 layouts fit")
    first, *helps = error.splitlines()
    assert first == "kforge-parallel: no layout of 1 device fits into 92% of 80.00 GB" and helps[0] == "what would fit:"
    size, devices = (re.match(r"  (\d+) (GB a device|devices): ", line)[1] for line in helps[1:3])
    assert run("--gpus", "1", "--memory", f"{size}GB")[0] == 0
    assert run("--gpus", "1", "--memory", f"{int(size) - 2}GB")[0] == 1
    assert run("--gpus", devices, "--memory", "80GB")[0] == 0
    assert run("--gpus", str(int(devices) // 2), "--memory", "80GB")[0] == 1
    code, out, error = run("--gpus", "1", "--memory", "120GB", "--json")
    assert code == 1 and json.loads(out)["fitting"] == []
    assert "  storage = split and moments = bf16: one process" in error and "parallel.cpu_offload = true" in error
    assert run("--gpus", "1", "--memory", "120GB", "--storage", "split", "--moments", "bf16")[0] == 0
    code, _, error = run("--gpus", "67", "--memory", "141GB", "--global-rows", "4", "--row-tokens", "4095")
    assert code == 1 and "no layout of 67 devices can be: 4 rows a step cannot be shared evenly" in error
