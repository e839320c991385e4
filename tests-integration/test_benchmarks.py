"""The benchmarks run, at a size that measures nothing, and leave their numbers in the common form."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
KEYS = {"row", "value", "unit", "better", "target", "reference", "spread"}


def check_form(path, name):
    result = json.loads(path.read_text(encoding="utf-8"))
    assert result["benchmark"] == name
    assert {"python", "torch", "cpu", "gpu", "date", "versions"} <= result["environment"].keys()
    assert result["rows"]
    for row in result["rows"]:
        assert row.keys() >= KEYS
        assert row["better"] in ("higher", "lower")
        assert row["value"] > 0
    return {row["row"]: row for row in result["rows"]}


def test_a_row_of_the_speed_benchmark_runs_on_a_cpu(tmp_path):
    words = ["--smoke", "--once", "--rows", "350m,bare-350m", "--out", str(tmp_path)]
    command = [sys.executable, str(BENCHMARKS / "h200.py"), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = check_form(tmp_path / "h200-smoke.json", "h200-smoke")
    row = rows["350m"]
    assert row["config"]["tokens_per_step"] == 256 and row["config"]["model"]["vocab_size"] == 257
    parts = row["parts"]
    assert parts["loss_finite"] and parts["loss_falling"] and parts["skipped_steps"] == 0
    assert len(parts["step_s"][0]) == 10 and min(parts["step_s"][0]) > 0
    floor = parts["floor"]
    assert floor["parts_s"].keys() == {"products", "attention", "elementwise", "accumulation", "optimizer"}
    assert sum(floor["parts_s"].values()) == pytest.approx(floor["seconds"])
    assert rows["350m value/floor"]["value"] == pytest.approx(row["value"] / floor["tokens_per_s"])
    assert rows["350m trainer/bare"]["parts"]["bare_tokens_per_s"][0] > 0
    assert "trainer/bare" in done.stdout and "loss_falling" in done.stdout
    assert str(tmp_path) not in (tmp_path / "h200-smoke.json").read_text()


def test_an_unknown_row_names_the_known_ones(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "h200.py"), "--rows", "9b", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no row is called 9b" in done.stderr and "350m" in done.stderr


def test_kernels_are_summed_by_class_and_overlap_is_not_idle(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from _trace import summary

    def event(name, start, duration, cat="kernel"):
        return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": duration}

    events = [
        event("nvjet_tst_128x256", 1000.0, 400.0),
        event("triton_poi_fused__to_copy_add", 1300.0, 200.0),  # 100 of it beside the product
        event("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", 1600.0, 300.0),
        event("Memcpy HtoD", 1900.0, 100.0, "gpu_memcpy"),
        event("aten::mm", 900.0, 5000.0, "cpu_op"),  # the host's view of the same: not counted
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    found = summary(path)
    assert found["classes_ms"] == {"gemm": 0.4, "attention": 0.3, "elementwise/triton": 0.2, "copy/memset": 0.1}
    assert (found["span_ms"], found["busy_ms"], found["idle_ms"]) == pytest.approx((1.0, 0.9, 0.1))
    assert found["overlap_ms"] == pytest.approx(0.1)


def test_the_benchmark_of_muon_runs_on_a_cpu(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "muon.py"), "--turns", "2", "--out", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = check_form(tmp_path / "muon_cpu.json", "muon_cpu")
    assert rows["muon: step / adamw's"]["target"] == 1.05
    assert rows["muon: step / adamw's"]["parts"]["tokens a step"] == 128
    assert {"adamw: optimizer", "muon: optimizer", "torch.optim.Muon: hidden matrices"} <= rows.keys()


@pytest.mark.parametrize("writer", ["thread", "process"])
def test_the_benchmark_of_checkpoints_runs_on_a_cpu(tmp_path, writer):
    words = ["--gib", "0.12", "--turns", "1", "--writer", writer, "--out", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "ckpt.py"), *words], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = check_form(tmp_path / "ckpt_cpu.json", "ckpt_cpu")
    assert rows["a synchronous save"]["bytes"] == 2 * 2**26
    if sys.platform == "linux":
        own = 15e6 if writer == "process" else 5e6
        for label, least in (("the state", 2 * 2**26), ("staging_bytes, a quarter of the state", 2 * 2**25)):
            parts = rows.pop(f"extra host memory of a background save / {label}")["parts"]
            assert least <= parts["extra_bytes"] <= least + own, "blocks of 32 MiB, two at least"
    assert len(rows) == 9


def test_small_tensors_and_several_files_are_timed(tmp_path):
    for name, words in (("ckpt_small", ["--tensors", "200"]), ("ckpt_threads", ["--gib", "0.1"])):
        command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *words, "--turns", "1", "--out", str(tmp_path)]
        done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        rows = check_form(tmp_path / f"{name}.json", name)
        assert len(rows) == 8
    assert rows["save, 4 files at once"]["bytes"] == 8 * 2**24


def test_the_race_of_optimizers_runs(tokens, tmp_path):
    words = ["--steps", "4", "--rates", "1", "--tokens", str(tokens), "--out", str(tmp_path)]
    command = [sys.executable, str(BENCHMARKS / "optim_race.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = check_form(tmp_path / "optim_race.json", "optim_race")
    assert {row.split()[0] for row in rows} == {"adamw", "muon", "lion", "adamax", "schedule_free"}
    assert all(list(row["parts"]["heldout_loss"]) == ["1", "2", "3", "4"] for row in rows.values())
    assert (tmp_path / "optim_race.png").read_bytes().startswith(b"\x89PNG")


def test_the_benchmark_of_optimizers_runs_on_a_cpu(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "optim.py"), "--turns", "1", "--device", "cpu", "--out", str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = check_form(tmp_path / "optim_cpu.json", "optim_cpu")
    kept = {name: row["value"] for name, row in rows.items() if row["unit"] == "bytes"}
    for name, nbytes in (("adamw", 12), ("adamw, split, bf16 moments", 8), ("adamw, split", 12), ("lion", 8)):
        assert kept[f"{name}: bytes a parameter"] == pytest.approx(nbytes, rel=1e-3)
    assert 6 < kept["adamw, split, 8-bit moments: bytes a parameter"] < 6.1
    assert rows["torch.optim.AdamW(fused=True)"]["unit"] == "s"


def test_the_benchmark_of_data_runs(tmp_path):
    words = ["--tokens", "400000", "--turns", "1", "--out", str(tmp_path)]
    command = [sys.executable, str(BENCHMARKS / "data.py"), *words]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = check_form(tmp_path / "data.json", "data")
    assert rows["best fit: fill"]["value"] > 0.97
    for name in ("memory after 1,000,000 rows more", "stream: memory after 100,000 rows more"):
        assert rows[name]["value"] < rows[name]["target"] == pytest.approx(rows[name]["reference"] + 50)
    assert rows["stream with 2 processes / datasets and DataLoader"]["unit"] == "ratio"
    assert rows["best-fit rows"]["target"] == 100e6 and rows["cut rows / loop over tokens"]["value"] > 1


@pytest.mark.timeout(300)  # seven runs, each a process
def test_the_comparison_of_losses_runs_on_a_cpu(tokens, tmp_path):
    words = ["--smoke", "--jobs", "2", "--tokens", str(tokens), "--out", str(tmp_path)]
    done = subprocess.run([sys.executable, str(BENCHMARKS / "loss.py"), *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = check_form(tmp_path / "loss-smoke.json", "loss-smoke")
    assert rows["split"]["value"] == pytest.approx(rows["fp32, seed 1"]["value"], abs=1e-3)
    assert 0 < rows["fp8 from fp32"]["value"] != rows["fp8, planted fault from fp32"]["value"]
    for way in ("documents apart", "rows as one text"):
        base, split, packed = (rows[name]["parts"][way] for name in ("fp32, seed 1", "split", "packed"))
        assert split == pytest.approx(base, abs=1e-3) and 3 < packed != base
    seeds = [rows[f"fp32, seed {seed}"]["parts"]["documents apart"] for seed in (1, 2, 3)]
    far = abs(rows["packed"]["parts"]["documents apart"] - seeds[0]) / (max(seeds) - min(seeds))
    assert rows["packed from fp32, held-out"]["value"] == pytest.approx(far)
    means = [rows[name]["value"] for name in ("fp32, seed 1", "fp32, seed 2", "fp32, seed 3")]
    far = abs(rows["packed"]["value"] - means[0]) / (max(means) - min(means))
    assert rows["packed from fp32"]["value"] == pytest.approx(far) and rows["packed from fp32"]["target"] == 1
    assert (tmp_path / "loss-smoke.png").read_bytes().startswith(b"\x89PNG")


def test_rows_of_an_earlier_call_keep_their_date(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import _results

    def write(name, day, gpu="H200"):
        environment = {"torch": "2.11", "gpu": gpu, "date": day}
        path = _results.write("b", [_results.row(name, 1.0, "s")], environment, tmp_path, keep=True, quiet=True)
        return {row["row"]: row.get("date") for row in json.loads(path.read_text())["rows"]}

    assert write("one", "Monday") == {"one": None}
    assert write("two", "Tuesday") == {"one": "Monday", "two": None}
    assert write("three", "Friday") == {"one": "Monday", "two": "Tuesday", "three": None}
    assert write("two", "Sunday") == {"one": "Monday", "three": "Friday", "two": None}
    assert write("two", "Sunday", gpu="another") == {"two": None}


def test_layouts_are_timed_beside_a_plain_script(tmp_path):
    words = ["--tiny", "--gpus", "2", "--rows", "fsdp-fp32", "--out", str(tmp_path)]
    command = [sys.executable, str(BENCHMARKS / "multi_gpu.py"), *words]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = check_form(tmp_path / "multi_gpu-tiny.json", "multi_gpu-tiny")
    assert rows.keys() == {"by-hand, 2 GPUs", "fsdp-fp32, 2 GPUs", "fsdp-fp32, 2 GPUs / by-hand"}
    mine, plain = rows["fsdp-fp32, 2 GPUs"], rows["by-hand, 2 GPUs"]
    assert rows["fsdp-fp32, 2 GPUs / by-hand"]["value"] == pytest.approx(plain["value"] / mine["value"])
    assert mine["config"]["tokens_per_step"] == 256 and len(mine["parts"]["peak_gb"]) == 2
    # Both start from the same weights and read the same rows.
    assert plain["parts"]["losses"][0] == pytest.approx(mine["parts"]["losses"][0], rel=0.02)
    assert str(tmp_path) not in (tmp_path / "multi_gpu-tiny.json").read_text()


def test_what_was_measured_on_several_gpus_before_an_interruption_is_kept(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from multi_gpu import Session, in_order, measure

    session = Session(tmp_path, 4, True)
    asked = []

    def run(name):
        asked.append(name)
        if len(asked) == 3:
            raise KeyboardInterrupt
        found = {"step_s": [0.5, 0.25], "peak_bytes": 1, "losses": [2.0, 1.0], "start_s": {}, "gpu": None, "cost_s": 1}
        return [{**found, "step_s": [0.5 + rank, 0.25]} for rank in range(session.processes(name))]

    session.run = run
    order = in_order(["fsdp", "hsdp", "moe-ep4"], session, {})
    assert order == ["one-8b", "fsdp", "hsdp", "one-moe", "moe-ep4"]
    kept = []
    measured = measure(order, session, {}, kept.extend)
    assert list(measured) == ["one-8b", "fsdp"] and kept == [*measured["one-8b"], *measured["fsdp"]]
    one, (speed, ratio) = measured["one-8b"][0]["value"], measured["fsdp"]
    assert one == pytest.approx((128 / 0.5 + 128 / 0.25) / 2)
    assert speed["value"] == pytest.approx((512 / 3.5 + 512 / 0.25) / 2 / 4)  # the slowest rank's time
    assert ratio["row"] == "fsdp, 4 GPUs / one" and ratio["value"] == pytest.approx(speed["value"] / one)
    assert ratio["target"] == 0.95
    kept = {"8b, 1 GPU": measured["one-8b"][0]}
    assert in_order(["hsdp"], session, kept) == ["hsdp"]
