"""A conversation: the only thing that appends to a trace.

Tokens are never made twice. The first request is rendered whole; afterwards only the suffix behind the
sampled answer is rendered, and the answer itself stays the ids that the engine gave.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from trivet.agents.attempt import Attempt
from trivet.engine.base import Generation, Sampling
from trivet.render.base import Rendered
from trivet.types import (
    Attachment,
    Message,
    Reward,
    Rollout,
    SchemaError,
    Task,
    Termination,
    Trace,
)

if TYPE_CHECKING:
    from trivet.agents.policy import Policy

_Result = TypeVar("_Result")
_SMALL = 256  # characters or tokens rendered or parsed in about a tenth of a millisecond


class ConversationError(ValueError):
    """A conversation was asked for something its state or its task does not allow; retrying is of no use."""


def _refuse_media(messages: Sequence[Message], task: Task) -> None:
    for message in messages:
        parts = () if isinstance(message.content, str) else message.content
        media = sorted({part.type for part in parts if part.type != "text"})
        if media:
            raise SchemaError(
                f"task {task.id}: a {message.role} message holds {media}; this policy reads text only"
            )


def cut_at(message: Message, stops: Sequence[str]) -> tuple[Message, bool]:
    """The message up to the first of `stops`, and whether there was one. The trace keeps all tokens.

    Stop strings are for evaluation; engines know token ids only, so text after one is cut from the view.
    """
    places = [place for stop in stops if stop and (place := message.text.find(stop)) >= 0]
    if not places:
        return message, False
    return replace(message, content=message.text[: min(places)]), True


class Conversation:
    """Messages, the trace of what the engine saw and wrote, and why it ended.

    `termination` is None before the first reply and after `add`. It is `finished` when the policy ended its
    answer, else what cut it off; only a finished answer can be followed by more messages.
    """

    def __init__(
        self, policy: Policy, task: Task, attempt: Attempt, tools: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        _refuse_media(task.messages, task)
        if task.messages[-1].role == "assistant":
            raise ConversationError(
                f"task {task.id} ends in an assistant message: it is an example to learn from; to play it, "
                "move the answer to the field `response` of the taskset"
            )
        self.policy = policy
        self.task = task
        self.attempt = attempt
        self.tools = tuple(tools)
        self.session = attempt.session(policy.player)
        self.messages: list[Message] = policy.opening(task)
        self.trace = Trace()
        self.termination: Termination | None = None
        self.turns = 0
        self.timings: dict[str, float] = {"render_s": 0.0, "generate_s": 0.0, "parse_s": 0.0}
        self.counters: dict[str, float] = {}
        self._head = -1  # the node that the next token continues
        self._answer = -1  # index of the last sampled message
        self._answer_ids = np.empty(0, np.int32)
        self._prompt_ready = False  # the trace ends in a generation prompt
        self._busy = False

    # -- what an environment calls ---------------------------------------------------------------

    def add(self, *messages: Message) -> None:
        """Append messages the policy did not write (tool results, a user's next turn)."""
        _refuse_media(messages, self.task)
        if any(message.role == "assistant" for message in messages):
            raise ConversationError("assistant messages are written by reply(), not added")
        if self.termination not in (None, Termination.FINISHED):
            raise ConversationError(
                f"session {self.session} has ended ({self.termination}); nothing can follow"
            )
        if self._busy or self._prompt_ready:
            raise ConversationError(f"session {self.session}: a reply is under way; await it before adding")
        if messages:
            self.messages.extend(messages)
            self.termination = None

    async def reply(self) -> Message:
        """The policy's next message, also appended to `messages` and, token by token, to the trace.

        When context or deadline leave no answer, `termination` says so and an empty message that is not
        part of the conversation is returned. Engine errors propagate; the conversation stays as it was and
        may be asked again.

        Raises EngineError and EngineTimeout (infrastructure), RenderError, and ConversationError for a task
        whose opening does not fit the context.
        """
        if self.termination is not None:
            raise ConversationError(f"session {self.session} has ended ({self.termination})")
        if self._busy:
            raise ConversationError(f"session {self.session}: a reply is already under way")
        self._busy = True
        try:
            return await self._reply()
        finally:
            self._busy = False

    def settle(self) -> None:
        """Tell the engine that this session asks for nothing more. May be called again."""
        self.policy.engine.settle(self.session)

    def rollout(
        self,
        reward: Reward,
        *,
        termination: Termination | None = None,
        counters: Mapping[str, float] | None = None,
        timings: Mapping[str, float] | None = None,
    ) -> Rollout:
        """The attempt as a rollout. `termination` overrides how the last reply ended (turn limits, errors).

        Counters: tokens (sampled), turns, prompt_tokens (not sampled), and the engine's own sums.
        """
        ended = termination or self.termination
        if ended is None:
            raise ConversationError(f"session {self.session}: no reply yet, and no termination was given")
        sampled = int(np.count_nonzero(self.trace.column("sampled")))
        counted = {
            "tokens": sampled,
            "turns": self.turns,
            "prompt_tokens": len(self.trace) - sampled,
            **self.counters,
            **(counters or {}),
        }
        return Rollout(
            task=self.task,
            trace=self.trace,
            reward=reward,
            termination=ended,
            attempt=self.attempt.index,
            group=self.attempt.group,
            player=self.policy.player,
            episode=self.attempt.episode,
            role=self.attempt.role,
            messages=list(self.messages),
            counters=counted,
            timings={**self.timings, **(timings or {})},
        )

    # -- the turn --------------------------------------------------------------------------------

    async def _reply(self) -> Message:
        remaining = self.attempt.remaining()
        if remaining is not None and remaining <= 0:
            return self._cut(Termination.DEADLINE)
        if not self._prompt_ready:
            rendered = await self._render()
            length = len(self.trace.tokens(self._head)) + len(rendered.ids_T)
            if length >= self.policy.context:
                return self._no_room(length)
            self._append(rendered)
        prompt = self.trace.tokens(self._head)
        room = self.policy.context - len(prompt)
        begin = time.perf_counter()
        try:
            async with asyncio.timeout(remaining) as timer:
                generation = await self.policy.engine.generate(
                    prompt, self._sampling(room), session=self.session
                )
        except TimeoutError:
            if not timer.expired():  # somebody else's time-out is not our deadline
                raise
            return self._cut(Termination.DEADLINE)
        finally:
            self.timings["generate_s"] += time.perf_counter() - begin
        return await self._accept(generation, room)

    async def _render(self) -> Rendered:
        policy, messages, answer, ids = self.policy, tuple(self.messages), self._answer, self._answer_ids

        def work() -> Rendered:
            if answer < 0:
                return policy.render_opening(messages, self.tools)
            return policy.renderer.extend(messages, answer, ids, tools=self.tools, generate=True)

        fresh = messages if answer < 0 else messages[answer + 1 :]
        size = sum(len(m.text) for m in fresh) + len(ids)
        return await self._thread("render_s", work, size=size)

    def _append(self, rendered: Rendered) -> None:
        position = 0
        for segment in rendered.segments:
            if segment.start != position:
                raise ConversationError(
                    f"renderer {self.policy.renderer.name}: segments leave a gap at token {position}"
                )
            ids = rendered.ids_T[segment.start : segment.stop]
            self._head = self.trace.add(self._head, ids, segment.origin, message=segment.message)
            position = segment.stop
        if position != len(rendered.ids_T):
            raise ConversationError(
                f"renderer {self.policy.renderer.name}: segments end at token {position} "
                f"of {len(rendered.ids_T)}"
            )
        self._prompt_ready = True

    @property
    def _temperature(self) -> float:
        """Of this attempt: a baseline is the policy's greedy answer."""
        return 0.0 if self.attempt.role == "baseline" else self.policy.sampling.temperature

    def _sampling(self, room: int) -> Sampling:
        ours, attempt = self.policy.sampling, self.attempt
        return Sampling(
            max_tokens=min(ours.max_tokens, room),
            seed=attempt.seed(self.policy.player, self.turns),
            temperature=self._temperature,
            stop_ids=tuple(self.policy.renderer.stop_ids),
            top=self.policy.top,
            top_p=ours.top_p,
            top_k=ours.top_k,
            order=(attempt.order, attempt.index, self.turns),
        )

    async def _accept(self, generation: Generation, room: int) -> Message:
        index = len(self.messages)
        parsed = await self._thread(
            "parse_s", lambda: self.policy.renderer.parse(generation.ids_T), size=len(generation.ids_T)
        )
        message, stopped = cut_at(parsed, self.policy.sampling.stop)
        attachments = await self._heavy(generation)
        # No await from here on: a cancelled reply leaves the trace without half an answer.
        self._head = self.trace.add_sampled(
            self._head,
            generation.ids_T,
            generation.logprob_T,
            generation.version_T,
            # Greedy log-probabilities are those of softmax(logits): temperature 1.
            temperature=self._temperature or 1.0,
            message=index,
            attachments=attachments,
        )
        self._answer, self._answer_ids = index, np.asarray(generation.ids_T, np.int32)
        self._prompt_ready = False
        self.messages.append(message)
        self.turns += 1
        for name, value in generation.counters.items():
            self.counters[name] = self.counters.get(name, 0.0) + value
        limit = self.policy.sampling.max_tokens
        if generation.finish == "stop" or stopped:
            self.termination = Termination.FINISHED
        elif generation.finish == "context" or room < limit:
            self.termination = Termination.CONTEXT
        else:
            self.termination = Termination.LENGTH
        return message

    async def _heavy(self, generation: Generation) -> tuple[Attachment, ...]:
        """Store the ragged top-k and the expert routes, where the engine gave them."""
        store = self.policy.attachments
        arrays: dict[str, np.ndarray] = {}
        if generation.top is not None:
            top = generation.top
            arrays = {
                "top.offset": top.offset_T,
                "top.id": top.id_K,
                "top.logprob": top.logprob_K,
                "top.mass": top.mass_T,
            }
        if generation.routes is not None:
            arrays["routes"] = generation.routes
        if store is None or not arrays:
            return ()
        n = len(generation.ids_T)

        def write() -> tuple[Attachment, ...]:
            return tuple(store.put(array, kind, 0, n) for kind, array in arrays.items())

        return await self._thread("store_s", write)

    def _no_room(self, length: int) -> Message:
        if self.turns == 0:
            raise ConversationError(
                f"task {self.task.id}: its opening is {length} tokens, the context is {self.policy.context}; "
                "drop the task or raise engine.context"
            )
        return self._cut(Termination.CONTEXT)

    def _cut(self, termination: Termination) -> Message:
        self.termination = termination
        return Message("assistant", "")

    async def _thread(self, timing: str, work: Callable[[], _Result], *, size: int | None = None) -> _Result:
        """Run `work` in the policy's executor; at once where `size` (characters or tokens) says that handing
        it over would take longer than doing it."""
        begin = time.perf_counter()
        try:
            if size is not None and size <= _SMALL:
                return work()
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self.policy.executor, work)
        finally:
            self.timings[timing] = self.timings.get(timing, 0.0) + time.perf_counter() - begin
