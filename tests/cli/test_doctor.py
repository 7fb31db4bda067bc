"""The doctor: healthy here, and right about what is missing."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from trivet import cli, doctor
from trivet.doctor import Finding, examine, file_system, healthy, usable_cores, usable_memory


def by_topic(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.topic: finding for finding in findings}


def test_this_machine_is_healthy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    findings = by_topic(examine(tmp_path))
    assert healthy(list(findings.values()))
    for topic in (
        "Python",
        "processor",
        "memory",
        "disk",
        "packages",
        "torch",
        "device",
        "writing",
        "file locks",
    ):
        assert topic in findings
    assert findings["file locks"].value == "work here"
    assert list(tmp_path.iterdir()) == []  # nothing is left behind
    with pytest.raises(SystemExit) as caught:
        cli.main(["doctor"])
    assert not caught.value.code
    assert "torch" in capsys.readouterr().out


def test_missing_packages_are_named_with_the_way_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec

    def without(name: str, *rest: Any) -> Any:
        return None if name in ("torch", "pyarrow", "datasets") else real(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    findings = by_topic(examine())
    assert not healthy(list(findings.values()))
    assert (findings["torch"].status, findings["packages"].status) == ("missing", "missing")
    assert "pyarrow" in findings["packages"].value
    assert findings["extra datasets"] == Finding(
        "extra datasets",
        "note",
        "not installed; gives tasksets by hub name (tasks.source: NAME)",
        "pip install 'trivet[datasets]'",
    )
    with pytest.raises(SystemExit) as caught:
        cli.main(["doctor"])
    assert caught.value.code == cli.FAILED


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    findings = by_topic(examine(tmp_path / "gone"))
    assert findings["writing"].status == "missing"
    assert "gone" in findings["writing"].value
    assert findings["disk"].status == "missing"


def test_network_file_systems_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mounts = f"disk / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\nbroken\n"
    monkeypatch.setattr(doctor, "_read", lambda path: mounts if path == "/proc/mounts" else "")
    (tmp_path / "runs").mkdir()
    assert file_system(tmp_path / "runs") == "nfs4"
    assert file_system(Path("/")) == "ext4"
    finding = by_topic(examine(tmp_path))["sqlite"]
    assert finding.status == "note"
    assert "network file system" in finding.hint


def test_limits_of_a_control_group(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"/sys/fs/cgroup/cpu.max": "50000 100000\n", "/sys/fs/cgroup/memory.max": "1048576\n"}
    monkeypatch.setattr(doctor, "_read", lambda path: files.get(path, ""))
    assert usable_cores() == 0.5
    assert usable_memory() == 1 << 20
    files["/sys/fs/cgroup/cpu.max"], files["/sys/fs/cgroup/memory.max"] = "max 100000\n", "max\n"
    assert usable_cores() >= 1
    assert (usable_memory() or 0) > 1 << 20
