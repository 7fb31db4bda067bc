"""One stage: sample (or read), train, publish, evaluate, keep. `StageRun.run` is the loop."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from trivet.algorithms import NothingToTrain, resolve
from trivet.explorer import Filled, conduct_metrics, reward_metrics, rollout_metrics
from trivet.monitor.alerts import Alerts
from trivet.recipe import Stage, sampled_after
from trivet.runtime.evaluation import Evaluator, crossed
from trivet.runtime.joined import joined, reference_kl
from trivet.runtime.keep import Keeper
from trivet.runtime.stop import Stopped, StopRequest
from trivet.runtime.supply import Supply
from trivet.runtime.sync import Synchroniser
from trivet.runtime.thread import WorkThread
from trivet.runtime.watchdog import StepTimeout, watching
from trivet.types import Group

if TYPE_CHECKING:
    from pathlib import Path

    from trivet.algorithms import Algorithm, Batch
    from trivet.algorithms.base import PreparedBatch
    from trivet.buffer import Lease, StageLedger
    from trivet.data.shards import Pack
    from trivet.explorer import Explorer
    from trivet.monitor import Monitor
    from trivet.runtime.experts import Experts
    from trivet.runtime.held_out import HeldOutLoss
    from trivet.runtime.reader import Reader
    from trivet.runtime.selection import Selection
    from trivet.trainer import Trainer
    from trivet.trainer.labels import Labels

_Result = TypeVar("_Result")
_DUMP_S = 0.5  # a step that is over its time gets this much more, in which the stacks are written
_END_S = 5.0  # for what the trainer is at when a stage ends early


class NothingTrained(RuntimeError):
    """A training stage came to its end without a single step; the message says what became of its tasks."""


@dataclass(slots=True)
class Experience:
    """What a step trains on: groups under a lease, and whether they were stored by an earlier run."""

    filled: Filled
    lease: Lease | None = None
    replayed: bool = False
    experts: Lease | None = None
    packs: Sequence[Pack] = ()  # of a stage on packed data; there is no lease then

    @property
    def used_up(self) -> bool:
        """There is nothing left to train on."""
        return self.lease is None and not self.packs


@dataclass(slots=True)
class Outcome:
    """How a stage ended: its last step, why, the numbers of its last evaluation, and (with `keep_best`) the
    step whose weights it hands on."""

    step: int
    why: str
    evals: dict[str, float]
    selected: int | None = None


class StageRun:
    """A training stage, put together. Every step is: experience, train, sync, evaluate, keep."""

    used_up = "all tasks are used up"

    def __init__(
        self,
        stage: Stage,
        *,
        folder: Path,
        algorithm: Algorithm,
        ledger: StageLedger,
        supply: Supply | None,
        source: Explorer | Reader | None,
        trainer: Trainer,
        synchroniser: Synchroniser | None,
        evaluator: Evaluator | None,
        keeper: Keeper,
        monitor: Monitor,
        stop: StopRequest,
        step_timeout_s: float,
        experts: Experts | None = None,
        held_out: HeldOutLoss | None = None,
        selection: Selection | None = None,
        limit: int | None = None,
    ) -> None:
        self.stage, self.folder, self.algorithm = stage, folder, algorithm
        self._algorithm = stage.algorithm
        self.ledger, self.supply, self.source = ledger, supply, source
        self.trainer, self.synchroniser, self.evaluator = trainer, synchroniser, evaluator
        self.keeper, self.monitor, self.stop = keeper, monitor, stop
        self.experts, self.held_out, self.selection, self.limit = experts, held_out, selection, limit
        if experts is not None:
            keeper.others.append(experts.ledger)
        self.step_timeout_s = step_timeout_s
        self.evals: dict[str, float] = {}
        self.alerts = Alerts()
        self.scales: dict[str, float] = {}  # where controls have moved the streams' scales to
        self.trained_s = 0.0
        self.trained, self._evaluated = 0, -1  # the step whose weights the trainer holds; the last evaluated
        self._doing = "starting"
        self._thread = WorkThread("trainer")

    # -- the loop --------------------------------------------------------------------------------

    async def run(self) -> Outcome:
        """Go on from the last checkpoint (or the start) to the end. Raises Stopped at a safe point."""
        why = await self.resume()
        while why is None:
            step = self.trained + 1
            try:
                with watching(self.step_timeout_s, self.folder / "stacks.txt"):
                    async with asyncio.timeout(self.step_timeout_s + _DUMP_S):
                        why = await self.step(step)
            except Stopped:
                await self.keep_if_exact(self.trained)
                raise
            except TimeoutError:
                raise StepTimeout(
                    f"stage {self.stage.name}: step {step} took over {self.step_timeout_s:.0f} s "
                    f"(runtime.step_timeout_s) while {self._doing}; the stacks of all threads are in "
                    f"{self.folder / 'stacks.txt'}. Start the run again: it goes on from the last checkpoint"
                ) from None
        await self.keep(self.trained, done=why)
        return Outcome(self.trained, why, self.evals, await self.hand_on())

    async def step(self, step: int) -> str | None:
        """One step; why the stage ends with it, or None."""
        settings, begin = self.settle(step), time.monotonic()
        self._doing = "sampling"
        experience = await self.experience(step, settings)
        filled = experience.filled
        if experience.used_up:
            if self.trained == 0:
                raise NothingTrained(self._unusable(filled))
            self._doing = "evaluating"
            await self.evaluate(self.trained, last=True)
            return self.used_up
        if self.experts is not None:
            self._doing = "reading the expert's examples"
            experience.experts = await self.experts.take(step)
        self._doing = "training"
        metrics = await self.train(step, settings, experience)
        self.trained = step
        self._doing = "bringing the weights to the engine"
        metrics |= await self.sync(step, settings)
        self.trained_s += time.monotonic() - begin
        metrics |= {"time/step_s": time.monotonic() - begin, "time/sample_s": filled.seconds}
        metrics = self._describe(step, settings, experience) | metrics
        self.monitor.log(step, metrics)
        if self.stage.mode == "both":
            for name, text in self.alerts.look(metrics):
                self.monitor.warn(name, f"step {step}: {text}")
            self.monitor.samples(step, [r for group in filled.groups for r in group.rollouts])
        why = self._ended(step)
        self._doing = "evaluating"
        why = await self.evaluate(step, last=why is not None) or why
        self._doing = "writing a checkpoint"
        if why is None and self.keeper.due(step) and self.exact(step):
            await self.keep(step)
        if why is None and self.stop:
            raise Stopped(f"stopped by {self.stop.reason}")
        return why

    # -- its parts -------------------------------------------------------------------------------

    def settle(self, step: int) -> Stage:
        """The stage's settings at `step`, handed to everyone they concern."""
        settings = self.stage.at(step)
        if settings is not self.stage:
            if settings.algorithm != self._algorithm:  # a part may keep something between steps
                self.algorithm, self._algorithm = resolve(settings.algorithm), settings.algorithm
                self.scales = {}
            self.trainer.set(settings.trainer)
            if self.source is not None:
                self.source.settle(settings)
        return settings

    async def experience(self, step: int, settings: Stage) -> Experience:
        """The step's groups: those it was trained on before a restart, or new ones."""
        prompts = settings.batch.prompts
        assert self.source is not None and self.supply is not None  # what packed data need not
        if step in self.keeper.pinned:
            lease = await asyncio.to_thread(self.ledger.take, prompts, step=step)
            return Experience(await asyncio.to_thread(self._stored, step, lease), lease, replayed=True)
        with self.monitor.progress(f"step {step}: sampling", prompts * settings.batch.group) as bar:
            self.source.advance = bar.advance
            filled = await self.stop.guard(self.source.fill(step, prompts, self.supply.claim))
        if not filled.accepted and filled.exhausted:
            return Experience(filled)
        lease = await asyncio.to_thread(self.ledger.take, max(1, len(filled.accepted)), step=step)
        known = {group.issue: group for group in filled.accepted}
        filled.accepted = await asyncio.to_thread(lease.groups, known)
        return Experience(filled, lease)

    def _stored(self, step: int, lease: Lease) -> Filled:
        """What an earlier run played for this step, as it was decided then."""
        dropped, failed = [], 0
        for decision in self.ledger.decided(step):
            stored = self.ledger.groups([decision.key])
            if decision.state == "failed":
                failed += 1
            elif stored:
                dropped.append((stored[0], decision.cause or str(decision.state)))
        return Filled(accepted=lease.groups(), dropped=dropped, failed=failed)

    async def train(self, step: int, settings: Stage, experience: Experience) -> dict[str, float]:
        """All of the step's updates, then the acknowledgement."""
        updates, groups = settings.batch.updates_per_batch, experience.filled.accepted
        metrics: dict[str, float] = {"train/skipped": 1.0}
        if experience.experts is not None:
            groups = [*groups, *await asyncio.to_thread(experience.experts.groups)]
        if groups:
            metrics = await self.update(step, lambda: self._collated(step, groups), updates)
        assert experience.lease is not None
        await asyncio.to_thread(self.ledger.ack, experience.lease, step)
        if self.experts is not None and experience.experts is not None:
            await asyncio.to_thread(self.experts.ledger.ack, experience.experts, step)
        return metrics

    async def update(
        self, step: int, collated: Callable[[], tuple[Batch, Labels]], updates: int
    ) -> dict[str, float]:
        """The step's optimiser updates; a batch that teaches nothing is said and counted."""
        try:
            return await self.in_trainer(lambda: self._update(step, collated, updates))
        except NothingToTrain as reason:
            self.monitor.warn("nothing_to_train", f"step {step}: {reason}")
            return {"train/skipped": 1.0} | {f"train/{n}": value for n, value in reason.counters.items()}

    def _collated(self, step: int, groups: list[Group]) -> tuple[Batch, Labels]:
        from trivet.trainer import collate

        needs = self.algorithm.needs | ({"routes"} if self.stage.trainer.replay_routes else set())
        batch = collate(groups, step=step, needs=needs, attachments=self.keeper.attachments)
        names = {tasks.source: tasks.label for tasks in self.stage.tasks}
        if self.algorithm.consumes != {"sft"} or len(names) < len(self.stage.tasks):
            return batch, {}
        return batch, {"source": [names.get(r.task.source, "") for g in groups for r in g.rollouts]}

    def _update(
        self, step: int, collated: Callable[[], tuple[Batch, Labels]], updates: int
    ) -> dict[str, float]:
        from trivet.trainer import prepare, split

        begin = time.monotonic()
        batch, labels = collated()
        columns, first = self.algorithm.annotations(updates), self.algorithm.credit_needs
        self.trainer.annotate(batch, columns & first)
        prepared = prepare(batch, self.algorithm, scales=self.scales, **self._ages(batch))
        metrics = {f"train/{name}": value for name, value in prepared.counters.items()}
        parts = split(prepared, updates)
        for part in parts:  # what only the loss reads: before the weights move, where there is a loss
            self.trainer.annotate(part.batch, columns - first, only_T=part.active_T)
        metrics |= joined(self._updates(step, parts, labels)) | reference_kl(parts)
        metrics |= self._control(step, metrics)
        metrics["time/train_s"] = time.monotonic() - begin
        return metrics

    def _updates(self, step: int, parts: Sequence[PreparedBatch], labels: Labels) -> list[dict[str, float]]:
        """The metrics of each update, with the loss by label where rollouts have labels."""
        from trivet.trainer.labels import LossByLabel

        out, first = [], 0
        for part in parts:
            last = first + part.batch.rollouts
            own = {kind: names[first:last] for kind, names in labels.items()}
            sums, first = LossByLabel(own), last
            weight_T = np.sum([stream.weight_T for stream in part.streams], axis=0)
            observe = sums.observer(part.batch, weight_T) if own else None
            metrics = self.trainer.update(part, step=step, observe=observe)
            out.append(metrics | {f"train/loss/{name}": value for name, value in sums.metrics().items()})
        return out

    def _ages(self, batch: Batch) -> dict[str, Any]:
        """How `prepare` measures staleness: in publications along the line that leads to the present weights.
        Versions of a line that was given up count as fresh: their step is repeated as it was."""
        if self.synchroniser is None or self.synchroniser.version is None:
            return {}
        current = self.synchroniser.version
        versions = {int(v) for v in np.unique(batch.version_T[batch.version_T >= 0])}
        gaps = self.synchroniser.ledger.gaps(versions, current)
        return {"current_version": current, "distance": lambda version: gaps.get(version) or 0}

    def _control(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Move the scales of streams that have a control; those the step was trained with, as metrics."""
        used: dict[str, float] = {}
        for stream in self.algorithm.streams:
            if stream.control is not None:
                scale = self.scales.get(stream.name, stream.scale)
                used[f"train/{stream.name}/scale"] = scale
                self.scales[stream.name] = float(stream.control(scale, step, metrics))
        return used

    async def sync(self, step: int, settings: Stage) -> dict[str, float]:
        """Publish where the schedule says so: after every `sync.interval` steps (mode both)."""
        if self.stage.mode != "both" or step % settings.sync.interval:
            return {}
        return await self.publish(step)

    async def publish(self, step: int) -> dict[str, float]:
        """Bring the weights after `step` to the engine, unless it already has them."""
        if self.synchroniser is None or self.synchroniser.step == step:
            return {}
        begin = time.monotonic()
        tensors = await self.in_trainer(self.trainer.published_tensors)
        out = await self.synchroniser.sync(step, tensors, self.trainer.logprobs_of, self.in_trainer)
        return out | {"time/sync_s": time.monotonic() - begin}

    async def evaluate(self, step: int, *, last: bool = False) -> str | None:
        """Run what is due; the reason to end when a rule is met."""
        fresh = await self._held_out_loss(step, last)
        if self.evaluator is not None and step != self._evaluated and self.evaluator.due(step, last):
            await self.publish(step)
            results = await self.evaluator.run_all(step)
            self._evaluated = step
            fresh |= {f"eval/{r.name}/{key}": value for r in results for key, value in r.metrics.items()}
        self.evals |= fresh
        until, why = self.stage.until, None
        if until is not None and until.metric.split("/")[1] in {name.split("/")[1] for name in fresh}:
            why = f"{until.metric} = {fresh[until.metric]:.3f}" if crossed(until, fresh) else None
        return await self._select(step, fresh) or why

    async def _held_out_loss(self, step: int, last: bool) -> dict[str, float]:
        """The held-out loss where it is due."""
        held = self.held_out
        if held is None or not held.due(step, last):
            return {}
        name = held.config.name
        with self.monitor.progress(f"held-out loss of {name}", held.pieces) as bar:
            found = await self.in_trainer(lambda: held.measure(self.trainer, bar.advance))
        self.monitor.eval(step, name, found)
        held.measured = step
        return {f"eval/{name}/{key}": value for key, value in found.items()}

    async def _select(self, step: int, fresh: Mapping[str, float]) -> str | None:
        """Keep the weights where they are the best so far; why a plateau ends the stage."""
        selection = self.selection
        if selection is None or selection.config.metric not in fresh:
            return None
        value = fresh[selection.config.metric]
        await self.in_trainer(lambda: selection.look(step, value, self.trainer))
        return selection.plateau

    async def hand_on(self) -> int | None:
        """Put the selected weights into the trainer, from which the stage's model is written; their step."""
        selection = self.selection
        if selection is None:
            return None
        chosen = selection.standing.step
        if chosen is None:
            metric = selection.config.metric
            self.monitor.warn("keep_best", f"{metric} was never a number: the last weights are handed on")
        elif chosen != self.trained:
            await self.in_trainer(lambda: selection.load(self.trainer))
            self.monitor.info(f"the best {selection.config.metric} was after step {chosen}: it is handed on")
        return chosen

    async def resume(self) -> str | None:
        """Restore the last checkpoint and do what was still to do after its step; why the stage is over."""
        state = await self.in_trainer(lambda: self.keeper.restore(self.trainer, self.ledger))
        for path, fault in self.keeper.damaged.items():
            self.monitor.warn("checkpoint", f"{path} is passed over: {fault}")
        self.trained = step = int(state.get("step", 0))
        if state:
            self.check_position(step, state.get("position"))
        self.trained_s, self.evals = float(state.get("trained_s", 0.0)), dict(state.get("evals", {}))
        self.scales = dict(state.get("scales", {}))
        if self.selection is not None:
            self.selection.restore(state.get("selection"))
        if self.held_out is not None:
            self.held_out.measured = int(state.get("measured", -1))
        if self.synchroniser is not None:
            self.synchroniser.version = state.get("version")
        self.monitor.rewind(self.stage.name, step if state else -1)
        if state.get("done"):
            return str(state["done"])
        self._evaluated = int(state.get("evaluated", -1))
        if self.stage.mode == "both":
            await self.publish(step)
        why = self._ended(step) if step else None
        # A stop during the evaluation leaves a checkpoint from before it.
        return await self.evaluate(step, last=why is not None) or why

    def position(self, step: int) -> dict[str, Any] | None:
        """Where in the data a run goes on after `step`, beyond what the ledger knows. JSON-able."""
        return None

    def check_position(self, step: int, saved: dict[str, Any] | None) -> None:
        """Raise what stands against going on after `step` from the position a checkpoint holds."""

    def exact(self, step: int) -> bool:
        """Whether a run that goes on after `step` can sample as this one would: only where the schedule
        brings
        the weights to the engine right then (older ones are gone with the process)."""
        return self.stage.mode != "both" or step % self.stage.at(step).sync.interval == 0

    async def keep_if_exact(self, step: int) -> None:
        """At a stop: keep the step, or say that stored rollouts will be trained on again."""
        if step <= self.keeper.kept:
            return
        if self.exact(step):
            await self.keep(step)
        else:
            again = step - self.keeper.kept
            self.monitor.info(f"the next run trains {again} steps again, on the rollouts that are stored")

    async def keep(self, step: int, done: str | None = None) -> None:
        """Write a checkpoint of the state after `step`, then let the ledger forget what it covers."""
        state: dict[str, Any] = {
            "step": step,
            "trained_s": self.trained_s,
            "evals": self.evals,
            "scales": self.scales,
            "evaluated": self._evaluated,
            "done": done,
            "version": self.synchroniser.version if self.synchroniser else None,
            "position": self.position(step),
            "selection": self.selection.state() if self.selection else None,
            "measured": self.held_out.measured if self.held_out else -1,
        }
        await self.in_trainer(lambda: self.keeper.write(step, self.trainer, self.ledger, state))
        if self.selection is not None:
            await self.in_trainer(self.selection.thin)

    async def in_trainer(self, work: Callable[[], _Result]) -> _Result:
        """Run `work` on the trainer's thread."""
        return await self._thread.run(work)

    def close(self) -> None:
        """End the trainer; one that hangs is left behind, and ends with the process."""
        if self._thread.close(_END_S):
            self.trainer.close()
        else:
            self.monitor.warn("trainer", f"left behind while {self._doing}: no end within {_END_S:.0f} s")

    # -- what is said of it ----------------------------------------------------------------------

    def _unusable(self, filled: Filled) -> str:
        tasks = len(self.supply.task_ids) if self.supply else 0
        causes = Counter(cause for _, cause in filled.dropped) + Counter(failed=filled.failed)
        counted = ", ".join(f"{cause} {n}" for cause, n in causes.most_common())
        return (
            f"stage {self.stage.name}: all of its {tasks} tasks are used up and not one "
            f"could be trained on ({counted}); look at explorer.window and at the tasks"
        )

    def _ended(self, step: int) -> str | None:
        if self.stage.steps is not None and step >= self.stage.steps:
            return f"{self.stage.steps} steps"
        if self.limit is not None and step >= self.limit:
            return f"{self.limit} steps were asked for"
        if self.stage.max_seconds is not None and self.trained_s >= self.stage.max_seconds:
            return f"{self.stage.max_seconds:.0f} s"
        return None

    def _describe(self, step: int, settings: Stage, experience: Experience) -> dict[str, float]:
        """What the step's experience was like."""
        filled, groups = experience.filled, experience.filled.groups
        out = {"train/prompts": float(len(filled.accepted)), "buffer/replayed": float(experience.replayed)}
        if self.stage.mode == "both":
            lag = step - 1 - sampled_after(step, settings.sync.interval, 0)
            trained = (r for group in groups for r in group.rollouts if r.role == "train")
            rollouts = [r for r in trained if r.source != "expert"]
            out |= reward_metrics(groups) | rollout_metrics(rollouts) | conduct_metrics(rollouts)
            out |= filled.metrics() | {"buffer/lag": float(lag)}
            if groups:
                refused = sum(cause != "surplus" for _, cause in filled.dropped)
                out["group/filtered"] = refused / len(groups)
            if filled.rounds:
                out |= self._sampling_speed(filled.seconds)
        return out

    def _sampling_speed(self, seconds: float) -> dict[str, float]:
        """engine/...: what the engine did since the last step; tokens a second over the whole of sampling."""
        assert self.synchroniser is not None
        counted = self.synchroniser.engine.metrics()
        out = {f"engine/{name}": value for name, value in counted.items()}
        return out | {"engine/tokens_per_s": counted["decoded_tokens"] / max(1e-9, seconds)}
