"""A trained reward model as a verifier: a directory with a body and a linear score, one number per answer.

Read are directories of Hugging Face's AutoModelForSequenceClassification with one label, and what a stage of
algorithm `reward_model` leaves where an architecture has no such class: a causal model's configuration and
safetensors with `score.weight` among them. A directory with `reward_model.json` is read at the token that
ends the last assistant message (as it was trained), any other at the conversation's last token.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from trivet.types import Message, Reward, Scored, Unscored

if TYPE_CHECKING:
    from torch import Tensor

CARD = "reward_model.json"
SCORE = "score.weight"
_END_S = 5.0  # for the batch that is being computed when the model is closed


class RewardModelError(ValueError):
    """A directory cannot be used as a reward model; says what it lacks."""


def stored_score(directory: Path) -> Tensor | None:
    """(1, hidden), or None where the directory's weights have no `score.weight` of one row."""
    from safetensors import safe_open

    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            if SCORE in tensors.keys():  # noqa: SIM118 - not a mapping
                found = tensors.get_tensor(SCORE)
                return found if len(found) == 1 else None
    return None


class Scorer:
    """The model itself: scores rows of ids, synchronously.

    Rows are computed `batch` at a time in a fixed shape, each padded to a length that depends on itself
    only: what else is scored at the same time does not change a score by a bit.
    """

    def __init__(
        self,
        directory: Path,
        *,
        batch: int = 16,
        device: str = "auto",
        dtype: Literal["float32", "bfloat16"] = "float32",
        renderer: str = "auto",
        template_args: Mapping[str, Any] | None = None,
    ) -> None:
        import torch

        from trivet.render import get_renderer, load_tokenizer

        if not (directory / "config.json").exists():
            raise RewardModelError(f"{directory} is no model directory: it has no config.json")
        score = stored_score(directory)
        if score is None:
            raise RewardModelError(
                f"{directory} is no reward model: its safetensors have no {SCORE} of one row. Train one with "
                "a stage of algorithm reward_model, or name a sequence classifier with one label"
            )
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.batch, self.device, self.dtype = batch, torch.device(device), getattr(torch, dtype)
        self.body = _body(directory, self.dtype).to(self.device).eval().requires_grad_(False)
        self.score = score.to(self.device, torch.float32)
        self.ends_at_answer = (directory / CARD).exists()
        self.renderer = get_renderer(load_tokenizer(directory), kind=renderer, template_args=template_args)
        known = self.body.config.get_text_config().max_position_embeddings
        self.context = int(known or 1 << 31)

    def ids_of(self, messages: Sequence[Message]) -> np.ndarray:
        """The conversation up to the token its score is read at, int64. Raises RewardModelError."""
        rendered = self.renderer.render(messages)
        ids_T = rendered.ids_T
        if self.ends_at_answer:
            answered = np.flatnonzero(rendered.mask_T())
            if not len(answered):
                raise RewardModelError("the rendered conversation has no answer to be scored")
            ids_T = ids_T[: int(answered[-1]) + 1]
        if len(ids_T) > self.context:
            raise RewardModelError(
                f"{len(ids_T)} tokens are more than the reward model's {self.context} positions"
            )
        return ids_T.astype(np.int64)

    def padded(self, length: int) -> int:
        """What a row of this length is padded to: at most a quarter more, in steps of at least 16."""
        step = max(16, (1 << length.bit_length() - 1) // 4)
        return min(-(-length // step) * step, max(self.context, length))

    def __call__(self, rows: Sequence[np.ndarray]) -> list[float]:
        """Scores of at most `batch` rows of one padded length."""
        import torch

        width = self.padded(len(rows[0]))
        ids, mask = (torch.zeros(self.batch, width, dtype=torch.long) for _ in range(2))
        mask[:, 0] = 1  # rows that are not there must attend to something
        for i, row in enumerate(rows):
            ids[i, : len(row)] = torch.from_numpy(row)
            mask[i, : len(row)] = 1
        last = mask.sum(1).sub(1).to(self.device)
        with torch.inference_mode():
            out = self.body(
                input_ids=ids.to(self.device), attention_mask=mask.to(self.device), use_cache=False
            )
            states = out.last_hidden_state[torch.arange(self.batch, device=self.device), last]
            # Row by row, and not as a product with a vector: its order of summing depends on the row.
            return (states.float() * self.score[0]).sum(-1)[: len(rows)].tolist()


def _body(directory: Path, dtype: Any) -> Any:
    from transformers import AutoModel

    from trivet.render.files import quiet

    with quiet():
        body, info = AutoModel.from_pretrained(str(directory), dtype=dtype, output_loading_info=True)
    if info["missing_keys"]:
        raise RewardModelError(
            f"{directory}: its weights lack {sorted(info['missing_keys'])[:3]} and more of a "
            f"{type(body).__name__}"
        )
    return body


@dataclass(slots=True, eq=False)
class _Request:
    messages: Sequence[Message]
    deliver: Callable[[Reward], None]
    ids_T: np.ndarray | None = None
    given_up: bool = False


class RewardModel:
    """Scores (messages, answer) with the reward model of `directory`, in a thread, in batches.

    The model is loaded when first used, or by `load`. An answer whose batch does not come to its end within
    `limit_s` (the queue before it does not count), that cannot be rendered, is longer than the model's
    context, or whose score is not finite is Unscored with the cause, never 0. `options`: see `Scorer`.
    """

    def __init__(self, directory: str | Path, *, limit_s: float = 60.0, **options: Any) -> None:
        self.directory, self.limit_s, self.options = Path(directory), limit_s, options
        self._scorer: Scorer | None = None
        self._queue: SimpleQueue[_Request | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._finished = 0  # batches

    async def load(self) -> None:
        """Load the model. Raises RewardModelError, or what loading a tokenizer or weights raises."""
        await asyncio.to_thread(self._loaded)

    async def score(self, messages: Sequence[Message], answer: Message) -> Reward:
        """The score of `answer` to `messages`. Never raises but on cancellation."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Reward] = loop.create_future()

        def settle(reward: Reward) -> None:
            if not future.done():
                future.set_result(reward)

        def deliver(reward: Reward) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, reward)

        request = _Request([*messages, answer], deliver)
        self._start()
        self._queue.put(request)
        try:
            while not future.done():
                before = self._finished
                await asyncio.wait({future}, timeout=self.limit_s)
                if not future.done() and self._finished == before:
                    return Unscored(
                        "verifier_timeout",
                        f"{self.directory.name}: no batch was done within {self.limit_s:g} s",
                    )
            return future.result()
        finally:
            request.given_up = True

    # -- the thread ------------------------------------------------------------------------------

    def _loaded(self) -> Scorer:
        with self._lock:
            if self._scorer is None:
                self._scorer = Scorer(self.directory, **self.options)
            return self._scorer

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._work, name="trivet-reward-model", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        waiting: list[_Request] = []
        while True:
            if not self._gather(waiting):
                self._scorer = None
                return
            batch: list[_Request] = []
            try:
                scorer = self._loaded()
                waiting = self._rendered(scorer, waiting)
                if not waiting:
                    continue
                batch, waiting = _same_length(scorer, waiting)
                rows = [request.ids_T for request in batch if request.ids_T is not None]
                for request, value in zip(batch, scorer(rows), strict=True):
                    request.deliver(self._reward(value))
            except Exception as error:  # whatever is wrong with the model must not become a 0 or end the run
                for request in batch or waiting:
                    request.deliver(Unscored("verifier_raised", f"{type(error).__name__}: {error}"))
                waiting = waiting if batch else []
            self._finished += 1

    def _gather(self, waiting: list[_Request]) -> bool:
        """Take in all that was asked for meanwhile; False at the end."""
        try:
            while True:
                request = self._queue.get_nowait() if waiting else self._queue.get()
                if request is None:
                    return False
                waiting.append(request)
        except Empty:
            return True

    def _rendered(self, scorer: Scorer, waiting: list[_Request]) -> list[_Request]:
        out = []
        for request in waiting:
            if request.given_up:
                continue
            try:
                if request.ids_T is None:
                    request.ids_T = scorer.ids_of(request.messages)
                out.append(request)
            except Exception as error:  # an answer that no template takes says nothing about the others
                request.deliver(Unscored("verifier_invalid", f"{self.directory.name}: {error}"))
        return out

    def _reward(self, value: float) -> Reward:
        if math.isfinite(value):
            return Scored(value)
        return Unscored("verifier_invalid", f"{self.directory.name} gave {value}")

    def close(self) -> None:
        """End the thread, which frees the model; one that hangs is left to end with the program."""
        if self._thread is None:
            self._scorer = None
        else:
            self._queue.put(None)
            self._thread.join(_END_S)
            self._thread = None

    async def __aenter__(self) -> Self:
        await self.load()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.close)


def _same_length(scorer: Scorer, waiting: list[_Request]) -> tuple[list[_Request], list[_Request]]:
    """(at most a batch of the first one's padded length, the rest in order)."""
    width_of = [scorer.padded(len(request.ids_T)) for request in waiting if request.ids_T is not None]
    chosen = [i for i, width in enumerate(width_of) if width == width_of[0]][: scorer.batch]
    taken = set(chosen)
    return [waiting[i] for i in chosen], [r for i, r in enumerate(waiting) if i not in taken]
