"""examples/net/cupy: with CuPy on a GPU, on the emulated GPU with a stand-in for CuPy, and compiled by NVRTC without a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib.util
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading

import pytest

import spinio

LIBRARY = os.environ.get("SPINIO_LIBRARY")
TESTS = pathlib.Path(__file__).resolve().parent
# A hang becomes a failure.
SECONDS = 300


@pytest.fixture
def example():
    # On a machine with a GPU the tests lie beside the examples that they run.
    for path in (TESTS / "echo.py", TESTS.parents[2] / "examples/net/cupy/echo.py"):
        if path.exists():
            return path
    pytest.skip("no examples/net/cupy/echo.py")


@contextlib.contextmanager
def interruptible():
    """Programs started here get SIGINT: a shell's background job ignores it, and so would all that it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def serve_and_interrupt(example, environment):
    """Starts the example, talks to it with two connections, and ends it as Ctrl-C does, while its kernel waits."""
    pipe, said = subprocess.PIPE, ""
    words = [sys.executable, example, "tcp://127.0.0.1:0"]
    with tempfile.TemporaryFile("w+") as errors:
        with interruptible():
            server = subprocess.Popen(words, env=os.environ | environment, stdout=pipe, stderr=errors, text=True)
        limit = threading.Timer(SECONDS, server.kill)
        limit.start()
        try:
            said = server.stdout.readline()
            found = re.fullmatch(r"listening on tcp://127\.0\.0\.1:(\d+); Ctrl-C ends it\n", said)
            assert found, "the example does not listen"
            at, data = ("127.0.0.1", int(found[1])), os.urandom(20_000)
            with socket.create_connection(at, SECONDS) as one, socket.create_connection(at, SECONDS) as two:
                for peer in (one, two):
                    peer.sendall(data)
                    assert peer.makefile("rb").read(len(data)) == data, "other bytes came back"
                server.send_signal(signal.SIGINT)
                rest = server.stdout.read()
                said += rest
            # CuPy may print warnings.
            assert (server.wait(SECONDS), rest) == (0, "2 connections, 40000 bytes through Linux\n")
        except (AssertionError, OSError, subprocess.TimeoutExpired) as why:
            server.kill()
            said += server.stdout.read()
            code = server.wait(SECONDS)
            errors.seek(0)
            ended = f"exit code {code}, -9 if it was killed (after {SECONDS} s, or just now)"
            pytest.fail(f"{why!r}\n{ended}\nstdout:\n{said}\nstderr:\n{errors.read()}")
        finally:
            limit.cancel()
            server.kill()
            server.wait()
            server.stdout.close()


def test_example_runs_with_cupy(example):
    cupy = pytest.importorskip("cupy")
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as why:
        pytest.skip(f"CuPy finds no GPU: {why}")
    serve_and_interrupt(example, {})


def test_example_runs_on_the_emulated_gpu(example, tmp_path):
    pytest.importorskip("numpy")
    if LIBRARY is None:
        pytest.skip("SPINIO_LIBRARY names no libspinio.so")
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    shutil.copy(TESTS / "emulated_cupy.py", tmp_path / "cupy.py")
    environment = {"PYTHONPATH": str(tmp_path), "LD_PRELOAD": LIBRARY, "SPINIO_EMULATED": "size=64M"}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    serve_and_interrupt(example, environment)
    # As in a background job of a shell.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        serve_and_interrupt(example, environment)
    finally:
        signal.signal(signal.SIGINT, before)


def test_errno_numbers_of_nvrtc_are_those_of_linux():
    header = (pathlib.Path(spinio.include()) / "spinio/standard.h").read_text()
    numbers = dict(re.findall(r"^#define (E[A-Z]+) (\d+)$", header, re.MULTILINE))
    assert len(numbers) > 30
    assert {name: getattr(errno, name) for name in numbers} == {name: int(number) for name, number in numbers.items()}
    used = set()
    for path in (pathlib.Path(spinio.include()) / "spinio/net").glob("*.h"):
        used |= set(re.findall(r"-(E[A-Z]{3,})\b", path.read_text()))
    assert used and used <= set(numbers)


# ---- NVRTC


def nvrtc():
    """The compiler of CuPy, or a skip with the reason."""
    names = ["libnvrtc.so.13", "libnvrtc.so.12"]
    package = importlib.util.find_spec("nvidia")
    for folder in package.submodule_search_locations or [] if package else []:
        names += map(str, pathlib.Path(folder).glob("*/lib/libnvrtc.so.1[23]"))
    for name in [os.environ["SPINIO_NVRTC"]] if "SPINIO_NVRTC" in os.environ else names:
        try:
            return ctypes.CDLL(name)
        except OSError as why:
            reason = why
    pytest.skip(f"no NVRTC (package nvidia-cuda-nvrtc, or a library named by SPINIO_NVRTC): {reason}")


def hopper_options():
    return ["-std=c++17", "-I" + spinio.include(), "--gpu-architecture=sm_90"]


def compile_by_nvrtc(source, options):
    """Compiles a source; returns the result code and the log."""
    library, program = nvrtc(), ctypes.c_void_p()
    assert library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"test.cu", 0, None, None) == 0
    words = [option.encode() for option in options]
    code = library.nvrtcCompileProgram(program, len(words), (ctypes.c_char_p * len(words))(*words))
    size = ctypes.c_size_t()
    assert library.nvrtcGetProgramLogSize(program, ctypes.byref(size)) == 0
    log = ctypes.create_string_buffer(size.value)
    assert library.nvrtcGetProgramLog(program, log) == 0
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return code, log.value.decode()


def options_and_source(example, monkeypatch):
    """What the example gives to CuPy."""
    given = {}

    class Enough(Exception):
        pass

    class Cupy:
        @staticmethod
        def RawModule(**named):
            given.update(named)
            raise Enough

    monkeypatch.setitem(sys.modules, "cupy", Cupy)
    with pytest.raises(Enough):
        exec(compile(example.read_text(), example, "exec"), {"__name__": "__main__"})
    return given["options"], given["code"]


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_nvrtc_compiles_the_example(example, monkeypatch, architecture):
    nvrtc()
    options, source = options_and_source(example, monkeypatch)
    assert compile_by_nvrtc(source, [*options, f"--gpu-architecture={architecture}"]) == (0, "")


def test_nvrtc_compiles_calls_of_every_kind():
    source = (TESTS / "net_kernels.cpp").read_text().partition('extern "C"')[0]
    source += """
    __global__ void calls(net::Handle handle, net::Poll *sockets, char *buffer)
    {
        int s = net::socket(net::warp(), handle, net::INET, net::DGRAM, 0);
        net::Address at = net::Address::inet(127, 0, 0, 1, 7);
        net::connect(net::warp(), handle, s, at);
        net::sendto(net::warp(), handle, s, buffer, 100, 0, at);
        net::recvfrom(net::thread(), handle, s, buffer, 100, net::DONTWAIT, &at);
        net::poll(net::block(), handle, sockets, 100, 1000);
        net::sendfile(net::block(), handle, s, 5, 0, 100);
    }
    """
    code, log = compile_by_nvrtc(source, hopper_options())
    assert code == 0, log


def test_nvrtc_compiles_the_calls_of_the_paper():
    source = '#include <spinio/gpunet.h>\n__global__ void calls(int listener, char *buffer) {\n'
    source += "int s = gaccept(listener); gsend(s, buffer, grecv(s, buffer, 100)); gclose(s); }\n"
    assert compile_by_nvrtc(source, hopper_options()) == (0, "")


def test_nvrtc_compiles_text_and_http():
    source = "#include <spinio/http.h>\nusing namespace spinio;\n"
    source += "__global__ void reply(char *bytes, unsigned count, size_t *length) {\n"
    source += "http::Request request = http::parse(bytes, http::head_length(bytes, count), 100);\n"
    source += "text::Buffer out(bytes, count); http::begin_head(out, request.status); http::Chunk chunk(out);\n"
    source += "http::add_event(out, request.path.bytes, request.path.length); chunk.end(); *length = out.length; }\n"
    assert compile_by_nvrtc(source, hopper_options()) == (0, "")


def test_nvrtc_accepts_integers_that_another_header_defines():
    source = "typedef unsigned long uint64_t;\ntypedef long int64_t;\n#include <spinio/net.h>\n"
    source += "__global__ void kernel(spinio::net::Handle handle, uint64_t *out) { *out = sizeof handle; }\n"
    code, log = compile_by_nvrtc(source, hopper_options())
    assert code == 0, log
