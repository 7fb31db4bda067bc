"""What a recipe must not ask for: each refusal says which key, why, and what to set instead."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

from trivet.recipe.memory import ModelShape, model_type
from trivet.recipe.problems import nearest
from trivet.recipe.schedule import FORMULA, lag
from trivet.recipe.schema import Recipe, Stage, TinyModel
from trivet.recipe.supervised import PackedNumbers


class PartLike(Protocol):
    """A part of an algorithm, as planning sees it."""

    @property
    def role(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def needs(self) -> frozenset[str]: ...


class AlgorithmLike(Protocol):
    """What planning asks of an algorithm; `trivet.algorithms.Algorithm` is one."""

    @property
    def kind(self) -> str: ...
    @property
    def parts(self) -> Sequence[Any]: ...
    @property
    def needs(self) -> frozenset[str]: ...
    @property
    def group_min(self) -> int: ...
    @property
    def modes(self) -> Collection[str]: ...
    @property
    def consumes(self) -> Collection[str]: ...


HOW_TO_PROVIDE = {
    "top": "set engine.top, e.g. engine.top: 20",
    "routes": "set engine.routes: true",
    "value": "it trains no critic; take algorithm ppo, or a credit that reads no values",
    "teacher_logp": "name a teacher, e.g. models: {teacher: {model: DIRECTORY}}",
}


ROUTED = ("qwen3_moe", "glm4_moe", "mixtral", "olmoe")
"""`model_type` of the mixtures of experts whose routes can be recorded and replayed."""

_ENDS = ("steps", "epochs", "max_seconds", "until", "phases")
_EVAL_METRICS = ("reward", "length", "truncated", "unscored")


def provided(stage: Stage) -> dict[str, str]:
    """What this version's engine and trainer provide in a stage: need -> who provides it."""
    found = {"proximal_logp": "trainer", "ref_logp": "trainer"}
    if stage.engine.top > 0:
        found["top"] = "engine"
    if stage.engine.routes:
        found["routes"] = "engine"
    return found


def check_recipe(
    recipe: Recipe,
    tasks: Mapping[str, int | None],
    algorithms: Mapping[str, AlgorithmLike],
    gives: Mapping[str, Mapping[str, str]],
    shape: ModelShape | None,
    packed: Mapping[str, PackedNumbers],
) -> list[str]:
    """All refusals, in the recipe's order. Empty: the recipe can be run."""
    problems = [*_policy(recipe), *_lease(recipe)]
    if not recipe.stages:
        problems.append("there is no stage to run; its data section is for `trivet data build`")
    for stage in recipe.stages:
        variants = {stage.name: stage}
        variants |= {f"{stage.name}@{p.from_step}": stage.at(p.from_step) for p in stage.phases}
        found: dict[str, None] = dict.fromkeys((*_models(recipe, stage), *_routes(recipe, stage)))
        found |= dict.fromkeys(_packed(stage, packed.get(stage.name), shape))
        for name, variant in variants.items():
            found |= dict.fromkeys(_stage(variant, tasks.get(stage.name), shape))
            algorithm = algorithms.get(name, algorithms.get(stage.name))
            if algorithm is not None and stage.mode != "bench":
                has = {**provided(variant), **gives.get(stage.name, {})}
                if getattr(algorithm, "critic", False):
                    has["value"] = "critic"
                if "teacher" in recipe.models:
                    has["teacher_logp"] = "models.teacher"
                found |= dict.fromkeys(_algorithm(variant, algorithm, has))
                first = algorithms.get(stage.name)
                if getattr(algorithm, "greedy", False) != getattr(first, "greedy", False):
                    found[
                        f"a phase changes the algorithm to {algorithm.kind}: whether an attempt of each "
                        "group is the policy's greedy answer cannot change in a stage; start another one"
                    ] = None
        problems += [f"stages.{stage.name}: {text}" for text in found]
    return problems


def _policy(recipe: Recipe) -> Iterator[str]:
    tiny = recipe.policy.model
    if not isinstance(tiny, TinyModel):
        return
    if tiny.hidden % tiny.heads or (tiny.hidden // tiny.heads) % 2:
        yield (
            f"policy.model: hidden {tiny.hidden} over {tiny.heads} heads must give an even head size; "
            f"set hidden to a multiple of {2 * tiny.heads}"
        )
    if tiny.heads % tiny.kv_heads:
        yield f"policy.model: heads {tiny.heads} must be a multiple of kv_heads {tiny.kv_heads}"
    if not tiny.alphabet:
        yield "policy.model: the alphabet is empty; list the characters the model shall know"


def _lease(recipe: Recipe) -> Iterator[str]:
    lease, step = recipe.buffer.lease_s, recipe.runtime.step_timeout_s
    if lease < step and any(stage.mode != "bench" for stage in recipe.stages):
        yield (
            f"buffer.lease_s {lease:g} is below runtime.step_timeout_s {step:g}: a slow step would lose its "
            f"own prompts and batch, which the ledger takes back; set buffer.lease_s to {step:g} or more"
        )


def _models(recipe: Recipe, stage: Stage) -> Iterator[str]:
    """`env_args: {model: stage:NAME}` needs an earlier stage of that name, `models:NAME` an entry."""
    earlier = [s.name for s in recipe.stages[: recipe.stages.index(stage)] if s.mode != "bench"]
    known = {"stage": earlier, "models": list(recipe.models)}
    for tasks in (*stage.tasks, *stage.eval.tasks):
        kind, found, name = str(tasks.env_args.get("model", "")).partition(":")
        if found and kind in known and name not in known[kind]:
            what = "earlier training stages" if kind == "stage" else "models"
            has = ", ".join(known[kind]) or "none"
            yield f"env_args.model {kind}:{name} names none of the {what} ({has}){nearest(name, known[kind])}"


def _routes(recipe: Recipe, stage: Stage) -> Iterator[str]:
    """Replayed routes need a mixture of experts of a known family; seen where the configuration is here."""
    if not stage.trainer.replay_routes or stage.mode == "bench":
        return
    kind = "a dense model" if isinstance(recipe.policy.model, TinyModel) else model_type(recipe)
    if kind is not None and kind not in ROUTED:
        yield (
            f"trainer.replay_routes: the policy is {kind}; routes are replayed in "
            f"{', '.join(ROUTED)}: take out replay_routes and engine.routes"
        )


def _stage(stage: Stage, tasks: int | None, shape: ModelShape | None) -> Iterator[str]:
    yield from _taskset(stage, tasks)
    yield from _eval(stage)
    limit = shape.context if shape else None
    if limit and stage.engine.context and stage.engine.context > limit:
        yield f"engine.context {stage.engine.context} is more than the model's {limit} positions"
    if stage.mode == "bench":
        return
    yield from _batch(stage)
    yield from _ending(stage)
    if stage.max_length is not None and stage.mode != "train":
        yield "max_length is for supervised stages; sampling.max_tokens bounds what is sampled"
    if stage.trainer.replay_routes and not stage.engine.routes:
        yield "trainer.replay_routes has nothing to replay; set engine.routes: true too"
    if stage.engine.routes and not stage.trainer.replay_routes:
        yield "engine.routes stores routes that nobody reads; set trainer.replay_routes: true, or take it out"
    if stage.mode == "both":
        yield from _sampling(stage)
    if limit and stage.mode == "both" and stage.sampling.max_tokens >= limit:
        yield (
            f"sampling.max_tokens {stage.sampling.max_tokens} leaves no room for a prompt in the model's "
            f"context of {limit} tokens"
        )


def _taskset(stage: Stage, tasks: int | None) -> Iterator[str]:
    if stage.mode == "bench":
        if not stage.eval.tasks:
            yield "a bench stage plays eval.tasks, and there are none"
        if stage.tasks:
            yield "a bench stage plays eval.tasks; move what is under tasks there"
        ends = [key for key in _ENDS if getattr(stage, key)]
        if ends:
            yield f"a bench stage has no steps: take out {', '.join(ends)}"
    elif stage.packed is not None:
        return  # has checks of its own
    elif not stage.tasks:
        yield "there is nothing to train on; give it tasks, or packed data"
    elif tasks == 0:
        yield "its tasksets hold no task; look at limit, skip, split and the source"


def _batch(stage: Stage) -> Iterator[str]:
    batch = stage.batch
    if batch.updates_per_batch > batch.prompts and stage.packed is None:
        yield (
            f"batch.updates_per_batch {batch.updates_per_batch} cannot split {batch.prompts} prompts: an "
            "update takes whole groups. batch.prompts counts groups, not rollouts: a step has prompts x "
            f"group = {batch.prompts * batch.group} rollouts"
        )
    if stage.mode == "both" and stage.sampling.max_tokens >= batch.micro_tokens:
        yield (
            f"batch.micro_tokens {batch.micro_tokens} must hold the longest row: a prompt and up to "
            f"sampling.max_tokens {stage.sampling.max_tokens} tokens. It counts tokens per forward pass, not "
            "rows"
        )


def _ending(stage: Stage) -> Iterator[str]:
    if stage.trainer.schedule != "constant" and stage.steps is None and stage.epochs is None:
        yield (
            f"trainer.schedule {stage.trainer.schedule} must know how many steps there are; set steps or "
            "epochs (until and max_seconds may end the stage earlier)"
        )
    updates = None if stage.steps is None else stage.steps * stage.batch.updates_per_batch
    if updates is not None and stage.trainer.warmup_steps >= updates > 1:
        yield (
            f"trainer.warmup_steps {stage.trainer.warmup_steps} is not below the stage's {updates} optimiser "
            "updates (steps x batch.updates_per_batch): the learning rate would never reach lr"
        )


def _sampling(stage: Stage) -> Iterator[str]:
    sampling, sync = stage.sampling, stage.sync
    if not sampling.exact:
        knobs = {
            "temperature: 0": sampling.temperature == 0,
            f"top_p: {sampling.top_p}": sampling.top_p != 1,
            f"top_k: {sampling.top_k}": sampling.top_k != 0,
            f"stop: {sampling.stop}": bool(sampling.stop),
        }
        named = ", ".join(name for name, used in knobs.items() if used)
        yield (
            f"sampling has {named}: training must sample from softmax(logits / temperature) over the whole "
            "vocabulary, or log-probabilities of sampler and trainer differ. Only temperature > 0 may be set "
            "here; the others belong under eval.sampling"
        )
    if stage.eval.tasks and stage.eval.every % sync.interval:
        yield (
            f"eval.every {stage.eval.every} is not a multiple of sync.interval {sync.interval}: an "
            "evaluation brings the newest weights to the engine, and what is sampled next would not come "
            "from those of the schedule"
        )
    if sync.offset > 0:
        lags = ", ".join(str(lag(step, sync.interval, sync.offset)) for step in range(1, 5))
        yield (
            f"sync.offset {sync.offset} is not available in this version; set it to 0. Batch e would be "
            f"sampled with the weights after step {FORMULA}, here with lags {lags}, ... for e = 1, 2, 3, 4"
        )


def _eval(stage: Stage) -> Iterator[str]:
    config = stage.eval
    too_many = [k for k in config.k if k > config.samples]
    if too_many and config.tasks:
        yield (
            f"eval.k {too_many} is more than eval.samples {config.samples}: pass@k needs at least k rollouts "
            f"per task; set eval.samples to {max(too_many)} or more"
        )
    labels = [tasks.label for tasks in config.tasks]
    double = sorted({label for label in labels if labels.count(label) > 1})
    if double:
        yield f"eval.tasks has {double} more than once, so their metrics would mix; set `name:` on one"
    if stage.mode == "bench":
        return
    if stage.until is not None:
        yield from _metric("until.metric", stage.until.metric, stage)
    if stage.keep_best is not None:
        yield from _metric("keep_best.metric", stage.keep_best.metric, stage)


def _metric(key: str, wanted: str, stage: Stage) -> Iterator[str]:
    """What a rule looks at must be what an evaluation of the stage gives."""
    labels = [tasks.label for tasks in stage.eval.tasks]
    held = [stage.held_out.name] if stage.held_out else []
    parts = wanted.split("/")
    if parts[0] != "eval" or len(parts) < 3:
        example = f"eval/{labels[0] if labels else 'TASKSET'}/pass@1"
        example = f"eval/{held[0]}/loss" if held and not labels else example
        yield f"{key} {wanted!r} must be eval/TASKSET/METRIC, e.g. {example}"
        return
    name, metric, kind = parts[1], "/".join(parts[2:]), parts[2]
    if name in held:
        if metric != "loss" and not metric.startswith(("loss/source/", "loss/category/")):
            yield f"{key} wants {metric}; held_out gives loss, loss/source/NAME and loss/category/NAME"
        return
    if name not in labels:
        has = ", ".join([*labels, *held]) or "none"
        where = "eval.tasks and held_out have" if held else "eval.tasks has"
        yield f"{key} names the taskset {name!r}; {where} {has}{nearest(name, [*labels, *held])}"
    passes = [f"pass@{k}" for k in stage.eval.k]
    known = [*_EVAL_METRICS, *passes, *(f"{one}/{side}" for one in passes for side in ("low", "high"))]
    if kind.startswith("pass@") and kind not in passes:
        yield f"{key} wants {metric}; eval.k computes {', '.join(passes)}"
    elif metric not in known:
        yield f"{key} wants {metric}, which no evaluation gives{nearest(metric, known)}"


def _packed(stage: Stage, numbers: PackedNumbers | None, shape: ModelShape | None) -> Iterator[str]:
    """Packed data, held-out loss and the choice of a checkpoint."""
    batch, held = stage.batch, stage.held_out
    if stage.mode != "train":
        given = {"packed": stage.packed, "held_out": held}
        yield from (
            f"{key} is for supervised stages; set mode: train, or take it out"
            for key, value in given.items()
            if value is not None
        )
    if stage.mode == "bench" and stage.keep_best is not None:
        yield "keep_best: a bench stage trains nothing; take it out"
    if held is not None and held.name in [tasks.label for tasks in stage.eval.tasks]:
        yield f"held_out.name {held.name!r} is also a taskset of eval.tasks, so their metrics would mix"
    if stage.packed is None:
        for key in ("packs", "tokens"):
            if getattr(batch, key) is not None:
                yield f"batch.{key} counts packed data, and there is none: set batch.prompts, or give packed"
        return
    if held is not None and held.packed == stage.packed:
        yield "held_out.packed is the folder that is trained on; give another build"
    if stage.tasks:
        yield "packed and tasks: give one of them; tasks of other stages stand under those stages"
    if (batch.packs is None) == (batch.tokens is None):
        yield "packed data needs exactly one of batch.packs (packs a step) and batch.tokens (tokens a step)"
    if stage.max_length is not None:
        yield "max_length is for tasks: packed data were cut to length when they were built (data.max_length)"
    if numbers is None:
        return
    if numbers.longest - 1 > batch.micro_tokens:
        yield (
            f"batch.micro_tokens {batch.micro_tokens} is below the longest document of the packs, "
            f"{numbers.longest} tokens, which is computed in one pass; raise it to {numbers.longest}"
        )
    if shape and shape.context and numbers.longest > shape.context:
        yield (
            f"the longest document of the packs has {numbers.longest} tokens, the model {shape.context} "
            "positions; build them with a lower data.max_length"
        )


def _algorithm(stage: Stage, algorithm: AlgorithmLike, has: Mapping[str, str]) -> Iterator[str]:
    kind, group = algorithm.kind, stage.batch.group
    if stage.mode not in algorithm.modes:
        sampled = (
            "samples nothing: the answers are in the data" if "both" not in algorithm.modes else "samples"
        )
        yield (
            f"mode {stage.mode} does not suit {kind}, which {sampled}; set mode: "
            f"{' or '.join(sorted(set(algorithm.modes) - {'async'}))}"
        )
    elif stage.mode == "train" and "rollout" in algorithm.consumes:
        yield (
            f"mode train has no rollouts for {kind}: replaying stored ones is not available in this version; "
            "set mode: both"
        )
    if getattr(algorithm, "produces", "policy") == "reward_model" and stage.trainer.lora is not None:
        yield f"{kind} trains a head that adapters do not reach: take out trainer.lora, or freeze the body"
    if getattr(algorithm, "produces", "policy") == "reward_model" and stage.eval.tasks:
        yield f"{kind} trains a model that scores and answers nothing: take out eval.tasks (and until)"
    if stage.mode != "train" and "rollout" in algorithm.consumes and group < algorithm.group_min:
        yield (
            f"batch.group {group} gives {kind} nothing to compare: credit needs at least "
            f"{algorithm.group_min} rollouts of one prompt. batch.group counts rollouts per prompt, "
            "batch.prompts the prompts of a step"
        )
    if stage.mode == "train" and "rollout" not in algorithm.consumes and group != 1:
        what = (
            "a pair is read whole" if "preference" in algorithm.consumes else "an example is a group of one"
        )
        yield f"batch.group {group} does not suit {kind}: {what}; set batch.group: 1"
    supervised = [key for key in ("packed", "held_out") if getattr(stage, key) is not None]
    if supervised and (set(algorithm.consumes) != {"sft"}):
        yield f"{kind} does not train on worked examples alone, as {supervised[0]} needs; take algorithm sft"
    if stage.expert is not None and not {"sft", "rollout"} <= set(algorithm.consumes):
        yield f"expert: {kind} makes no use of worked examples; take it out, or take algorithm mix or chord"
    if stage.expert is None and {"sft", "rollout"} <= set(algorithm.consumes):
        yield f"{kind} imitates worked examples and there are none; give the stage expert: {{tasks: [...]}}"
    for need in sorted(algorithm.needs - has.keys()):
        who = [f"{p.role} {p.name}" for p in algorithm.parts if need in p.needs] or [kind]
        yield f"{kind} ({', '.join(who)}) needs {need}: {HOW_TO_PROVIDE.get(need, 'nobody provides it')}"
