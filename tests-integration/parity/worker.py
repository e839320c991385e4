"""What the processes of a case do: a few steps by the product's own parts, and the same by plain torch."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from cases import LAYOUTS, MODELS, ROWS, SHAPE, SILENT_ROW, STEPS, TABLE, TOKENS, VARIANTS, VOCAB

from kforge_data import DataConfig, TokenShards, evaluation_batches
from kforge_model import ModelConfig, Transformer
from kforge_optim import OptimConfig, build_optimizer, clip
from kforge_parallel import ParallelConfig, launch, parallelize
from kforge_parallel.fsdp import full
from kforge_parallel.testing import Trajectory, differences
from kforge_train.balance import update_balance
from kforge_train.engine import build_engine, rows_of
from kforge_train.evaluate import evaluate

SEED = 3
CLIP = 0.5
DEVICE = os.environ.get("KFORGE_DEVICE", "cpu")
"""cuda: each rank has a GPU of its own, and NCCL between them (`nox -s gpu_multi`)."""
DTYPES = {"fp64": torch.float64, "fp32": torch.float32}
# In float32 AdamW turns the rounding of small gradients into steps: smaller ones, and none where all is rounding.
LR, EPS = {"fp64": 1e-2, "fp32": 1e-3, "bf16": 1e-3}, {"fp64": 1e-8, "fp32": 1e-5, "bf16": 1e-5}


def optim_config(precision):
    return OptimConfig(lr=LR[precision], schedule="constant", clip_norm=CLIP, eps=EPS[precision])


def data_config(packed):
    """What evaluation reads of a job: 5 rows in microbatches of 2, so that some ranks get rows of padding."""
    data = DataConfig(row_tokens=TOKENS, microbatch_rows=2, global_rows=ROWS, isolate_documents=packed)
    return SimpleNamespace(data=data)


EVALUATION_ROWS = 5


@cache
def rows(step, packed, count):
    """The global batch of a step, row by row: ids, labels, positions, document numbers and their lengths."""
    rng = np.random.default_rng(step)
    result = []
    for row in range(count):
        lengths = [TOKENS]
        if packed:
            cuts = np.sort(rng.choice(np.arange(1, TOKENS), size=rng.integers(1, 5), replace=False))
            lengths = np.diff([0, *cuts, TOKENS]).tolist()
        ids = rng.integers(1, VOCAB, TOKENS)
        labels = np.roll(ids, -1)
        labels[np.cumsum(lengths) - 1] = -100
        labels[rng.random(TOKENS) < rng.random()] = -100  # from none to all of a row
        if row == SILENT_ROW:
            labels[:] = -100
        positions = np.concatenate([np.arange(length) for length in lengths])
        documents = np.repeat(np.arange(len(lengths)), lengths)
        result.append((ids, labels, positions, documents, lengths))
    return result


def microbatch(part, packed):
    """Rows as the batch that a loader gives."""
    ids, labels, positions, documents = (torch.from_numpy(np.stack([row[i] for row in part])) for i in range(4))
    batch = {"input_ids": ids, "labels": labels, "position_ids": positions, "doc_ids": None}
    batch |= {"cu_seqlens": None, "max_seqlen": TOKENS}
    if packed:
        ends = np.concatenate([[0], *(row[4] for row in part)]).cumsum()
        ends = np.concatenate([ends, np.full(6 * len(part) + 1 - len(ends), ends[-1])])  # of one length, as loaders do
        batch |= {"doc_ids": documents, "cu_seqlens": torch.from_numpy(ends).to(torch.int32)}
    return batch


def on_device(batches, device):
    """Microbatches with all tensors on a device."""
    return [{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()} for batch in batches]


def window(step, variant, data_rank, data_size):
    """The microbatches of one data rank."""
    count = variant.rows // data_size
    mine = rows(step, variant.packed, variant.rows)[data_rank * count :][:count]
    size = variant.microbatch or len(mine) // variant.accumulate
    return [microbatch(mine[i : i + size], variant.packed) for i in range(0, len(mine), size)]


# ------------------------------------------------------------------------------------------ in a layout


def parallel_config(layout, variant):
    sizes = {"dp_shard": 1, **LAYOUTS[layout]}
    return ParallelConfig(device=DEVICE, precision=variant.precision, **sizes, **variant.parallel)


def model_config(model):
    return ModelConfig(**{**SHAPE, **MODELS[model]})


def build(layout, model, variant, mesh):
    """The model of a case, as kforge-train builds it."""
    return parallelize(
        lambda: Transformer(model_config(model)),
        mesh,
        parallel_config(layout, variant),
        init=lambda m: m.init_weights(SEED),
        gradients="sum",
        cast_inputs=False,
    )


def start(layout, fault=None):
    """Join the group, after a fault is planted."""
    import kforge_parallel.build

    kforge_parallel.offload.SMALL = 0
    kforge_parallel.build.compile_blocks = partial(kforge_parallel.build.compile_blocks, backend="aot_eager")
    if fault is not None:
        import mutations

        mutations.plant(fault)
    return launch(parallel_config(layout, VARIANTS["packed"]))


def train_variant(layout, model, variant, mesh, heldout):
    """Three clipped steps and an evaluation, by the parts that a job consists of."""
    spread = build(layout, model, variant, mesh)
    config = optim_config(variant.precision)
    with torch.device("meta"):
        whole = Transformer(model_config(model))
    optimizer = build_optimizer(spread, config, STEPS, whole=whole)
    engine = build_engine(spread, mesh, reduce_each=parallel_config(layout, variant).accumulate == "sharded")
    seen = Trajectory()
    for step in range(STEPS):
        batches = on_device(window(step, variant, mesh.data_rank, mesh.data_size), mesh.device)
        loss = engine.forward_backward(batches, 1.0 / engine.scored_tokens(batches))
        gradients = {n: full(p.grad).cpu() for n, p in spread.named_parameters() if p.grad is not None}
        seen.gradients.append(of_all_stages(gradients, mesh))
        norm, _ = clip.total_norm(spread, stages=mesh.pp_size, stages_holding=engine.copies, also=optimizer.groups)
        optimizer.step(scale=clip.clip_factor(norm, config.clip_norm))
        optimizer.zero_grad()
        update_balance(spread, mesh, torch.ones((), device=mesh.device), step, STEPS)
        torch.distributed.all_reduce(loss)
        seen.losses.append(loss.item())
        seen.norms.append(norm.item())
    seen.weights = of_all_stages(weights_of(spread), mesh)
    source = TokenShards(heldout)
    seen.evaluation = evaluate(spread, source, data_config(variant.packed), mesh, EVALUATION_ROWS)["loss"]
    return seen


def of_all_stages(tensors, mesh):
    """What the stages of a pipeline have together. Copies on several of them must be the same bits."""
    if mesh.pp_size == 1:
        return tensors
    everyone = [None] * mesh.pp_size
    torch.distributed.all_gather_object(everyone, tensors, group=mesh.pp.get_group())
    together = {}
    for theirs in everyone:
        for name, tensor in theirs.items():
            assert torch.equal(together.setdefault(name, tensor), tensor), f"copies of {name} differ"
    return together


def compare_variants(rank, world, layout, model, names, folder, fault=None):
    """Variant -> errors (`kforge_parallel.testing.differences`) that this rank sees."""
    mesh = start(layout, fault)
    return {name: errors_of(layout, model, VARIANTS[name], mesh, folder) for name in names}


def errors_of(layout, model, variant, mesh, folder):
    """`differences` from what one process computes; bf16 is held against fp32."""
    want = torch.load(reference_path(folder, model, variant), weights_only=False)
    got = train_variant(layout, model, variant, mesh, Path(folder) / "heldout")
    return differences(got, Trajectory(**want), "max" if variant.precision == "fp64" else "norm")


def compare_on_devices(rank, world, lines, folder):
    """The same of many (layout, model, variant) of one number of processes, one after the other in one group."""
    return [errors_of(layout, model, variant, start(layout), folder) for layout, model, variant in lines]


# ------------------------------------------------------------------------------------------ on one process


def reference_path(folder, model, variant):
    return Path(folder) / f"{model}-{variant.reference}.pt"


def nll_sum(model, batch, label_smoothing=0.0, z_loss=0.0):
    """By torch's own cross-entropy, from whole logits."""
    logits = model(batch["input_ids"], rows_of(batch)).flatten(0, 1)
    labels = batch["labels"].flatten()
    z = logits.logsumexp(-1).square()[labels != -100].sum()
    return F.cross_entropy(logits, labels, reduction="sum", label_smoothing=label_smoothing) + z_loss * z


def loss_of(model, batch, scale):
    """What is trained on: with further tokens or experts, by the model's own sum (its tests hold that to a formula)."""
    config = model.config
    if config.mtp_depth or config.n_experts:
        return model(batch["input_ids"], rows_of(batch), batch["labels"], scale)[0]
    return nll_sum(model, batch, config.label_smoothing, config.z_loss) * scale


def weights_of(model):
    """All that a model holds, whole."""
    with torch.no_grad():
        return {name: full(tensor).cpu() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def train_plain(model, variant, heldout):
    """The same steps without kforge-parallel, kforge-train's engine, or kforge-optim's norm."""
    precision = variant.reference_precision
    plain = Transformer(model_config(model)).to(DTYPES[precision])
    plain.init_weights(SEED)
    optimizer = build_optimizer(plain, optim_config(precision), STEPS)
    seen = Trajectory()
    for step in range(STEPS):
        (batch,) = window(step, replace(variant, accumulate=1, microbatch=None), 0, 1)
        count = (batch["labels"] != -100).sum()
        loss_of(plain, batch, 1 / count.double()).backward()
        with torch.no_grad():
            seen.losses.append((nll_sum(plain, batch) / count).item())
        seen.gradients.append({name: full(p.grad) for name, p in plain.named_parameters()})
        norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
        assert norm > CLIP, "the clip must be at work"
        for parameter in plain.parameters():
            parameter.grad.mul_(CLIP / (norm + 1e-6))
        optimizer.step()
        optimizer.zero_grad()
        plain.update_balance(step=step, steps=STEPS)
        seen.norms.append(norm.item())
    seen.weights = weights_of(plain)
    total = tokens = 0
    with torch.no_grad():
        for batch in evaluation_batches(
            TokenShards(heldout),
            row_tokens=TOKENS,
            microbatch_rows=1,
            max_rows=EVALUATION_ROWS,
            isolate_documents=variant.packed,
        ):
            total += nll_sum(plain, batch).item()
            tokens += int((batch["labels"] != -100).sum())
    seen.evaluation = total / tokens
    return seen


def write_references(rank, world, folder, cases=None):
    """A file for every model, kind of rows and precision of ``cases``, (model, variant) each; None: of the table."""
    cases = [(model, VARIANTS[name]) for _, model, names in TABLE for name in names] if cases is None else cases
    wanted = {reference_path(folder, *case): case for case in cases}
    for path, (model, variant) in wanted.items():
        torch.save(vars(train_plain(model, variant, Path(folder) / "heldout")), path)
