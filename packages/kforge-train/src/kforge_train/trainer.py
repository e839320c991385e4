"""The loop. It holds no feature of its own: what is optional is a part that it calls at a named point."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from kforge_ckpt import CheckpointError, PerRank, StateMismatchError
from kforge_metrics import read_events
from kforge_optim import clip
from kforge_parallel import check_replicas, compression_of, phase, precision_of, precision_table
from kforge_resilience import exitcodes
from kforge_train.balance import update_balance
from kforge_train.build import Job, build, versions
from kforge_train.config import JobConfig
from kforge_train.errors import ConfigError, config_errors
from kforge_train.estimate import estimate_job, in_one_line, on_this_machine
from kforge_train.evaluate import anywhere, evaluate
from kforge_train.loading import LoaderState
from kforge_train.qk_clip import clip_scores
from kforge_train.saved import check_same_job, save_config, state_changes
from kforge_train.starting import start_from

FAILED = 1


class Trainer:
    """Moves a job from its first step, or the step it was restored at, to its last."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.config = job.config
        self.next_step = 0
        """Optimizer steps done, which is the number of the next one."""
        self.compression = compression_of(job.model)
        """What the replicas of a job that compresses gradients have left over."""
        own = job.config.model.kind != "transformer"
        self.forward_writes = own and bool(job.model.state_dict().keys() - dict(job.model.named_parameters()).keys())
        """Whether a forward pass may change what is saved: the buffers of a model that is not kforge's own."""
        self.saved_step: int | None = None
        self.saved_at = time.monotonic()
        self.save_failed = False
        self.started = time.monotonic()
        self.time_is_up = False

    def state_dict(self) -> dict[str, Any]:
        left = {} if self.compression is None else {"compression": PerRank(self.compression.state_dict())}
        return {"next_step": self.next_step, **left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next_step = int(state["next_step"])
        if self.compression is None:
            return
        saved = state.get("compression", [])
        rank, world = self.job.mesh.rank, self.job.mesh.size
        if len(saved) != world or saved[rank] is None or not self.compression.load_state_dict(saved[rank]):
            self.job.log.info(
                "what compressed gradients had left over is forgotten: the checkpoint was made without "
                "parallel.compress = %s, or with other axes",
                self.config.parallel.compress,
            )

    @property
    def state(self) -> dict[str, Any]:
        """Everything that a checkpoint holds, by name."""
        job = self.job
        averages = {} if job.optimizer.ema is None else {"ema": job.optimizer.ema}
        return {
            **averages,
            "model": job.model,
            "optim": job.optimizer,
            "loader": LoaderState(job.loader),
            "scaler": job.scaler,
            "guard": job.guard,
            "tracker": job.tracker,
            "rng": job.rng,
            "trainer": self,
        }

    def step(self) -> Any:
        """One optimizer step. Returns the verdict on the step before it, which is the same on all ranks."""
        job = self.job
        with job.tracker.data_wait():
            window = job.loader.next()
        rows = self.config.data.batch_size().at(self.next_step)
        scored = job.engine.scored_tokens(window)
        if self.forward_writes:
            job.checkpointer.staged()
        boost = job.scaler.scale  # 1, but for fp16
        scale = boost / scored.clamp(min=1)  # a window without a label to score changes nothing
        loss = job.engine.forward_backward(window, scale) / boost
        job.checkpointer.staged()  # from here on states change
        norm, group_norms = clip.total_norm(
            job.model, stages=job.mesh.pp_size, stages_holding=job.engine.copies, also=job.optimizer.groups
        )
        norm = norm / boost
        clip.clip_values_(job.model.parameters(), self.config.optim.clip_value, scale=boost)
        factor = clip.clip_factor(norm, self.config.optim.clip_norm)
        vote = job.guard.vote(loss, norm, self.wants_stop(), step=self.next_step + 1, save=self.wants_save())
        lr = max(job.optimizer.lrs().values())
        job.optimizer.step(scale=factor / boost, gate=vote.gate)
        job.optimizer.zero_grad()
        if self.compression is not None:
            self.compression.settle(vote.gate)
        load = update_balance(job.model, job.mesh, vote.gate, self.next_step, self.config.train.steps)
        self.next_step += 1
        clip_scores(job.model, job.optimizer, self.config.optim, job.mesh, window, vote.gate, self.next_step)
        job.tracker.step(
            self.next_step,
            tokens=rows * self.config.data.row_tokens_at(self.next_step - 1),
            scored_tokens=scored,
            loss=vote.loss,
            norm=norm,
            lr=lr,
            gate=vote.gate,
            loss_scale=boost if job.scaler.enabled else None,
            more={**{f"norm/{name}": value / boost for name, value in group_norms.items()}, **load},
        )
        job.scaler.update(vote.gate)  # in place, so only now: the tracker has been told of this step's
        return vote.verdict

    def run(self) -> int:
        """Train to the last step, or until all ranks agree to stop. Returns the exit code."""
        config, job = self.config, self.job
        with phase("build", config.parallel, job.mesh):
            self.restore()
            check_replicas(job.model, drawn=False)  # initial values were looked at when it was built
        if job.mesh.rank == 0:
            save_config(config)
        self.report_start()
        job.checkpointer.prepare(self.state)
        verdict = job.guard.settle()
        going = not self.lacks_evaluation() or self.evaluate()
        while going and self.next_step < config.train.steps:
            verdict = self.step()
            if verdict.action != "ok":
                break
            # Saved first: what comes while an evaluation runs then finds everything safe.
            due = self.due(config.ckpt.every_steps)
            by_clock = verdict.save and self.next_step < config.train.steps  # the last one is no temporary one
            if (due or by_clock) and not job.guard.settle().skipped:
                self.save(temporary=not due)
            # One that a stop has cut short is made when the run goes on from here: no step is made before it.
            going = not self.due(config.train.eval_every_steps) or self.evaluate()
        if verdict.action == "ok":
            verdict = job.guard.settle()
        return self.finish(verdict)

    def due(self, every_steps: int) -> bool:
        """Whether something that happens each so many steps happens now; what is due at the end is `finish`'s."""
        return every_steps > 0 and self.next_step % every_steps == 0 and self.next_step < self.config.train.steps

    def wants_stop(self) -> bool:
        """Whether this process has been asked to stop, by a signal or by the clock, or knows of a save that failed."""
        limit = self.config.train.max_minutes
        if limit > 0 and not self.time_is_up and time.monotonic() - self.started > limit * 60:
            self.time_is_up = True
            self.job.log.info("train.max_minutes = %g are over", limit)
        failed = self.save_failed or self.job.checkpointer.failed
        return self.time_is_up or self.job.stop.requested is not None or failed

    def wants_save(self) -> bool:
        """Whether, by this process's clock, it is time for a checkpoint."""
        minutes = self.config.ckpt.every_minutes
        return minutes > 0 and time.monotonic() - self.saved_at > minutes * 60

    def restore(self) -> None:
        """Go on from the newest committed checkpoint, where there is one. Raises ConfigError for one of another job."""
        job = self.job
        job.optimizer.init_state()
        config = self.config.ckpt
        changed: list[str] = []

        def accept(step: int, meta: dict[str, Any]) -> None:
            check_same_job(meta.get("config"), self.config, step)
            changed[:] = state_changes(meta.get("config"), self.config)

        with config_errors():
            try:
                self.saved_step = job.checkpointer.restore(self.state, verify=config.verify, accept=accept)
            except StateMismatchError as error:
                if not changed:
                    raise
                raise ConfigError(
                    f"{'; '.join(changed)}: go on with what the run has, or start another one from its weights, "
                    f"--ckpt.init_from {self.config.train.run_dir} --train.run_dir with another folder ({error})"
                ) from error
            if self.saved_step is None and config.init_from:
                step = start_from(config, job.model, job.optimizer, self.config.model)
                job.tracker.event("start_from", 0, {"checkpoint": step, "folder": config.init_from})
        if self.saved_step is None:
            return
        if self.next_step > self.config.train.steps:
            raise ConfigError(
                f"train.steps = {self.config.train.steps}, but the run is at step {self.next_step} already; ask for "
                "more steps, or start another run with --train.run_dir"
            )
        job.tracker.event("resume", self.next_step, {"checkpoint": self.saved_step})

    def save(self, *, temporary: bool = False) -> None:
        """Write a checkpoint of the step just done, unless there is one. In the background it is a part of training."""
        if self.saved_step == self.next_step:
            return
        job = self.job
        self.settle_save()
        with nullcontext() if job.checkpointer.mode == "async" else job.tracker.pause():
            start = time.monotonic()
            meta = {"config": asdict(self.config), **versions()}
            job.checkpointer.save(self.next_step, self.state, meta=meta, temporary=temporary)
            seconds = time.monotonic() - start
        self.saved_step, self.saved_at = self.next_step, time.monotonic()
        values = {"seconds": seconds, "background": job.checkpointer.mode == "async"}
        job.tracker.event("checkpoint", self.next_step, values)

    def settle_save(self) -> None:
        """Wait for the save in the background. One that failed is told of, and ends the run after another try."""
        try:
            self.job.checkpointer.wait()
        except CheckpointError as error:
            self.job.log.error("%s", error)
            self.save_failed, self.saved_step = True, None

    def evaluate(self) -> bool:
        """Score the held-out text, where there is any. Returns False when a stop was asked for meanwhile."""
        job = self.job
        if job.heldout is None:
            return True
        rows = self.config.train.eval_rows
        job.checkpointer.staged()  # an average takes the place of the weights that are saved
        with job.tracker.pause(), job.optimizer.evaluation_weights():
            values = evaluate(job.model, job.heldout, self.config, job.mesh, max_rows=rows, stop=self.wants_stop)
        if values is not None:
            if self.config.ckpt.keep_best:
                job.checkpointer.score(self.next_step, loss=values["loss"])
            job.tracker.event("eval", self.next_step, values)
        return values is not None

    def lacks_evaluation(self) -> bool:
        """Whether the run goes on from a step whose evaluation was not made. The same on all ranks."""
        job = self.job
        if self.saved_step is None or job.heldout is None or not self.due(self.config.train.eval_every_steps):
            return False
        told = Path(self.config.train.run_dir) / "events.jsonl"
        made = (
            job.mesh.rank == 0
            and told.exists()
            and ("eval", self.next_step) in [(event.kind, event.step) for event in read_events(told)]
        )
        return not anywhere(made, job.mesh)

    def report_start(self) -> None:
        job = self.job
        job.log.info("%s; %s parameters; %s", job.mesh, f"{job.parameters:,}", self.config.train.run_dir)
        layout: dict[str, int | bool | str] = {axis: size for axis, size in job.mesh.axes.items() if size > 1}
        if "tp" in layout:
            layout["sequence_parallel"] = self.config.parallel.sequence_parallel
        if "cp" in layout:
            layout["cp_style"] = self.config.parallel.cp_style
        values = {"config": asdict(self.config), "versions": versions(), "world": job.mesh.size}
        job.tracker.event("start", self.next_step, {**values, "layout": layout, "parameters": job.parameters})
        if not self.config.model.layout_exact:
            job.log.info("the losses depend on how the batch is spread: model.expert_capacity, or balance_over = batch")
        if not self.config.parallel.layout_exact:
            job.log.info("the losses depend a little on how the batch is spread: parallel.fp8, or parallel.compress")
        if self.config.model.kind == "transformer":
            told = estimate_job(on_this_machine(self.config), job.mesh.size)[1]
            job.log.info("memory of a rank, estimated: %s", in_one_line(told))
        for what, how in precision_table(self.config.parallel, job.mesh.size).items():
            job.log.info("%s: %s", what, how)

    def finish(self, verdict: Any) -> int:
        """Save what is not saved, say why the run ends, and choose the exit code."""
        log = self.job.log
        self.settle_save()
        done = self.next_step >= self.config.train.steps
        if verdict.action == "abort" or (done and verdict.skipped_in_a_row > 1):
            # Weights that only make bad steps are not worth a checkpoint that pushes a good one out.
            log.error("ending without a checkpoint: %s", verdict.reason)
            return exitcodes.NONFINITE
        self.save()
        self.settle_save()
        if self.save_failed:
            return FAILED
        if done and self.evaluate():
            self.job.tracker.event("end", self.next_step)
            return exitcodes.OK
        log.info("step %d is saved; start me again to go on (%s)", self.next_step, verdict.reason or "asked to stop")
        return exitcodes.STOPPED


def run(config: JobConfig) -> int:
    """Train a job in this process and return the exit code. Every process of the job calls it."""
    torch.set_float32_matmul_precision(precision_of(config.parallel.precision).matmul)
    with build(config) as job, phase("step", config.parallel, job.mesh):
        try:
            code = Trainer(job).run()
            job.checkpointer.close()  # waits for the copies of checkpoints, where they go to ckpt.remote
            return code
        except CheckpointError as error:  # a full disk, say: known well enough to be told without a traceback
            job.log.error("%s", error)
            return FAILED
