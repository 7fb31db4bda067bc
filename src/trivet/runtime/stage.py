"""One stage: sample (or read), train, publish, evaluate, keep. `StageRun.run` is the loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from trivet.algorithms import NothingToTrain
from trivet.explorer import Filled, reward_metrics, rollout_metrics
from trivet.recipe import Stage, sampled_after
from trivet.runtime.evaluation import Evaluator, crossed
from trivet.runtime.keep import Keeper
from trivet.runtime.stop import Stopped, StopRequest
from trivet.runtime.supply import Supply
from trivet.runtime.sync import Synchroniser
from trivet.runtime.watchdog import StepTimeout, watching
from trivet.types import Group

if TYPE_CHECKING:
    from pathlib import Path

    from trivet.algorithms import Algorithm
    from trivet.buffer import Lease, StageLedger
    from trivet.explorer import Explorer
    from trivet.monitor import Monitor
    from trivet.runtime.reader import Reader
    from trivet.trainer import Trainer

_Result = TypeVar("_Result")
USED_UP = "all tasks are used up"


@dataclass(slots=True)
class Experience:
    """What a step trains on: groups under a lease, and whether they were stored by an earlier run."""

    filled: Filled
    lease: Lease | None = None
    replayed: bool = False


@dataclass(slots=True)
class Outcome:
    """How a stage ended: its last step, why, and the numbers of its last evaluation."""

    step: int
    why: str
    evals: dict[str, float]


class StageRun:
    """A training stage, put together. Every step is: experience, train, sync, evaluate, keep."""

    def __init__(
        self,
        stage: Stage,
        *,
        folder: Path,
        algorithm: Algorithm,
        ledger: StageLedger,
        supply: Supply,
        source: Explorer | Reader,
        trainer: Trainer,
        synchroniser: Synchroniser | None,
        evaluator: Evaluator | None,
        keeper: Keeper,
        monitor: Monitor,
        stop: StopRequest,
        step_timeout_s: float,
    ) -> None:
        self.stage, self.folder, self.algorithm = stage, folder, algorithm
        self.ledger, self.supply, self.source = ledger, supply, source
        self.trainer, self.synchroniser, self.evaluator = trainer, synchroniser, evaluator
        self.keeper, self.monitor, self.stop = keeper, monitor, stop
        self.step_timeout_s = step_timeout_s
        self.evals: dict[str, float] = {}
        self.trained_s = 0.0
        self._doing, self._evaluated = "starting", -1
        # One thread for all of the trainer's work: torch keeps its worker threads with the thread that calls
        # it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")

    # -- the loop --------------------------------------------------------------------------------

    async def run(self) -> Outcome:
        """Go on from the last checkpoint (or the start) to the end. Raises Stopped at a safe point."""
        step, why = await self.resume()
        while why is None:
            step += 1
            try:
                with watching(self.step_timeout_s, self.folder / "stacks.txt"):
                    async with asyncio.timeout(self.step_timeout_s):
                        why = await self.step(step)
            except Stopped:
                await self.keep_if_exact(step - 1)
                raise
            except TimeoutError:
                raise StepTimeout(
                    f"stage {self.stage.name}: step {step} took over {self.step_timeout_s:.0f} s "
                    f"(runtime.step_timeout_s) while {self._doing}; the stacks of all threads are in "
                    f"{self.folder / 'stacks.txt'}. Start the run again: it goes on from the last checkpoint"
                ) from None
            if why == USED_UP:
                step -= 1
                await self.evaluate(step, last=True)
        await self.keep(step, done=why)
        return Outcome(step, why, self.evals)

    async def step(self, step: int) -> str | None:
        """One step; why the stage ends with it, or None."""
        settings, begin = self.settle(step), time.monotonic()
        self._doing = "sampling"
        experience = await self.experience(step, settings)
        filled = experience.filled
        if experience.lease is None:
            return USED_UP
        self._doing = "training"
        metrics = await self.train(step, settings, experience)
        self._doing = "bringing the weights to the engine"
        metrics |= await self.sync(step, settings)
        self.trained_s += time.monotonic() - begin
        metrics |= {"time/step_s": time.monotonic() - begin, "time/sample_s": filled.seconds}
        self.monitor.log(step, self._describe(step, settings, experience) | metrics)
        if self.stage.mode == "both":
            self.monitor.samples(step, [r for group in filled.groups for r in group.rollouts])
        why = self._ended(step)
        self._doing = "evaluating"
        why = await self.evaluate(step, last=why is not None) or why
        self._doing = "writing a checkpoint"
        if why is None and self.keeper.due(step) and self.exact(step):
            await self.keep(step)
        if why is None and self.stop:
            await self.keep_if_exact(step)
            raise Stopped(f"stopped by {self.stop.reason}")
        return why

    # -- its parts -------------------------------------------------------------------------------

    def settle(self, step: int) -> Stage:
        """The stage's settings at `step`, handed to everyone they concern."""
        settings = self.stage.at(step)
        if settings is not self.stage:
            self.trainer.set(settings.trainer)
            self.source.settle(settings)
        return settings

    async def experience(self, step: int, settings: Stage) -> Experience:
        """The step's groups: those it was trained on before a restart, or new ones."""
        prompts = settings.batch.prompts
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
                dropped.append((stored[0], decision.cause or ""))
        return Filled(accepted=lease.groups(), dropped=dropped, failed=failed)

    async def train(self, step: int, settings: Stage, experience: Experience) -> dict[str, float]:
        """All of the step's updates, then the acknowledgement."""
        updates, groups = settings.batch.updates_per_batch, experience.filled.accepted
        metrics: dict[str, float] = {"train/skipped": 1.0}
        if groups:
            try:
                metrics = await self.in_trainer(lambda: self._update(step, groups, updates))
            except NothingToTrain as reason:
                self.monitor.warn("nothing_to_train", f"step {step}: {reason}")
                metrics |= {f"train/{name}": value for name, value in reason.counters.items()}
        assert experience.lease is not None
        await asyncio.to_thread(self.ledger.ack, experience.lease, step)
        return metrics

    def _update(self, step: int, groups: list[Group], updates: int) -> dict[str, float]:
        from trivet.trainer import collate, prepare, split

        begin = time.monotonic()
        batch = collate(groups)
        self.trainer.annotate(batch, self.algorithm.annotations(updates))
        prepared = prepare(batch, self.algorithm)
        metrics = {f"train/{name}": value for name, value in prepared.counters.items()}
        for part in split(prepared, updates):
            metrics |= self.trainer.update(part, step=step)
        metrics["time/train_s"] = time.monotonic() - begin
        return metrics

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
        tensors = await self.in_trainer(self.trainer.state_tensors)
        out = await self.synchroniser.sync(step, tensors, self.trainer.logprobs_of)
        return out | {"time/sync_s": time.monotonic() - begin}

    async def evaluate(self, step: int, *, last: bool = False) -> str | None:
        """Run what is due; the reason to end when the stop rule is met."""
        if self.evaluator is None or step == self._evaluated or not self.evaluator.due(step, last):
            return None
        await self.publish(step)
        self._evaluated = step
        results = await self.evaluator.run_all(step)
        self.evals = {f"eval/{r.name}/{key}": value for r in results for key, value in r.metrics.items()}
        if crossed(self.stage.until, self.evals):
            return f"{self.stage.until.metric} = {self.evals[self.stage.until.metric]:.3f}"  # type: ignore[union-attr]
        return None

    async def resume(self) -> tuple[int, str | None]:
        """Restore the last checkpoint: (its step, why the stage had ended)."""
        state = await self.in_trainer(lambda: self.keeper.restore(self.trainer, self.ledger))
        step = int(state.get("step", 0))
        self.trained_s, self.evals = float(state.get("trained_s", 0.0)), dict(state.get("evals", {}))
        if self.synchroniser is not None:
            self.synchroniser.version = state.get("version")
        self.monitor.rewind(self.stage.name, step if state else -1)
        if state.get("done"):
            return step, str(state["done"])
        self._evaluated = step if step else -1
        if self.stage.mode == "both":
            await self.publish(step)
        why = await self.evaluate(0) if step == 0 else None
        return step, why

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
            "done": done,
            "version": self.synchroniser.version if self.synchroniser else None,
        }
        await self.in_trainer(lambda: self.keeper.write(step, self.trainer, self.ledger, state))

    async def in_trainer(self, work: Callable[[], _Result]) -> _Result:
        """Run `work` on the trainer's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        self.trainer.close()

    # -- what is said of it ----------------------------------------------------------------------

    def _ended(self, step: int) -> str | None:
        if self.stage.steps is not None and step >= self.stage.steps:
            return f"{self.stage.steps} steps"
        if self.stage.max_seconds is not None and self.trained_s >= self.stage.max_seconds:
            return f"{self.stage.max_seconds:.0f} s"
        return None

    def _describe(self, step: int, settings: Stage, experience: Experience) -> dict[str, float]:
        """What the step's experience was like."""
        filled, groups = experience.filled, experience.filled.groups
        out = {"train/prompts": float(len(filled.accepted)), "buffer/replayed": float(experience.replayed)}
        if self.stage.mode == "both":
            lag = step - 1 - sampled_after(step, settings.sync.interval, 0)
            out |= reward_metrics(groups) | rollout_metrics([r for g in groups for r in g.rollouts])
            out |= filled.metrics() | {"buffer/lag": float(lag)}
            if filled.rounds:
                out |= self._sampling_speed(filled.seconds)
        return out

    def _sampling_speed(self, seconds: float) -> dict[str, float]:
        """engine/...: what the engine did since the last step; tokens a second over the whole of sampling."""
        assert self.synchroniser is not None
        counted = self.synchroniser.engine.metrics()
        out = {f"engine/{name}": value for name, value in counted.items()}
        return out | {"engine/tokens_per_s": counted["decoded_tokens"] / max(1e-9, seconds)}
