"""Tensors of one file, shared by processes: load_file(shared=True)."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time

import pytest

import serving

numpy = pytest.importorskip("numpy")
reference = pytest.importorskip("safetensors.numpy")

SECONDS = 300
CHUNK = 2 << 20

# Loads argument 1, prints what it has, and waits for a line before it ends.
PROGRAM = """
import gc, hashlib, json, sys
from spinio import gaia
from spinio.safetensors import load_file, load_sharded

load = load_sharded if sys.argv[1].endswith(".json") else load_file
tensors = load(sys.argv[1], device="emulated", shared=True)
gc.collect()
sums = {name: hashlib.sha256(t.numpy().tobytes()).hexdigest() for name, t in tensors.items()}
readonly = "no error"
try:
    big = tensors["big"]
    big.set(bytes(big.nbytes))
except Exception as error:
    readonly = type(error).__name__
print(json.dumps({"sums": sums, "readonly": readonly}), flush=True)
for line in sys.stdin:
    if line.startswith("one"):
        # One tensor keeps the map.
        big = tensors["big"]
        del tensors
        gc.collect()
        print(json.dumps(hashlib.sha256(big.numpy().tobytes()).hexdigest()), flush=True)
    else:
        del big
        tensors = None
        gc.collect()
        print(json.dumps("dropped"), flush=True)
"""

TENSORS = {
    "small": numpy.arange(33, dtype="float32"),
    "bytes": numpy.arange(251, dtype="uint8"),
    "after": numpy.arange(1000, dtype="float64"),
    "big": numpy.arange(1 << 18, dtype="int64").reshape(256, 1024),
}


@pytest.fixture(scope="module")
def daemon():
    daemon = serving.Daemon()
    yield daemon
    daemon.close()


class Loader:
    """A process that loads a file."""

    def __init__(self, daemon, path):
        pipe = subprocess.PIPE
        words = [sys.executable, "-c", PROGRAM, str(path)]
        self.process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=daemon.environment())

    def answer(self):
        line = self.process.stdout.readline()
        return json.loads(line) if line else pytest.fail(self.process.stderr.read())

    def ask(self, word):
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        return self.answer()

    def end(self):
        _, errors = self.process.communicate(timeout=SECONDS)
        assert self.process.returncode == 0, errors


def wait_for_maps(daemon, maps):
    """Until the daemon has seen that processes have unmapped."""
    deadline = time.monotonic() + SECONDS
    while daemon.status()["maps"] != maps:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def sums(tensors):

    return {name: hashlib.sha256(t.tobytes()).hexdigest() for name, t in tensors.items()}


def test_processes_share_one_copy_of_a_model(daemon, tmp_path):
    path = tmp_path / "model.safetensors"
    reference.save_file(TENSORS, path)
    loaders = [Loader(daemon, path) for _ in range(3)]
    for loader in loaders:
        answer = loader.answer()
        assert answer["sums"] == sums(TENSORS)
        assert answer["readonly"] != "no error", "a store to a shared tensor"
    status = daemon.status()
    assert status["maps"] == 3 and [f["path"] for f in status["files"]] == [str(path)]
    size = path.stat().st_size
    assert status["held_bytes"] == -(-size // CHUNK) * CHUNK
    assert loaders[0].ask("one") == sums(TENSORS)["big"]
    assert daemon.status()["maps"] == 3, "one tensor keeps the map"
    assert loaders[0].ask("none") == "dropped"
    wait_for_maps(daemon, 2)
    for loader in loaders:
        loader.end()
    wait_for_maps(daemon, 0)
    assert daemon.status()["held_bytes"] == -(-size // CHUNK) * CHUNK, "for the next process"


def test_sharded_model_is_shared(daemon, tmp_path):
    names = ["small", "after"], ["big", "bytes"]
    weight_map = {}
    for number, part in enumerate(names):
        reference.save_file({n: TENSORS[n] for n in part}, tmp_path / f"part{number}.safetensors")
        weight_map.update({n: f"part{number}.safetensors" for n in part})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    loader = Loader(daemon, index)
    assert loader.answer()["sums"] == sums(TENSORS)
    assert daemon.status()["maps"] == 2
    loader.end()


def test_without_daemon_or_device(tmp_path):
    path = tmp_path / "model.safetensors"
    reference.save_file({"a": numpy.zeros(4)}, path)
    code = f"""
import errno, sys
from spinio.safetensors import load_file
try:
    load_file({str(path)!r}, device="emulated", shared=True)
except OSError as error:
    assert error.errno == errno.ENOTSUP and "spinio gaia serve" in str(error) and error.filename, error
else:
    raise AssertionError
try:
    load_file({str(path)!r}, device="cpu", library="numpy", shared=True)
except ValueError as error:
    assert "GPU" in str(error)
else:
    raise AssertionError
"""
    environment = {**os.environ, "SPINIO_GAIA_SOCKET": str(tmp_path / "none.sock")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr


def test_file_that_is_written_is_refused_and_loaded_afterwards(daemon, tmp_path):
    path = tmp_path / "model.safetensors"
    reference.save_file(TENSORS, path)
    code = f"""
import errno
from spinio import gaia
from spinio.safetensors import load_file
with gaia.open({str(path)!r}) as f, open({str(path)!r}, "r+b") as writer:
    m = f.map(0, 8192, device="emulated")
    assert m.readonly
    try:
        m.acquire()
    except OSError as error:
        assert error.errno == errno.ETXTBSY and "open for writing" in str(error), error
    else:
        raise AssertionError
    writer.close()
    assert m.acquire() == 8192 and m.info()["bytes_from_file"] > 0
    with m.reading(0, 100) as array:
        assert array.tobytes() == open({str(path)!r}, "rb").read(100)
    assert m.release(0, 1) == 0 and m.info()["device_bytes"] > 0
    try:
        m.acquire(write=True)
    except OSError as error:
        assert error.errno == errno.EACCES, error
    else:
        raise AssertionError
    m.unmap()
with gaia.open({str(path)!r}, "r+") as f:
    try:
        f.map(device="emulated")
    except OSError as error:
        assert error.errno == errno.ENOTSUP and "reading only" in str(error), error
    else:
        raise AssertionError
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=daemon.environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("runs_already", [True, False])
def test_example_loads_one_copy_into_all_processes(daemon, tmp_path, runs_already):
    example = os.path.join(os.path.dirname(__file__), "../../../examples/python/shared_weights.py")
    if not os.path.exists(example):
        pytest.skip("examples/python/shared_weights.py is not here")
    environment = {**daemon.environment(), "SPINIO_COMMAND": serving.command(), "TMPDIR": str(tmp_path)}
    if not runs_already:
        environment["SPINIO_GAIA_SOCKET"] = str(tmp_path / "none.sock")
    words = [sys.executable, example, "--processes", "3", "--mib", "5"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, env=environment, check=False)
    assert done.returncode == 0 and not done.stderr, done
    # Chunks are 2 MiB: 5.0 MiB of tensors and the header are 3 of them.
    assert "copies   6.0 MiB are held for 3 processes" in done.stdout, done.stdout
    assert "✓ each of 16 tensors is right in each of 3 processes" in done.stdout, done.stdout
    assert ("which ran already" if runs_already else "started by this example") in done.stdout, done.stdout
    assert not list(tmp_path.iterdir()), "the example leaves something"
    wait_for_maps(daemon, 0)  # which also shows that this daemon serves on


def test_example_without_command_says_what_is_missing(tmp_path):
    example = os.path.join(os.path.dirname(__file__), "../../../examples/python/shared_weights.py")
    if not os.path.exists(example):
        pytest.skip("examples/python/shared_weights.py is not here")
    environment = {**os.environ, "SPINIO_COMMAND": str(tmp_path / "none")}
    words = [sys.executable, example]
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, env=environment, check=False)
    assert done.returncode == 1 and "no command spinio" in done.stderr, done
