"""Conversations: what the engine saw and wrote is what the trace holds, token by token."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trivet.agents import Attempt, ConversationError, Policy
from trivet.buffer import AttachmentStore
from trivet.engine.base import EngineError, EngineTimeout, Generation, Sampling, Top, request_seed
from trivet.recipe import schema
from trivet.render import Renderer, get_renderer
from trivet.render.tiny import tiny_tokenizer
from trivet.types import (
    IssueKey,
    Message,
    Origin,
    Part,
    SchemaError,
    Scored,
    Task,
    Termination,
    Tokens,
    Unscored,
)


class Script:
    """An engine that says what it was told to say; keeps every request."""

    version = 7

    def __init__(
        self, renderer: Renderer, answers: Iterable[str | BaseException], delay: float = 0.0
    ) -> None:
        self.renderer = renderer
        self.answers = list(answers)
        self.delay = delay
        self.requests: list[tuple[np.ndarray, Sampling, str]] = []
        self.settled: list[str] = []
        self.extra: dict[str, Any] = {}

    def ids(self, text: str) -> np.ndarray:
        """An answer's tokens, without what stands around it."""
        messages = (Message("user", "x"), Message("assistant", text))
        rendered = self.renderer.render(messages)
        return rendered.ids_T[rendered.mask_T()]

    async def generate(
        self, prompt: Tokens, sampling: Sampling, *, session: str, media: Any = None
    ) -> Generation:
        self.requests.append((np.array(prompt), sampling, session))
        await asyncio.sleep(self.delay)
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        ids = self.ids(answer)
        finish = "stop"
        if len(ids) > sampling.max_tokens:
            ids, finish = ids[: sampling.max_tokens], "length"
        logprob = -np.arange(1, len(ids) + 1, dtype=np.float32) / 10
        counters = {"prefilled": float(len(prompt))}
        return Generation(
            ids, logprob, np.full(len(ids), 7, np.int32), finish, counters=counters, **self.extra
        )

    def settle(self, session: str) -> None:
        self.settled.append(session)


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return get_renderer(tiny_tokenizer(schema.TinyModel()))


TASK = Task("math", (Message("user", "12+35="),), {"answer": "47"}, id="sum")
ATTEMPT = Attempt("run", IssueKey("sum", 3, 0), "group", 5, retry=1, order=9)

Make = Callable[..., tuple[Policy, Script]]


@pytest.fixture
def make(renderer: Renderer) -> Make:
    def build(*answers: str | BaseException, **options: Any) -> tuple[Policy, Script]:
        sampling = schema.Sampling(**options.pop("sampling", {"max_tokens": 32}))
        engine = Script(renderer, answers, options.pop("delay", 0.0))
        policy = Policy(engine, renderer, sampling, context=options.pop("context", 128), **options)  # type: ignore[arg-type]
        return policy, engine

    return build


def test_one_turn(make: Make, renderer: Renderer) -> None:
    policy, engine = make("47", sampling={"max_tokens": 8, "temperature": 0.7})
    conversation = policy.conversation(TASK, ATTEMPT)
    message = asyncio.run(conversation.reply())
    assert message.text == "47"
    assert conversation.messages == [*TASK.messages, message]
    assert conversation.termination is Termination.FINISHED

    prompt = renderer.render(TASK.messages, generate=True)
    seen, sampling, session = engine.requests[0]
    assert np.array_equal(seen, prompt.ids_T)
    assert sampling.seed == request_seed("run", "sum", 3, 5, "policy", 0, 1)
    assert sampling.order == (9, 5, 0)
    assert sampling.stop_ids == renderer.stop_ids
    assert (sampling.max_tokens, sampling.temperature) == (8, 0.7)
    assert session == ATTEMPT.session()

    (row,) = conversation.trace.rows()
    answer = engine.ids("47")
    assert np.array_equal(row.ids_T, np.concatenate([prompt.ids_T, answer]))
    assert row.sampled_T.tolist() == [False] * len(prompt.ids_T) + [True] * len(answer)
    assert np.array_equal(row.train_T, row.sampled_T.astype(np.float32))
    assert np.allclose(row.logprob_T[-len(answer) :], [-0.1, -0.2, -0.3])
    assert np.isnan(row.logprob_T[: -len(answer)]).all()
    assert row.version_T.tolist() == [-1] * len(prompt.ids_T) + [7] * len(answer)
    assert set(row.temperature_T[-len(answer) :].tolist()) == {np.float32(0.7)}
    origins = [node.origin for node in conversation.trace.nodes]
    assert origins[-2:] == [Origin.GENERATION_PROMPT, Origin.SAMPLED]
    assert conversation.trace.nodes[-1].message == 1


def test_rollout_carries_the_attempt(make: Make) -> None:
    policy, _ = make("47")
    conversation = policy.conversation(TASK, ATTEMPT)
    with pytest.raises(ConversationError, match="no reply yet"):
        conversation.rollout(Scored(1.0))
    asyncio.run(conversation.reply())
    rollout = conversation.rollout(Scored(1.0), counters={"calls": 2}, timings={"score_s": 0.5})
    assert (rollout.attempt, rollout.group, rollout.player, rollout.role) == (5, "group", "policy", "train")
    assert rollout.episode == "group/5"
    assert rollout.counters["tokens"] == 3
    assert rollout.counters["turns"] == 1
    assert rollout.counters["calls"] == 2
    assert rollout.counters["prompt_tokens"] + 3 == len(rollout.trace)
    assert rollout.counters["prefilled"] == rollout.counters["prompt_tokens"]
    assert rollout.timings["score_s"] == 0.5
    assert rollout.timings["generate_s"] >= 0
    again = type(rollout).from_bytes(rollout.to_bytes())
    assert again.messages == rollout.messages


def test_later_turns_render_only_the_suffix(make: Make, renderer: Renderer) -> None:
    policy, engine = make("47", "12", "ok")

    async def play() -> Any:
        conversation = policy.conversation(TASK, ATTEMPT)
        await conversation.reply()
        conversation.add(Message("user", "and 5+7="))
        assert conversation.termination is None
        await conversation.reply()
        conversation.add(Message("user", "a"), Message("user", "b"))
        await conversation.reply()
        return conversation

    conversation = asyncio.run(play())
    assert [m.text for m in conversation.messages] == ["12+35=", "47", "and 5+7=", "12", "a", "b", "ok"]
    prompts = [seen for seen, _, _ in engine.requests]
    for earlier, later in pairwise(prompts):
        assert np.array_equal(later[: len(earlier)], earlier)
    (row,) = conversation.trace.rows()
    full = renderer.render(conversation.messages).ids_T
    assert np.array_equal(row.ids_T, full[: len(row.ids_T)])
    assert sorted(set(row.turn_T.tolist())) == [-1, 0, 1, 2]
    assert [s.seed for _, s, _ in engine.requests] == [ATTEMPT.seed("policy", turn) for turn in range(3)]
    assert [s.order for _, s, _ in engine.requests] == [(9, 5, turn) for turn in range(3)]
    assert [n.message for n in conversation.trace.nodes if n.origin is Origin.SAMPLED] == [1, 3, 6]


def test_sampled_ids_are_never_encoded_again(make: Make, renderer: Renderer) -> None:
    """Ids that no encoder would give for their text stay as they were sampled."""
    policy, engine = make("47", "12")
    letters = engine.ids("ab")
    spelt = np.concatenate([letters[:1], letters])  # aab and an end, as the engine wrote it

    async def odd(prompt: Tokens, sampling: Sampling, *, session: str, media: Any = None) -> Generation:
        engine.requests.append((np.array(prompt), sampling, session))
        return Generation(spelt, np.full(len(spelt), -1, np.float32), np.zeros(len(spelt), np.int32), "stop")

    engine.generate = odd  # type: ignore[method-assign]

    async def play() -> None:
        conversation = policy.conversation(TASK, ATTEMPT)
        await conversation.reply()
        conversation.add(Message("user", "go on"))
        await conversation.reply()

    asyncio.run(play())
    first, second = engine.requests[0][0], engine.requests[1][0]
    assert np.array_equal(second[len(first) : len(first) + len(spelt)], spelt)


def test_budgets(make: Make, renderer: Renderer) -> None:
    opening = len(renderer.render(TASK.messages, generate=True).ids_T)

    def ends(context: int, max_tokens: int) -> tuple[Termination | None, int]:
        policy, engine = make("123456", context=context, sampling={"max_tokens": max_tokens})
        conversation = policy.conversation(TASK, ATTEMPT)
        asyncio.run(conversation.reply())
        return conversation.termination, engine.requests[0][1].max_tokens

    assert ends(128, 7) == (Termination.FINISHED, 7)
    assert ends(128, 4) == (Termination.LENGTH, 4)
    assert ends(opening + 4, 7) == (Termination.CONTEXT, 4)
    assert ends(opening + 4, 4) == (Termination.LENGTH, 4)
    with pytest.raises(ConversationError, match=f"opening is {opening} tokens"):
        ends(opening, 4)


def test_a_full_context_ends_a_later_turn(make: Make, renderer: Renderer) -> None:
    opening = len(renderer.render(TASK.messages, generate=True).ids_T)
    policy, engine = make("47", context=opening + 8)

    async def play() -> Any:
        conversation = policy.conversation(TASK, ATTEMPT)
        await conversation.reply()
        conversation.add(Message("user", "a long further question"))
        empty = await conversation.reply()
        assert empty.text == ""
        return conversation

    conversation = asyncio.run(play())
    assert conversation.termination is Termination.CONTEXT
    assert len(engine.requests) == 1
    assert conversation.rollout(Scored(0.0)).counters["turns"] == 1
    assert conversation.trace.nodes[-1].origin is Origin.SAMPLED  # what did not fit is not in the trace
    with pytest.raises(ConversationError, match="ended"):
        asyncio.run(conversation.reply())
    with pytest.raises(ConversationError, match="ended"):
        conversation.add(Message("user", "more"))


def test_deadline_is_the_policys_end_and_engine_errors_are_not(make: Make) -> None:
    policy, engine = make("47", delay=5.0)
    soon = Attempt("run", IssueKey("sum", 1), "group", 0, deadline=time.monotonic() + 0.1)
    conversation = policy.conversation(TASK, soon)
    begin = time.monotonic()
    assert asyncio.run(conversation.reply()).text == ""
    assert time.monotonic() - begin < 3
    assert conversation.termination is Termination.DEADLINE
    assert conversation.rollout(Unscored("deadline")).sampled_tokens == 0

    past = Attempt("run", IssueKey("sum", 1), "group", 0, deadline=time.monotonic() - 1)
    conversation = policy.conversation(TASK, past)
    asyncio.run(conversation.reply())
    assert conversation.termination is Termination.DEADLINE
    assert len(engine.requests) == 1

    for error in (EngineTimeout("waited"), EngineError("gone"), TimeoutError("a socket's")):
        policy, _ = make(error)
        conversation = policy.conversation(TASK, ATTEMPT)
        with pytest.raises(type(error)):
            asyncio.run(conversation.reply())
        assert conversation.termination is None


def test_a_reply_can_be_asked_again_after_failure_and_cancellation(make: Make) -> None:
    policy, engine = make(EngineError("gone"), "47", delay=0.01)

    async def play() -> Any:
        conversation = policy.conversation(TASK, ATTEMPT)
        with pytest.raises(EngineError):
            await conversation.reply()
        reply = asyncio.ensure_future(conversation.reply())
        await asyncio.sleep(0)
        with pytest.raises(ConversationError, match="under way"):
            await conversation.reply()
        with pytest.raises(ConversationError, match="under way"):
            conversation.add(Message("user", "x"))
        reply.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reply
        await conversation.reply()
        return conversation

    conversation = asyncio.run(play())
    (row,) = conversation.trace.rows()
    assert np.array_equal(row.ids_T, np.concatenate([engine.requests[0][0], engine.ids("47")]))
    assert len({request[1].seed for request in engine.requests}) == 1


def test_what_is_refused(make: Make) -> None:
    policy, _ = make("47")
    image = Message("user", (Part("image", attachment="abc"),))
    with pytest.raises(SchemaError, match=r"task .* user message holds \['image'\]"):
        policy.conversation(Task("math", (image,)), ATTEMPT)
    example = Task("math", (Message("user", "x"), Message("assistant", "y")))
    with pytest.raises(ConversationError, match="example to learn from"):
        policy.conversation(example, ATTEMPT)
    conversation = policy.conversation(TASK, ATTEMPT)
    with pytest.raises(ConversationError, match="written by reply"):
        conversation.add(Message("assistant", "47"))
    with pytest.raises(SchemaError, match="image"):
        conversation.add(image)
    with pytest.raises(ValueError, match="attachment store"):
        make("47", top=4)


def test_system_prompt_only_where_there_is_none(make: Make) -> None:
    policy, _ = make(system_prompt="be brief")
    assert [m.role for m in policy.conversation(TASK, ATTEMPT).messages] == ["system", "user"]
    own = Task("math", (Message("system", "mine"), Message("user", "x")))
    assert [m.text for m in policy.conversation(own, ATTEMPT).messages] == ["mine", "x"]


def test_greedy_and_stop_strings_for_evaluation(make: Make) -> None:
    policy, engine = make("47: 48", sampling={"max_tokens": 32, "temperature": 0.0, "stop": [":"]})
    conversation = policy.conversation(TASK, ATTEMPT)
    assert asyncio.run(conversation.reply()).text == "47"
    assert conversation.termination is Termination.FINISHED
    assert conversation.trace.nodes[-1].temperature == 1.0
    assert conversation.trace.nodes[-1].length == len(engine.ids("47: 48"))


def test_heavy_columns_become_attachments(make: Make, tmp_path: Path) -> None:
    store = AttachmentStore(tmp_path)
    policy, engine = make("4", attachments=store, top=2)
    engine.extra["top"] = Top(
        np.array([0, 2, 3], np.int64),
        np.array([1, 2, 3], np.uint32),
        np.array([-0.1, -2, -0.01], np.float16),
        np.array([0.99, 0.98], np.float32),
    )
    conversation = policy.conversation(TASK, ATTEMPT)
    asyncio.run(conversation.reply())
    assert engine.requests[0][1].top == 2
    attachments = conversation.trace.attachments()
    assert [a.kind for a in attachments] == ["top.offset", "top.id", "top.logprob", "top.mass"]
    assert {(a.start, a.stop) for a in attachments} == {(0, 2)}


def test_seeds_tell_all_requests_apart() -> None:
    """48 prompts x 16 samples: 768 seeds; and a further round or retry samples anew."""
    seeds = {
        Attempt("r", IssueKey(f"t{t}", 1), f"g{t}", i).seed("p", 0) for t in range(48) for i in range(16)
    }
    assert len(seeds) == 768
    base = Attempt("r", IssueKey("t", 1), "g", 0)
    others = [
        Attempt("r", IssueKey("t", 1, 1), "g", 0),
        Attempt("r", IssueKey("t", 1), "g", 0, retry=1),
        Attempt("r", IssueKey("t", 2), "g", 0),
        Attempt("q", IssueKey("t", 1), "g", 0),
    ]
    assert len({a.seed("p", 0) for a in (base, *others)} | {base.seed("p", 1), base.seed("q", 0)}) == 7


@pytest.mark.parametrize("small", [True, False])
def test_rendering_and_parsing_run_in_the_executor_unless_small_and_a_prompt_is_rendered_once(
    make: Make, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not small:
        monkeypatch.setattr(sys.modules["trivet.agents.conversation"], "_SMALL", 0)
    names: list[str] = []
    calls: list[int] = []

    class Watched:
        def __init__(self, inner: Renderer) -> None:
            self.inner, self.name, self.stop_ids = inner, inner.name, inner.stop_ids

        def __getattr__(self, name: str) -> Any:
            import threading

            names.append(threading.current_thread().name)
            if name == "render":
                calls.append(1)
            return getattr(self.inner, name)

    with ThreadPoolExecutor(1, thread_name_prefix="own") as executor:
        policy, _ = make(*["47"] * 8, executor=executor)
        policy.renderer = Watched(policy.renderer)  # type: ignore[assignment]

        async def play() -> None:
            attempts = [Attempt("r", IssueKey("sum", 1), "g", i) for i in range(8)]
            await asyncio.gather(*(policy.conversation(TASK, a).reply() for a in attempts))

        asyncio.run(play())
    assert {name.split("_")[0] for name in names} == {"MainThread" if small else "own"}
    assert len(calls) == 1
