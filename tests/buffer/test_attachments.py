"""Files named by their hash."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trivet.buffer import AttachmentError, AttachmentStore, faults


@pytest.fixture
def store(tmp_path: Path) -> AttachmentStore:
    return AttachmentStore(tmp_path / "heavy")


@pytest.fixture(scope="session")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> AttachmentStore:
    return AttachmentStore(tmp_path_factory.mktemp("heavy"))


@given(
    hnp.arrays(
        st.sampled_from([np.uint8, np.uint16, np.uint32, np.float16, np.float32, np.int64, np.bool_]),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
    )
)
def test_arrays_come_back_equal_and_read_only(shared_store: AttachmentStore, array: np.ndarray) -> None:
    attachment = shared_store.put(array, "top", 2, 9)
    assert (attachment.kind, attachment.start, attachment.stop) == ("top", 2, 9)
    back = shared_store.open(attachment)
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert back.tobytes() == array.tobytes()
    assert not back.flags.writeable


def test_a_file_is_named_by_its_bytes_and_mapped(store: AttachmentStore) -> None:
    array = np.arange(1000, dtype=np.float32).reshape(10, 100)
    attachment = store.put(array[:, ::2], "routes", 0, 10)
    raw = store.path(attachment.name).read_bytes()
    assert hashlib.sha256(raw).hexdigest() == attachment.name
    assert raw == array[:, ::2].tobytes()
    assert isinstance(store.open(attachment), np.memmap)


def test_big_endian_and_little_endian_share_a_file(store: AttachmentStore) -> None:
    array = np.arange(5, dtype="<i4")
    assert store.put(array, "top", 0, 5) == store.put(array.astype(">i4"), "top", 0, 5)
    assert len([p for p in store.directory.rglob("*") if p.is_file()]) == 1


def test_equal_bytes_are_stored_once_by_many_threads(store: AttachmentStore) -> None:
    array = np.zeros(100_000, np.uint8)
    with ThreadPoolExecutor(8) as pool:
        names = {a.name for a in pool.map(lambda _: store.put(array, "media", 0, 0), range(32))}
    assert len(names) == 1
    assert [p.name for p in store.directory.rglob("*") if p.is_file()] == list(names)


def test_missing_short_and_changed_files_are_errors(store: AttachmentStore) -> None:
    attachment = store.put(np.arange(100, dtype=np.int32), "top", 0, 100)
    path = store.path(attachment.name)
    data = path.read_bytes()
    path.write_bytes(data[:-4])
    with pytest.raises(AttachmentError, match="396 bytes where <i4 of shape"):
        store.open(attachment)
    path.write_bytes(b"\x01" + data[1:])
    with pytest.raises(AttachmentError, match=r"its bytes hash to .* not to its name"):
        store.open(attachment)
    assert AttachmentStore(store.directory, verify=False).open(attachment)[0] == 1
    path.unlink()
    with pytest.raises(AttachmentError, match="is missing from"):
        store.open(attachment)
    store.put(np.arange(100, dtype=np.int32), "top", 0, 100)
    with pytest.raises(AttachmentError, match="needs 404"):
        store.open(replace(attachment, shape=(101,)))


def test_put_repairs_a_truncated_file(store: AttachmentStore) -> None:
    array = np.arange(100, dtype=np.int32)
    attachment = store.put(array, "top", 0, 100)
    store.path(attachment.name).write_bytes(b"")
    store.put(array, "top", 0, 100)
    assert store.open(attachment).tobytes() == array.tobytes()


def test_free_removes_files_and_leaves_open_maps_alone(store: AttachmentStore) -> None:
    array = np.arange(100_000, dtype=np.int32)
    attachment = store.put(array, "top", 0, 1)
    mapped = store.open(attachment)
    assert store.free([attachment.name]) == [attachment.name]
    assert store.free([attachment.name]) == []
    assert mapped.tobytes() == array.tobytes()
    with pytest.raises(AttachmentError, match="is missing"):
        store.open(attachment)


@pytest.mark.parametrize("name", ["", "../../etc/passwd", "A" * 64, "a" * 63, "/" * 64])
def test_a_name_never_leaves_the_folder(store: AttachmentStore, name: str) -> None:
    with pytest.raises(AttachmentError, match="is not a SHA-256"):
        store.free([name])


def test_a_crash_while_writing_leaves_no_half_file(store: AttachmentStore) -> None:
    array = np.arange(10)
    with faults.injected(faults.crash_at(1, only="attachment.written")), pytest.raises(faults.Crash):
        store.put(array, "top", 0, 1)
    assert all(p.name.startswith(".tmp-") for p in store.directory.rglob("*") if p.is_file())
    assert store.open(store.put(array, "top", 0, 1)).tolist() == array.tolist()


@pytest.mark.parametrize("array", [np.array([None]), np.zeros(2, [("a", "i4")])])
def test_objects_are_refused(store: AttachmentStore, array: np.ndarray) -> None:
    with pytest.raises(AttachmentError, match="cannot be stored"):
        store.put(array, "top", 0, 1)


def test_bad_ranges_and_folders(store: AttachmentStore, tmp_path: Path) -> None:
    with pytest.raises(AttachmentError, match=r"token range \[3, 2\)"):
        store.put(np.zeros(1), "top", 3, 2)
    (tmp_path / "file").write_text("")
    with pytest.raises(AttachmentError, match="cannot be made"):
        AttachmentStore(tmp_path / "file" / "heavy")


def test_a_file_that_is_freed_meanwhile_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may free equal bytes between the look and the touch."""
    store = AttachmentStore(tmp_path)
    array = np.arange(5)
    name = store.put(array, "top", 0, 1).name
    touch = os.utime

    def late(path: Path) -> None:
        Path(path).unlink()
        touch(path)

    monkeypatch.setattr(os, "utime", late)
    again = store.put(array, "top", 0, 1)
    assert again.name == name
    assert store.open(again).tolist() == [0, 1, 2, 3, 4]
