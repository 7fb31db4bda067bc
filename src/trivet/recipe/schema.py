"""The recipe: every key a user may write, its default and its meaning.

Sections written at the top level are defaults for all stages; a stage may override any key of them, and a
phase of a stage any key from a step on. Nothing here imports torch.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from trivet.recipe.data import Data
from trivet.recipe.paths import override, split_path
from trivet.recipe.secret import refuse_password
from trivet.recipe.section import Fraction, Free, Location, Momentum, PositiveInt, Section
from trivet.recipe.supervised import HeldOut, KeepBest
from trivet.recipe.taskset import Tasks


class TinyModel(Section):
    """A small Qwen3-style transformer from random initialisation, with its own tokenizer."""

    hidden: PositiveInt = Field(default=64, description="width of the residual stream")
    layers: PositiveInt = Field(default=2, description="transformer blocks")
    heads: PositiveInt = Field(default=4, description="query heads; hidden / heads must be even")
    kv_heads: PositiveInt = Field(default=2, description="key-value heads; divides heads")
    mlp: PositiveInt = Field(default=256, description="width of the gated MLP")
    context: PositiveInt = Field(default=256, description="positions")
    alphabet: str = Field(
        default="0123456789+-*/=()., abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ:?!{}\\\n",
        description="characters its tokenizer knows, one token each",
    )
    seed: int = Field(default=0, description="of the initialisation")


class Policy(Section):
    """The model that is trained."""

    model: Location | TinyModel = Field(
        default_factory=TinyModel, description="directory, hub name or tiny model"
    )
    revision: str | None = Field(default=None, description="of a hub name")
    renderer: str = Field(default="auto", description="auto, chatml, or a name of the renderers library")
    template_args: Free = Field(default_factory=dict, description="passed to the chat template")
    system_prompt: str | None = Field(
        default=None, description="put before a task that has no system message"
    )
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="of the weights that sample")


class AuxModel(Section):
    """A model that helps (judge, reference, teacher); named under `models:`."""

    model: Location = Field(description="directory or hub name")
    revision: str | None = Field(default=None, description="of a hub name")
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="of its weights")


class Engine(Section):
    """Who samples."""

    kind: Literal["torch"] = Field(default="torch", description="the embedded engine")
    slots: PositiveInt = Field(default=32, description="sequences decoded at once")
    context: PositiveInt | None = Field(
        default=None, description="tokens per sequence; default: what the stage needs"
    )
    deterministic: bool | None = Field(default=None, description="same seeds, same bits; default: true")
    fused: bool = Field(default=True, description="use the fused path where the model's shape allows")
    top: int = Field(default=0, ge=0, description="top-k log-probabilities stored per sampled token")
    routes: bool = Field(default=False, description="store which experts each sampled token went through")
    request_timeout_s: float = Field(default=600.0, gt=0, description="deadline of one generation")


class Sampling(Section):
    """How the policy is sampled. Training knows temperature only; the rest is for evaluation."""

    temperature: float = Field(default=1.0, ge=0, description="0 is greedy and is for evaluation only")
    max_tokens: PositiveInt = Field(default=64, description="response budget, tokens")
    top_p: float = Field(default=1.0, gt=0, le=1, description="evaluation only")
    top_k: int = Field(default=0, ge=0, description="evaluation only; 0: all")
    stop: list[str] = Field(default_factory=list, description="texts that end an answer; evaluation only")

    @property
    def exact(self) -> bool:
        """Samples from softmax(logits / T) over the whole vocabulary, as training needs."""
        return self.temperature > 0 and self.top_p == 1 and self.top_k == 0 and not self.stop


class Batch(Section):
    """Units: a batch is `prompts` accepted groups of `group` rollouts each, trained at one step."""

    prompts: PositiveInt = Field(default=32, description="groups (RL) or examples (SFT) per step")
    group: PositiveInt = Field(default=16, description="rollouts per prompt; 1 for SFT")
    updates_per_batch: PositiveInt = Field(
        default=1, description="optimiser updates a step; each takes a share of the groups"
    )
    micro_tokens: PositiveInt = Field(default=4096, description="tokens per forward pass")
    packs: PositiveInt | None = Field(default=None, description="packed data: packs a step")
    tokens: PositiveInt | None = Field(
        default=None, description="packed data: instead of packs, as many as hold at most so many tokens"
    )


class Sync(Section):
    """When sampling weights follow: after every `interval` steps, `offset` steps late."""

    interval: PositiveInt = Field(default=1, description="steps between two publications")
    offset: int = Field(default=0, ge=0, description="steps of delay; only 0 in this version")


class Window(Section):
    """Keep groups whose mean reward lies in (above, upto]; refill what is dropped."""

    above: float = Field(default=0.0, description="mean rewards up to this are dropped")
    upto: float = Field(default=1.0, description="mean rewards above this are dropped")
    not_all_equal: bool = Field(default=False, description="drop groups whose rewards are all equal")
    oversample: float = Field(
        default=1.0, ge=1, le=8, description="groups sampled a round, as a multiple of those still missing"
    )
    max_rounds: PositiveInt = Field(
        default=4,
        description="rounds of sampling, the first included, before a step goes on with what it has",
    )

    @model_validator(mode="after")
    def _has_room(self) -> Window:
        if self.above >= self.upto:
            raise ValueError(
                f"above {self.above:g} must lie below upto {self.upto:g}: every group would be dropped"
            )
        return self


class Explorer(Section):
    """How rollouts are scheduled."""

    concurrency: PositiveInt = Field(default=512, description="rollouts in flight at once")
    deadline_s: float = Field(default=600.0, gt=0, description="wall-clock limit of one rollout")
    retries: int = Field(default=2, ge=0, description="of a rollout lost to infrastructure")
    max_unscored: Fraction = Field(default=0.1, description="stop when a larger share of a step is unscored")
    window: Window | None = Field(default=None, description="which groups are accepted; default: all")


class Lora(Section):
    """Low-rank adapters beside frozen weights; what samples and what is exported is merged."""

    rank: PositiveInt = Field(default=16, description="r, width of the adapters")
    alpha: float = Field(default=32.0, gt=0, description="the adapters' output is multiplied by alpha / rank")
    targets: list[str] = Field(
        default_factory=list,
        description="layers, by name or glob pattern, e.g. q_proj; empty: all linear layers but the head",
    )


class Trainer(Section):
    """How the policy is updated."""

    lr: float = Field(default=1e-5, gt=0, le=1, description="learning rate of AdamW")
    critic_lr: float | None = Field(
        default=None, gt=0, le=1, description="learning rate of the critic, where there is one; default: lr"
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="of the learning rate, over all updates of the stage"
    )
    warmup_steps: int = Field(default=0, ge=0, description="updates of linear warm-up")
    min_lr_ratio: Fraction = Field(default=0.0, description="where the schedule ends, as a share of lr")
    betas: tuple[Momentum, Momentum] = Field(
        default=(0.9, 0.95), strict=False, description="decay of the two moments"
    )
    eps: float = Field(default=1e-8, gt=0, description="of AdamW")
    weight_decay: float = Field(default=0.0, ge=0, le=100, description="decoupled")
    clip_grad_norm: float = Field(default=1.0, gt=0, description="global norm; a bound of the gradient")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="of the weights that are trained"
    )
    trainable: list[str] = Field(default_factory=list, description="glob patterns; empty: all")
    frozen: list[str] = Field(default_factory=list, description="glob patterns")
    lora: Lora | None = Field(default=None, description="train low-rank adapters instead of the weights")
    share_prefix: bool = Field(default=True, description="compute what rows share (a group's prompt) once")
    head_chunk: PositiveInt = Field(
        default=1024, description="trained positions per pass through the vocabulary"
    )
    gradient_checkpointing: bool = Field(
        default=False, description="compute activations again in the backward pass"
    )
    replay_routes: bool = Field(
        default=False, description="send each token through the experts the sampler sent it through"
    )
    max_bad_updates: PositiveInt = Field(
        default=3, description="NaN or infinite updates in a row before the run stops"
    )

    @model_validator(mode="after")
    def _adapters_alone(self) -> Trainer:
        if self.lora is not None and (self.trainable or self.frozen):
            raise ValueError(
                "lora trains its adapters and nothing else: choose layers with lora.targets and take out "
                "trainable and frozen"
            )
        return self


class Checkpoints(Section):
    """What is kept on disk."""

    every: int = Field(default=50, ge=0, description="steps; 0: at the stage's end only")
    keep_last: PositiveInt = Field(default=2, description="older ones are removed")


class Eval(Section):
    """Held-out tasks played every `every` steps and at step 0; never in the ledger."""

    tasks: list[Tasks] = Field(default_factory=list, description="held-out tasksets; none may be trained on")
    every: PositiveInt = Field(
        default=20, description="steps between two evaluations; the last step is always evaluated"
    )
    at_start: bool = Field(default=True, description="evaluate before the first step")
    samples: PositiveInt = Field(default=1, description="rollouts per task")
    k: list[PositiveInt] = Field(default_factory=lambda: [1], description="of pass@k; at most `samples`")
    threshold: float = Field(default=0.5, description="a reward of at least this is a pass")
    sampling: Sampling | None = Field(default=None, description="default: the stage's")


class Until(Section):
    """Ends the stage when a metric of an evaluation crosses a bound."""

    metric: str = Field(description="as in metrics.jsonl, e.g. eval/addition/pass@1")
    above: float | None = Field(default=None, description="end when the metric is at least this")
    below: float | None = Field(default=None, description="end when the metric is at most this")

    @model_validator(mode="after")
    def _one_bound(self) -> Until:
        if (self.above is None) == (self.below is None):
            raise ValueError("until: give exactly one of above and below")
        return self


class Phase(Section):
    """Dotted overrides of the stage's settings from step `from` on."""

    from_step: int = Field(alias="from", ge=1, description="the first step it holds for")
    set: dict[str, Any] = Field(
        min_length=1, description="e.g. {trainer.lr: 1e-4, sampling.temperature: 0.8}"
    )


class Monitor(Section):
    """What a person sees."""

    samples_every: int = Field(default=20, ge=0, description="steps between stored samples; 0: never")
    samples: PositiveInt = Field(default=4, description="rollouts per stored sample page")
    tensorboard: bool = Field(default=False, description="write event files too (extra tensorboard)")
    plots: bool = Field(default=True, description="draw plots/ with the report")
    show: list[str] = Field(default_factory=list, description="further metrics in the line of a step")


class Runtime(Section):
    """On what the run takes place."""

    threads: PositiveInt | None = Field(default=None, description="of torch; default: all cores")
    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:0 ...")
    placement: Literal["colocated"] = Field(
        default="colocated", description="engine and trainer share the device, in turn"
    )
    step_timeout_s: float = Field(
        default=3600.0, gt=0, description="deadline of one step; then stacks are dumped"
    )


class Buffer(Section):
    """Where experience is kept."""

    url: str | None = Field(
        default=None,
        description="default: a SQLite file in the run folder; :memory: for tests. `${NAME}` is stored as it "
        "is and read from the environment at use, so that no password is stored",
    )

    @field_validator("url")
    @classmethod
    def _no_password(cls, url: str | None) -> str | None:
        return None if url is None else refuse_password(url)

    lease_s: float = Field(
        default=3600.0, gt=0, description="a batch that is not trained within this time goes back, seconds"
    )
    keep_tokens: bool = Field(
        default=True,
        description="keep the tokens of what was trained; false: free what the oldest kept checkpoint covers",
    )
    requeue: list[Literal["surplus", "failed"]] = Field(
        default_factory=lambda: ["surplus", "failed"],
        description="which prompts that came to nothing are played once more",
    )


class Weights(Section):
    """How weights travel from trainer to engine."""

    transport: Literal["memory", "disk"] = Field(
        default="memory", description="memory: by reference; disk: memory-mapped files"
    )
    proof: Literal["checksum", "probe", "both"] = Field(
        default="both", description="how a sync is proved to have arrived"
    )


class Expert(Section):
    """Worked examples that join every step's batch, for algorithms that imitate and learn from rewards."""

    tasks: list[Tasks] = Field(min_length=1, description="tasksets with answers; as in a supervised stage")
    prompts: PositiveInt = Field(default=16, description="examples a step")


FIXED_IN_PHASES = (
    *("name", "mode", "steps", "epochs", "max_seconds", "until", "phases", "max_length", "keep_best"),
    # Read once, when the stage is put together:
    *("tasks", "engine", "checkpoints", "eval", "expert", "batch.micro_tokens", "explorer.concurrency"),
    *("packed", "held_out", "batch.packs", "batch.tokens"),
    *("trainer.dtype", "trainer.gradient_checkpointing", "trainer.replay_routes", "trainer.lora"),
)


def _check_phase_key(key: str) -> None:
    """Raises ValueError where a phase would change what belongs to the whole stage."""
    for fixed in FIXED_IN_PHASES:
        if f"{key}.".startswith(f"{fixed}."):
            raise ValueError(f"a phase cannot set {key!r}: it belongs to the whole stage")
        if fixed.startswith(f"{key}."):
            raise ValueError(f"a phase cannot set {key!r} as a whole: name the keys, e.g. {key}.KEY")


class Stage(Section):
    """One stage; it starts from the checkpoint of the one before."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$", description="lower-case letters, digits, - and _")
    mode: Literal["both", "train", "bench"] = Field(
        default="both",
        description="both: sample and train; train: on data alone; bench: evaluate every model so far",
    )
    algorithm: str | Free = Field(default="grpo", description="a name, or {kind: name, part: value, ...}")
    tasks: list[Tasks] = Field(default_factory=list, description="what is trained on")
    packed: Location | None = Field(
        default=None, description="SFT: folder of `trivet data build` whose packs are trained on, not tasks"
    )
    steps: PositiveInt | None = Field(default=None, description="at most so many")
    epochs: PositiveInt | None = Field(default=None, description="passes over the tasks or packs")
    max_seconds: float | None = Field(
        default=None, gt=0, description="the stage ends at the first step after it"
    )
    until: Until | None = Field(default=None, description="ends the stage by a metric")
    batch: Batch = Field(default_factory=Batch, description="how much a step takes")
    sync: Sync = Field(default_factory=Sync, description="when the engine gets new weights")
    sampling: Sampling = Field(default_factory=Sampling, description="how answers are sampled")
    engine: Engine = Field(default_factory=Engine, description="who samples")
    explorer: Explorer = Field(default_factory=Explorer, description="how rollouts are scheduled")
    trainer: Trainer = Field(default_factory=Trainer, description="how the policy is updated")
    checkpoints: Checkpoints = Field(default_factory=Checkpoints, description="what is kept on disk")
    eval: Eval = Field(default_factory=Eval, description="held-out tasks")
    held_out: HeldOut | None = Field(default=None, description="SFT: loss on data that is not trained on")
    keep_best: KeepBest | None = Field(
        default=None, description="hand on the best checkpoint; default: the last"
    )
    expert: Expert | None = Field(default=None, description="examples that join the rollouts")
    phases: list[Phase] = Field(default_factory=list, description="settings that change from a step on")
    max_length: PositiveInt | None = Field(
        default=None, description="SFT: longer examples are dropped and counted"
    )

    @model_validator(mode="after")
    def _ends(self) -> Stage:
        ends = (self.steps, self.epochs, self.until, self.max_seconds)
        if self.mode != "bench" and all(end is None for end in ends):
            raise ValueError(f"stage {self.name!r}: say when it ends: steps, epochs, until or max_seconds")
        return self

    @model_validator(mode="after")
    def _one_example_is_a_group_of_one(self) -> Stage:
        own = "group" in self.batch.model_fields_set or self.batch.group == 1
        if self.mode == "train" and not own:
            # Past validate_assignment, which would run this validator again.
            object.__setattr__(self.batch, "group", 1)
        return self

    @property
    def kind(self) -> str:
        """The algorithm's name."""
        return self.algorithm if isinstance(self.algorithm, str) else str(self.algorithm.get("kind", ""))

    def at(self, step: int) -> Stage:
        """The settings in force at `step` (1, 2, ...): phases whose `from` is reached, later ones on top.

        Raises pydantic's ValidationError when a phase sets what does not exist, ValueError when it sets what
        a phase cannot change. A recipe from `load_recipe` has been checked for both.
        """
        reached = any(phase.from_step <= step for phase in self.phases)
        return Stage.model_validate(self.settings_at(step)) if reached else self

    def settings_at(self, step: int) -> dict[str, Any]:
        """Plain data of `at(step)`, not checked yet. Raises ValueError as `at` does."""
        data = self.model_dump(by_alias=True, exclude={"phases"})
        reached = [phase for phase in self.phases if phase.from_step <= step]
        for phase in sorted(reached, key=lambda phase: phase.from_step):
            for key, value in phase.set.items():
                path = split_path(key)
                _check_phase_key(".".join(path))
                override(data, path, value)
        return data


class Recipe(Section):
    """The whole file."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="of the run")
    seed: int = Field(default=0, description="everything random follows from it")
    output: Location = Field(default="runs/{name}", description="run folder; {name} is filled in")
    policy: Policy = Field(default_factory=Policy, description="the model that is trained")
    models: dict[str, AuxModel] = Field(default_factory=dict, description="models that help, by name")
    runtime: Runtime = Field(default_factory=Runtime, description="on what the run takes place")
    buffer: Buffer = Field(default_factory=Buffer, description="where experience is kept")
    weights: Weights = Field(default_factory=Weights, description="how weights travel")
    monitor: Monitor = Field(default_factory=Monitor, description="what a person sees")
    imports: list[Location] = Field(
        default_factory=list, description="Python files or modules that register environments and algorithms"
    )
    data: Data | None = Field(default=None, description="what `trivet data build` makes of raw chats")
    stages: list[Stage] = Field(
        default_factory=list, description="in order; each starts from the model the one before left"
    )

    @model_validator(mode="after")
    def _something_to_do(self) -> Recipe:
        if not self.stages and self.data is None:
            raise ValueError("stages is missing or empty: list at least one stage (or a data section)")
        return self

    @field_validator("output")
    @classmethod
    def _only_the_name(cls, output: str) -> str:
        if not output.strip() or set("{}") & set(output.replace("{name}", "")):
            raise ValueError(f"must be a path in which only {{name}} stands in braces, not {output!r}")
        return output

    @field_validator("stages")
    @classmethod
    def _names_differ(cls, stages: list[Stage]) -> list[Stage]:
        names = [stage.name for stage in stages]
        double = sorted({name for name in names if names.count(name) > 1})
        if double:
            raise ValueError(f"stage names must differ; {double} are used more than once")
        return stages

    def stage(self, name: str) -> Stage:
        """The stage of that name. Raises KeyError that lists the names."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise KeyError(f"no stage {name!r}; the recipe has {[stage.name for stage in self.stages]}")

    @property
    def run_dir(self) -> str:
        """The run folder: `output` with {name} filled in."""
        return self.output.replace("{name}", self.name)
