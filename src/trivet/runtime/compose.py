"""Wires one training stage: who samples, who trains, who brings the weights across."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from trivet.agents import Policy
from trivet.algorithms import resolve
from trivet.buffer import AttachmentStore
from trivet.data.shards import PackedData
from trivet.engine.base import Engine, EngineError
from trivet.explorer import Explorer
from trivet.recipe import Stage
from trivet.render import Renderer, get_renderer, load_tokenizer
from trivet.runtime.build import (
    Games,
    Held,
    SetupError,
    check_leaks,
    check_tokenizer,
    context_for,
    load_games,
    load_held,
    located,
    longest_prompt,
)
from trivet.runtime.evaluation import Evaluator
from trivet.runtime.experts import Experts
from trivet.runtime.held_out import HeldOutLoss
from trivet.runtime.keep import Keeper
from trivet.runtime.packed import PackedRun
from trivet.runtime.packs import PackReader, pack_lengths, pack_order
from trivet.runtime.reader import Reader
from trivet.runtime.selection import Selection
from trivet.runtime.stage import StageRun
from trivet.runtime.supply import Supply
from trivet.runtime.sync import Synchroniser
from trivet.tasks import load_tasks
from trivet.weights import DiskStore, MemoryStore, WeightStore

if TYPE_CHECKING:
    from trivet.buffer import StageLedger
    from trivet.runtime.pipeline import Run
    from trivet.trainer import Trainer

_PROBE = 64  # tokens of the prompt whose log-probabilities prove a sync


async def compose_stage(run: Run, stage: Stage, start: Path, stack: AsyncExitStack) -> StageRun:
    """Everything a training stage needs, opened on `stack`. Raises what cannot be set up, before any work."""
    recipe = run.recipe
    algorithm = resolve(stage.algorithm)
    renderer = open_renderer(run, start)
    placed = located(stage, run.place)
    packs = _packs(run, stage, start, stack)
    games = Games({}, packs.data.fingerprint[:16]) if packs else await _games(run, placed, stack)
    held = await load_held(placed, recipe.seed, stack)
    check_leaks(stage, games.by_id, held)
    ledger = run.ledger.stage(stage.name, fingerprint=games.fingerprint)
    trainer = _trainer(run, stage, start, packs.order.steps if packs else _steps(stage, games))
    context = _context(run, stage, games, held, renderer, trainer)
    engine = open_engine(run, stage, start, context, stack) if stage.mode == "both" or held else None
    source = supply = None
    if packs is None:
        source = _source(run, stage, ledger, games, renderer, engine, context)
        shuffle = any(tasks.shuffle for tasks in stage.tasks)
        supply = Supply(ledger, games.ids, epochs=stage.epochs, seed=recipe.seed, shuffle=shuffle)
    composed = (partial(PackedRun, packs=packs) if packs else StageRun)(
        stage,
        folder=run.folder.stage(stage.name),
        algorithm=algorithm,
        ledger=ledger,
        supply=supply,
        source=source,
        trainer=trainer,
        synchroniser=_synchroniser(run, stage, engine, renderer, games, held, context) if engine else None,
        evaluator=open_evaluator(run, stage, held, engine, renderer, context) if engine and held else None,
        keeper=Keeper(
            run.folder.stage(stage.name) / "checkpoints",
            stage.checkpoints,
            keep_tokens=recipe.buffer.keep_tokens,
            attachments=AttachmentStore(run.folder.path / "attachments"),
        ),
        monitor=run.monitor,
        stop=run.stop,
        step_timeout_s=recipe.runtime.step_timeout_s,
        experts=Experts.of(stage, run.ledger, renderer, recipe.seed, run.monitor.warn),
        held_out=_held_out(run, stage, start, games, packs, renderer),
        selection=_selection(run, stage),
        limit=run.limit,
    )
    if composed.experts is not None:
        check_leaks(stage, composed.experts.task_ids, held)
    stack.callback(composed.close)
    return composed


async def _games(run: Run, stage: Stage, stack: AsyncExitStack) -> Games:
    return await load_games(stage, run.recipe.seed, stack, play=stage.mode == "both")


def _packs(run: Run, stage: Stage, start: Path, stack: AsyncExitStack) -> PackReader | None:
    """The stage's packed data, if that is what it trains on. Raises ShardError, SetupError."""
    if stage.packed is None:
        return None
    data = PackedData(stage.packed)
    check_tokenizer(stage, data, start)
    reader = PackReader(data, pack_order(stage, run.recipe.seed, pack_lengths(data).tokens_P))
    stack.callback(reader.close)
    return reader


def _held_out(
    run: Run, stage: Stage, start: Path, games: Games, packs: PackReader | None, renderer: Renderer
) -> HeldOutLoss | None:
    """The stage's held-out loss. Raises ShardError, SetupError and TasksetError, before any work."""
    config = stage.held_out
    if config is None:
        return None
    if config.packed is not None:
        data = PackedData(config.packed)
        check_tokenizer(stage, data, start)
        if packs is not None and data.fingerprint == packs.data.fingerprint:
            raise SetupError(
                f"stage {stage.name}: held_out.packed {data.folder} holds the very packs that are trained "
                "on; build one from other data"
            )
        return HeldOutLoss.of_packs(config, data, run.stop)
    parts = [(tasks.label, load_tasks(tasks, seed=run.recipe.seed).tasks) for tasks in config.tasks]
    for name, tasks in parts:
        check_leaks(stage, games.by_id, [Held(name, tasks, None)])  # type: ignore[arg-type]
    return HeldOutLoss.of_tasks(
        config, parts, renderer, run.stop, max_length=stage.batch.micro_tokens, warn=run.monitor.warn
    )


def _selection(run: Run, stage: Stage) -> Selection | None:
    if stage.keep_best is None:
        return None
    return Selection(stage.keep_best, run.folder.stage(stage.name) / "best")


def open_renderer(run: Run, start: Path) -> Renderer:
    policy = run.recipe.policy
    tokenizer = load_tokenizer(start)
    return get_renderer(tokenizer, kind=policy.renderer, template_args=policy.template_args)


def open_engine(run: Run, stage: Stage, start: Path, context: int, stack: AsyncExitStack) -> Engine:
    from trivet.engine.torch import TorchEngine

    config = stage.engine
    engine = TorchEngine(
        str(start),
        slots=config.slots,
        context=context,
        deterministic=config.deterministic is not False,
        fused=config.fused,
        device=run.recipe.runtime.device,
        dtype=run.recipe.policy.dtype,
        request_timeout_s=config.request_timeout_s,
        routes=config.routes,
    )
    stack.callback(_close_engine, engine, run)
    return engine


def _close_engine(engine: Engine, run: Run) -> None:
    """An engine that does not end must not hide why the stage did."""
    try:
        engine.close()
    except EngineError as error:
        run.monitor.warn("engine", f"closing it: {error}")


def open_evaluator(
    run: Run, stage: Stage, held: list[Held], engine: Engine, renderer: Renderer, context: int
) -> Evaluator:
    return Evaluator(
        held,
        stage.eval,
        stage.explorer,
        sampling=stage.sampling,
        run=f"{run.seed_name}:eval",
        engine=engine,
        renderer=renderer,
        context=context,
        system_prompt=run.recipe.policy.system_prompt,
        monitor=run.monitor,
        stop=run.stop,
    )


def _steps(stage: Stage, games: Games) -> int | None:
    """Steps until the last epoch of the tasks is used up."""
    return None if stage.epochs is None else -(-stage.epochs * len(games.by_id) // stage.batch.prompts)


def _trainer(run: Run, stage: Stage, start: Path, by_epochs: int | None) -> Trainer:
    from trivet.trainer import Trainer

    steps = stage.steps if stage.steps is not None else by_epochs
    phases = [resolve(stage.at(phase.from_step).algorithm) for phase in stage.phases]
    algorithms = [resolve(stage.algorithm), *phases]
    if len({algorithm.produces for algorithm in algorithms}) > 1:
        raise SetupError(
            f"stage {stage.name}: a phase cannot turn a policy into a reward model; make it a stage"
        )
    make: Callable[..., Trainer] = Trainer
    if algorithms[0].produces == "reward_model":
        from trivet.trainer.scalar import RewardTrainer as make
    elif any(algorithm.critic for algorithm in algorithms):
        from trivet.trainer.critic import ActorCritic

        make = partial(ActorCritic, critic=_frozen(run, "critic"))
    needs = frozenset().union(*(algorithm.needs for algorithm in algorithms))
    return make(
        str(start),
        stage.trainer,
        reference=(_frozen(run, "reference") if "ref_logp" in needs else None) or str(start),
        teacher=_frozen(run, "teacher") if "teacher_logp" in needs else None,
        device=run.recipe.runtime.device,
        seed=run.recipe.seed,
        micro_tokens=stage.batch.micro_tokens,
        total_steps=_updates(stage, steps) if steps is not None else None,
    )


def _frozen(run: Run, name: str) -> str | None:
    """The directory of one of the recipe's `models:`, where it names it."""
    return str(run.place(f"models:{name}")) if name in run.recipe.models else None


def _updates(stage: Stage, steps: int) -> int:
    """Optimiser updates of `steps` steps; a phase may change how many a step makes."""
    starts = sorted({1, *(phase.from_step for phase in stage.phases if phase.from_step <= steps), steps + 1})
    return sum((end - at) * stage.at(at).batch.updates_per_batch for at, end in pairwise(starts))


def _context(
    run: Run, stage: Stage, games: Games, held: list[Held], renderer: Renderer, trainer: Trainer
) -> int:
    tasks = [task for part in held for task in part.tasks]
    if stage.mode == "both":
        tasks += [game.task for game in games.by_id.values()]
    prompt = longest_prompt(tasks, renderer, run.recipe.policy.system_prompt) if tasks else 0
    return context_for(stage, prompt, trainer.context_limit)


def _source(
    run: Run,
    stage: Stage,
    ledger: StageLedger,
    games: Games,
    renderer: Renderer,
    engine: Engine | None,
    context: int,
) -> Explorer | Reader:
    if stage.mode == "train":
        algorithm = resolve(stage.algorithm)
        return Reader(
            ledger,
            games.by_id,
            renderer,
            max_length=stage.max_length,
            warn=run.monitor.warn,
            pairs="preference" in algorithm.consumes,
            lone=not algorithm.compares,
        )
    assert engine is not None  # mode both always has one
    policy = Policy(
        engine,
        renderer,
        stage.sampling,
        context=context,
        system_prompt=run.recipe.policy.system_prompt,
        attachments=AttachmentStore(run.folder.path / "attachments"),
        top=stage.engine.top,
    )
    return Explorer(
        ledger,
        games.by_id,
        policy,
        stage.explorer,
        run=f"{run.seed_name}:{stage.name}",
        group=stage.batch.group,
        deterministic=stage.engine.deterministic is not False,
        requeue=run.recipe.buffer.requeue,
        greedy=resolve(stage.algorithm).greedy,
        warn=run.monitor.warn,
    )


def _synchroniser(
    run: Run, stage: Stage, engine: Engine, renderer: Renderer, games: Games, held: list[Held], context: int
) -> Synchroniser:
    store: WeightStore = MemoryStore()
    if run.recipe.weights.transport == "disk":
        store = DiskStore(run.folder.stage(stage.name) / "weights")
    first = next((game.task for game in games.by_id.values()), None) or held[0].tasks[0]
    probe = renderer.render(first.messages).ids_T[: min(_PROBE, context)]
    return Synchroniser(
        run.ledger,
        store,
        engine,
        run.recipe.weights,
        stage=stage.name,
        incarnation=run.incarnation,
        probe_ids=probe,
        dtype=run.recipe.policy.dtype,
        timeout_s=run.recipe.runtime.step_timeout_s,
    )
