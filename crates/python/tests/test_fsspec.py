"""The fsspec file system: fsspec's own behaviour, and files that take device memory."""

from __future__ import annotations

import pytest

fsspec = pytest.importorskip("fsspec")

from spinio.fsspec import FileSystem, OpenFile  # noqa: E402


@pytest.fixture
def fs():
    return fsspec.filesystem("spinio", skip_instance_cache=True)


def test_the_protocol_is_known(fs, data, noise):
    assert isinstance(fs, FileSystem)
    with fsspec.open(f"spinio://{data}") as f:
        assert isinstance(f, OpenFile) and f.size == len(noise)
        assert f.read(100) == noise[:100] and f.read() == noise[100:] and f.read(5) == b""
    with fsspec.open(f"spinio://{data}", "rt", encoding="latin-1") as f:
        assert f.read(10) == noise[:10].decode("latin-1")


def test_files_take_device_memory(fs, memory, data, noise):
    array = memory.full(100000, 0)
    with fs.open(str(data)) as f:
        assert f.pread(array, 77) == 100000
    assert memory.read(array) == noise[77:100077]
    assert fs.cat_into(f"spinio://{data}", array, 5) == 100000
    assert memory.read(array) == noise[5:100005]


def test_the_rest_is_the_local_file_system(fs, tmp_path, data, noise):
    assert fs.cat_file(str(data), 10, 20) == noise[10:20]
    assert fs.info(str(data))["size"] == len(noise)
    fs.pipe_file(str(tmp_path / "a"), b"hello")
    assert (tmp_path / "a").read_bytes() == b"hello"
    with fs.open(str(tmp_path / "a"), "ab") as f:
        f.write(b" you")
    assert fs.cat(str(tmp_path / "a")) == b"hello you"
    fs.copy(str(tmp_path / "a"), str(tmp_path / "b"))
    assert sorted(p.rsplit("/", 1)[1] for p in fs.ls(str(tmp_path), detail=False)) == ["a", "b"]
    with fs.transaction:
        with fs.open(str(tmp_path / "c"), "wb") as f:
            f.write(b"later")
        assert not (tmp_path / "c").exists()
    assert (tmp_path / "c").read_bytes() == b"later"
