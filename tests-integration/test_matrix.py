"""Any checkpoint loads into any layout: saved on each, continued on each, as one process that never stopped."""

import pytest
from jobs import job

from kforge_ckpt import Checkpointer
from kforge_testing import run_ranks

LAYOUTS = {
    "one": (1, {}),
    "dp2": (2, {}),
    "dp4": (4, {}),
    "replicas2-dp2": (4, {"dp_replicate": 2}),
    "tp2": (2, {"tp": 2}),
    "dp2-tp2": (4, {"tp": 2}),
    "dp2-cp2": (4, {"cp": 2}),
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
