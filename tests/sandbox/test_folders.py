"""The folder that sandboxes are lent things from belongs to this user alone."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from trivet.sandbox import SandboxError, client


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return client.base_folder()


def test_it_is_made_and_made_only_once(place: Path) -> None:
    assert client.own_base_folder() == place == client.own_base_folder()
    assert place.is_dir() and place.stat().st_mode & 0o022 == 0


def test_one_that_others_can_write_is_refused(place: Path) -> None:
    place.mkdir()
    place.chmod(0o777)
    with pytest.raises(SandboxError, match="this user's alone"):
        client.own_base_folder()


def test_a_link_is_refused(place: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SandboxError, match="this user's alone"):
        client.own_base_folder()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give folders away")
def test_anothers_is_refused(place: Path) -> None:
    place.mkdir()
    os.chown(place, 65534, 65534)
    with pytest.raises(SandboxError, match="this user's alone"):
        client.own_base_folder()
