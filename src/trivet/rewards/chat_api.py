"""A chat model behind an OpenAI-compatible API: one question, one answer, with everything that goes wrong on
the way told apart.

The key is read from the environment when it is needed and never appears in a message. A reply is read up to a
limit; redirects are not followed (they would carry the key elsewhere).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import httpx

_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_SHOWN = 300


class ChatError(RuntimeError):
    """No answer could be had. `cause`: "timeout", "rate_limited", "server", "connection", "refused" (the
    request itself is at fault: key, model name, size) or "malformed" (the reply is no chat completion)."""

    def __init__(self, cause: str, detail: str, *, retry: bool = False, wait_s: float | None = None) -> None:
        super().__init__(detail)
        self.cause, self.retry, self.wait_s = cause, retry, wait_s


@dataclass(frozen=True, slots=True)
class ChatReply:
    """`text`, and the tokens that were paid for (0 where the server does not say)."""

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(slots=True)
class ChatCounters:
    """What was asked and what came back; `seconds` are those spent waiting for the server."""

    requests: int = 0
    retries: int = 0
    seconds: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    failures: dict[str, int] = field(default_factory=dict)  # cause -> requests that failed so


class ChatAPI:
    """Asks `model` at `base_url` (".../v1"). Use it from one event loop.

    `key_env` names the environment variable that holds the key ("" for a server without). `timeout_s` bounds
    one request, `attempts` their number for a question, `backoff_s` the first pause between them (it doubles,
    is spread by chance and is never over `longest_wait_s`; a server's Retry-After is kept to as far as that).
    `parallel` requests run at once. `options` are sent along (temperature, max_tokens, ...).
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        key_env: str = "OPENAI_API_KEY",
        timeout_s: float = 60.0,
        attempts: int = 4,
        backoff_s: float = 0.5,
        longest_wait_s: float = 30.0,
        parallel: int = 16,
        max_bytes: int = 1 << 20,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url {base_url!r} must begin with http:// or https://")
        if timeout_s <= 0 or attempts < 1 or backoff_s < 0 or parallel < 1 or max_bytes < 1:
            raise ValueError(
                "timeout_s, attempts, parallel and max_bytes must be above 0, backoff_s 0 or more"
            )
        self.url, self.model, self.key_env = f"{base_url.rstrip('/')}/chat/completions", model, key_env
        self.timeout_s, self.attempts, self.backoff_s = timeout_s, attempts, backoff_s
        self.longest_wait_s, self.max_bytes = longest_wait_s, max_bytes
        self.options = dict(options or {})
        self.counters = ChatCounters()
        self._slots = asyncio.Semaphore(parallel)
        self._client: httpx.AsyncClient | None = None

    @property
    def name(self) -> str:
        """Of model, server and options: what a kept verdict belongs to."""
        return json.dumps([self.url, self.model, self.options], sort_keys=True, default=str)

    def key(self) -> str:
        """The key, "" where none is asked for. Raises ChatError when the variable is not set."""
        if not self.key_env:
            return ""
        value = os.environ.get(self.key_env, "").strip()
        if not value:
            raise ChatError("refused", f"environment variable {self.key_env} holds no API key; set it")
        if not value.isascii() or not value.isprintable():
            raise ChatError(
                "refused", f"environment variable {self.key_env} holds no API key: odd characters"
            )
        return value

    async def __call__(self, messages: Sequence[Mapping[str, str]], **options: Any) -> ChatReply:
        """The model's answer. Raises ChatError after the last attempt, or at once where another is idle."""
        wait = self.backoff_s
        for attempt in range(self.attempts):
            try:
                async with self._slots:
                    return await self._once(messages, options)
            except ChatError as error:
                self.counters.failures[error.cause] = self.counters.failures.get(error.cause, 0) + 1
                if not error.retry or attempt + 1 == self.attempts:
                    raise
                pause = max(wait * random.uniform(0.5, 1.0), error.wait_s or 0.0)
            self.counters.retries += 1
            await asyncio.sleep(min(pause, self.longest_wait_s))
            wait *= 2
        raise AssertionError("the last attempt returns or raises")

    async def _once(self, messages: Sequence[Mapping[str, str]], options: Mapping[str, Any]) -> ChatReply:
        import httpx

        key = self.key()
        # Escaped, so that a lone surrogate in an answer is no obstacle; servers replace or refuse it.
        body = json.dumps(
            {"model": self.model, "messages": list(messages), **self.options, **options}
        ).encode()
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"} | (
            {"Authorization": f"Bearer {key}"} if key else {}
        )
        if self._client is None:
            self._client = httpx.AsyncClient(
                timeout=None, trust_env=False, limits=httpx.Limits(max_connections=None)
            )
        self.counters.requests += 1
        begin = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self.timeout_s):
                request = self._client.stream("POST", self.url, content=body, headers=headers)
                async with request as response:
                    data = await self._read(response)
        except TimeoutError as error:
            raise ChatError("timeout", f"no answer within {self.timeout_s:g} s", retry=True) from error
        except (httpx.HTTPError, httpx.StreamError) as error:
            detail = _hidden(f"{type(error).__name__}: {error}", key)
            raise ChatError("connection", detail, retry=True) from None  # its traceback holds the headers
        finally:
            self.counters.seconds += asyncio.get_running_loop().time() - begin
        if response.status_code != 200:
            raise _http_error(response, data, key)
        return self._reply(data, key)

    async def _read(self, response: httpx.Response) -> bytes:
        chunks, size = [], 0
        async for chunk in response.aiter_raw():
            size += len(chunk)
            if size > self.max_bytes:
                raise ChatError("malformed", f"the reply is over {self.max_bytes} bytes long", retry=True)
            chunks.append(chunk)
        return b"".join(chunks)

    def _reply(self, data: bytes, key: str) -> ChatReply:
        try:
            parsed = json.loads(data)
            text = parsed["choices"][0]["message"]["content"]
            if not isinstance(text, str):
                raise TypeError(f"content is {type(text).__name__}")
            usage = parsed.get("usage") or {}
            paid = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
            shown = _hidden(data[: 4 * _SHOWN].decode("utf-8", "replace"), key)
            detail = f"the reply is no chat completion ({type(error).__name__}): {shown!r}"
            raise ChatError("malformed", detail, retry=True) from None
        tokens = [one if isinstance(one, int) and 0 <= one < 1 << 40 else 0 for one in paid]
        self.counters.prompt_tokens += tokens[0]
        self.counters.completion_tokens += tokens[1]
        return ChatReply(text.replace(key, "[key]") if key else text, *tokens)

    async def aclose(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


def _hidden(text: str, key: str) -> str:
    """The text without the key (servers echo it) and cut short."""
    return (text.replace(key, "[key]") if key else text)[:_SHOWN]


def _http_error(response: httpx.Response, data: bytes, key: str) -> ChatError:
    status = response.status_code
    shown = _hidden(data[: 4 * _SHOWN].decode("utf-8", "replace"), key)
    cause = (
        "rate_limited" if status == 429 else "server" if status >= 500 or status in _RETRIED else "refused"
    )
    return ChatError(
        cause, f"HTTP {status}: {shown!r}", retry=status in _RETRIED, wait_s=_retry_after(response.headers)
    )


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds, where the server says so in seconds."""
    try:
        wait = float(headers.get("retry-after", ""))
    except ValueError:
        return None
    return wait if 0 <= wait < float("inf") else None
