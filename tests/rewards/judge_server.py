"""A chat server on this machine that behaves, or misbehaves, as it is told."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def completion(text: str, **usage: Any) -> bytes:
    reply = {"choices": [{"message": {"role": "assistant", "content": text}}], "usage": usage}
    return json.dumps(reply).encode()


def verdict(value: Any) -> bytes:
    said = f"Thinking {{about}} it. {json.dumps({'verdict': value})}"
    return completion(said, prompt_tokens=100, completion_tokens=10)


Behaviour = Callable[["Handler", dict[str, Any], int], None]


class Handler(BaseHTTPRequestHandler):
    """`server.behave(self, request, number)` answers the number-th request."""

    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with self.server.lock:
            number = len(self.server.requests)
            self.server.requests.append(json.loads(body))
            self.server.keys.append(self.headers.get("Authorization", ""))
        self.server.behave(self, self.server.requests[number], number)

    def say(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        return None


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, behave: Behaviour) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behave = behave
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.lock = threading.Lock()
        self.over = threading.Event()  # ends those that hang
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        return None  # clients hang up on answers that are too long


@contextmanager
def serving(behave: Behaviour) -> Iterator[Server]:
    server = Server(behave)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.over.set()
        server.shutdown()
        server.server_close()
        thread.join(10)


def always(status: int, body: bytes, **headers: str) -> Behaviour:
    return lambda handler, request, number: handler.say(status, body, **headers)


def in_turn(*behaviours: Behaviour) -> Behaviour:
    """The last one from then on."""
    return lambda handler, request, number: behaviours[min(number, len(behaviours) - 1)](
        handler, request, number
    )


def hang(handler: Handler, request: dict[str, Any], number: int) -> None:
    handler.server.over.wait(60)


def drip(handler: Handler, request: dict[str, Any], number: int) -> None:
    """One byte at a time, never done: no single read takes long."""
    handler.send_response(200)
    handler.end_headers()
    while not handler.server.over.wait(0.02):
        try:
            handler.wfile.write(b" ")
            handler.wfile.flush()
        except OSError:
            return


def endless(handler: Handler, request: dict[str, Any], number: int) -> None:
    handler.send_response(200)
    handler.end_headers()
    try:
        while not handler.server.over.is_set():
            handler.wfile.write(b'{"choices":' + b" " * 65536)
    except OSError:
        return


def hang_up(handler: Handler, request: dict[str, Any], number: int) -> None:
    handler.connection.close()


def half(handler: Handler, request: dict[str, Any], number: int) -> None:
    """Promises more than it sends."""
    body = verdict("yes")
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body[: len(body) // 2])
    handler.wfile.flush()
    handler.connection.close()


def slow(seconds: float, then: Behaviour) -> Behaviour:
    def behave(handler: Handler, request: dict[str, Any], number: int) -> None:
        time.sleep(seconds)
        then(handler, request, number)

    return behave
