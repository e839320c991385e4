"""A run's weights as a folder of Hugging Face and back: logits, layouts, averages, dtypes, tokenizer, memory."""

import json
import math
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from jobs import job, train
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from kforge_ckpt import Checkpointer
from kforge_ckpt.export import SafetensorsFolder
from kforge_data import DataConfig, train_tokenizer
from kforge_model import ModelConfig, Transformer, config_from_hf, config_to_hf, to_hf
from kforge_model.hf import FAMILIES, family_of
from kforge_parallel.fsdp import full
from kforge_testing import RankFailure, run_ranks
from kforge_train import ConfigError, JobConfig
from kforge_train.cli import main
from kforge_train.hf import HfFolder, differing, export_folder, import_folder
from kforge_train.saved import fill_model, load_run, save_config

SIZES = {
    "vocab_size": 61,
    "vocab_multiple": 32,
    "dim": 32,
    "ffn_dim": 48,
    "n_layers": 2,
    "n_heads": 8,
    "n_kv_heads": 2,
    "head_dim": 12,  # not dim / n_heads
    "max_seq_len": 64,
    "norm_eps": 1e-5,
}
GEMMA = {**SIZES, "mlp": "geglu_tanh", "embed_scale": math.sqrt(32), "norm_placement": "sandwich"}
GEMMA |= {"window": 7, "attn_scale": 20**-0.5, "tie_embeddings": True}
EXPERTS = {"n_experts": 6, "moe_top_k": 3, "expert_dim": 20}
LATENT = {name: value for name, value in SIZES.items() if name != "n_kv_heads"} | EXPERTS
LATENT |= {"norm_eps": 1e-6, "attention": "mla", "rope_dim": 6, "v_head_dim": 7, "kv_lora_rank": 16, "q_lora_rank": 20}
LATENT |= {"moe_pattern": "DM", "shared_experts": 1, "router": "sigmoid", "router_bias": True, "router_scale": 1.5}
MODELS = {
    "llama": ModelConfig(**SIZES, qkv_bias=True, out_bias=True, mlp_bias=True),
    "mistral": ModelConfig(**SIZES, window=7),
    "qwen2": ModelConfig(**SIZES, qkv_bias=True, tie_embeddings=True),
    "qwen3": ModelConfig(**SIZES, qk_norm="per_head"),
    "olmo2": ModelConfig(**SIZES, qk_norm="across_heads", norm_placement="post"),
    "gemma": ModelConfig(**SIZES, mlp="geglu_tanh", embed_scale=math.sqrt(32), tie_embeddings=True),
    "gemma2": ModelConfig(**GEMMA, window_pattern="WF", attn_softcap=0.7, logit_softcap=0.9),
    "gemma3_text": ModelConfig(**GEMMA, window_pattern="WF", qk_norm="per_head", rope_theta_window=100.0),
    "mixtral": ModelConfig(**SIZES, **EXPERTS, window=7),
    "qwen3_moe": ModelConfig(**SIZES, **EXPERTS, qk_norm="per_head", moe_pattern="DM"),
    "deepseek_v3": ModelConfig(**LATENT),
}
IDS = torch.randint(61, (2, 16), generator=torch.Generator().manual_seed(3))


def a_run(config, run_dir):
    """A run of a model with random weights, norms and biases among them, as if it had been trained."""
    model = Transformer(config)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            base = 1.0 if tensor.ndim == 1 and name.endswith("norm.weight") else 0.0
            tensor.copy_(base + 0.15 * torch.randn_like(tensor))
            if name in ("embed.weight", "head.weight"):
                tensor[config.vocab_size :] = 0
    job_config = JobConfig(model=config, data=DataConfig(row_tokens=32))
    run_dir.mkdir(parents=True)
    save_config(replace(job_config, train=replace(job_config.train, run_dir=str(run_dir))))
    Checkpointer(run_dir / "checkpoints").save(3, {"model": model})
    return model.eval()


def model_of(run_dir, **changes):
    config = load_run(run_dir)
    model = Transformer(replace(config.model, **changes))
    fill_model(config, model)
    return model.eval()


@torch.no_grad()
def logits_of(model):
    out = model(IDS)
    return getattr(out, "logits", out)


def test_every_family_is_here():
    assert MODELS.keys() == FAMILIES.keys()
    for name, config in MODELS.items():
        said = config_to_hf(config)
        assert family_of(said) == name
        assert differing(config_from_hf(said), config, name) == []
        assert differing(replace(config_from_hf(said), norm_eps=1e-6, rope_theta=50.0), config, name)


@pytest.mark.parametrize("family", MODELS)
def test_c29_logits_are_those_of_transformers_both_ways(family, tmp_path):
    ours = a_run(MODELS[family], tmp_path / "run")
    assert export_folder(tmp_path / "run", tmp_path / "out", max_file_bytes=20_000) == 3
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    held = {key: tensor for name in files for key, tensor in load_file(tmp_path / "out" / name).items()}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in held.values())
    expected = to_hf(ours.state_dict(), MODELS[family])
    assert held.keys() == expected.keys() == index["weight_map"].keys()
    assert all(held[key].equal(expected[key]) for key in held)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert theirs.dtype == torch.float32
    torch.testing.assert_close(logits_of(theirs), logits_of(ours), rtol=0, atol=1e-4)

    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    import_folder(tmp_path / "theirs", tmp_path / "again")
    again = model_of(tmp_path / "again", vocab_multiple=1)
    torch.testing.assert_close(logits_of(again), logits_of(theirs), rtol=0, atol=1e-4)
    # Gemma's norms lose the last digit of 1 + w in transformers, not here: straight back, all is as it was.
    import_folder(tmp_path / "out", tmp_path / "back")
    for name, tensor in model_of(tmp_path / "back", vocab_multiple=1).state_dict().items():
        before = ours.state_dict()[name][: len(tensor)] if tensor.ndim else ours.state_dict()[name]
        torch.testing.assert_close(tensor, before, rtol=0, atol=2e-7 if "norm" in name and "gemma" in family else 0)


@pytest.mark.parametrize("limit", [10**9, 20_000], ids=["one file", "several"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"], ids=["tied", "untied"])
def test_c30_a_missing_tensor_is_an_error_by_name_tied_or_not(family, limit, tmp_path):
    tied = MODELS[family].tie_embeddings
    a_run(MODELS[family], tmp_path / "run")
    export_folder(tmp_path / "run", tmp_path / "out", max_file_bytes=limit)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is tied
    files = [*(tmp_path / "out").glob("*.safetensors")]
    assert len(files) == 1 or limit < 10**6
    held = {key: tensor for path in files for key, tensor in load_file(path).items()}
    assert ("lm_head.weight" in held) is not tied and "model.embed_tokens.weight" in held
    for path in [*files, *(tmp_path / "out").glob("*.index.json")]:
        path.unlink()
    del held["model.embed_tokens.weight"]
    save_file(held, tmp_path / "out" / "model.safetensors")
    with pytest.raises(ConfigError, match=r"missing: model\.embed_tokens\.weight"):
        import_folder(tmp_path / "out", tmp_path / "again")
    assert not (tmp_path / "again" / "config.toml").exists()


def test_dtypes_are_chosen_and_biases_of_routers_stay_what_they_are(tmp_path):
    ours = a_run(MODELS["deepseek_v3"], tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    held = load_file(tmp_path / "out" / "model.safetensors")
    for key, tensor in to_hf(ours.state_dict(), ours.config).items():
        assert held[key].equal(tensor if key.endswith("_bias") else tensor.bfloat16()), key
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert theirs.dtype == torch.bfloat16
    # Straight from bfloat16 to the same bfloat16, norms by way of float32.
    for family in ("llama", "gemma2"):
        a_run(MODELS[family], tmp_path / family)
        export_folder(tmp_path / family, tmp_path / f"{family}-out", dtype="bfloat16")
        import_folder(tmp_path / f"{family}-out", tmp_path / f"{family}-run")
        export_folder(tmp_path / f"{family}-run", tmp_path / f"{family}-again", dtype="BF16")
        one, two = (load_file(tmp_path / f"{family}-{end}" / "model.safetensors") for end in ("out", "again"))
        assert one.keys() == two.keys() and all(one[key].equal(two[key]) for key in one)
    assert main(["import", str(tmp_path / "out"), str(tmp_path / "wide"), "--dtype", "float32"]) == 0
    assert {tensor.dtype for tensor in HfFolder(tmp_path / "out", dtype=torch.float32).values()} == {torch.float32}


EXPERT_JOB = {
    "model__vocab_multiple": 2,
    "model__n_experts": 4,
    "model__expert_dim": 24,
    "model__qk_norm": "per_head",
    "train__steps": 2,
}


@pytest.mark.parametrize(
    ("world", "axes"), [(1, {}), (3, {}), (2, {"tp": 2}), (2, {"ep": 2})], ids=["one", "dp3", "tp2", "ep2"]
)
def test_a_checkpoint_of_any_ranks_is_exported_and_each_tensor_read_once(tokens, tmp_path, monkeypatch, world, axes):
    changes = {**EXPERT_JOB, **{f"parallel__{axis}": size for axis, size in axes.items()}, "data__global_rows": 6}
    assert run_ranks(train, world, job(tokens, tmp_path / "run", **changes), init=False) == [0] * world
    import kforge_train.hf as module

    read, asked = module.read_tensor, []
    monkeypatch.setattr(module, "read_tensor", lambda saved, name: asked.append(name) or read(saved, name))
    export_folder(tmp_path / "run", tmp_path / "out", max_file_bytes=5000, dtype="float32")
    assert sorted(asked) == sorted(f"model.{name}" for name in model_of(tmp_path / "run").state_dict())
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    torch.testing.assert_close(logits_of(theirs), logits_of(model_of(tmp_path / "run")), rtol=0, atol=1e-4)


def trained_and_averages(rank, world, config):
    """What a run trains and what it evaluates, after its last save."""
    from kforge_train.build import build
    from kforge_train.trainer import Trainer

    with build(config) as parts:
        if rank == 0:
            save_config(config)
        trainer = Trainer(parts)
        for _ in range(3):
            trainer.step()
        trainer.save()
        parts.checkpointer.wait()
        names = [name for name, _ in parts.model.named_parameters()]
        trained = {name: full(parts.optimizer.full_weight(name)) for name in names}
        with parts.optimizer.evaluation_weights():
            return trained, {name: full(parts.optimizer.full_weight(name)) for name in names}


AVERAGES = {
    "ema": {"optim__ema_decay": 0.9},
    "schedule-free": {"optim__name": "schedule_free", "optim__schedule": "constant"},
    "neither": {},
}


@pytest.mark.parametrize("storage", ["fp32", "split"])
@pytest.mark.parametrize("kind", AVERAGES)
def test_averages_are_what_is_exported_unless_the_raw_weights_are_asked_for(tokens, tmp_path, kind, storage):
    changes = {"parallel__precision": "bf16", "parallel__storage": storage, **AVERAGES[kind]}
    config = job(tokens, tmp_path / "run", **changes)
    (trained, averages), _ = run_ranks(trained_and_averages, 2, config, init=False)
    assert (kind == "neither") == all(trained[name].equal(averages[name]) for name in trained)
    for raw, expected in ((False, averages), (True, trained)):
        export_folder(tmp_path / "run", tmp_path / f"out-{raw}", raw=raw)
        held = HfFolder(tmp_path / f"out-{raw}")
        assert held.keys() == expected.keys()
        for name, weight in expected.items():
            assert weight.dtype == torch.float32 and held[name].equal(weight), name


def started(rank, world, config):
    from kforge_train.build import build
    from kforge_train.trainer import Trainer

    with build(config) as parts:
        trainer = Trainer(parts)
        trainer.restore()
        weights = {name: parts.optimizer.full_weight(name).detach() for name, _ in parts.model.named_parameters()}
        whole = {name: w.full_tensor() if hasattr(w, "full_tensor") else w.clone() for name, w in weights.items()}
        return whole, trainer.next_step


@pytest.mark.parametrize(
    ("world", "changes"),
    [(1, {}), (2, {}), (2, {"parallel__tp": 2}), (2, {"parallel__ep": 2}), (1, {"parallel__storage": "split"})],
    ids=["one", "dp2", "tp2", "ep2", "split"],
)
def test_a_run_starts_from_a_folder_of_hugging_face_in_any_layout(tokens, tmp_path, world, changes):
    model = replace(MODELS["qwen3_moe"], vocab_multiple=1)
    ours = a_run(model, tmp_path / "run")
    export_folder(tmp_path / "run", tmp_path / "folder")
    fields = {name: getattr(model, name) for name in (*SIZES, *EXPERTS, "qk_norm", "moe_pattern")}
    fields["vocab_multiple"] = 64
    precision = "bf16" if changes.get("parallel__storage") else "fp32"
    more = {**changes, **{f"model__{name}": value for name, value in fields.items()}, "parallel__precision": precision}
    config = job(tokens, tmp_path / "new", ckpt__init_from=str(tmp_path / "folder"), train__steps=2, **more)
    for weights, next_step in run_ranks(started, world, config, init=False):
        assert next_step == 0
        for name, weight in weights.items():
            expected = ours.state_dict()[name]
            assert weight[: len(expected)].equal(expected) and not weight[len(expected) :].any(), name
    assert run_ranks(train, world, config, init=False) == [0] * world


def test_what_config_json_says_otherwise_is_told_and_what_does_not_fit_is_an_error(tokens, tmp_path):
    model = ModelConfig(vocab_size=61, dim=16, n_layers=2, n_heads=4, n_kv_heads=2, rope_theta=500.0, max_seq_len=64)
    a_run(model, tmp_path / "run")
    export_folder(tmp_path / "run", tmp_path / "folder")
    init = {"ckpt__init_from": str(tmp_path / "folder"), "train__steps": 2, "data__row_tokens": 32}
    assert run_ranks(train, 1, job(tokens, tmp_path / "new", **init)) == [0]
    log = "".join(p.read_text() for p in (tmp_path / "new").rglob("*.jsonl") if p.name != "events.jsonl")
    assert "folder has rope_parameters = {" in log and "'rope_theta': 500.0" in log and "heads" not in log
    with pytest.raises(RankFailure, match="of another shape"):
        run_ranks(train, 1, job(tokens, tmp_path / "other", **init, model__dim=32, model__head_dim=4))
    larger = {"model__dim": 32, "model__head_dim": 4, "ckpt__init_partial": True}
    assert run_ranks(train, 1, job(tokens, tmp_path / "larger", **init, **larger)) == [0]
    with pytest.raises(RankFailure, match=r"ckpt\.init_step = 3, but .*folder is a folder of Hugging Face"):
        run_ranks(train, 1, job(tokens, tmp_path / "step", **init, ckpt__init_step=3))


def test_the_tokenizer_goes_along_both_ways(tmp_path):
    tokenizer = train_tokenizer(["some text, and more of it: été 12 345 " * 20], vocab_size=300)
    tokenizer.save(tmp_path / "tokenizer.json")
    a_run(replace(MODELS["llama"], vocab_size=300), tmp_path / "run")
    text = (tmp_path / "run" / "config.toml").read_text()
    text = re.sub(r"^tokenizer = .*$", f'tokenizer = "{tmp_path / "tokenizer.json"}"', text, flags=re.MULTILINE)
    (tmp_path / "run" / "config.toml").write_text(text)
    export_folder(tmp_path / "run", tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    said = "some été <|endoftext|> 12"
    assert theirs("some été 12", add_special_tokens=False)["input_ids"] == tokenizer.encode("some été 12")
    assert theirs.decode(tokenizer.encode(said, parse_special=True)) == said
    assert theirs.eos_token_id == tokenizer.eos_id
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.eos_token_id == tokenizer.eos_id
    import_folder(tmp_path / "out", tmp_path / "again")
    assert load_run(tmp_path / "again").data.tokenizer == str(tmp_path / "out")
    assert main(["generate", str(tmp_path / "again"), "--prompt", "some", "--max-new-tokens", "3"]) == 0


def test_a_run_without_a_tokenizer_says_how_to_export_one(tmp_path, caplog):
    tokenizer = train_tokenizer(["some text, and more of it"], vocab_size=260)
    tokenizer.save(tmp_path / "tokenizer.json")
    a_run(replace(MODELS["llama"], vocab_size=300), tmp_path / "run")
    export_folder(tmp_path / "run", tmp_path / "out")
    (said,) = [record.getMessage() for record in caplog.records if "AutoTokenizer" in record.getMessage()]
    assert f"kforge export {tmp_path / 'run'} ANOTHER_FOLDER --tokenizer PATH" in said
    argv = ["export", str(tmp_path / "run"), str(tmp_path / "new"), "--tokenizer", str(tmp_path / "tokenizer.json")]
    assert main(argv) == 0
    theirs = AutoTokenizer.from_pretrained(tmp_path / "new")
    assert theirs("some text", add_special_tokens=False)["input_ids"] == tokenizer.encode("some text")
    assert json.loads((tmp_path / "new" / "config.json").read_text())["eos_token_id"] == tokenizer.eos_id


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["export", "{run}", "{new}", "--tokenizer", "{new}/t.json"], "t.json does not exist"),
        (["export", "{run}", "{new}", "--tokenizer", "{large}"], "has 300 tokens, more than model.vocab_size = "),
        (["export", "{run}", "{new}", "--step", "9"], "no committed checkpoint of step 9; there are 3"),
        (["export", "{run}", "{new}", "--dtype", "int8"], "'int8' is no floating-point dtype"),
        (["export", "{run}", "{new}", "--max-file-gb", "0"], "--max-file-gb 0 must be above 0"),
        (["export", "{new}", "{new}"], "is no run"),
        (["export", "{run}", "{out}"], "holds model.safetensors already"),
        (["export", "{run}", "{file}/out"], "Not a directory"),
        (["import", "{new}", "{new}2"], "config.json"),
        (["import", "{out}", "{run}"], "is a run already"),
        (["import", "{bad}", "{new}2"], "is not known"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_one_line(argv, words, tmp_path, capsys):
    a_run(MODELS["llama"], tmp_path / "run")
    export_folder(tmp_path / "run", tmp_path / "out")
    (tmp_path / "bad").mkdir()
    (tmp_path / "file").write_text("")
    train_tokenizer(["some text"], vocab_size=257, multiple=100).save(tmp_path / "large")
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "bad" / "config.json").write_text(json.dumps({**said, "hidden_act": "relu2"}))
    places = {name: tmp_path / name for name in ("run", "out", "new", "bad", "file", "large")}
    assert main([word.format(**places) for word in argv]) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.splitlines()) == 1
    assert not (tmp_path / "new").exists()


def test_a_model_that_no_family_can_say_is_refused_before_anything_is_written(tmp_path):
    a_run(replace(MODELS["llama"], sinks=True), tmp_path / "run")
    with pytest.raises(ConfigError, match="sinks"):
        export_folder(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


PEAK = """
import sys
from pathlib import Path
from kforge_train.hf import export_folder, import_folder

def status(key):
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)]
    return int(line.split()[1]) * 1024

small, large = sys.argv[1:]
for run in (small, large):  # the first time, libraries come into memory
    for work in (lambda: export_folder(run, run + "-out", max_file_bytes=16_000_000),
                 lambda: import_folder(run + "-out", run + "-in")):
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        work()
        print(status("VmHWM") - before)
"""


def test_memory_is_that_of_a_tensor_and_not_of_the_model(tmp_path):
    sizes = {"vocab_size": 2048, "dim": 512, "ffn_dim": 1024, "n_heads": 8, "n_kv_heads": 8}
    for name, layers in (("small", 1), ("large", 12)):
        a_run(ModelConfig(**sizes, n_layers=layers), tmp_path / name)
    command = [sys.executable, "-c", PEAK, str(tmp_path / "small"), str(tmp_path / "large")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    exported, imported = map(int, done.stdout.split()[2:])
    files = [path.stat().st_size for path in (tmp_path / "large-out").glob("*.safetensors")]
    assert len(files) > 8 and sum(files) > 120_000_000
    assert exported < max(files) and imported < 2 * max(files), (exported, imported, max(files))
    one, two = (SafetensorsFolder(tmp_path / "large-out"), HfFolder(tmp_path / "large-out"))
    assert len(one) > len(two)
