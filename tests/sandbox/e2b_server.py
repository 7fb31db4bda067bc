"""A small server that speaks E2B's protocol, over sandboxes of this package: enough for the stock SDK.

Control: create, list, get, kill, time-out, snapshot. Data, addressed by the header `E2b-Sandbox-Id`: files,
health, and the Connect service `process.Process` with the SDK's own message classes. Output of a program is
sent when it has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs

from e2b.envd.process import process_connect, process_pb
from protobuf import Oneof

from trivet.sandbox import Backend, Limits, PathError, Sandbox, SandboxError, Template

KEY = "e2b_" + "0" * 40
_FIRST_PID = 1000
_ROOM = Limits(wall_s=120.0, cpu_s=100, memory_mb=1024, processes=64, file_mb=1024, output_bytes=4 << 20)


@dataclass(slots=True)
class Live:
    sandbox: Sandbox
    template: str
    metadata: dict[str, str]
    env: dict[str, str]
    started: float
    ends: float
    programs: set[asyncio.Task[Any]] = field(default_factory=set)

    def facts(self, name: str) -> dict[str, Any]:
        return {
            "templateID": self.template,
            "sandboxID": name,
            "clientID": "local",
            "envdVersion": "0.6.7",
            "startedAt": datetime.fromtimestamp(self.started, UTC).isoformat(),
            "endAt": datetime.fromtimestamp(self.ends, UTC).isoformat(),
            "cpuCount": 1,
            "memoryMB": 512,
            "diskSizeMB": 64,
            "state": "running",
            "metadata": self.metadata,
        }


class Programs(process_connect.Process):
    """Starts programs; one stream each: start, data, end."""

    def __init__(self, server: E2BServer) -> None:
        self._server = server

    async def start(self, request: Any, ctx: Any, /) -> AsyncIterator[Any]:
        live = self._server.of(ctx.request_headers.get("e2b-sandbox-id", ""))
        config = request.process
        self._server.pids += 1
        yield _event("start", process_pb.ProcessEvent.StartEvent(pid=self._server.pids))
        argv = [config.cmd, *config.args]
        env = {**live.env, **dict(config.envs)}
        work = live.sandbox.exec(argv, env=env, cwd=config.cwd or None, limits=_ROOM)
        task = asyncio.ensure_future(work)
        live.programs.add(task)
        try:
            result = await task
        finally:
            task.cancel()  # the caller has hung up: its program is killed
            live.programs.discard(task)
        for name, data in (("stdout", result.stdout), ("stderr", result.stderr)):
            for begin in range(0, len(data), 1 << 16):
                chunk = data[begin : begin + (1 << 16)]
                yield _event("data", process_pb.ProcessEvent.DataEvent(output=Oneof(name, chunk)))
        exited = result.cause in ("ok", "exit", "killed")  # the shell's own 128 + signal is an exit code
        code = result.exit_code if exited else -1
        yield _event(
            "end", process_pb.ProcessEvent.EndEvent(exit_code=code, exited=exited, status=result.cause)
        )


def _event(name: Any, value: Any) -> Any:
    return process_pb.StartResponse(event=process_pb.ProcessEvent(event=Oneof(name, value)))


class E2BServer:
    """The ASGI application; `serve` runs it on a free port and gives its address."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.live: dict[str, Live] = {}
        self.pids = _FIRST_PID
        self.delay_s = 0.0  # how long a sandbox takes to be made
        self.refuse = 0  # so many of the next control requests answer 500
        self._snapshots: dict[str, str] = {}
        self._programs = process_connect.ProcessASGIApplication(Programs(self))

    def of(self, name: str) -> Live:
        if name not in self.live:
            raise SandboxError(f"sandbox {name} was not found")
        return self.live[name]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        headers = {key.decode().lower(): value.decode() for key, value in scope["headers"]}
        name, path = headers.get("e2b-sandbox-id", ""), scope["path"]
        if path.startswith("/process."):
            if name in self.live:
                await self._programs(scope, receive, send)
            else:
                await _answer(send, 502, {"message": f"the sandbox {name} was not found"})
            return
        body = await _body(receive)
        query = {key: values[0] for key, values in parse_qs(scope["query_string"].decode()).items()}
        if path in ("/files", "/health"):
            status, reply = await self._data(scope["method"], path, name, query, body)
        elif headers.get("x-api-key") != KEY:
            status, reply = 401, {"code": 401, "message": "wrong key"}
        elif self.refuse:
            self.refuse -= 1
            status, reply = 500, {"code": 500, "message": "no room"}
        else:
            try:
                status, reply = await self._control(scope["method"], path, query, body)
            except SandboxError as error:
                status, reply = 500, {"code": 500, "message": str(error)}
        await _answer(send, status, reply)

    async def _data(
        self, method: str, path: str, name: str, query: dict[str, str], body: bytes
    ) -> tuple[int, Any]:
        if name not in self.live:
            return 502, {"message": f"the sandbox {name} was not found"}
        sandbox = self.live[name].sandbox
        if path == "/health":
            return 204, None
        try:
            if method == "GET":
                return 200, await sandbox.read(query["path"], 64 << 20)
            await sandbox.write(query["path"], body)
        except PathError as error:
            return 404, {"code": 404, "message": str(error)}
        return 200, [{"name": query["path"].rpartition("/")[2], "type": "file", "path": query["path"]}]

    async def _control(self, method: str, path: str, query: dict[str, str], body: bytes) -> tuple[int, Any]:
        order = json.loads(body) if body else {}
        parts = [part for part in path.split("/") if part and part != "v2"]
        if method == "POST" and parts == ["sandboxes"]:
            return await self._create(order)
        if method == "GET" and parts == ["sandboxes"]:
            return 200, self._listed(query)
        name = parts[1] if len(parts) > 1 else ""
        if name not in self.live:
            return 404, {"code": 404, "message": f"no sandbox {name}"}
        live, action = self.live[name], "/".join([method, *parts[2:]])
        if action == "GET":
            return 200, live.facts(name)
        if action == "DELETE":
            await self.end(name)
            return 204, None
        if action == "POST/timeout":
            live.ends = time.time() + order["timeout"]
            return 204, None
        if action == "POST/snapshots":
            snapshot = f"snap-{secrets.token_hex(4)}"
            self._snapshots[snapshot] = await live.sandbox.snapshot()
            return 201, {"snapshotID": snapshot, "names": []}
        return 404, {"code": 404, "message": f"{method} {path} is not served here"}

    async def _create(self, order: dict[str, Any]) -> tuple[int, Any]:
        wanted = order["templateID"]
        if wanted not in ("base", *self._snapshots):
            return 404, {"code": 404, "message": f"template {wanted!r} not found"}
        await asyncio.sleep(self.delay_s)
        template = Template(snapshot=self._snapshots.get(wanted, ""))
        sandbox = await self._backend.start(template, limits=_ROOM)
        name, now = f"i{secrets.token_hex(8)}", time.time()
        # 15 s where no time-out is given, as self-hosted servers have it.
        ends = now + order.get("timeout", 15)
        live = Live(sandbox, wanted, order.get("metadata", {}), order.get("envVars", {}), now, ends)
        self.live[name] = live
        return 201, live.facts(name)

    def _listed(self, query: dict[str, str]) -> list[dict[str, Any]]:
        wanted = {key: values[0] for key, values in parse_qs(query.get("metadata", "")).items()}
        found = [(name, live) for name, live in self.live.items() if wanted.items() <= live.metadata.items()]
        return [live.facts(name) for name, live in found]

    async def end(self, name: str) -> None:
        live = self.live.pop(name)
        for task in live.programs:
            task.cancel()
        await live.sandbox.close()

    async def expire(self) -> None:
        while True:
            for name in [name for name, live in self.live.items() if live.ends < time.time()]:
                await self.end(name)
            await asyncio.sleep(0.05)

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        import uvicorn

        server = uvicorn.Server(uvicorn.Config(self, log_level="critical", lifespan="off", ws="none"))
        listener = socket.create_server(("127.0.0.1", 0))
        tasks = [
            asyncio.ensure_future(server.serve(sockets=[listener])),
            asyncio.ensure_future(self.expire()),
        ]
        try:
            while not server.started:
                await asyncio.sleep(0.01)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = server.force_exit = True
            tasks[1].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for name in list(self.live):
                await self.end(name)
            listener.close()


async def _body(receive: Any) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


async def _answer(send: Any, status: int, reply: Any) -> None:
    raw = reply if isinstance(reply, bytes) else b"" if reply is None else json.dumps(reply).encode()
    kind = b"application/octet-stream" if isinstance(reply, bytes) else b"application/json"
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
    await send({"type": "http.response.body", "body": raw})
