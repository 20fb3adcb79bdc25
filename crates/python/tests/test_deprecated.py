"""Names of earlier releases: each works, warns, and gives what the new name gives."""

from __future__ import annotations

import errno
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import spinio
from spinio import emulated, nvmmu

USED: set[str] = set()


def old(name, use):
    """Uses an old name, which warns once, at the line that uses it; returns the result."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        result = use()
    assert [w.category for w in seen] == [DeprecationWarning], name
    assert str(seen[0].message).startswith(f"{name} is deprecated: use ") and seen[0].filename == __file__
    USED.add(name)
    return result


@pytest.fixture
def path(tmp_path, noise):
    path = tmp_path / "file"
    path.write_bytes(noise)
    return path


def test_pinned_files(path):
    array = emulated.empty(100)
    assert old("spinio.Hold", lambda: spinio.Hold) is spinio.PinnedFile
    assert "Hold" not in spinio.__all__
    with pytest.raises(AttributeError, match="no attribute 'Held'"):
        spinio.Held
    with spinio.open(path) as f:
        try:
            h = old("File.hold", lambda: f.hold(array))
        except OSError as why:
            if why.errno == errno.EOPNOTSUPP:
                pytest.skip(str(why))
            raise
        assert type(h) is spinio.PinnedFile
        assert old("Hold.is_held", lambda: h.is_held) is h.is_pinned is True
        with h.map(0, 100) as m:
            assert old("Map.is_wanted_back", lambda: m.is_wanted_back) is m.revoke_requested is False
        old("Hold.release", lambda: h.release())
        assert old("Hold.is_held", lambda: h.is_held) is h.is_pinned is False


def test_pause_of_the_emulated_device(data, noise):
    array = emulated.empty(100)
    assert "held" not in emulated.__all__
    with old("emulated.held", lambda: emulated.held()), spinio.open(data) as f:
        assert f.pread(array, 0) == 100
    assert array.tobytes() == noise[:100]


def test_sessions(tmp_path):
    with nvmmu.session(tmp_path / "out") as s:
        old("Session.expect", lambda: s.expect(0, 100))
        with pytest.raises(OverflowError):
            s.hint_range(-1, 100)
        s.download(emulated.empty(100))
    for new, was in [("mode", "promise"), ("full_stripe", "whole"), ("filler", "neighbours"), ("unaligned", "loose")]:
        assert s.report[new] == s.report[was]
    assert s.report["unaligned"] + s.report["full_stripe"] - s.report["filler"] == 100


def test_gauges():
    stats = spinio.stats()
    names = {
        "staging": "bounce_bytes",
        "kept files": "file_cache_entries",
        "held files": "pinned_files",
        "held": "pinned_file_bytes",
        "read-ahead set": "readahead_pages",
        "pinned": "pinned_bytes",
    }
    assert {new: stats["kept"][was] for was, new in names.items()} == stats["gauges"]
    assert len(stats["kept"]) == len(stats["gauges"]) == 6


def test_importing_everything_uses_no_old_name():
    code = "import spinio, spinio.fsspec; dir(spinio); from spinio import *; from spinio.emulated import *"
    command = [sys.executable, "-W", "error::DeprecationWarning:spinio", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 or "fsspec" in done.stderr, done.stderr


def test_table_lists_the_names_that_were_used():
    table = Path(__file__).resolve().parents[3] / "docs/deprecated.md"
    if not table.exists():
        pytest.skip("the tests are not in a source tree")
    if "File.hold" not in USED or "Hold.release" not in USED or "emulated.held" not in USED:
        pytest.skip("not all tests of this file have run")
    section = table.read_text().split("\n## Python\n")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `([A-Za-z.]+_?[a-z_]*)` \|", section, re.M)
    assert {name.removeprefix("nvmmu.") for name in listed} == USED
