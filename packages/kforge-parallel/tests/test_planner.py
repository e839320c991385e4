import itertools
import json
import math
import subprocess
import sys

import pytest

from kforge_parallel import Machine, ParallelConfig, Work, estimate_layout, plan_layouts
from kforge_parallel.cli import bytes_of, main, read_shape
from kforge_parallel.planner import bubble

LLAMA_8B = {"vocab_size": 128_256, "dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "ffn_dim": 14_336}
SMALL = {"vocab_size": 1024, "dim": 256, "n_layers": 4, "n_heads": 4, "ffn_dim": 1024}
EXPERTS = {**SMALL, "n_experts": 8}


def plan(shape=LLAMA_8B, gpus=8, memory=141e9, global_rows=64, **more):
    return plan_layouts(shape, gpus, memory, row_tokens=4096, global_rows=global_rows, **more)


def test_what_fits_is_ranked_and_is_what_the_estimate_says():
    found = plan()
    assert [one.seconds for one in found.fitting] == pytest.approx(sorted(o.seconds for o in found.fitting), rel=1e-2)
    for one in found.fitting:
        told = estimate_layout(LLAMA_8B, one.config, 8, one.work)
        assert told == one.estimate and told.peak <= 0.92 * 141e9
        assert one.work.microbatch_rows * one.work.microbatches * one.config.dp_replicate * one.config.dp_shard == 64
        assert 0 < one.mfu <= Machine().efficiency
    names = [one.name for one in found.fitting]
    assert names[0] == "dp_shard 8" and len({*names}) == len(names)


def test_what_does_not_fit_says_why_and_the_nearest_comes_first():
    found = plan(gpus=1, global_rows=8)
    assert not found.fitting
    ((candidate, why),) = found.beyond
    assert candidate.config.recompute == "full" and candidate.work.microbatches == 1  # which need no sums
    over = candidate.estimate.peak - 0.92 * 141e9
    assert why.startswith(f"{over / 1e9:.2f} GB too much, moments 64.24 GB and ")
    assert "storage = split and moments in bf16" in why
    lean = plan(
        gpus=1,
        global_rows=8,
        config=ParallelConfig(storage="split", compile=True),
        work=Work(row_tokens=1, moments="bf16"),
    )
    assert len(lean.fitting) == 1
    peaks = [one.estimate.peak for one, _ in plan(memory=40e9).beyond]
    assert peaks == sorted(peaks) and len(peaks) > 3


def test_the_cost_of_a_step_by_hand():
    machine = Machine(peak_flops=1e15, efficiency=0.5, host_bytes_per_s=1e11, network_bytes_per_s=1e10)
    (alone,) = plan(SMALL, 1, global_rows=1, machine=machine).fitting
    matrices = 4 * (3 * 256 * 256 + 256 * 256 + 3 * 256 * 1024) + 1024 * 256
    flops = 3 * 4096 * (2 * matrices + 4 * 4 * 4 * 64 * 4097 / 2)
    assert alone.seconds == pytest.approx(flops / 0.5e15, rel=1e-12)
    assert alone.mfu == pytest.approx(0.5, rel=1e-12)
    pairs = {one.name: one for one in plan(SMALL, 2, global_rows=2, machine=machine).fitting}
    tp = pairs["tp 2"]
    compute, sent = flops / 0.5e15, tp.estimate.sent["tp"] / 1e11
    assert tp.seconds == pytest.approx(compute + sent, rel=1e-12)
    shards = pairs["dp_shard 2"]
    assert shards.seconds == pytest.approx(max(compute, shards.estimate.sent["dp_shard"] / 1e11), rel=1e-12)
    apart = Machine(peak_flops=1e15, efficiency=0.5, host_bytes_per_s=1e11, network_bytes_per_s=1e10, gpus_per_host=1)
    far = {one.name: one for one in plan(SMALL, 2, global_rows=2, machine=apart).fitting}
    assert "tp 2" not in far  # a group of it stays in a host
    slow = far["dp_shard 2"]  # which keeps what it has gathered now
    assert slow.seconds == pytest.approx(slow.estimate.sent["dp_shard"] / 1e10, rel=1e-12)
    assert slow.estimate.sent["dp_shard"] < shards.estimate.sent["dp_shard"]


def test_recomputation_is_taken_where_it_has_to_be():
    roomy, tight = plan(memory=141e9), plan(memory=40e9)
    assert all(one.config.recompute == "none" for one in roomy.fitting[:3])
    assert {one.config.recompute for one in tight.fitting} > {"full"} or tight.fitting[0].config.recompute != "none"
    assert tight.fitting[0].seconds > roomy.fitting[0].seconds


def test_experts_are_dealt_out():
    found = plan(EXPERTS, 8)
    assert {one.config.ep for one in found.fitting} == {1, 2, 4, 8}
    assert not any(one.config.recompute == "selective" for one in found.fitting)  # not in compiled blocks


def test_layouts_that_cannot_be_are_counted():
    odd = plan({**SMALL, "n_heads": 6, "n_kv_heads": 3, "head_dim": 64}, 8, global_rows=4)
    assert any("n_heads = 6 cannot be split over parallel.tp = 4" in why for why in odd.refused)
    assert any("4 rows a step cannot be shared evenly by the data ranks; take a multiple" in w for w in odd.refused)
    told = str(odd)
    assert "layouts cannot be:" in told


def test_bubbles():
    def part(word, pp=4, microbatches=8, **more):
        return bubble(ParallelConfig(pp_schedule=word, **more), pp, microbatches)

    assert part("1f1b") == part("gpipe") == 3 / 8
    assert part("interleaved_1f1b") == 3 / 16 and part("interleaved_1f1b", pp_stages=4) == 3 / 32
    assert part("zbv") == 3 / 48
    assert part("1f1b", pp=1) == 0


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"efficiency": 1.5}, "a share of the peak"),
        ({"peak_flops": 0.0}, "above 0"),
        ({"network_bytes_per_s": math.inf}, "above 0"),
        ({"gpus_per_host": 1.5}, "must be a whole number"),
        ({"peak_flops": 989e24}, r"peak_flops = 9\.89e\+26 is more than any device has, by far: .* mind the unit"),
        ({"host_bytes_per_s": 370e18}, "host_bytes_per_s .* mind the unit"),
    ],
)
def test_machines_that_cannot_be_are_refused(options, told):
    with pytest.raises(ValueError, match=told):
        Machine(**options)
    with pytest.raises(ValueError, match="gpus = 0"):
        plan(gpus=0)


def test_the_command_ranks_without_torch(tmp_path):
    file = tmp_path / "shape.toml"
    file.write_text("[shape]\n" + "\n".join(f"{key} = {value}" for key, value in LLAMA_8B.items()))
    words = ["plan", "--shape", str(file), "--gpus", "16", "--memory", "141GB"]
    code = f"import sys; from kforge_parallel.cli import main; main({words!r}); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    first, head, best, *_ = done.stdout.splitlines()
    assert first.endswith("layouts fit into 92% of 141.00 GB")
    assert head.split() == [
        *("layout", "rows", "recompute", "reshard", "mfu", "step"),
        *("peak", "weights", "state", "gradients", "activations", "gathered"),
    ]
    assert best.strip().startswith("dp_") and "%" in best


def test_the_command_as_json_and_its_errors(tmp_path, capsys):
    file = tmp_path / "shape.json"
    file.write_text(json.dumps(SMALL))
    words = ["plan", "--shape", str(file), "--gpus", "2"]
    assert main([*words, "--memory", "80GiB", "--storage", "split", "--moments", "bf16", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["memory"] == 80 * 2**30 and told["fitting"][0]["config"]["storage"] == "split"
    assert main([*words, "--memory", "many"]) == 2
    assert "--memory many is no size" in capsys.readouterr().err
    assert main([*words, "--memory", "141"]) == 2
    assert "--memory 141 is 141 bytes, less than any device has; write 141GB" in capsys.readouterr().err
    assert main([*words, "--memory", "80GB", "--global-rows", "0"]) == 2
    assert "--global-rows 0 must be a whole number above 0" in capsys.readouterr().err
    file.write_text(json.dumps({**SMALL, "n_layer": 3}))
    assert main([*words, "--memory", "80GB"]) == 2
    assert "did you mean n_layers" in capsys.readouterr().err
    assert main(["plan", "--shape", str(tmp_path / "none"), "--gpus", "2", "--memory", "1GB"]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_sizes_of_memory_and_files(tmp_path):
    assert [bytes_of(text) for text in ("141GB", "80 GiB", "8e10", "1.5TB")] == [141e9, 80 * 2**30, 8e10, 1.5e12]
    file = tmp_path / "shape.toml"
    file.write_text("dim = 64\ntie_embeddings = true\n")
    assert read_shape(str(file)) == {"dim": 64, "tie_embeddings": True}


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("list.json", "[1, 2]", "list.json holds no table of sizes, such as dim = 4096, but [1, 2]"),
        ("nothing.json", "null", "holds no table of sizes, such as dim = 4096, but None"),
        ("broken.json", '{"dim": 4', "cannot be read as JSON (a name in .json, or { first) or TOML: Expecting"),
        ("twice.json", '{"dim": 4096, "dim": 64}', "dim is there twice"),
        ("twice.toml", "dim = 4\ndim = 5", "Cannot overwrite a value"),
        ("sizes.yaml", "dim: 64", "cannot be read as JSON (a name in .json, or { first) or TOML"),
        ("bits.json", b"\xff\xfe\x00", "cannot be read"),
        ("config.json", '{"hidden_size": 64, "num_experts": 2}', "write its sizes anew: hidden_size is"),
        ("job.toml", "[model]\ndim = 64", "sizes stand alone or below `shape`, and it has them below model"),
        ("few.json", '{"dim": 64}', "shape has no vocab_size"),
    ],
)
def test_a_file_without_sizes_says_what_it_is(tmp_path, capsys, name, text, told):
    file = tmp_path / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert main(["plan", "--shape", str(file), "--gpus", "1", "--memory", "80GB"]) == 2
    assert told in capsys.readouterr().err


def test_a_byte_order_mark_is_no_content(tmp_path):
    file = tmp_path / "shape.json"
    file.write_text('\ufeff{"dim": 64}', "utf-8")
    assert read_shape(str(file)) == {"dim": 64}


@pytest.mark.parametrize(("gpus", "names"), [(7, {"dp_shard 7", "cp 7", "pp 7"}), (24, {"pp 3 × tp 8", "pp 3 × cp 8"})])
def test_numbers_of_devices_with_odd_factors_have_stages_and_parts_of_rows_too(gpus, names):
    shape = {**LLAMA_8B, "n_layers": 42}
    found = plan_layouts(shape, gpus, 141e9, row_tokens=8400, global_rows=8 * gpus)
    assert names <= {one.name for one in (*found.fitting, *(one for one, _ in found.beyond))}
    assert str(found).startswith(f"{len(found.fitting)} layouts fit")


OPTIONS = {
    "precision": ("bf16", "fp16", "tf32", "fp32"),
    "storage": ("fp32", "split", "stochastic"),
    "fp8": ("none", "tensorwise", "rowwise"),
    "schedule": ("1f1b", "gpipe", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"),
    "optimizer": ("adamw", "lion", "cautious_lion", "muon", "schedule_free", "none"),
    "moments": ("fp32", "bf16", "int8"),
}


def can_be(precision, storage, fp8, optimizer, moments, **_):
    narrow = precision == "bf16" or (storage == "fp32" and fp8 == "none")
    return narrow and (moments == "fp32" or optimizer in ("adamw", "muon"))


def test_any_two_options_are_planned_for_or_refused_by_name(tmp_path, capsys):
    file = tmp_path / "shape.json"
    file.write_text(json.dumps(SMALL))
    first = {name: words[0] for name, words in OPTIONS.items()}
    for a, b in itertools.combinations(OPTIONS, 2):
        for one, other in itertools.product(OPTIONS[a], OPTIONS[b]):
            chosen = {**first, a: one, b: other}
            words = [word for name, value in chosen.items() for word in (f"--{name}", value)]
            code = main(["plan", "--shape", str(file), "--gpus", "1", "--memory", "80GB", *words])
            error = capsys.readouterr().err
            assert code == (0 if can_be(**chosen) else 2), (chosen, error)
            assert (f"--{a}" in error and f"--{b}" in error) == (not can_be(**chosen)), error


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("dim = true", "shape.dim = True must be a whole number of at least 1"),
        ("n_layers = 2.5", "shape.n_layers = 2.5 must be a whole number"),
        ("n_layers = 4.0", "shape.n_layers = 4.0 must be a whole number"),
        ("ffn_dim = nan", "shape.ffn_dim = nan must be a whole number"),
        ("vocab_size = inf", "shape.vocab_size = inf must be a whole number"),
        ("n_heads = -4", "shape.n_heads = -4 must be a whole number of at least 1"),
        ("n_heads = 0", "shape.n_heads = 0 must be a whole number of at least 1"),
        ('dim = "256"', "shape.dim = '256' must be a whole number"),
        ("n_experts = true", "shape.n_experts = True must be a whole number of at least 0"),
        ("n_experts = -1", "shape.n_experts = -1 must be a whole number of at least 0"),
        ("moe_top_k = [2]", "shape.moe_top_k = [2] must be a whole number"),
        ('qk_norm = "yes"', "shape.qk_norm = 'yes' must be true or false"),
        ("tie_embeddings = -1", "shape.tie_embeddings = -1 must be true or false"),
    ],
)
def test_what_is_no_size_is_refused_in_a_file(tmp_path, capsys, line, told):
    key = line.split()[0]
    file = tmp_path / "shape.toml"
    file.write_text("\n".join([f"{name} = {size}" for name, size in SMALL.items() if name != key] + [line]))
    assert main(["plan", "--shape", str(file), "--gpus", "1", "--memory", "80GB"]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        *(("--gpus", text) for text in ("0", "-1", "1.5", "nan", "inf", "true")),
        *(("--memory", text) for text in ("0GB", "-80GB", "nan", "inf", "1e999", "true")),
        *(("--row-tokens", text) for text in ("0", "-1", "1.5", "nan")),
        *(("--global-rows", text) for text in ("0", "-1", "1.5", "inf")),
        *(("--gpus-per-host", text) for text in ("0", "-8", "0.5", "nan")),
        *((name, text) for name in ("--peak-tflops", "--efficiency") for text in ("0", "-1", "nan", "inf", "many")),
        *(("--peak-tflops", "989e12"), ("--host-gb-s", "370e9"), ("--network-gb-s", "45e9")),
        *((name, text) for name in ("--host-gb-s", "--network-gb-s") for text in ("0", "-1", "nan", "inf", "many")),
    ],
    ids=" ".join,
)
def test_what_is_no_number_is_refused_on_the_command_line(tmp_path, capsys, words):
    file = tmp_path / "shape.json"
    file.write_text(json.dumps(SMALL))
    name, text = words
    try:
        code = main(["plan", "--shape", str(file), "--gpus", "1", "--memory", "80GB", f"{name}={text}"])
    except SystemExit as refused:
        code = refused.code
    assert code == 2 and name in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"gpus": True}, "gpus = True must be a whole number above 0"),
        ({"gpus": 2.0}, "gpus = 2.0 must be a whole number above 0"),
        ({"global_rows": 1.5}, "global_rows = 1.5 must be a whole number above 0"),
        ({"memory": math.nan}, "memory = nan must be bytes"),
        ({"memory": math.inf}, "memory = inf must be bytes"),
        ({"memory": True}, "memory = True must be bytes"),
    ],
)
def test_what_is_no_number_is_refused_of_a_program(changes, told):
    with pytest.raises(ValueError, match=told):
        plan(**changes)


def test_a_moment_that_an_optimizer_has_not_is_refused():
    with pytest.raises(ValueError, match="moments = 'int8' is how AdamW keeps its moments, and optimizer = 'lion'"):
        Work(row_tokens=8, optimizer="lion", moments="int8")
    with pytest.raises(ValueError, match="row_variance = true is a moment of muon, and optimizer = 'adamw'"):
        Work(row_tokens=8, row_variance=True)
    assert Work(row_tokens=8, optimizer="muon", moments="int8", row_variance=True)
    with pytest.raises(ValueError, match="microbatches = True must be a whole number"):
        Work(row_tokens=8, microbatches=True)
    with pytest.raises(ValueError, match=r"row_tokens = 8\.5 must be a whole number"):
        Work(row_tokens=8.5)
