"""Everything that is not a program: mathematics, instructions, multiple choice, chat, preferences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trivet.data.shapes import transcript
from trivet.rewards.answers import last_boxed
from trivet.rewards.instructions import UNSUPPORTED
from trivet.tasks.layouts.base import (
    Dropped,
    Layout,
    Made,
    Row,
    conversation,
    decoded,
    labels,
    message,
    needed,
    own_id,
    text,
)
from trivet.types import Message, SchemaError

# -- mathematics -----------------------------------------------------------------------------------


def _marked(row: Row) -> bool:
    return isinstance(row["answer"], str) and "####" in row["answer"]


def _solved(row: Row) -> bool:
    answered = row.get("answer") not in (None, "")
    return answered or (isinstance(row["solution"], str) and last_boxed(row["solution"]) is not None)


def _is_aime(row: Row) -> bool:
    said = str(row.get("url") or "") + str(row.get("id") or "")
    return "problem_idx" in row or "aime" in said.lower() or {"year", "url"} <= row.keys()


def _whole(value: Any) -> Any:
    """A final answer: text, or a number, 145.0 as 145. Raises Dropped."""
    if value is None or isinstance(value, bool) or (isinstance(value, str) and not value.strip()):
        raise Dropped("no_answer")
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, str | int | float):
        raise Dropped("bad_answer")
    return value


def _capitalised(row: Row) -> Made:
    payload = {"answer": _whole(row.get("Answer"))}
    if solution := text(row, "Solution"):
        payload["response"] = solution
    return Made(needed(row, "Problem"), payload=payload, id=own_id("aime", row.get("ID")))


def _svamp(row: Row) -> Made:
    body, question = needed(row, "Body").strip(), needed(row, "Question").strip()
    prompt = f"{body}{'' if body[-1] in '.?!' else '.'} {question}"
    return Made(prompt, payload={"answer": _whole(row.get("Answer"))}, tags=labels(row.get("Type")))


# -- instructions ----------------------------------------------------------------------------------


def _instructions(name: str, row: Row) -> Made:
    prompt, ids = needed(row, "prompt"), row.get("instruction_id_list")
    if not isinstance(ids, list) or not ids or not all(isinstance(one, str) for one in ids):
        raise Dropped("no_instructions")
    given = decoded(row.get("kwargs"), "bad_instructions")
    if given is None:
        given = [{}] * len(ids)
    if not isinstance(given, list) or len(given) != len(ids):
        raise Dropped("bad_instructions")
    if not all(isinstance(one, Mapping | None) for one in given):
        raise Dropped("bad_instructions")
    if any(one in UNSUPPORTED for one in ids):
        raise Dropped("unsupported_instruction")
    # Columnar files give every instruction every key, most of them null.
    kwargs = [{key: value for key, value in (one or {}).items() if value is not None} for one in given]
    payload = {"instruction_id_list": list(ids), "kwargs": kwargs, "prompt": prompt}
    return Made(prompt, payload=payload, id=own_id(name, row.get("key")), tags=labels(*ids))


def _is_ifeval(row: Row) -> bool:
    """IFEval's families of instructions; IFBench has others."""
    ids = row["instruction_id_list"]
    families = {"keywords", "language", "length_constraints", "detectable_content", "detectable_format"}
    families |= {"combination", "startend", "change_case", "punctuation"}
    return isinstance(ids, list) and all(str(one).partition(":")[0] in families for one in ids)


# -- multiple choice -------------------------------------------------------------------------------


def _mmlu(row: Row) -> Made:
    choices = row.get("choices")
    answer = row.get("answer")
    if not isinstance(choices, list) or not all(isinstance(one, str) for one in choices) or len(choices) < 2:
        raise Dropped("bad_choices")
    if isinstance(answer, str) and len(answer.strip()) == 1 and answer.strip().isalpha():
        answer = ord(answer.strip().upper()) - ord("A")
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
        raise Dropped("no_answer")
    letters = [chr(ord("A") + n) for n in range(len(choices))]
    return _choice(row, letters, choices, letters[answer], labels(row.get("subject")))


def _arc(row: Row) -> Made:
    given = row["choices"]
    names, texts = given.get("label"), given.get("text")
    if not isinstance(names, list) or not isinstance(texts, list) or len(names) != len(texts):
        raise Dropped("bad_choices")
    key = text(row, "answerKey").strip()
    if key not in names:
        raise Dropped("no_answer")
    letters = [chr(ord("A") + n) for n in range(len(names))]  # some rows count 1, 2, 3, 4
    return _choice(row, letters, texts, letters[names.index(key)], ())


def _choice(row: Row, letters: list[str], choices: list[str], answer: str, tags: tuple[str, ...]) -> Made:
    listed = "\n".join(f"{letter}. {one}" for letter, one in zip(letters, choices, strict=True))
    prompt = f"{needed(row, 'question').strip()}\n\n{listed}"
    payload = {"answer": answer, "choices": choices, "match": "choice"}
    return Made(prompt, payload=payload, tags=tags)


# -- chat ------------------------------------------------------------------------------------------


def _arena_hard(row: Row) -> Made:
    name = own_id("arena_hard", row.get("uid") or row.get("question_id"))
    tags = labels(row.get("category"), row.get("subcategory"), row.get("cluster"))
    if "prompt" in row:
        return Made(needed(row, "prompt"), id=name, tags=tags)
    turns = row.get("turns")
    first = turns[0] if isinstance(turns, list) and len(turns) == 1 else None
    content = first.get("content") if isinstance(first, Mapping) else first
    if not isinstance(content, str) or not content.strip():
        raise Dropped("no_prompt" if not turns else "several_turns")
    return Made(content, id=name, tags=tags)


def _judged_completions(row: Row) -> Made:
    payload = {key: row[key] for key in ("completions", "models", "aspect") if key in row}
    prompt = needed(row, "raw_text")
    return Made(
        prompt, payload=payload, id=own_id("completions", row.get("id")), tags=labels(row.get("aspect"))
    )


# -- preferences: (what both begin with, chosen, rejected) -------------------------------------------


def _pair(opening: tuple[Message, ...], first: Any, second: Any, better: int, **rest: Any) -> Made:
    """`better` says which is chosen: 0, 1, or -1 for a tie."""
    if better < 0:
        raise Dropped("tie")
    sides = [first, second] if better == 0 else [second, first]
    if not all(isinstance(one, str | list) for one in sides):
        raise Dropped("bad_answer")
    if any(not (one.strip() if isinstance(one, str) else one) for one in sides):
        raise Dropped("empty_answer")
    if sides[0] == sides[1]:
        raise Dropped("same_answers")
    if not opening or opening[-1].role != "user":
        raise Dropped("no_user_turn")
    payload = {"chosen": sides[0], "rejected": sides[1], **rest.pop("payload", {})}
    return Made(messages=opening, payload=payload, **rest)


_WINNERS = {"model_a": 0, "model_b": 1, "tie": -1, "tie (bothbad)": -1, "both_bad": -1}


def _arena_battle(row: Row) -> Made:
    better = _WINNERS.get(str(row.get("winner")))
    if better is None:
        raise Dropped("no_winner")
    left, right = (conversation(row.get(f"conversation_{side}")) for side in "ab")
    shared = 0
    while shared < min(len(left), len(right)) and left[shared] == right[shared]:
        shared += 1
    while shared and left[shared - 1].role == "assistant":
        shared -= 1
    rest = {
        "id": own_id("arena", row.get("question_id") or row.get("id")),
        "tags": labels(row.get("language")),
    }
    return _pair(left[:shared], _tail(left, shared), _tail(right, shared), better, **rest)


def _tail(messages: tuple[Message, ...], start: int) -> str | list[dict[str, Any]]:
    """What follows the shared opening: the text of one answer, or messages."""
    rest = messages[start:]
    if len(rest) == 1 and rest[0].role == "assistant":
        return rest[0].text
    return [one.to_dict() for one in rest] if any(one.text.strip() for one in rest) else ""


def _arena_55k(row: Row) -> Made:
    votes = [row.get(f"winner_{name}") for name in ("model_a", "model_b", "tie")]
    if [bool(one) for one in votes].count(True) != 1:
        raise Dropped("no_winner")
    better = (0, 1, -1)[[bool(one) for one in votes].index(True)]
    prompts, left, right = (decoded(row.get(name)) for name in ("prompt", "response_a", "response_b"))
    turns = (prompts, left, right)
    if (
        not all(isinstance(one, list) for one in turns)
        or len({len(one) for one in turns}) != 1
        or not prompts
    ):
        raise Dropped("bad_messages")
    if len(prompts) > 1:
        # Both models went their own way from the first answer on: only that one answers the same question.
        prompts, left, right = prompts[:1], left[:1], right[:1]
    if not isinstance(prompts[0], str) or not prompts[0].strip():
        raise Dropped("no_prompt")
    if left[0] is None or right[0] is None:
        raise Dropped("empty_answer")
    opening = (Message("user", prompts[0]),)
    return _pair(opening, left[0], right[0], better, id=own_id("arena", row.get("id")))


def _helpsteer3(row: Row) -> Made:
    preference = row.get("overall_preference")
    if isinstance(preference, bool) or not isinstance(preference, int | float):
        raise Dropped("no_winner")
    better = -1 if preference == 0 else int(preference > 0)
    strength = {"margin": abs(float(preference))}
    tags = labels(row.get("domain"), row.get("language"))
    opening = conversation(row.get("context"))
    return _pair(opening, row.get("response1"), row.get("response2"), better, payload=strength, tags=tags)


def _helpsteer2(row: Row) -> Made:
    preference = row.get("preference_strength")
    if isinstance(preference, bool) or not isinstance(preference, int | float):
        raise Dropped("no_winner")
    better = -1 if preference == 0 else int(preference > 0)
    opening = (Message("user", needed(row, "prompt")),)
    strength = {"margin": abs(float(preference))}
    return _pair(opening, row.get("response_1"), row.get("response_2"), better, payload=strength)


def _is_transcript(row: Row) -> bool:
    return all(transcript(row[side]) is not None for side in ("chosen", "rejected"))


def hh_sides(chosen: Any, rejected: Any) -> tuple[tuple[Message, ...], ...]:
    """Both texts of a pair as messages. Raises Dropped."""
    sides = []
    for side in (chosen, rejected):
        turns = transcript(side)
        if not turns:
            raise Dropped("bad_messages")
        sides.append(tuple(Message(one["role"], one["content"]) for one in turns))
    return tuple(sides)


def _hh(row: Row) -> Made:
    left, right = hh_sides(row.get("chosen"), row.get("rejected"))
    if left == right:
        raise Dropped("same_answers")
    shared = 0
    while shared < min(len(left), len(right)) and left[shared] == right[shared]:
        shared += 1
    while shared and left[shared - 1].role == "assistant":
        shared -= 1
    if not shared:
        raise Dropped("no_shared_opening")
    chosen, rejected = (_tail(side, shared) for side in (left, right))
    return _pair(left[:shared], chosen, rejected, 0)


def _conversation_pair(row: Row) -> Made:
    chosen, rejected = (_answer(row.get(side)) for side in ("chosen", "rejected"))
    return _pair(conversation(row.get("conversations")), chosen, rejected, 0)


def _answer(value: Any) -> Any:
    """One side: text, or a message with it."""
    try:
        return message(value).text if isinstance(value, Mapping) else value
    except SchemaError as error:
        raise Dropped("bad_messages") from error


LAYOUTS = (
    Layout(
        "ifeval",
        "instruct",
        ("prompt", "instruction_id_list", "kwargs"),
        lambda row: _instructions("ifeval", row),
        test=_is_ifeval,
    ),
    Layout(
        "ifbench",
        "instruct",
        ("prompt", "instruction_id_list", "kwargs"),
        lambda row: _instructions("ifbench", row),
    ),
    Layout(
        "arc",
        "qa",
        ("question", "choices", "answerKey"),
        _arc,
        test=lambda row: isinstance(row["choices"], Mapping),
    ),
    Layout(
        "mmlu",
        "qa",
        ("question", "choices", "answer"),
        _mmlu,
        test=lambda row: isinstance(row["choices"], list),
    ),
    Layout("arena_battles", "chat", ("winner", "conversation_a", "conversation_b"), _arena_battle),
    Layout(
        "arena_55k",
        "chat",
        ("prompt", "response_a", "response_b", "winner_model_a", "winner_tie"),
        _arena_55k,
    ),
    Layout("helpsteer3", "chat", ("context", "response1", "response2", "overall_preference"), _helpsteer3),
    Layout("helpsteer2", "chat", ("prompt", "response_1", "response_2", "preference_strength"), _helpsteer2),
    Layout("hh_rlhf", "chat", ("chosen", "rejected"), _hh, test=_is_transcript),
    Layout("conversation_pairs", "chat", ("conversations", "chosen", "rejected"), _conversation_pair),
    Layout(
        "message_pairs",
        "chat",
        ("chosen_messages", "rejected_messages"),
        fields={"chosen": "chosen_messages", "rejected": "rejected_messages"},
    ),
    Layout(
        "arena_hard",
        "chat",
        (("uid", "question_id"), "category", "cluster", ("prompt", "turns")),
        _arena_hard,
    ),
    Layout("arena_hard", "chat", ("uid", "category", "subcategory", "prompt"), _arena_hard),
    Layout("judged_completions", "chat", ("raw_text", "completions", "models"), _judged_completions),
    Layout("svamp", "math", ("Body", "Question", "Answer"), _svamp),
    Layout("aime", "math", ("Problem", "Answer"), _capitalised),
    Layout("aime", "math", ("problem", "answer"), test=_is_aime),
    Layout("gsm8k", "math", ("question", "answer"), test=_marked),
    Layout("math", "math", ("problem", "solution"), test=_solved),
    Layout("math", "math", ("problem", "answer")),
)
