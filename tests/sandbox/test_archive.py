"""Folders to streams and back: contents survive, and no stream writes outside its target."""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trivet.sandbox import PathError
from trivet.sandbox.archive import pack, unpack

_ROOM = 1 << 20


def _stream(*members: tuple[tarfile.TarInfo, bytes]) -> io.BytesIO:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for member, data in members:
            tar.addfile(member, io.BytesIO(data))
    out.seek(0)
    return out


def _file(name: str, data: bytes = b"!") -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    return member, data


def _special(name: str, kind: bytes, link: str = "") -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, link
    return member, b""


def _tree(folder: Path) -> dict[str, bytes | str | None]:
    """Names to contents; a link's target as text, None for a folder."""
    found: dict[str, bytes | str | None] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = os.readlink(path)
        else:
            found[name] = None if path.is_dir() else path.read_bytes()
    return found


_NAMES = st.text(
    st.characters(codec="utf-8", exclude_characters="/\0", categories=["L", "N", "P"]), min_size=1
)
_NAME = _NAMES.map(lambda name: name[:20]).filter(lambda name: name not in (".", ".."))


@given(st.dictionaries(st.tuples(_NAME, _NAME), st.binary(max_size=300), max_size=6))
def test_what_is_packed_comes_out_again(files: dict[tuple[str, str], bytes]) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        source, target = Path(temporary, "source"), Path(temporary, "target")
        source.mkdir()
        for (folder, name), data in files.items():
            (source / f"d{folder}").mkdir(exist_ok=True)
            (source / f"d{folder}" / name).write_bytes(data)
        stream = io.BytesIO()
        pack(source, stream)
        stream.seek(0)
        unpack(stream, target, _ROOM)
        assert _tree(target) == _tree(source)


def test_the_executable_bit_travels_and_the_rest_of_the_mode_does_not(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    for name, mode in (("run", 0o4755), ("data", 0o600)):
        (tmp_path / "source" / name).write_text("x")
        (tmp_path / "source" / name).chmod(mode)
    stream = io.BytesIO()
    pack(tmp_path / "source", stream)
    stream.seek(0)
    unpack(stream, tmp_path / "target", _ROOM)
    assert (tmp_path / "target" / "run").stat().st_mode & 0o7777 == 0o755
    assert (tmp_path / "target" / "data").stat().st_mode & 0o7777 == 0o644


@pytest.mark.parametrize("name", ["/abs", "../out", "a/../../out", "a/" * 80 + "deep"])
def test_names_that_lead_out_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(PathError, match="name"):
        unpack(_stream(_file(name)), tmp_path / "target", _ROOM)
    assert _tree(tmp_path) == {"target": None}


def test_a_file_is_never_written_through_a_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    for link in (str(outside), "../outside"):
        stream = _stream(
            _special("d", tarfile.SYMTYPE, link),
            _file("d/kept", b"lost"),
            _special("d", tarfile.SYMTYPE, link),
        )
        unpack(stream, tmp_path / "target", _ROOM)
    assert (outside / "kept").read_text() == "kept"
    # A link that was in the target before is not followed either, for folders as for files.
    planted = tmp_path / "planted"
    planted.mkdir()
    (planted / "d").symlink_to(outside)
    (planted / "f").symlink_to(outside / "kept")
    with pytest.raises(PathError):
        unpack(_stream(_file("d/kept", b"lost")), planted, _ROOM)
    unpack(_stream(_file("f", b"new")), planted, _ROOM)
    assert (outside / "kept").read_text() == "kept" and (planted / "f").read_text() == "new"


@pytest.mark.parametrize(
    ("name", "link"),
    [
        ("l", "/etc/passwd"),
        ("l", ".."),
        ("a/l", "../../x"),
        ("l", "a/../../x"),
        ("l", ""),
        ("a/b/l", "../../../x"),
    ],
)
def test_links_that_could_lead_out_are_left_out(tmp_path: Path, name: str, link: str) -> None:
    unpack(_stream(_special(name, tarfile.SYMTYPE, link)), tmp_path / "target", _ROOM)
    assert [found for found, what in _tree(tmp_path / "target").items() if what is not None] == []


@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from("abc"), min_size=1, max_size=3),
            st.lists(st.sampled_from(["a", "b", "c", "..", "."]), min_size=1, max_size=6),
        ),
        max_size=6,
    )
)
def test_no_chain_of_links_leads_out(links: list[tuple[list[str], list[str]]]) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        target = Path(temporary, "x", "y", "target")
        stream = _stream(*(_special("/".join(at), tarfile.SYMTYPE, "/".join(to)) for at, to in links))
        try:
            unpack(stream, target, _ROOM)
        except PathError:  # a link where a later member needs a folder
            return
        for path in target.rglob("*"):
            real = os.path.realpath(path)  # unlike Path.resolve it takes loops
            assert Path(real).is_relative_to(os.path.realpath(target)), (path, real)


def test_devices_pipes_and_hard_links_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    kinds = (tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE)
    stream = _stream(
        *(_special(f"s{n}", kind) for n, kind in enumerate(kinds)),
        _special("hard", tarfile.LNKTYPE, str(tmp_path / "secret")),
        _special("hard2", tarfile.LNKTYPE, "../secret"),
        _file("plain"),
    )
    unpack(stream, tmp_path / "target", _ROOM)
    assert _tree(tmp_path / "target") == {"plain": b"!"}


def test_size_count_and_damage_are_bounded(tmp_path: Path) -> None:
    with pytest.raises(PathError, match="larger"):
        unpack(_stream(_file("a", bytes(600)), _file("b", bytes(600))), tmp_path / "a", 1000)
    liar = tarfile.TarInfo("sparse")
    liar.size = 1 << 60
    with pytest.raises(PathError, match="larger"):
        unpack(io.BytesIO(liar.tobuf()), tmp_path / "b", 1000)
    whole = _stream(_file("a", bytes(5000))).getvalue()
    for damaged in (b"\xff" * 4096, whole[:2000], b""):
        with pytest.raises(PathError):
            unpack(io.BytesIO(damaged), tmp_path / "c", _ROOM)
    (tmp_path / "big").mkdir()
    (tmp_path / "big" / "f").write_bytes(bytes(2000))
    with pytest.raises(PathError, match="more than"):
        pack(tmp_path / "big", io.BytesIO(), 1000)
    with pytest.raises(PathError, match="not a folder"):
        pack(tmp_path / "absent", io.BytesIO())
