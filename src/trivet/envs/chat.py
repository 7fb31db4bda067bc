"""Open questions, whose answers a judge, a rubric, a reward model or a comparison within the group scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal, Self, get_args

from trivet.envs.base import NOT_SCORED, SingleTurn
from trivet.envs.registry import EnvError, register_env
from trivet.rewards.chat_api import ChatAPI
from trivet.rewards.judge import Judge, JudgeError, Labels, Scale, VerdictCache
from trivet.rewards.local_chat import LocalChat
from trivet.rewards.ranking import rank
from trivet.rewards.reward_model import RewardModel
from trivet.rewards.rubric import Rubric, RubricError
from trivet.types import Group, Message, Reward, Rollout, Scored, Task, Unscored

By = Literal["judge", "rubric", "ranking", "reward_model"]
_JUDGED = ("judge", "ranking")
_API = ("base_url", "model", "key_env", "timeout_s", "attempts", "parallel", "options")
_LOCAL = ("directory", "max_tokens", "temperature", "slots", "context", "dtype", "renderer", "template_args")
_JUDGE = ("question", "template", "votes", "agreement", "rereads", "deadline_s", "max_text")
_OTHER = ("labels", "scale", "cache", "prices")


def make_judge(settings: Mapping[str, Any]) -> Judge:
    """A judge from a recipe's settings.

    `base_url`, `model` and more are of an API (`ChatAPI`), `directory` and more of a model that runs here
    (`LocalChat`); `labels` ({"yes": 1, "no": 0}) or `scale` ([1, 10]) say what a verdict is; the rest is
    `Judge`'s. Raises ValueError.
    """
    of = _LOCAL if "directory" in settings else _API
    known = (*of, *_JUDGE, *_OTHER)
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise ValueError(f"judge: unknown {unknown} (known: {', '.join(known)})")
    for key in ("base_url", "model") if of is _API else ():
        if not isinstance(settings.get(key), str):
            raise ValueError(
                f"judge: {key} is missing; it is the API's, such as http://localhost:8000/v1 (a model that "
                "runs here is named by directory)"
            )
    if "labels" in settings and "scale" in settings:
        raise ValueError("judge: give labels or a scale, not both")
    given = {key: settings[key] for key in of if key in settings}
    api: ChatAPI | LocalChat = ChatAPI(**given) if of is _API else LocalChat(**given)
    verdict: Labels | Scale | None = None
    if "labels" in settings:
        verdict = Labels(settings["labels"])
    elif "scale" in settings:
        verdict = Scale(*settings["scale"])
    options = {key: settings[key] for key in _JUDGE if key in settings}
    if "prices" in settings:
        options["prices"] = tuple(settings["prices"])
    if settings.get("cache"):
        options["cache"] = VerdictCache(settings["cache"])
    return Judge(api, verdict=verdict, **options)


@register_env("chat")
class Chat(SingleTurn):
    """Reward by one of:

    - "judge": a model's verdict on the answer, 0 to 1; a task's `payload["question"]` asks for something of
      its own, and `payload["reference"]` is shown for comparison;
    - "rubric": 1 when all required criteria of `rubric` (or the task's `payload["rubric"]`) hold; judged ones
      ask the judge;
    - "ranking": the judge orders the answers of a group, the best is worth 1 and the last 0; an answer on its
      own has no score;
    - "reward_model": the score of the model in the directory `model`. From a positive score
      `length_penalty` is taken off for every 1,000 letters of the answer, down to 0; a score below stays
      what it is.

    `judge` holds the settings of `make_judge` (from Python also a `Judge`). An answer that was cut off is
    judged as it stands. Whatever fails leaves an answer unscored.
    """

    def __init__(
        self,
        by: By = "judge",
        *,
        judge: Mapping[str, Any] | Judge | None = None,
        rubric: Sequence[Mapping[str, Any]] | None = None,
        model: str | None = None,
        length_penalty: float = 0.0,
        model_args: Mapping[str, Any] | None = None,
    ) -> None:
        if by not in get_args(By):
            raise ValueError(f"by {by!r} is not one of {', '.join(get_args(By))}")
        if by in _JUDGED and judge is None:
            raise ValueError(f"by: {by} needs a judge: {{base_url: ..., model: ...}}")
        if (by == "reward_model") != (model is not None):
            raise ValueError("by: reward_model and model: DIRECTORY belong together")
        if length_penalty < 0 or (length_penalty and by != "reward_model"):
            raise ValueError("length_penalty is 0 or more, and of a reward model's scores")
        self.score_limit_s = None  # judge and reward model have limits of their own
        self.by: By = by
        self.length_penalty = length_penalty
        try:
            self.judge = make_judge(judge) if isinstance(judge, Mapping) else judge
            self.rubric = None if rubric is None else Rubric.from_data(list(rubric))
            if self.rubric is not None and self.rubric.judged and self.judge is None:
                raise ValueError("the rubric asks a judge: give judge: {base_url: ..., model: ...}")
        except (JudgeError, RubricError, TypeError) as error:
            raise ValueError(str(error)) from error
        self.reward_model = None if model is None else RewardModel(model, **(model_args or {}))

    async def score(self, task: Task, message: Message, rollout: Rollout) -> Reward:
        if self.by == "ranking":
            return NOT_SCORED  # until score_group
        if self.reward_model is not None:
            return self._shortened(await self.reward_model.score(task.messages, message), message)
        if self.by == "rubric":
            return await self._by_rubric(task, message)
        assert self.judge is not None
        question, reference = (_text(task, key) for key in ("question", "reference"))
        return await self.judge.score(task.messages, message.text, question=question, reference=reference)

    async def _by_rubric(self, task: Task, message: Message) -> Reward:
        rubric, given = self.rubric, task.payload.get("rubric")
        if given is not None:
            try:
                rubric = Rubric.from_data(given, prompt=task.messages[-1].text)
            except RubricError as error:
                return Unscored("bad_rubric", f"task {task.id}: {error}")
        if rubric is None:
            return Unscored("no_rubric", f"task {task.id} has no payload.rubric, and env_args no rubric")
        return await rubric.score(task.messages, message.text, judge=self.judge)

    def _shortened(self, reward: Reward, message: Message) -> Reward:
        if not isinstance(reward, Scored) or not self.length_penalty:
            return reward
        taken = self.length_penalty * len(message.text) / 1000 if reward.value > 0 else 0.0
        taken = min(taken, max(reward.value, 0.0))
        return Scored(reward.value - taken, {**reward.parts, "raw": reward.value, "length_penalty": taken})

    async def score_group(self, group: Group) -> None:
        """By ranking: the answers of the group are compared with each other. What has a reward, or a cause
        of having none (the deadline), is left out."""
        if self.by != "ranking":
            return
        assert self.judge is not None
        members = [rollout for rollout in group.rollouts if rollout.reward == NOT_SCORED]
        if not members:
            return
        task = group.task
        answers = [rollout.messages[-1].text for rollout in members]
        rewards = await rank(self.judge, task.messages, answers, question=_text(task, "question"))
        for rollout, reward in zip(members, rewards, strict=True):
            rollout.reward = reward

    async def __aenter__(self) -> Self:
        if self.reward_model is not None:
            try:
                await self.reward_model.load()
            except (ValueError, OSError) as error:
                raise EnvError(f"environment 'chat': {error}") from error
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self.judge is not None:
            await self.judge.aclose()
        if self.reward_model is not None:
            await self.reward_model.__aexit__(*exc)

    def counters(self) -> dict[str, float]:
        """What the judge was asked and what it cost: numbers of `JudgeCounters`."""
        if self.judge is None:
            return {}
        counted = self.judge.counters
        numbers = {one.name: getattr(counted, one.name) for one in fields(counted)}
        return {name: float(value) for name, value in numbers.items() if isinstance(value, int | float)}


def _text(task: Task, key: str) -> str:
    value = task.payload.get(key)
    return value if isinstance(value, str) else ""
