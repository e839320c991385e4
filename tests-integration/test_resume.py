"""A killed run goes on as if nothing had happened, on any number of processes."""

import pytest
from jobs import job, train, train_and_die, values

from kforge_testing import RankFailure, run_ranks

INT8 = {"optim__moments": "int8", "model__vocab_size": 512}  # embedding and head are large enough for blocks


@pytest.mark.parametrize(
    ("world", "changes"),
    [
        pytest.param(1, {"parallel__storage": "split"}, id="1-split"),
        pytest.param(1, {"parallel__storage": "stochastic", **INT8}, id="1-stochastic-int8"),
        pytest.param(2, {}, id="2"),
        pytest.param(2, {"optim__name": "muon", "parallel__dp_replicate": 2}, id="2-muon-replicas"),
        pytest.param(2, {"optim__name": "schedule_free"}, id="2-schedule-free"),
        pytest.param(1, {"optim__name": "schedule_free", "parallel__storage": "split"}, id="1-schedule-free-split"),
        pytest.param(2, {"optim__ema_decay": 0.9, "parallel__storage": "split"}, id="2-ema-split"),
        pytest.param(2, {"optim__offload": True, "parallel__storage": "split"}, id="2-offload-split"),
        pytest.param(2, {"parallel__tp": 2, "parallel__precision": "fp16"}, id="2-tp-fp16"),
        pytest.param(2, {"data__batch_phases": '[{"steps": 7, "rows": 2}, {"steps": 5, "rows": 4}]'}, id="2-phases"),
        pytest.param(4, {"parallel__tp": 2, "parallel__storage": "split", **INT8}, id="4-tp-split-int8"),
    ],
)
def test_a_run_killed_outright_ends_bit_equal(tokens, tmp_path, world, changes):
    common = {"train__steps": 20, "ckpt__every_steps": 10, "parallel__precision": "bf16", "model__vocab_size": 64}
    common |= changes
    whole = job(tokens, tmp_path / "whole", **common)
    assert run_ranks(train, world, whole, init=False) == [0] * world
    killed = job(tokens, tmp_path / "killed", **common)
    with pytest.raises(RankFailure):
        run_ranks(train_and_die, world, killed, 13, world - 1, init=False)
    assert max(values(tmp_path / "killed", "loss")) in (12, 13)
    assert run_ranks(train, world, killed, init=False) == [0] * world
    for name in ("loss", "grad_norm", "lr"):
        expected, got = values(tmp_path / "whole", name), values(tmp_path / "killed", name)
        assert list(expected) == list(range(1, 21))
        assert got == expected, name
    assert values(tmp_path / "killed", "loss", "eval") == values(tmp_path / "whole", "loss", "eval")


EXPERTS = {"model__n_experts": 4, "model__router_bias": True, "model__balance_loss": 0.1}
REPLICAS = {"parallel__dp_replicate": 2, "parallel__dp_shard": 1, "parallel__precision": "fp32", "model__dim": 32}
DETERMINISTIC = {
    "experts": {**EXPERTS, "parallel__recompute": "selective"},
    "fp8": {"parallel__fp8": "tensorwise", "model__dim": 32, "parallel__precision": "bf16"},
    "compiled": {"parallel__compile": True, "parallel__precision": "fp32"},
    "compressed": {**REPLICAS, "parallel__compress": "powersgd", "parallel__compress_rank": 4},
    "ring": {"parallel__cp": 2, "parallel__cp_style": "ring"},
}


@pytest.mark.parametrize("kind", DETERMINISTIC)
def test_two_deterministic_runs_have_the_same_bits(tokens, tmp_path, kind):
    options = {"train__steps": 6, "train__deterministic": True, **DETERMINISTIC[kind]}
    seen = []
    for name in ("one", "other"):
        config = job(tokens, tmp_path / name, **options)
        assert run_ranks(train_eagerly, 2, config, init=False, timeout_s=120) == [0, 0]
        seen.append([values(tmp_path / name, what) for what in ("loss", "grad_norm")])
    assert seen[0] == seen[1] and len(seen[0][0]) == 6


def train_backwards(rank, world, config):
    """As `train`, with the microbatches of a step taken from the last to the first: the same sums in another order."""
    from kforge_train.engine import PlainEngine

    forward_backward = PlainEngine.forward_backward
    PlainEngine.forward_backward = lambda self, window, scale: forward_backward(self, window[::-1], scale)
    return train(rank, world, config)


def test_sums_in_another_order_have_other_bits(tokens, tmp_path):
    """The planted fault of the test above: what it compares tells the orders of sums apart."""
    options = {"train__steps": 6, "train__deterministic": True, "parallel__precision": "fp32"}
    seen = []
    for name, run in (("one", train), ("other", train_backwards)):
        config = job(tokens, tmp_path / name, **options, data__microbatch_rows=1)
        assert run_ranks(run, 2, config, init=False) == [0, 0]
        seen.append([values(tmp_path / name, what) for what in ("loss", "grad_norm")])
    assert seen[0] != seen[1]
    assert seen[0][0] == pytest.approx(seen[1][0], rel=1e-4)


def train_eagerly(rank, world, config):
    """As `train`; what is compiled is so without a compiler of C++."""
    from functools import partial

    import kforge_parallel.build as parallel

    parallel.compile_blocks = partial(parallel.compile_blocks, backend="aot_eager")
    return train(rank, world, config)


LAYOUTS = [
    pytest.param({}, ({}, {}, {}), id="shards"),
    pytest.param({}, ({"dp_replicate": 2}, {"tp": 2}, {}), id="replicas-then-tp-and-shards"),
    pytest.param({}, ({"tp": 2}, {"dp_replicate": 2, "tp": 2}, {}), id="tp-then-tp-and-replicas"),
    pytest.param(EXPERTS, ({"ep": 2}, {"tp": 2, "ep": 4}, {}), id="experts"),
]


@pytest.mark.parametrize(("model", "layouts"), LAYOUTS)
def test_two_processes_then_four_then_one(tokens, tmp_path, model, layouts):
    """Losses equal those of one process that never stopped, and each sample is seen exactly once."""
    common = {"train__steps": 12, "ckpt__every_steps": 4, "model__vocab_size": 64, "model__tie_embeddings": True}
    common |= model
    whole = job(tokens, tmp_path / "whole", **common)
    ((code, expected_rows),) = run_ranks(train_noting_rows, 1, whole, None, init=False)
    assert code == 0

    seen = []
    for world, die_at, layout in zip((2, 4, 1), (4, 8, None), layouts, strict=True):
        axes = {f"parallel__{axis}": size for axis, size in layout.items()}
        config = job(tokens, tmp_path / "moved", **common, **axes)
        ranks = run_ranks(train_noting_rows, world, config, die_at, init=False)
        readers = range(0, world, layout.get("tp", 1))  # the ranks of a tensor-parallel group read the same rows
        seen += [row for rank in readers for row in ranks[rank][1]]
    assert sorted(seen) == sorted(expected_rows)
    assert len(seen) == 12 * 8
    expected, got = values(tmp_path / "whole", "loss"), values(tmp_path / "moved", "loss")
    assert list(got) == list(range(1, 13))
    for step in expected:
        assert got[step] == pytest.approx(expected[step], rel=1e-11)
    if model:
        for name in ("moe/balance_loss", "moe/1/load_max", "moe/1/bias_range"):
            assert values(tmp_path / "moved", name) == pytest.approx(values(tmp_path / "whole", name), rel=1e-9), name


PHASES = '[{"steps": 5, "rows": 4}, {"tokens": 700, "rows": 8}]'  # 8 rows of 32 tokens: 3 steps


def test_a_batch_that_grows(tokens, tmp_path):
    """The rows of a run whose batch does not grow, in its order, cut into other steps; layouts and resumes, inside of
    phases, change neither them nor the losses; tokens are counted, and the rate is a function of the step."""
    common = {"train__steps": 12, "ckpt__every_steps": 3, "model__vocab_size": 64, "data__global_rows": 16}
    common |= {"data__batch_phases": PHASES, "data__microbatch_rows": 1}
    ((_, rows),) = run_ranks(train_noting_rows, 1, job(tokens, tmp_path / "whole", **common), None, init=False)
    plain = job(tokens, tmp_path / "plain", train__steps=27, data__global_rows=4, model__vocab_size=64)
    assert run_ranks(train_noting_rows, 1, plain, None, init=False) == [(0, rows)]
    seen = []
    for world, die_at, tp in ((2, 3, 1), (4, 6, 2), (4, None, 1)):
        config = job(tokens, tmp_path / "moved", **common, parallel__tp=tp)
        ranks = run_ranks(train_noting_rows, world, config, die_at, init=False)
        seen += [row for rank in range(0, world, tp) for row in ranks[rank][1]]
    assert sorted(seen) == sorted(rows) and len(rows) == 5 * 4 + 3 * 8 + 4 * 16
    expected, got = values(tmp_path / "whole", "loss"), values(tmp_path / "moved", "loss")
    assert got == pytest.approx(expected, rel=1e-11) and list(got) == list(range(1, 13))
    steps = [4 * 32] * 5 + [8 * 32] * 3 + [16 * 32] * 4
    for run in ("whole", "moved"):
        counted = values(tmp_path / run, "tokens_total")
        assert list(counted.values()) == [sum(steps[: step + 1]) for step in range(12)]
    same_rate = job(tokens, tmp_path / "rate", train__steps=12)
    assert run_ranks(train, 1, same_rate, init=False) == [0]
    assert values(tmp_path / "whole", "lr") == values(tmp_path / "rate", "lr")


LENGTHS = [{"step": 3, "row_tokens": 48, "weights": {"b": 3}}, {"step": 6, "row_tokens": 16}]


def test_rows_that_change_their_length(tokens, tmp_path):
    """With rows of other lengths and other weights from a step on, and documents kept whole: layouts, stages among
    them, and resumes inside of phases and where one begins change no row and no loss; tokens are counted."""
    names = {"a": "train", "b": "heldout"}
    mixture = [{"name": name, "path": str(tokens / folder)} for name, folder in names.items()]
    common = {"train__steps": 9, "ckpt__every_steps": 1, "model__vocab_size": 64, "data__train": ""}
    common |= {"data__mixture": mixture, "data__phases": LENGTHS, "data__packing": "best_fit"}
    common |= {"data__cache": str(tmp_path / "cache"), "data__microbatch_rows": 2}
    ((_, rows),) = run_ranks(train_noting_rows, 1, job(tokens, tmp_path / "whole", **common), None, init=False)
    seen = []
    for world, die_at, layout in ((2, 4, {}), (2, 6, {"pp": 2}), (4, None, {"tp": 2})):
        axes = {f"parallel__{axis}": size for axis, size in layout.items()}
        ranks = run_ranks(
            train_noting_rows, world, job(tokens, tmp_path / "moved", **common, **axes), die_at, init=False
        )
        readers = {"pp": [0], "tp": [0, 2]}.get(next(iter(layout), ""), range(world))
        seen += [row for rank in readers for row in ranks[rank][1]]
    assert sorted(seen) == sorted(rows) and len(rows) == 9 * 8
    expected, got = values(tmp_path / "whole", "loss"), values(tmp_path / "moved", "loss")
    assert got == pytest.approx(expected, rel=1e-11) and list(got) == list(range(1, 10))
    steps = [8 * 32] * 3 + [8 * 48] * 3 + [8 * 16] * 3
    for run in ("whole", "moved"):
        assert list(values(tmp_path / run, "tokens_total").values()) == [sum(steps[: k + 1]) for k in range(9)]


def evaluated(rank, world, run_dir):
    from kforge_train.evaluate import evaluate_run

    return evaluate_run(run_dir)["loss"]


def test_a_run_over_two_processes_is_evaluated_on_one_and_on_three(tokens, tmp_path):
    common = {"train__steps": 2, "train__eval_rows": 0, "model__vocab_size": 64, "parallel__tp": 2}
    assert run_ranks(train, 2, job(tokens, tmp_path, **common), init=False) == [0, 0]
    (expected,) = values(tmp_path, "loss", "eval").values()
    for world in (1, 3):
        assert run_ranks(evaluated, world, tmp_path, init=False)[0] == pytest.approx(expected, rel=1e-12)


def train_noting_rows(rank, world, config, leave_at):
    """Train; return the exit code and every row id that this rank trained on. Leaves without a word at a step."""
    from kforge_train.build import build
    from kforge_train.trainer import Trainer

    rows = []

    class Notes(Trainer):
        def step(self):
            if self.next_step == leave_at:
                raise KeyboardInterrupt
            return super().step()

    with build(config) as parts:
        take = parts.loader.next

        def noted():
            window = take()
            rows.extend(int(row) for batch in window for row in batch["row_ids"])
            return window

        parts.loader.next = noted
        try:
            return Notes(parts).run(), rows
        except KeyboardInterrupt:
            return None, rows


def test_a_checkpoint_of_another_seed_of_data_is_refused(tokens, tmp_path):
    assert run_ranks(train, 1, job(tokens, tmp_path, train__steps=2), init=False) == [0]
    with pytest.raises(RankFailure, match="seed"):
        run_ranks(train, 1, job(tokens, tmp_path, train__steps=4, data__seed=9), init=False)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"optim__name": "lion"}, r"optim\.name was adamw, now lion: go on with .* --ckpt\.init_from"),
        ({"optim__ema_decay": 0.9}, r"optim\.ema_decay was 0\.0, now 0\.9: go on .* under the name 'ema'"),
        ({"parallel__precision": "fp32"}, r"parallel\.precision was fp64, now fp32: go on .* of another dtype"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_has_other_state_than_the_checkpoint_is_refused_by_its_name(tokens, tmp_path, changes, says):
    assert run_ranks(train, 1, job(tokens, tmp_path, train__steps=2), init=False) == [0]
    with pytest.raises(RankFailure, match=says):
        run_ranks(train, 1, job(tokens, tmp_path, train__steps=4, **changes), init=False)


class Bomb:
    """Unpickled, it touches a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_no_file_of_a_checkpoint_is_read_as_a_pickle(tokens, tmp_path):
    import pickle
    import shutil

    run = tmp_path / "run"
    config = job(tokens, run, train__steps=2)
    assert run_ranks(train, 1, config, init=False) == [0]
    longer = job(tokens, run, train__steps=3)
    files = sorted(p.relative_to(run) for p in (run / "checkpoints").rglob("*") if p.is_file())
    assert len(files) >= 4
    shutil.copytree(run, tmp_path / "clean")
    for name in files:
        shutil.rmtree(run)
        shutil.copytree(tmp_path / "clean", run)
        touched = tmp_path / "touched"
        (run / name).write_bytes(pickle.dumps(Bomb(touched)))
        try:
            run_ranks(train, 1, longer, init=False)
            survived = True  # only a pointer that can be found out again may be lost
        except RankFailure as failure:
            survived = False
            assert name.name in str(failure), f"{name}: the refusal does not name the file"
        assert not touched.exists(), name
        assert not survived or name.name == "latest", name


def train_from_alike_parts(rank, world, config):
    """Train with scores of sinks that are the same on each rank, as a few steps of Lion may leave them."""
    import torch

    from kforge_train.build import build
    from kforge_train.trainer import Trainer

    with build(config) as parts:
        for name, parameter in parts.model.named_parameters():
            if name.endswith("sinks"):
                parameter.data.to_local().copy_(torch.tensor([0.003, -0.003]))
        return Trainer(parts).run()


def test_parts_that_training_made_alike_are_no_fault(tokens, tmp_path):
    config = job(tokens, tmp_path, model__sinks=True, optim__name="lion", train__steps=3)
    assert run_ranks(train_from_alike_parts, 2, config, init=False) == [0, 0]
