"""Any checkpoint loads into any layout: saved on each, continued on each, as one process that never stopped; whole, or
a part of it."""

import pytest
from jobs import job, train

from kforge_ckpt import Checkpointer, Fit, tools
from kforge_testing import run_ranks

LAYOUTS = {
    "one": (1, {}),
    "dp2": (2, {}),
    "dp4": (4, {}),
    "replicas2-dp2": (4, {"dp_replicate": 2}),
    "tp2": (2, {"tp": 2}),
    "dp2-tp2": (4, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "cp2": (2, {"cp": 2}),
    "dp2-ep2": (2, {"ep": 2}),
    "dp2-tp2-ep4": (4, {"tp": 2, "ep": 4}),
}
OPTIMIZERS = {
    "adamw": {},
    "muon": {"optim__name": "muon"},
    "schedule_free": {"optim__name": "schedule_free"},
}
SAVED, LAST = 3, 5


def config_of(tokens, folder, optimizer, layout):
    axes = {f"parallel__{axis}": size for axis, size in LAYOUTS[layout][1].items()}
    common = {"train__steps": LAST, "ckpt__every_steps": SAVED, "optim__schedule": "constant", "model__vocab_size": 64}
    common |= {"model__n_experts": 4, "model__router_bias": True, "train__eval_rows": 8}
    common |= {"data__microbatch_rows": 2}  # several for the stages
    return job(tokens, folder / optimizer / layout, **common, **OPTIMIZERS[optimizer], **axes)


@pytest.fixture(scope="module", params=OPTIMIZERS)
def saved(request, tokens, tmp_path_factory):
    """Optimizer, folder, and layout -> losses after the save, of a run on each layout that saved once and went on."""
    folder = tmp_path_factory.mktemp("saved")
    losses = {}
    for layout, (world, _) in LAYOUTS.items():
        config = config_of(tokens, folder, request.param, layout)
        ranks = run_ranks(undisturbed, world, config, init=False)
        assert [code for code, _ in ranks] == [0] * world
        losses[layout] = ranks[0][1][SAVED:]
    return request.param, folder, losses


def note_losses(parts):
    """The list to which each vote from now on adds its loss."""
    vote, losses = parts.guard.vote, []

    def noted(*arguments, **more):
        result = vote(*arguments, **more)
        losses.append(result.loss.item())
        return result

    parts.guard.vote = noted
    return losses


def undisturbed(rank, world, config):
    from kforge_train.build import build
    from kforge_train.trainer import Trainer

    with build(config) as parts:
        losses = note_losses(parts)
        return Trainer(parts).run(), losses


def continued(rank, world, config, places):
    """Place -> the losses of the steps after its checkpoint, in this layout."""
    from dataclasses import replace

    from kforge_train.build import build
    from kforge_train.trainer import Trainer

    found = {}
    with build(replace(config, train=replace(config.train, run_dir=f"{config.train.run_dir}-again"))) as parts:
        losses = note_losses(parts)
        for place, folder in places.items():
            losses.clear()
            trainer, source = Trainer(parts), Checkpointer(folder)
            parts.checkpointer.restore = lambda states, source=source, **more: source.restore(states, SAVED, **more)
            trainer.restore()
            assert trainer.next_step == SAVED
            while trainer.next_step < LAST:
                trainer.step()
            parts.guard.settle()
            found[place] = list(losses)
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_saved_on_each_layout_and_continued_on_this_one(tokens, saved, layout):
    optimizer, folder, expected = saved
    world = LAYOUTS[layout][0]
    config = config_of(tokens, folder, optimizer, layout)
    places = {name: str(folder / optimizer / name / "checkpoints") for name in LAYOUTS}
    (losses, *_) = run_ranks(continued, world, config, places, init=False, timeout_s=240)
    for name in LAYOUTS:
        assert losses[name] == pytest.approx(expected["one"], rel=1e-10), name
    assert losses[layout] == expected[layout]  # bit for bit


LAYERS_SWAPPED = ((r"\.layers\.0\.", ".layers.x."), (r"\.layers\.1\.", ".layers.0."), (r"\.layers\.x\.", ".layers.1."))
PARTS = {
    1: (["optim"], Fit()),
    2: (["model"], Fit(exclude=(r"\.layers\.1\.", r"\.head\."))),
    3: (["model"], Fit(rename=LAYERS_SWAPPED)),
    4: (["model"], Fit()),
}
"""The states that are restored, and what may differ; each after the one before."""


def restored_in_parts(rank, world, config, source, target):
    """Save what is there afresh as step 0, and after each of `PARTS` as the step of its number."""
    from kforge_train.build import build

    with build(config) as parts:
        states = {"model": parts.model, "optim": parts.optimizer}
        out = Checkpointer(target, keep_every=1)
        out.save(0, states)
        for number, (names, fit) in PARTS.items():
            Checkpointer(source).restore({name: states[name] for name in names}, fit=fit)
            out.save(number, states)
        out.close()


@pytest.fixture(scope="module")
def trained(tokens, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    assert run_ranks(train, 4, config_of(tokens, folder, "muon", "dp2-tp2-ep4"), init=False) == [0] * 4
    return folder / "muon" / "dp2-tp2-ep4" / "checkpoints"


@pytest.mark.parametrize("layout", ["one", "dp2", "dp2-tp2", "pp2", "dp2-ep2"])
def test_a_part_of_a_checkpoint_into_each_layout(tokens, tmp_path, trained, layout):
    config = config_of(tokens, tmp_path, "muon", layout)
    run_ranks(restored_in_parts, LAYOUTS[layout][0], config, str(trained), str(tmp_path / "out"), init=False)
    saved = tools.open_checkpoint(trained)
    found = [tools.open_checkpoint(f"{tmp_path / 'out'}@{number}") for number in range(5)]
    names = [name for name in saved.index if name.startswith(("model.", "optim."))]
    assert [set(one.index) for one in found] == [set(names)] * 5
    swapped = {".layers.0.": ".layers.1.", ".layers.1.": ".layers.0."}
    for name in names:
        fresh, *tensors = (tools.read_tensor(one, name) for one in found)
        trained_one = tools.read_tensor(saved, name)
        if name.startswith("optim."):
            assert all(tensor.equal(trained_one) for tensor in tensors), name
            continue
        assert not fresh.equal(trained_one), name
        assert tensors[0].equal(fresh), name
        assert tensors[1].equal(fresh if ".layers.1." in name or ".head." in name else trained_one), name
        block = next((block for block in swapped if block in name), None)
        other = trained_one if block is None else tools.read_tensor(saved, name.replace(block, swapped[block]))
        assert tensors[2].equal(other), name
        assert tensors[3].equal(trained_one), name
