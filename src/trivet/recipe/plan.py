"""The numbers a recipe comes to, before anything starts, and what stands against starting it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from trivet.recipe.checks import AlgorithmLike, check_recipe
from trivet.recipe.memory import ModelShape, human_bytes, memory_parts, policy_shape
from trivet.recipe.problems import Problem, RecipeError
from trivet.recipe.schedule import lag
from trivet.recipe.schema import Recipe, Stage, Until
from trivet.recipe.supervised import PackedNumbers

_LAGS_SHOWN = 4


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Derived numbers of one stage; None where they depend on what is not known before the run."""

    name: str
    mode: str
    algorithm: str
    tasks: int | None
    prompts: int
    group: int
    updates_per_step: int
    steps: int | None
    ends: str
    max_tokens: int
    rounds: int
    evaluations: int | None
    eval_rollouts: int | None  # per evaluation
    checkpoints: int | None
    interval: int
    lags: tuple[int, ...]  # of the first steps; empty outside mode both
    packed: PackedNumbers | None = None
    taken: str = ""  # of packed data, by a step
    memory: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def rollouts_per_step(self) -> int:
        """Accepted rollouts (SFT: examples) a step trains on; also its rows while nothing branches."""
        return self.prompts * self.group

    @property
    def tokens_per_step(self) -> int | None:
        """Bound on the tokens sampled for a step without refills; None where nothing is sampled."""
        return self.rollouts_per_step * self.max_tokens if self.mode == "both" else None

    @property
    def tokens_per_step_refilled(self) -> int | None:
        """The same with every refill round of `explorer.window` used up."""
        return None if self.tokens_per_step is None else self.tokens_per_step * self.rounds

    @property
    def epochs(self) -> float | None:
        """How often the steps go through the tasks."""
        return self.steps * self.prompts / self.tasks if self.steps and self.tasks else None

    @property
    def all_eval_rollouts(self) -> int | None:
        if self.evaluations is None or self.eval_rollouts is None:
            return None
        return self.evaluations * self.eval_rollouts

    @property
    def memory_total(self) -> int:
        return sum(self.memory.values())

    def lines(self) -> list[tuple[str, str]]:
        """Label and value, one a line, for a person."""
        out = [("mode", f"{self.mode}, {self.algorithm}" if self.mode != "bench" else "bench")]
        if self.mode != "bench":
            out += self._training_lines()
        if self.eval_rollouts is not None or self.evaluations:
            each, total = _count(self.eval_rollouts), _count(self.all_eval_rollouts)
            out.append(("evaluations", f"{_count(self.evaluations)} of {each} rollouts = {total}"))
        if self.memory:
            out.append(("memory", f"{human_bytes(self.memory_total)} without activations"))
            out += [("", f"{human_bytes(size):>10}  {what}") for what, size in self.memory.items()]
        return out + [("note", note) for note in self.notes]

    def _steps_line(self) -> str:
        """How many, and by what they end where a number of steps is not all there is to it."""
        count = _count(self.steps)
        return count if self.ends == f"steps {count}" else f"at most {count} ({self.ends})"

    def _packed_lines(self, numbers: PackedNumbers) -> list[tuple[str, str]]:
        tokens, share = numbers.tokens, numbers.trained / max(1, numbers.tokens)
        fill = tokens / max(1, numbers.packs * numbers.capacity)
        in_all = f", {numbers.steps:,} steps in all epochs" if numbers.steps is not None else ""
        return [
            ("packed", f"{numbers.packs:,} packs of {numbers.capacity:,} tokens, {fill:.1%} full{in_all}"),
            ("", f"{numbers.documents:,} documents, the longest {numbers.longest:,} tokens"),
            ("", f"{tokens:,} tokens, {numbers.trained:,} trained ({share:.1%})"),
            ("a step", f"{self.taken}, {self.updates_per_step} optimiser update(s)"),
            ("steps", self._steps_line()),
            ("checkpoints", _count(self.checkpoints)),
        ]

    def _training_lines(self) -> list[tuple[str, str]]:
        if self.packed is not None:
            return self._packed_lines(self.packed)
        unit = "examples" if self.mode == "train" and self.group == 1 else "rollouts"
        batch = f"{self.rollouts_per_step:,} {unit}"
        if unit == "rollouts":
            batch = f"{self.prompts:,} prompts x {self.group} rollouts = {batch}"
        out = [
            ("tasks", _count(self.tasks)),
            ("a step", f"{batch}, {self.updates_per_step} optimiser update(s)"),
            ("steps", self._steps_line() + _passes(self.epochs)),
        ]
        if self.steps is not None:
            out.append(("in all", f"at most {self.steps * self.rollouts_per_step:,} {unit}"))
        if self.tokens_per_step is not None:
            refilled = f", {self.tokens_per_step_refilled:,} with refills" if self.rounds > 1 else ""
            out.append(("sampled tokens", f"at most {self.tokens_per_step:,} a step{refilled}"))
            lags = ", ".join(map(str, self.lags))
            out.append(("weights", f"to the engine after every {self.interval} step(s); lags {lags}, ..."))
        return [*out, ("checkpoints", _count(self.checkpoints))]


@dataclass(frozen=True, slots=True)
class Plan:
    """All stages' numbers, and the reasons (if any) why this recipe cannot be run."""

    recipe: Recipe
    stages: tuple[StagePlan, ...]
    problems: tuple[str, ...]
    parameters: int | None = None

    def stage(self, name: str) -> StagePlan:
        return next(stage for stage in self.stages if stage.name == name)

    def check(self) -> Plan:
        """Itself, when nothing stands against the run. Raises RecipeError with all that does."""
        if self.problems:
            raise RecipeError(self.recipe.name, [Problem(text) for text in self.problems])
        return self

    def text(self) -> str:
        """The plan as plain text."""
        size = f", policy of {self.parameters:,} parameters" if self.parameters else ""
        blocks = [f"{self.recipe.name}: {len(self.stages)} stage(s){size}, run folder {self.recipe.run_dir}"]
        for stage in self.stages:
            blocks.append("")
            blocks.append(f"stage {stage.name}")
            blocks += [f"  {label:<15} {value}" for label, value in stage.lines()]
        if self.problems:
            blocks += ["", "cannot be run:", *(f"  - {problem}" for problem in self.problems)]
        return "\n".join(blocks)


def plan(
    recipe: Recipe,
    tasks: Mapping[str, int | None] | None = None,
    *,
    eval_tasks: Mapping[str, int | None] | None = None,
    algorithms: Mapping[str, AlgorithmLike] | None = None,
    gives: Mapping[str, Mapping[str, str]] | None = None,
    shape: ModelShape | None = None,
    packed: Mapping[str, PackedNumbers] | None = None,
) -> Plan:
    """The derived numbers and refusals of a recipe. Never raises for them: see `Plan.check`.

    By stage name: `tasks`, how many tasks it trains on; `eval_tasks`, how many its evaluations hold;
    `algorithms`, what `trivet.algorithms.resolve_all` gives (without it, nothing is refused on the
    algorithms' behalf); `gives`, what is provided beyond `checks.provided`: need -> who. `shape` of the
    policy, by default read from the recipe or a local directory.
    """
    shape = shape or policy_shape(recipe)
    tasks, eval_tasks, algorithms = tasks or {}, eval_tasks or {}, algorithms or {}
    packed = packed or {}
    problems = check_recipe(recipe, tasks, algorithms, gives or {}, shape, packed)

    def memory(stage: Stage) -> dict[str, int]:
        algorithm = algorithms.get(stage.name)
        reference = algorithm is not None and "ref_logp" in algorithm.needs
        critic = algorithm is not None and getattr(algorithm, "critic", False)
        return memory_parts(recipe, stage, shape, reference, critic) if shape else {}

    policies = {n for n, a in algorithms.items() if getattr(a, "produces", "policy") == "policy"}
    known = [stage for stage in recipe.stages if stage.name in policies or stage.name not in algorithms]
    models = 1 + sum(stage.mode != "bench" for stage in known)
    stages = [
        _stage_plan(
            *(stage, tasks.get(stage.name), eval_tasks.get(stage.name), memory(stage), models),
            packed=packed.get(stage.name),
        )
        for stage in recipe.stages
    ]
    return Plan(recipe, tuple(stages), tuple(problems), shape.parameters if shape else None)


def _stage_plan(
    stage: Stage,
    tasks: int | None,
    eval_tasks: int | None,
    memory: Mapping[str, int],
    models: int,
    *,
    packed: PackedNumbers | None,
) -> StagePlan:
    steps = derived_steps(stage, tasks, packed)
    window = stage.explorer.window
    lags = [lag(e, stage.sync.interval, stage.sync.offset) for e in range(1, _LAGS_SHOWN + 1)]
    return StagePlan(
        name=stage.name,
        mode=stage.mode,
        algorithm=stage.kind,
        tasks=tasks,
        prompts=stage.batch.prompts,
        group=stage.batch.group,
        updates_per_step=stage.batch.updates_per_batch,
        steps=steps,
        ends=_ends(stage),
        max_tokens=stage.sampling.max_tokens,
        rounds=window.max_rounds if window else 1,
        evaluations=_evaluations(stage, steps, models),
        eval_rollouts=None if eval_tasks is None else eval_tasks * stage.eval.samples,
        checkpoints=_checkpoints(stage, steps),
        interval=stage.sync.interval,
        lags=tuple(lags) if stage.mode == "both" else (),
        packed=packed,
        taken=f"{stage.batch.packs:,} packs" if stage.batch.packs else f"{stage.batch.tokens or 0:,} tokens",
        memory=memory,
        notes=tuple(_notes(stage, steps, tasks)),
    )


def derived_steps(stage: Stage, tasks: int | None, packed: PackedNumbers | None = None) -> int | None:
    """The number of steps (an upper bound where filters drop groups); None where until or time decide.

    `steps`, or ceil(epochs * tasks / batch.prompts) (packed data: those of `packed`), or the smaller of both.
    """
    if stage.mode == "bench":
        return None
    bounds = [stage.steps] if stage.steps is not None else []
    if packed is not None and packed.steps is not None:
        bounds.append(packed.steps)
    elif stage.epochs is not None and tasks:
        bounds.append(math.ceil(stage.epochs * tasks / stage.batch.prompts))
    return min(bounds) if bounds else None


def _ends(stage: Stage) -> str:
    reasons = []
    if stage.steps is not None:
        reasons.append(f"steps {stage.steps:,}")
    if stage.epochs is not None:
        reasons.append(f"epochs {stage.epochs}")
    if stage.max_seconds is not None:
        reasons.append(f"{stage.max_seconds:,.0f} s")
    if stage.until is not None:
        reasons.append(f"{stage.until.metric} {_bound(stage.until)}")
    if stage.keep_best is not None and stage.keep_best.patience is not None:
        reasons.append(f"{stage.keep_best.patience} evaluations without progress")
    return ", or ".join(reasons)


def _bound(until: Until) -> str:
    return f">= {until.above}" if until.above is not None else f"<= {until.below}"


def _evaluations(stage: Stage, steps: int | None, models: int) -> int | None:
    """At step 0 (unless switched off), every `every` steps, and at the end. Bench: one for each model."""
    if not stage.eval.tasks:
        return 0
    if stage.mode == "bench":
        return models
    if steps is None:
        return None
    every = stage.eval.every
    return int(stage.eval.at_start) + steps // every + int(steps % every > 0)


def _checkpoints(stage: Stage, steps: int | None) -> int | None:
    if stage.mode == "bench":
        return 0
    every = stage.checkpoints.every
    if every == 0:
        return 1
    return None if steps is None else steps // every + int(steps % every > 0)


def _notes(stage: Stage, steps: int | None, tasks: int | None) -> list[str]:
    notes = []
    batch = stage.batch
    if stage.mode == "bench":
        return notes
    if tasks and batch.prompts > tasks:
        notes.append(f"a step of {batch.prompts} prompts is more than the {tasks} tasks: it spans epochs")
    if stage.phases:
        first = min(phase.from_step for phase in stage.phases)
        notes.append(f"phases change settings from step {first} on; these numbers are of the stage's own")
    if batch.prompts % batch.updates_per_batch and stage.packed is None:
        notes.append(f"{batch.prompts} prompts do not split evenly into {batch.updates_per_batch} updates")
    if steps is not None:
        late = [phase.from_step for phase in stage.phases if phase.from_step > steps]
        notes += [f"the phase from step {step} begins after the last step, {steps}" for step in late]
    if stage.held_out is not None:
        notes.append(f"held-out loss every {stage.held_out.every} step(s): eval/{stage.held_out.name}/loss")
    if stage.keep_best is not None:
        best = "lowest" if stage.keep_best.mode == "min" else "highest"
        notes.append(f"the checkpoint with the {best} {stage.keep_best.metric} is handed on")
    sampling = stage.eval.sampling
    if stage.eval.tasks and sampling and sampling.temperature == 0 and stage.eval.samples > 1:
        notes.append(f"eval is greedy: its {stage.eval.samples} samples per task will be equal")
    return notes


def _count(number: int | None) -> str:
    return "not known yet" if number is None else f"{number:,}"


def _passes(epochs: float | None) -> str:
    return "" if epochs is None else f"; {epochs:.3g} pass(es) over the tasks"
