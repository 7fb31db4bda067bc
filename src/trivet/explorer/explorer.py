"""Fills a batch: pulls issues from the ledger, plays their groups, filters, stores.

The event loop only schedules. Rendering and parsing run in the policy's threads, verification in the
verifiers'
processes, storing in a thread here.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from trivet.agents import Attempt, Policy
from trivet.buffer import StageLedger
from trivet.envs import Environment, judge_group
from trivet.explorer.filters import reject, solve_histogram
from trivet.explorer.metrics import unscored_causes
from trivet.explorer.play import Played, Warn, play
from trivet.recipe.schema import Explorer as ExplorerConfig
from trivet.recipe.schema import Stage
from trivet.types import Group, IssueKey, Task, Termination

_ROUNDS = 4  # without a window: to make up for issues that could not be played


class TooManyUnscored(RuntimeError):
    """A larger share of rollouts than `explorer.max_unscored` has no score; the message names the causes."""


class Game(NamedTuple):
    """A task and the environment it is played in."""

    task: Task
    env: Environment


@dataclass(slots=True)
class Filled:
    """What one step's sampling gave. `accepted` are in issue order, as are `dropped` (group, cause)."""

    accepted: list[Group] = field(default_factory=list)
    dropped: list[tuple[Group, str]] = field(default_factory=list)
    failed: int = 0
    retried: int = 0
    rounds: int = 0  # 0 for what an earlier run stored
    exhausted: bool = False
    seconds: float = 0.0

    @property
    def groups(self) -> list[Group]:
        """All groups that were played, accepted or not, in issue order within each."""
        return [*self.accepted, *(group for group, _ in self.dropped)]

    def metrics(self) -> dict[str, float]:
        out = {
            "explorer/accepted": float(len(self.accepted)),
            "explorer/filtered": float(len(self.dropped)),
            "explorer/failed": float(self.failed),
        }
        if played := len(self.accepted) + len(self.dropped) + self.failed:
            out["explorer/lost"] = self.failed / played
        if self.rounds:
            out |= {"explorer/retried": float(self.retried), "explorer/rounds": float(self.rounds)}
        for _, cause in self.dropped:
            out[f"explorer/filtered/{cause}"] = out.get(f"explorer/filtered/{cause}", 0.0) + 1
        return out


Refill = Callable[[int], Sequence[IssueKey]]
"""Claims up to n further issues (in flight from then on); fewer when the stage's tasks are used up."""


class Explorer:
    """Plays issues with one policy. One explorer serves one stage."""

    def __init__(
        self,
        ledger: StageLedger,
        games: Mapping[str, Game],
        policy: Policy,
        config: ExplorerConfig,
        *,
        run: str,
        group: int,
        deterministic: bool,
        requeue: Collection[str],
        warn: Warn,
        greedy: bool = False,
        advance: Callable[[int], None] = lambda n: None,
    ) -> None:
        """`games` by task id; `run` enters every seed; `group` rollouts are played per issue; `requeue`: what
        is issued once more (failed, surplus); `greedy`: the last attempt of each group is the policy's
        greedy answer, of role baseline: compared with and never trained.

        `advance(n)` is called when n more rollouts have ended (for a progress bar).
        """
        self.ledger, self.games, self.policy = ledger, games, policy
        self.config, self.run, self.group, self.deterministic = config, run, group, deterministic
        self.requeue, self.warn, self.greedy, self.advance = requeue, warn, greedy, advance
        self._places = asyncio.Semaphore(config.concurrency)

    def settle(self, settings: Stage) -> None:
        """Go on under other settings (a phase)."""
        self.config, self.group = settings.explorer, settings.batch.group
        self.policy.sampling = settings.sampling

    async def fill(self, step: int, prompts: int, refill: Refill) -> Filled:
        """Play until `prompts` groups are accepted, the window's rounds are used up or no task is left.

        Accepted groups are `ready` in the ledger when this returns, in issue order; the others are in a
        terminal state. Raises TooManyUnscored. On cancellation the issues in flight go back to the ledger.
        """
        begin = time.monotonic()
        filled = Filled()
        rounds = self.config.window.max_rounds if self.config.window else _ROUNDS
        while len(filled.accepted) < prompts and filled.rounds < rounds and not filled.exhausted:
            missing = prompts - len(filled.accepted)
            wanted = math.ceil(missing * (self.config.window.oversample if self.config.window else 1.0))
            keys = await asyncio.to_thread(refill, wanted)
            filled.exhausted = len(keys) < missing
            if keys:
                filled.rounds += 1
                await self._round(step, prompts, keys, filled)
        self._check_scored(filled)
        if len(filled.accepted) < prompts and not filled.exhausted:
            self.warn("starved", self._starved(step, prompts, filled))
        filled.seconds = time.monotonic() - begin
        return filled

    def _starved(self, step: int, prompts: int, filled: Filled) -> str:
        """Why a batch is short: how many were dropped for what, and what the tasks are like."""
        causes = Counter(cause for _, cause in filled.dropped) + Counter(failed=filled.failed)
        why = ", ".join(f"{cause} {n}" for cause, n in causes.most_common())
        advice = "what is always or never solved teaches nothing: widen explorer.window, or change the tasks"
        return (
            f"step {step}: {len(filled.accepted)} of {prompts} groups were accepted after "
            f"{filled.rounds} rounds ({why}; {solve_histogram(filled.groups)})"
            + (f"; {advice}" if self.config.window else "")
        )

    async def _round(self, step: int, prompts: int, keys: Sequence[IssueKey], filled: Filled) -> None:
        """Play `keys`; where order matters, in waves that the engine can hold as one."""
        wave = len(keys)
        if self.deterministic:
            wave = max(1, self.config.concurrency // self.group)
        for start in range(0, len(keys), wave):
            now = list(keys[start : start + wave])
            try:
                groups = await self.play_groups(now)
            except BaseException:  # cancellation too
                # Nothing of this wave was stored: give it and what was to follow back.
                await asyncio.shield(asyncio.to_thread(self.ledger.abandon, list(keys[start:])))
                raise
            await asyncio.to_thread(self._store, step, prompts, groups, filled)

    def _store(self, step: int, prompts: int, played: Sequence[tuple[Group, int]], filled: Filled) -> None:
        """Accepted groups in one transaction, the others each with what was decided about it. What is
        accepted beyond `prompts`, in issue order, is surplus: the next step's come from newer weights."""
        accepted: list[Group] = []
        for group, tries in played:
            filled.retried += tries - self.group
            if all(r.termination is Termination.ABORTED for r in group.rollouts):
                causes = ", ".join(unscored_causes(group.rollouts))
                self.ledger.fail(group.issue, causes, tries, group=group, step=step)
                if "failed" in self.requeue and group.issue.round == 0:
                    self.ledger.requeue(group.issue)
                filled.failed += 1
            elif (cause := reject(group, self.config.window)) is None:
                if len(filled.accepted) + len(accepted) < prompts:
                    accepted.append(group)
                    continue
                self.ledger.surplus(group.issue, group, step=step)
                if "surplus" in self.requeue and group.issue.round == 0:
                    self.ledger.requeue(group.issue)
                filled.dropped.append((group, "surplus"))
            else:
                self.ledger.filtered(group.issue, cause, group=group, step=step)
                filled.dropped.append((group, cause))
        self.ledger.put_all(accepted)
        filled.accepted += accepted

    async def play_groups(self, keys: Sequence[IssueKey]) -> list[tuple[Group, int]]:
        """All attempts of `keys` at once: per key its group and the tries its attempts took in all."""
        orders = await asyncio.to_thread(self.ledger.orders, keys)
        attempts = {key: self._attempts(key, orders[key]) for key in keys}
        if self.deterministic:
            self.policy.engine.expect([a.session(self.policy.player) for key in keys for a in attempts[key]])
        async with asyncio.TaskGroup() as tasks:
            jobs = {key: [tasks.create_task(self._attempt(a)) for a in attempts[key]] for key in keys}
        out = []
        for key in keys:
            played = [job.result() for job in jobs[key]]
            rollouts = [rollout for p in played for rollout in p.rollouts]
            for n, rollout in enumerate(rollouts):
                rollout.id = f"{attempts[key][0].group}#{n}"
            out.append((Group(attempts[key][0].group, key, rollouts), sum(p.tries for p in played)))
        envs = [self.games[key.task_id].env for key in keys]
        await asyncio.gather(*(judge_group(env, group) for env, (group, _) in zip(envs, out, strict=True)))
        return out

    def _attempts(self, key: IssueKey, order: int) -> list[Attempt]:
        name = f"{self.ledger.name}/{key}"
        last = self.group - 1 if self.greedy else -1
        return [
            Attempt(
                run=self.run,
                issue=key,
                group=name,
                index=i,
                order=order,
                role="baseline" if i == last else "train",
            )
            for i in range(self.group)
        ]

    async def _attempt(self, attempt: Attempt) -> Played:
        game = self.games[attempt.issue.task_id]
        try:
            async with self._places:
                return await play(game.env, self.policy, game.task, attempt, self.config, self.warn)
        finally:
            self.policy.engine.settle(attempt.session(self.policy.player))
            self.advance(1)

    def _check_scored(self, filled: Filled) -> None:
        rollouts = [r for group in filled.groups for r in group.rollouts]
        causes = unscored_causes(rollouts)
        lost = causes.total()
        if lost > self.config.max_unscored * len(rollouts):
            example = next(r.reward for r in rollouts if r.score is None)
            raise TooManyUnscored(
                f"{lost} of {len(rollouts)} rollouts have no score ({dict(causes)}); the recipe allows "
                f"{self.config.max_unscored:.0%} (explorer.max_unscored). One of them: {example}"
            )
