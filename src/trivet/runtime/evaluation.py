"""A stage's evaluations: when they are due, what they report, and whether they end the stage."""

from __future__ import annotations

from collections.abc import Sequence

from trivet.agents import Policy
from trivet.engine.base import Engine
from trivet.evals import Evaluation, evaluate
from trivet.monitor import Monitor
from trivet.recipe.schema import Eval, Explorer, Sampling, Until
from trivet.render import Renderer
from trivet.runtime.build import Held
from trivet.runtime.stop import StopRequest


class Evaluator:
    """Plays held-out tasks with whatever weights the engine holds."""

    def __init__(
        self,
        held: Sequence[Held],
        config: Eval,
        explorer: Explorer,
        *,
        sampling: Sampling,
        run: str,
        engine: Engine,
        renderer: Renderer,
        context: int,
        system_prompt: str | None,
        monitor: Monitor,
        stop: StopRequest,
    ) -> None:
        self.held, self.config, self.explorer, self.run = held, config, explorer, run
        self.monitor, self.stop = monitor, stop
        self.policy = Policy(
            engine, renderer, config.sampling or sampling, context=context, system_prompt=system_prompt
        )

    def due(self, step: int, last: bool = False) -> bool:
        """At step 0 (unless switched off), every `every` steps, and at the stage's end."""
        if not self.held:
            return False
        return self.config.at_start if step == 0 else last or step % self.config.every == 0

    async def run_all(self, step: int, *, suffix: str = "") -> list[Evaluation]:
        """Every held-out taskset once; numbers go to the monitor as eval/<name>/<metric>."""
        out: list[Evaluation] = []
        for part in self.held:
            samples = self.config.samples
            with self.monitor.progress(f"evaluating {part.name}", len(part.tasks) * samples) as bar:
                work = evaluate(
                    part.name,
                    part.tasks,
                    part.env,
                    self.policy,
                    self.explorer,
                    run=self.run,
                    samples=samples,
                    ks=self.config.k,
                    threshold=self.config.threshold,
                    warn=self.monitor.warn,
                    advance=bar.advance,
                )
                result = await self.stop.guard(work)
            self.monitor.eval(step, part.name + suffix, result.metrics)
            self.monitor.samples(step, result.rollouts)
            out.append(result)
        return out


def crossed(until: Until | None, metrics: dict[str, float]) -> bool:
    """Whether the stage's stop rule is met. Raises KeyError listing the metrics when it names none."""
    if until is None:
        return False
    if until.metric not in metrics:
        raise KeyError(f"until: no metric {until.metric!r}; this stage's evaluations give {sorted(metrics)}")
    value = metrics[until.metric]
    return value >= until.above if until.above is not None else value <= until.below  # type: ignore[operator]
