"""Hugging Face models on packed rows over ranks that have parts of rows, experts or blocks, against one process."""

from types import SimpleNamespace

import families
import pytest
import torch
import torch.distributed as dist
from attending import documents
from torch.nn import functional as F

from kforge_parallel import (
    ParallelConfig,
    Pipeline,
    Work,
    check_rank,
    estimate_layout,
    launch,
    parallelize,
    parameters_of,
    shard_rows,
)
from kforge_parallel.causal_lm import CausalLM, Plain
from kforge_parallel.cli import main
from kforge_testing import run_ranks

LENGTHS = [[8], [1, 7], [3, 5], [2, 2, 4]]
THREE = ("Llama", "Qwen3", "Qwen3Moe")
UNTIED = {"tie_word_embeddings": False}


class Rows:
    def __init__(self, part):
        self.position_ids, self.doc_ids = part["positions"], part["docs"]
        self.cu_seqlens, self.max_seqlen = None, 0
        if "whole" in part:
            self.columns, self.whole = part["columns"], Rows(part["whole"])


def make_batch():
    docs, positions, _ = documents(LENGTHS)
    labels = families.IDS.roll(-1, 1)
    labels[docs != docs.roll(-1, 1)] = -100
    labels[:, -1] = -100
    return {"ids": families.IDS, "labels": labels, "positions": positions, "docs": docs}


BATCH = make_batch()


def call(model, part):
    return model(part["ids"], Rows(part), labels=part["labels"], scale=0.1)


def packed_loss(model, part):
    loss, nll = call(model, part)
    assert torch.allclose(loss, 0.1 * nll.sum(), rtol=1e-12) and not nll.requires_grad
    return loss


def through_stages(mesh):
    def loss(model, part):
        losses = [torch.zeros((), dtype=torch.float64)]

        def stage(module, x, number):
            rows = {name: value[number : number + 1] for name, value in part.items()}
            made = call(module, rows | ({} if x is None else {"ids": x}))
            if isinstance(made, torch.Tensor):
                return made
            losses.append(made[0].detach())
            return made[0]

        pipeline = Pipeline(model, mesh)
        pipeline.train(stage, [pipeline.hidden_shape(ids, families.DIM) for ids in part["ids"].split(1)])
        return torch.stack(losses).sum().requires_grad_()

    return loss


def run_layout(rank, world, layout, names, sizes=None):
    mesh = launch(ParallelConfig(precision="fp64", sequence_parallel=False, **layout))
    worst = {}
    for name in names:
        options = {"num_hidden_layers": 2 * mesh.pp_size}
        options |= {"mlp_only_layers": []} if name == "Qwen3Moe" else {}
        options |= sizes or {}

        def build(name=name, options=options):
            return CausalLM(families.build(name, **options, **UNTIED))

        whole, gradients, weights = families.step(build(), BATCH, packed_loss)
        model = parallelize(build, mesh, gradients="sum")
        rows = {key: value.tensor_split(mesh.data_size)[mesh.data_rank] for key, value in BATCH.items()}
        loss = through_stages(mesh) if mesh.pp_size > 1 else packed_loss
        total, other_gradients, other_weights = families.step(model, shard_rows(rows, mesh), loss)
        dist.all_reduce(total)
        errors = [(total / mesh.tp_size / whole - 1).abs().item()]
        for got, want in ((other_gradients, gradients), (other_weights, weights)):
            errors.append(max(((got[n] - want[n]).abs().max() / want[n].abs().max()).item() for n in got))
        worst[name] = max(errors), {*got}, {*want}
    return worst


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        ({"cp": 2}, THREE),
        ({"cp": 2, "cp_style": "ulysses"}, ("Qwen3",)),
        ({"cp": 2, "cp_style": "ring"}, ("Llama",)),
        ({"ep": 2}, ("Qwen3Moe", "Mixtral")),
        ({"pp": 2}, THREE),
        ({"pp": 2, "pp_schedule": "zbv"}, ("Qwen3Moe",)),
        ({"tp": 2}, ("Qwen3",)),
        ({"pp": 2, "dp_shard": 2, "ep": 2}, ("Qwen3Moe",)),
        ({"tp": 2, "cp": 2}, ("Qwen3Moe",)),
    ],
    ids=str,
)
def test_layouts_compute_what_one_process_computes(layout, names):
    world = 4 if len(layout) > 2 or layout.keys() == {"tp", "cp"} else 2
    found = run_ranks(run_layout, world, layout, names, init=False, timeout_s=120)
    for name in names:
        errors, got, want = zip(*(rank[name] for rank in found), strict=True)
        assert max(errors) < 1e-10, (name, errors)
        assert set().union(*got) == want[0]  # no stage's weights are left out


ODD = {"vocab_size": 33, "intermediate_size": 25}


@pytest.mark.parametrize(
    ("layout", "name", "sizes"),
    [
        ({"pp": 2}, "Llama", {**ODD, "num_hidden_layers": 3}),
        ({"pp": 2, "pp_schedule": "interleaved_1f1b"}, "Qwen3Moe", {**ODD, "num_hidden_layers": 5}),
        ({"dp_shard": 3, "ep": 3}, "Qwen3Moe", {**ODD, "num_experts": 3, "num_key_value_heads": 1}),
        ({"cp": 2}, "Qwen3", {**ODD, "num_key_value_heads": 1}),
        ({"cp": 4, "cp_style": "ulysses"}, "Qwen3", ODD),  # two key/value heads on four ranks
    ],
    ids=str,
)
def test_sizes_that_do_not_divide_are_computed_right(layout, name, sizes):
    """An odd vocabulary and width, fewer blocks on the last stage, four rows on three ranks, heads fewer than ranks."""
    world = max(size for size in layout.values() if isinstance(size, int))
    for rank in run_ranks(run_layout, world, layout, (name,), sizes, init=False, timeout_s=120):
        assert rank[name][0] < 1e-10, rank[name][0]


@pytest.mark.parametrize(
    ("name", "layout", "sizes", "says"),
    [
        ("Llama", {"tp": 2}, {"vocab_size": 33}, r"vocab_size = 33 cannot be split over parallel\.tp = 2; use .* 34"),
        ("Llama", {"tp": 2}, {"intermediate_size": 25}, "ffn_dim = 25 cannot be split over .* use ffn_dim = 26"),
        ("Qwen3", {"tp": 8}, {}, "n_heads = 4 cannot be split over parallel.tp = 8"),
        ("Qwen3", {"tp": 4}, {}, "num_key_value_heads = 2, which parallel.tp = 4 does not divide.*a divisor of 2"),
        ("Qwen3Moe", {"tp": 2}, {"num_experts": 3}, "has 3 entries along dimension 0, which tp = 2 does not divide"),
        ("Qwen3Moe", {"ep": 8}, {}, "n_experts = 4 cannot be split over parallel.ep = 8; set ep to a divisor of 4"),
        ("Llama", {"ep": 8}, {}, "parallel.ep = 8, but the model has no experts"),
        ("Llama", {"pp": 4}, {}, "n_layers = 2 is fewer than the 4 stages"),
        ("Llama", {"pp": 2, "pp_schedule": "zbv"}, {}, "n_layers = 2 is fewer than the 4 stages"),
        ("Qwen3", {"cp": 8, "cp_style": "ulysses"}, {}, "n_heads = 4 cannot be split over parallel.cp = 8"),
    ],
)
def test_sizes_that_cannot_be_are_refused_without_other_processes(name, layout, sizes, says):
    config = ParallelConfig(sequence_parallel=False, **layout)
    with pytest.raises(ValueError, match=says):
        check_rank(lambda: CausalLM(families.build(name, **sizes, **UNTIED)), config, 8, 0)


@pytest.mark.parametrize(("tokens", "style"), [(7, "ulysses"), (6, "allgather"), (10, "ring")])
def test_rows_that_cannot_be_cut_are_refused(tokens, style):
    mesh = SimpleNamespace(config=ParallelConfig(cp=2, cp_style=style), cp_size=2, cp_rank=0, cp_group=None, tp_size=1)
    with pytest.raises(ValueError, match=f"data.row_tokens = {tokens} cannot be split over .* use row_tokens = "):
        shard_rows({"ids": torch.zeros(1, tokens, dtype=torch.int64)}, mesh)


def test_documents_of_a_row_do_not_see_one_another():
    model = CausalLM(families.build("Qwen3"))
    rows = Rows({key: value[2:3] for key, value in BATCH.items()})
    both = model(families.IDS[2:3], rows)
    alone = [model(part) for part in families.IDS[2:3].split([3, 5], 1)]
    assert torch.allclose(both, torch.cat(alone, 1), rtol=1e-12, atol=0)
    assert not torch.allclose(both[:, 3:], model(families.IDS[2:3])[:, 3:], rtol=1e-2)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen3Moe", "Olmo2", "Cohere2"])
def test_a_plain_row_is_what_transformers_computes(name):
    want = families.build(name)(input_ids=families.IDS, use_cache=False).logits
    got = CausalLM(families.build(name))(families.IDS)
    assert torch.allclose(got, want, rtol=1e-6 if name in families.CASTS else 1e-11, atol=1e-7)
    labels = BATCH["labels"]
    loss, nll = CausalLM(families.build(name))(families.IDS, None, labels=labels, scale=2.0)
    each = F.cross_entropy(want.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    assert torch.allclose(nll, each, rtol=1e-6) and torch.allclose(loss, 2 * each.sum(), rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "layout", "part", "held"),
    [
        ("Qwen3", {"tp": 2}, "model.layers.0.self_attn.o_proj.weight", (4, 16)),
        ("Qwen3Moe", {"ep": 4}, "model.layers.0.mlp.experts.down_proj", (1, 8, 12)),
        ("Qwen3Moe", {"tp": 2}, "model.layers.0.mlp.experts.down_proj", (2, 4, 12)),
    ],
)
def test_one_rank_of_eight_is_looked_at(name, layout, part, held):
    found = check_rank(
        lambda: CausalLM(families.build(name, **UNTIED)), ParallelConfig(sequence_parallel=False, **layout), 8, 3
    )
    assert found.shapes[part] == held


def untied():
    return CausalLM(families.build("Llama", **UNTIED))


def test_the_command_names_its_own_options(capsys):
    words = ["check", "--model", "test_causal_lm:untied", "--world", "8", "--rank", "3", "--tp", "2"]
    assert main(words) == 2
    assert "has whole rows; give --no-sequence-parallel" in capsys.readouterr().err
    assert main([*words, "--no-sequence-parallel"]) == 0


def test_what_it_cannot_is_refused():
    with pytest.raises(ValueError, match=r"type 'olmo2' cannot be cut into stages .*llama, qwen3, qwen3_moe can"):
        CausalLM(families.build("Olmo2")).stage(True, [0], False)
    with pytest.raises(ValueError, match="tie_word_embeddings = true"):
        CausalLM(families.build("Llama", tie_word_embeddings=True)).stage(True, [0], False)
    with pytest.raises(ValueError, match=r"Gemma2Attention bounds its scores by softcap 50\.0"):
        CausalLM(families.build("Gemma2"))
    with pytest.raises(ValueError, match=r"attention_dropout to 0\.0"):
        CausalLM(families.build("Llama", attention_dropout=0.1))
    with pytest.raises(ValueError, match="output_router_logits = true"):
        CausalLM(families.build("Qwen3Moe", output_router_logits=True))
    with pytest.raises(ValueError, match="labels need a scale"):
        CausalLM(families.build("Llama"))(families.IDS, Plain(BATCH["positions"]), labels=BATCH["labels"])


TINY = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
HALF = {**TINY, "intermediate_size": 24}


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda _: torch.nn.Linear(2, 2), "Linear is none: it has no `config` and no `base_model_prefix`"),
        (lambda t: t.LlamaConfig(), "LlamaConfig is none"),
        (lambda t: t.LlamaModel(t.LlamaConfig(**HALF)), "LlamaModel has no head over the vocabulary; take the class"),
        (lambda t: t.LlamaForSequenceClassification(t.LlamaConfig(**HALF)), "has no head over the vocabulary"),
        (lambda t: t.BertForMaskedLM(t.BertConfig(**HALF)), "has no list of blocks bert.layers"),
        (lambda t: t.BloomForCausalLM(t.BloomConfig(vocab_size=32, hidden_size=16)), "no list of blocks transformer.l"),
        (lambda t: t.MambaForCausalLM(t.MambaConfig(**TINY)), "2 blocks, of which 0 have causal attention"),
        (lambda t: t.ModernBertForMaskedLM(t.ModernBertConfig(**HALF, pad_token_id=0)), "of which 0 have causal"),
        (lambda _: CausalLM(families.build("Llama")), "CausalLM is one already"),
    ],
)
def test_what_is_no_language_model_of_transformers_is_refused(build, says):
    import transformers

    with pytest.raises(ValueError, match=f"such as LlamaForCausalLM\\(config\\), and .*{says}"):
        CausalLM(build(transformers))


def test_sinks_are_refused():
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(**HALF, num_key_value_heads=2, head_dim=4, num_local_experts=2)
    with pytest.raises(ValueError, match="GptOssAttention has sinks"):
        CausalLM(GptOssForCausalLM(config))


@pytest.mark.parametrize("name", families.FAMILIES)
def test_parameters_of_every_family_are_listed(name):
    model = CausalLM(families.build(name, **({"attn_logit_softcapping": None} if name == "Gemma2" else {})))
    listed = parameters_of(model)
    assert [(p.name, p.shape) for p in listed] == [(n, tuple(p.shape)) for n, p in model.named_parameters()]
    assert {p.layer for p in listed} == {None, 0, 1} and all(p.word for p in listed)


def kept_bytes(name, layers):
    """What autograd saves of a model of so many blocks beside its weights, in bf16."""
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 320, "num_hidden_layers": layers, **UNTIED}
    sizes |= {"mlp_only_layers": []} if name == "Qwen3Moe" else {}
    model = CausalLM(families.build(name, **sizes)).bfloat16()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(x):
        if x.untyped_storage().data_ptr() not in weights:
            kept[x.untyped_storage().data_ptr()] = (x.untyped_storage().nbytes(), x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        ids = torch.arange(256).view(2, 128)
        model(ids, None, labels=ids, scale=1.0)
    return sum(size for size, _ in kept.values()), model


BOUNDS = {"DeepseekV2": 0.3, "DeepseekV3": 0.3}
"""Latent attention is not counted as what it is."""


@pytest.mark.parametrize("name", [name for name in families.FAMILIES if name != "Gemma2"])  # which has soft-caps
def test_estimates_know_what_blocks_of_a_family_keep(name):
    (two, _), (four, model) = kept_bytes(name, 2), kept_bytes(name, 4)
    work = Work(row_tokens=128, microbatch_rows=2)
    told = estimate_layout(model.shape, ParallelConfig(device="cpu"), 1, work, parameters=parameters_of(model))
    assert told.block_kept == pytest.approx((four - two) / 2, rel=BOUNDS.get(name, 0.15))
    assert told.logits > 256 * 512 * 14  # all at once: in bf16, and three times in fp32


def test_estimates_know_its_sizes():
    shape = CausalLM(families.build("Qwen3Moe")).shape
    known = {"head_dim": 8, "ffn_dim": 24, "expert_dim": 12, "moe_top_k": 2, "moe_layers": 1, "qk_norm": True}
    assert shape.items() >= known.items()
    assert CausalLM(families.build("Qwen3")).stage(True, [0], False).shape == CausalLM(families.build("Qwen3")).shape
