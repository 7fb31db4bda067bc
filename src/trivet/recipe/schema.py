"""The recipe: every key a user may write, its default and its meaning.

Sections written at the top level are defaults for all stages; a stage may override any key of them, and a
phase of a stage any key from a step on. Nothing here imports torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

PositiveInt = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are checked on assignment too."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, protected_namespaces=())


class TinyModel(Section):
    """A small Qwen3-style transformer from random initialisation, with its own tokenizer."""

    hidden: PositiveInt = 64
    layers: PositiveInt = 2
    heads: PositiveInt = 4
    kv_heads: PositiveInt = 2
    mlp: PositiveInt = 256
    context: PositiveInt = 256
    alphabet: str = "0123456789+-*/=()., abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ:?!{}\\\n"
    seed: int = 0


class Policy(Section):
    """The model that is trained."""

    model: str | TinyModel = Field(default_factory=TinyModel, description="directory, hub name or tiny model")
    revision: str | None = None
    renderer: str = Field("auto", description="auto, chatml, or a name of the renderers library")
    template_args: dict[str, Any] = Field(default_factory=dict, description="passed to the chat template")
    system_prompt: str | None = Field(None, description="put before a task that has no system message")
    dtype: Literal["float32", "bfloat16"] = "float32"


class AuxModel(Section):
    """A model that helps (judge, reference, teacher); named under `models:`."""

    model: str
    revision: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"


class Engine(Section):
    """Who samples."""

    kind: Literal["torch"] = "torch"
    slots: PositiveInt = Field(32, description="sequences decoded at once")
    context: PositiveInt | None = Field(None, description="tokens per sequence; default: what the stage needs")
    deterministic: bool | None = Field(None, description="default: true in mode both")
    fused: bool = Field(True, description="use the fused path where the model's shape allows")
    top: int = Field(0, ge=0, description="top-k log-probabilities stored per sampled token")
    request_timeout_s: float = Field(600.0, gt=0, description="deadline of one generation")


class Sampling(Section):
    """How the policy is sampled. Training knows temperature only; the rest is for evaluation."""

    temperature: float = Field(1.0, ge=0, description="0 is greedy and is for evaluation only")
    max_tokens: PositiveInt = 64
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    stop: list[str] = Field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Samples from softmax(logits / T) over the whole vocabulary, as training needs."""
        return self.temperature > 0 and self.top_p == 1 and self.top_k == 0 and not self.stop


class Tasks(Section):
    """One taskset: where tasks come from and which environment plays them."""

    source: str = Field(description="file or glob (JSONL, Parquet), dataset name, or generated:NAME")
    env: str = "math"
    name: str | None = Field(None, description="shown in tables; default: derived from source")
    split: str = "train"
    subset: str | None = Field(None, description="configuration name of a hub dataset")
    fields: dict[str, str] = Field(
        default_factory=dict,
        description="our field -> column: prompt, answer, id, messages, response, or payload.NAME",
    )
    template: str = Field("{prompt}", description="the user message; any column may be named in braces")
    args: dict[str, Any] = Field(default_factory=dict, description="of a generated taskset")
    env_args: dict[str, Any] = Field(default_factory=dict, description="of the environment")
    tags: list[str] = Field(default_factory=list)
    limit: PositiveInt | None = None
    skip: int = Field(0, ge=0)
    shuffle: bool = True
    licence: str = ""


class Batch(Section):
    """Units: a batch is `prompts` accepted groups of `group` rollouts each, trained at one step."""

    prompts: PositiveInt = Field(32, description="groups (RL) or examples (SFT) per step")
    group: PositiveInt = Field(16, description="rollouts per prompt; 1 for SFT")
    updates_per_batch: PositiveInt = 1
    micro_tokens: PositiveInt = Field(4096, description="tokens per forward pass")


class Sync(Section):
    """When sampling weights follow: after every `interval` steps, `offset` steps late."""

    interval: PositiveInt = 1
    offset: int = Field(0, ge=0)


class Window(Section):
    """Keep groups whose mean reward lies in (above, upto]; refill what is dropped."""

    above: float = 0.0
    upto: float = 1.0
    not_all_equal: bool = Field(False, description="drop groups whose rewards are all equal")
    max_rounds: PositiveInt = Field(4, description="refill rounds before the step goes on with what there is")


class Explorer(Section):
    """How rollouts are scheduled."""

    concurrency: PositiveInt = Field(512, description="rollouts in flight at once")
    deadline_s: float = Field(600.0, gt=0, description="wall-clock limit of one rollout")
    retries: int = Field(2, ge=0, description="of a rollout lost to infrastructure")
    max_unscored: Fraction = Field(0.1, description="stop when a larger share of a step is unscored")
    window: Window | None = None


class Trainer(Section):
    """How the policy is updated."""

    lr: float = Field(1e-5, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    min_lr_ratio: Fraction = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    clip_grad_norm: float = Field(1.0, gt=0)
    dtype: Literal["float32", "bfloat16"] = "float32"
    trainable: list[str] = Field(default_factory=list, description="glob patterns; empty: all")
    frozen: list[str] = Field(default_factory=list, description="glob patterns")
    share_prefix: bool = Field(True, description="compute what rows share (a group's prompt) once")
    head_chunk: PositiveInt = Field(1024, description="trained positions per pass through the vocabulary")
    gradient_checkpointing: bool = False
    max_bad_updates: PositiveInt = Field(3, description="NaN or infinite updates in a row before the run stops")


class Checkpoints(Section):
    """What is kept on disk."""

    every: int = Field(50, ge=0, description="steps; 0: at the stage's end only")
    keep_last: PositiveInt = 2


class Eval(Section):
    """Held-out tasks played every `every` steps and at step 0; never in the ledger."""

    tasks: list[Tasks] = Field(default_factory=list)
    every: PositiveInt = 20
    at_start: bool = True
    samples: PositiveInt = Field(1, description="rollouts per task")
    k: list[PositiveInt] = Field(default_factory=lambda: [1], description="of pass@k; at most `samples`")
    threshold: float = Field(0.5, description="a reward of at least this is a pass")
    sampling: Sampling | None = Field(None, description="default: the stage's")


class Until(Section):
    """Ends the stage when a metric of an evaluation crosses a bound."""

    metric: str = Field(description="as in metrics.jsonl, e.g. eval/addition/pass@1")
    above: float | None = None
    below: float | None = None

    @model_validator(mode="after")
    def _one_bound(self) -> Until:
        if (self.above is None) == (self.below is None):
            raise ValueError("until: give exactly one of above and below")
        return self


class Phase(Section):
    """Dotted overrides of the stage's settings from step `from` on."""

    from_step: int = Field(alias="from", ge=1)
    set: dict[str, Any]


class Monitor(Section):
    """What a person sees."""

    samples_every: int = Field(20, ge=0, description="steps between stored samples; 0: never")
    samples: PositiveInt = Field(4, description="rollouts per stored sample page")
    tensorboard: bool = False
    plots: bool = True
    show: list[str] = Field(default_factory=list, description="further metrics in the line of a step")


class Runtime(Section):
    """On what the run takes place."""

    threads: PositiveInt | None = Field(None, description="of torch; default: all cores")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:0 ...")
    placement: Literal["colocated"] = "colocated"
    verifier_workers: PositiveInt = 2
    step_timeout_s: float = Field(3600.0, gt=0, description="deadline of one step; then stacks are dumped")


class Buffer(Section):
    """Where experience is kept."""

    url: str | None = Field(None, description="default: sqlite file in the run folder; :memory: for tests")
    lease_s: float = Field(3600.0, gt=0)
    requeue: list[Literal["surplus", "failed"]] = Field(default_factory=lambda: ["surplus", "failed"])


class Weights(Section):
    """How weights travel from trainer to engine."""

    transport: Literal["memory", "disk"] = "memory"
    proof: Literal["checksum", "probe", "both"] = "both"


class Stage(Section):
    """One stage; it starts from the checkpoint of the one before."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")
    mode: Literal["both", "train", "bench"] = "both"
    algorithm: str | dict[str, Any] = Field("grpo", description="a name, or {kind: name, part: value, ...}")
    tasks: list[Tasks] = Field(default_factory=list)
    steps: PositiveInt | None = None
    epochs: PositiveInt | None = None
    max_seconds: float | None = Field(None, gt=0, description="the stage ends at the first step after it")
    until: Until | None = None
    batch: Batch = Field(default_factory=Batch)
    sync: Sync = Field(default_factory=Sync)
    sampling: Sampling = Field(default_factory=Sampling)
    engine: Engine = Field(default_factory=Engine)
    explorer: Explorer = Field(default_factory=Explorer)
    trainer: Trainer = Field(default_factory=Trainer)
    checkpoints: Checkpoints = Field(default_factory=Checkpoints)
    eval: Eval = Field(default_factory=Eval)
    phases: list[Phase] = Field(default_factory=list)
    max_length: PositiveInt | None = Field(None, description="SFT: longer examples are dropped and counted")

    @model_validator(mode="after")
    def _ends(self) -> Stage:
        ends = (self.steps, self.epochs, self.until, self.max_seconds)
        if self.mode != "bench" and all(end is None for end in ends):
            raise ValueError(f"stage {self.name!r}: say when it ends: steps, epochs, until or max_seconds")
        return self


class Recipe(Section):
    """The whole file."""

    name: str = "run"
    seed: int = 0
    output: str = Field("runs/{name}", description="run folder; {name} is filled in")
    policy: Policy = Field(default_factory=Policy)
    models: dict[str, AuxModel] = Field(default_factory=dict)
    runtime: Runtime = Field(default_factory=Runtime)
    buffer: Buffer = Field(default_factory=Buffer)
    weights: Weights = Field(default_factory=Weights)
    monitor: Monitor = Field(default_factory=Monitor)
    imports: list[str] = Field(
        default_factory=list, description="Python files or modules that register environments and algorithms"
    )
    stages: list[Stage] = Field(min_length=1)

    @field_validator("stages")
    @classmethod
    def _names(cls, stages: list[Stage]) -> list[Stage]:
        names = [stage.name for stage in stages]
        double = sorted({name for name in names if names.count(name) > 1})
        if double:
            raise ValueError(f"stage names must differ; {double} are used more than once")
        return stages
