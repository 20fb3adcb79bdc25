"""Maps of files in device memory, on a mount of the command, against plain reads and writes of the same files."""

from __future__ import annotations

import errno
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import threading

import pytest
from mounted import SECONDS

import spinio
from spinio import emulated, gaia

PAGE = 4096


@pytest.fixture(params=["emulated", "cuda"])
def device(request):
    """A device that files are mapped on."""
    if request.param == "cuda":
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("PyTorch finds no GPU")
        torch.zeros(1, device="cuda")  # its context is current now
    return request.param


def plain(path):
    """The file's bytes, as any program reads them."""
    with open(path, "rb") as f:
        return f.read()


def raises(number, path):
    """A block that must raise an OSError of this errno, with the file's name."""
    return pytest.raises(OSError, check=lambda e: e.errno == number and e.filename == path and bool(e.strerror))


# ---- on a mount


def test_map_in_place_shows_the_page_cache(mount):
    path = mount.file("in_place", bytes(2 * PAGE))
    with gaia.open(path, "r+") as f, f.map(device="emulated", in_place=True) as m:
        assert m.readonly
        for byte in range(1, 4):
            os.pwrite(f.fileno(), bytes([byte]), 5000)
            with m.reading() as array:
                assert array.tobytes()[5000] == byte
        with pytest.raises(OSError, check=lambda e: e.errno == errno.EINVAL):
            f.map(device="emulated", in_place=True, write=True)


COHERENT = """
import errno, os, sys
from spinio import gaia
path, plain = sys.argv[1:]
with gaia.open(path, "r+") as f, f.map(device="emulated", in_place=True, write=True) as m:
    assert m.info()["in_place"] == 2 and not m.readonly
    with m.writing(4096, 4096) as array:
        os.pwrite(f.fileno(), b"cpu", 5000)
        assert array.tobytes()[904:907] == b"cpu"
        array[:3].set(b"gpu")
        assert os.pread(f.fileno(), 3, 4096) == b"gpu"
    try:
        with m.writing() as array:
            array[:4].set(b"stay")
            raise KeyError("of the block")
    except KeyError:
        pass
    assert os.pread(f.fileno(), 4, 0) == b"stay"
    try:
        m.release()
    except OSError as error:
        assert error.errno == errno.EINVAL
    else:
        raise AssertionError("the epoch has not ended")
    m.sync()
with gaia.open(plain) as f, f.map(device="emulated", in_place=True) as m, m.reading() as array:
    assert array.tobytes() == b"abc"
    with open(plain, "r+b") as writer:
        writer.write(b"x")
    assert array.tobytes() == b"xbc"
"""


def test_map_in_place_is_coherent_where_kernels_access_all_memory(mount, tmp_path):
    path = mount.file("coherent", bytes(2 * PAGE))
    other = tmp_path / "plain"
    other.write_bytes(b"abc")
    # A process of its own: the device is started once.
    environment = dict(os.environ, SPINIO_EMULATED="size=16M,hmm=1")
    subprocess.run([sys.executable, "-c", COHERENT, path, other], env=environment, check=True, timeout=SECONDS)


def test_calls_in_stream_order_need_no_wait(mount, device):
    path = mount.file("stream", bytes(2 * PAGE))
    if device == "cuda":
        torch = pytest.importorskip("torch")
        streams = [torch.cuda.Stream() for _ in range(12)] + [torch.cuda.default_stream()]
    else:
        streams = [emulated.Stream(), None]
    with gaia.open(path, "r+") as f, f.map(device=device) as m:
        for n, stream in enumerate(streams * 5):
            f.pwrite(bytes([n]), PAGE)
            m.acquire_async(write=True, stream=stream)
            if device == "cuda":
                with torch.cuda.stream(stream):
                    torch.as_tensor(m)[:PAGE].add_(1)
            m.release_async(stream=stream)
            # Streams share these pages: one epoch after the other.
            m.sync()
        assert plain(path)[PAGE] == n
        assert plain(path)[0] == (5 * len(streams) if device == "cuda" else 0)
        # A release without an acquire is reported by the next call, once.
        m.release_async(0, PAGE, stream=streams[0])
        with raises(errno.EINVAL, path):
            m.sync()
        m.sync()
        with raises(errno.EINVAL, path):
            m.acquire_async(0, 3 * PAGE)
        with pytest.raises(TypeError):
            m.acquire_async(stream="no stream")


def test_checkpoint_is_written_without_being_fetched(mount, device):
    path = mount.file("checkpoint", bytes(8 * PAGE))
    with gaia.open(path, "r+") as f, f.map(device=device) as m:
        with m.writing(overwrite=True) as array:
            array.set(bytes([7]) * 8 * PAGE)
        info = m.info()
        assert (info["bytes_from_file"], info["bytes_published"]) == (0, 8 * PAGE)
        assert plain(path) == bytes([7]) * 8 * PAGE
    with gaia.open(path) as f, f.map(device=device) as m, raises(errno.EACCES, path):
        m.acquire(overwrite=True)


def test_checkpoint_that_is_handed_over_is_whole(mount, device):
    size = (5 << 20) + 100
    path = mount.file("handed", bytes(size))
    with gaia.open(path, "r+") as f, f.map(device=device) as m:
        for step in (1, 2):
            with m.writing(overwrite=True, handoff=True) as array:
                array.set(bytes([step]) * size)
            info = m.info()
            assert (info["releases_handed_over"], info["bytes_published"]) == (step, step * size), info
            assert info["device_bytes"] == 0
            assert plain(path) == bytes([step]) * size
        with m.reading() as array:
            assert array.tobytes() == bytes([2]) * size
        m.sync()


def test_epochs_and_plain_writes_agree_with_a_model(mount, device):
    size, chance = 9 * PAGE + 123, random.Random(7)
    model = bytearray(chance.randbytes(size))
    path = mount.file("model", model)
    with gaia.open(path, "r+") as f, f.map(0, 10 * PAGE, device=device) as m:
        assert m.device == f"{device}:0"
        assert m.nbytes == 10 * PAGE and not m.readonly
        for _ in range(150):
            at = chance.randrange(size)
            data = chance.randbytes(chance.randrange(1, min(3 * PAGE, size - at) + 1))
            end = at + len(data)
            kind = chance.randrange(4)
            if kind == 0:
                assert f.pwrite(data, at) == len(data)
                model[at:end] = data
            elif kind == 1:
                with m.writing(at, len(data)) as array:
                    assert array.tobytes() == model[at:end]
                    array.set(data)
                model[at:end] = data
            elif kind == 2:
                with m.reading(at, len(data)) as array:
                    assert array.tobytes() == model[at:end]
            else:
                assert os.pread(f.fileno(), len(data), at) == model[at:end]
        assert m.acquire() == size
        assert m.view().tobytes() == model + bytes(10 * PAGE - size)
        info = m.info()
        assert info["file_size"] == size and info["releases"] and info["bytes_published"] and not info["reattached"]
    assert plain(path) == model


@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_arrays_of_a_gpu_are_the_map(mount, library):
    module = pytest.importorskip(library)
    found = module.cuda.is_available() if library == "torch" else module.is_available()
    if not found:
        pytest.skip(f"{library} finds no GPU")
    size = 300 * PAGE
    path = mount.file(f"tensors-{library}", bytes(range(256)) * (size // 256))
    (module.zeros(1, device="cuda") if library == "torch" else module.zeros(1))  # its context is current now
    with gaia.open(path, "r+") as f, f.map() as m:
        assert m.device == "cuda:0" and hasattr(m, "__cuda_array_interface__")
        with m.writing() as array:
            if library == "torch":
                ones = [module.as_tensor(array, device="cuda"), module.from_dlpack(array), module.as_tensor(m, device="cuda")]
                assert all(one.data_ptr() == m.address for one in ones)
            else:
                ones = [module.asarray(array), module.from_dlpack(array), module.asarray(m)]
                assert all(one.data.ptr == m.address for one in ones)
            assert all(one.shape == (size,) for one in ones)
            ones[0][5::PAGE] += 1
            ones[1][6::PAGE] += 2
            ones[2][7] = 200
            words = array.view("uint32")
            assert words.__cuda_array_interface__["typestr"] == "<u4" and words.shape == (size // 4,)
        assert m.info()["bytes_published"] == size
        expected = bytearray(bytes(range(256)) * (size // 256))
        expected[5::PAGE], expected[6::PAGE], expected[7] = b"\x06" * 300, b"\x08" * 300, 200
        assert plain(path) == expected
        f.pwrite(b"CPU", 17 * PAGE)
        with m.reading(17 * PAGE, PAGE) as array:
            assert array.readonly and array.tobytes()[:4] == b"CPU\x03"
            assert bytes(ones[0][17 * PAGE : 17 * PAGE + 4].tolist()) == b"CPU\x03"


def test_acquire_and_release_return_bytes(mount):
    path = mount.file("counts", bytes(PAGE + 10))
    with gaia.open(path, "r+") as f, f.map(nbytes=2 * PAGE, device="emulated") as m:
        assert m.acquire(PAGE, PAGE, write=True) == 10
        assert m.acquire(0, 5) == 5
        assert m.release(PAGE) == 0
        assert m.acquire(PAGE, PAGE, write=True) == 10
        m.view()[PAGE:].fill(7)
        # The stores past the end of the file are dropped.
        assert m.release(PAGE) == 10
        assert plain(path) == bytes(PAGE) + b"\7" * 10


def test_offset_default_device_and_types(mount):
    path = mount.file("types", bytes(range(256)) * 48)
    emulated.empty(1)  # puts the device to use
    with gaia.open(path) as f, f.map(PAGE) as m:
        assert m.readonly and m.nbytes == 2 * PAGE and m.acquire() == 2 * PAGE
        assert m.view("uint16").shape == (PAGE,) and m.view("uint16")[1:2].tobytes() == b"\2\3"
        on_gpu = m.device == "cuda:0"  # that of an earlier test
        assert m.view().readonly and m.__dlpack_device__() == ((2, 0) if on_gpu else (12, 0))
        assert hasattr(m, "__cuda_array_interface__") == on_gpu
        assert spinio.describe(m)["address"] == m.address and spinio.describe(m)["bytes"] == m.nbytes
        # Other calls of the module take the map as an array.
        copy = os.path.join(mount.folder, "copy")
        with spinio.open(copy, "w") as out:
            assert out.write(m) == 2 * PAGE
        assert plain(copy) == plain(path)[PAGE:]
        with m.reading(0, 10) as array, pytest.raises(ValueError, match="read-only"):
            array.fill(1)
        with pytest.raises(BufferError, match="read-only"):
            f.pread(m, 0)


def test_exception_in_a_block_releases_nothing(mount):
    path = mount.file("exception", bytes(PAGE))
    with gaia.open(path, "r+") as f, f.map(device="emulated") as m:
        with pytest.raises(ZeroDivisionError), m.writing() as array:
            array.fill(1)
            raise ZeroDivisionError
        assert plain(path) == bytes(PAGE) and m.info()["releases"] == 0
    assert plain(path) == bytes(PAGE)


def test_reading_block_gives_up_what_no_other_block_uses(mount):
    size = 4 * PAGE
    path = mount.file("given-up", bytes(size))
    with gaia.open(path, "r+") as f, f.map(device="emulated") as m:

        def is_in_use(page):
            # A release is misuse if nothing was acquired.
            try:
                m.release(page * PAGE, PAGE)
            except OSError as error:
                assert error.errno == errno.EINVAL
                return False
            return True

        with m.reading():
            pass
        assert not is_in_use(0)
        with m.reading(0, 3 * PAGE):
            with m.reading(PAGE, 2 * PAGE + 1):
                pass
            assert is_in_use(2) and not is_in_use(3)
        assert not any(is_in_use(page) for page in range(4))
        with m.writing(0, PAGE) as array:
            with pytest.raises(ZeroDivisionError), m.reading():
                raise ZeroDivisionError
            assert not is_in_use(1)
            array.fill(5)
        assert plain(path) == bytes([5]) * PAGE + bytes(3 * PAGE)
        with m.reading() as array:
            m.unmap()


def test_stores_of_a_block_that_raised_are_in_no_later_release(mount):
    path = mount.file("discarded", bytes(3 * PAGE))
    with gaia.open(path, "r+") as f, f.map(device="emulated") as m:
        with pytest.raises(KeyboardInterrupt), m.writing(0, 2 * PAGE) as array:
            array.fill(1)
            raise KeyboardInterrupt
        with raises(errno.EINVAL, path):
            m.release(0, 1)
        with m.writing() as array:
            assert array.tobytes() == bytes(3 * PAGE)
            array[10:11].fill(2)
        assert plain(path) == bytes(10) + b"\2" + bytes(3 * PAGE - 11)
        # A block that has unmapped, and a block that has released.
        with pytest.raises(ZeroDivisionError), m.writing(PAGE, PAGE) as array:
            array.fill(3)
            m.release(PAGE, PAGE)
            raise ZeroDivisionError
        assert plain(path)[PAGE : 2 * PAGE] == b"\3" * PAGE
        with pytest.raises(ZeroDivisionError), m.writing():
            m.unmap()
            raise ZeroDivisionError


def test_sync_brings_released_bytes_to_the_file_below(mount):
    path = mount.file("synced", bytes(2 * PAGE))
    with gaia.open(path, "r+") as f, f.map(device="emulated") as m, f.map(device="emulated") as other:
        with m.writing() as array:
            array.fill(5)
        m.sync()
        m.sync(PAGE, 1)
        other.acquire()
        # Before they are written out, acquire gets released pages from the server.
        assert other.info()["bytes_from_snapshots"] == 0 and other.view().tobytes() == b"\5" * (2 * PAGE)
        with raises(errno.EINVAL, path):
            m.sync(1, 2 * PAGE)
    with pytest.raises(ValueError):
        m.sync()


def test_discard_drops_whole_pages(mount):
    path = mount.file("discard", bytes(3 * PAGE))
    with gaia.open(path, "r+") as f, f.map(device="emulated") as m:
        m.acquire(write=True)
        m.view().fill(1)
        m.discard(PAGE + 5, 1)
        m.discard(PAGE)
        assert m.release(0, PAGE) == PAGE
        assert plain(path) == b"\1" * PAGE + bytes(2 * PAGE)
        assert m.acquire() == 3 * PAGE and m.view().tobytes() == plain(path)
        with raises(errno.EINVAL, path):
            m.discard(0, 3 * PAGE + 1)
    with gaia.open(path) as f, f.map(device="emulated") as m:
        m.acquire()
        m.discard()


WRITER = """
import sys
from spinio import gaia

path, parity = sys.argv[1], int(sys.argv[2])
with gaia.open(path, "r+") as f, f.map(device="emulated") as m:
    for line in sys.stdin:
        round = int(line)
        with m.writing() as array:
            data = bytearray(array.tobytes())
            data[parity::2] = bytes([round]) * len(data[parity::2])
            array.set(data)
            print("stored", flush=True)
            sys.stdin.readline()
        print("released", flush=True)
"""


def test_two_processes_write_one_page_at_the_same_time(mount):
    path = mount.file("shared", bytes(PAGE))
    words, pipe = [sys.executable, "-c", WRITER, path], subprocess.PIPE
    writers = [subprocess.Popen([*words, parity], stdin=pipe, stdout=pipe, text=True) for parity in "01"]

    def all_do(text, answer):
        for writer in writers:
            writer.stdin.write(text)
            writer.stdin.flush()
        for writer in writers:
            assert writer.stdout.readline() == answer

    stop = threading.Timer(SECONDS, lambda: [writer.kill() for writer in writers])
    stop.start()
    try:
        for round_ in range(1, 9):
            # Both have stored before one of them releases.
            all_do(f"{round_}\n", "stored\n")
            assert plain(path) == bytes([round_ - 1]) * PAGE
            all_do("\n", "released\n")
            assert plain(path) == bytes([round_]) * PAGE
        for writer in writers:
            writer.communicate(timeout=SECONDS)
            assert writer.returncode == 0
    finally:
        stop.cancel()
        for writer in writers:
            writer.kill()
            writer.wait()


def test_epoch_of_a_killed_server_is_stale_and_can_be_redone(mount):
    path = mount.file("killed", b"a" * 2 * PAGE)
    with gaia.open(path, "r+") as f, f.map(device="emulated") as m:
        with m.writing(0, PAGE) as array:
            array.fill(ord("b"))
        with raises(errno.ESTALE, path) as caught, m.writing() as array:
            array.fill(ord("c"))
            os.kill(mount.server(), signal.SIGKILL)
            mount.wait_for_next_server()
        assert "acquire again" in str(caught.value)
        assert plain(path) == b"b" * PAGE + b"a" * PAGE
        with m.writing(PAGE) as array:
            assert array.tobytes() == b"a" * PAGE
            array.fill(ord("c"))
        assert m.info()["reattached"] == 1
    assert plain(path) == b"b" * PAGE + b"c" * PAGE


def test_other_threads_run_while_an_acquire_waits(mount):
    path = mount.file("waits", bytes(PAGE))
    with gaia.open(path, "r+") as f, f.map(device="emulated") as m:
        m.acquire()
        done = []
        mount.stop_server()
        try:
            thread = threading.Thread(target=lambda: done.append(m.acquire(write=True)))
            thread.start()
            # A thread that waits with the GIL would let nothing run here.
            for _ in range(20):
                thread.join(0.01)
            assert not done and thread.is_alive()
        finally:
            mount.continue_server()
        thread.join(SECONDS)
        assert done == [PAGE]


def test_misuse_on_a_mount(mount):
    path = mount.file("misuse", bytes(2 * PAGE))
    with gaia.open(path) as f:
        with raises(errno.EACCES, path):
            f.map(device="emulated", write=True)
        with raises(errno.EINVAL, path):
            f.map(100, device="emulated")
        with raises(errno.EINVAL, path):
            f.map(0, 0, device="emulated")
        with f.map(device="emulated") as m:
            with raises(errno.EACCES, path):
                m.acquire(write=True)
            with raises(errno.EACCES, path), m.writing():
                pytest.fail("the block ran")
    with gaia.open(path, "r+") as f:
        m = f.map(PAGE, device="emulated")
        with raises(errno.EINVAL, path):
            m.release(0, 10)
        m.acquire(0, 10)
        assert m.release(0, 10) == 0
        with raises(errno.EINVAL, path):
            m.release(0, 10)
        for outside in [(PAGE, 1), (0, PAGE + 1), (0, 0), (1 << 62, 1 << 62)]:
            with raises(errno.EINVAL, path):
                m.acquire(*outside)
        for number in (-1, 1 << 63):
            with pytest.raises(ValueError):
                m.acquire(number, 1)
        with pytest.raises(TypeError):
            m.acquire(0.5, 1)
        with pytest.raises(TypeError, match="belongs to its process"):
            pickle.dumps(m)
    # The map stays when the file is closed.
    with m.writing(0, 1) as array:
        array.fill(9)
    assert plain(path)[PAGE] == 9
    whole = m.view()
    assert "writable" in repr(m)
    m.unmap()
    m.unmap()
    assert repr(m) == "<spinio.gaia.Map unmapped>"
    of_map, of_array = (m.acquire, m.release, m.info, m.view), (whole.tobytes, lambda: whole.fill(1), whole.__dlpack__)
    for use in (*of_map, *of_array, lambda: m.address):
        with pytest.raises(ValueError, match="no longer mapped"):
            use()
    with pytest.raises(ValueError, match="closed"):
        f.map(device="emulated")


def test_unmap_waits_for_tensors_and_for_paused_device(mount):
    path = mount.file("lifetime", b"x" * PAGE)
    with gaia.open(path) as f:
        m = f.map(device="emulated")
        m.acquire()
        capsule = m.__dlpack__(max_version=(1, 0))
        m.unmap()
        assert spinio.describe(Exported(capsule))["bytes"] == PAGE
        with f.map(device="emulated") as other, emulated.paused():
            other.unmap()
        # An array keeps its map.
        m = f.map(device="emulated")
        array = m.view()
        with pytest.raises(RuntimeError, match="acquired"):
            array.tobytes()
        m.acquire()
        del m
        assert len(array) == PAGE and len(array.tobytes()) == PAGE


class Exported:
    """An object of one DLPack capsule."""

    def __init__(self, capsule):
        self.capsule = capsule

    def __dlpack__(self, **_):
        return self.capsule

    def __dlpack_device__(self):
        return (12, 0)


def test_forked_child_has_no_map(mount):
    path = mount.file("forked", bytes(PAGE))
    with gaia.open(path, "r+") as f, f.map(device="emulated") as m:
        m.acquire(write=True)
        m.view().fill(5)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                signal.alarm(SECONDS)
                for use in (m.acquire, m.release, m.info, m.view, lambda: m.address):
                    with pytest.raises(ValueError, match="forked from"):
                        use()
                m.unmap()
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert m.release() == PAGE
    assert plain(path) == b"\5" * PAGE


KERNEL = "void kernel(void *memory) { unsigned char *at = memory; for (int i = 0; i < 100; i++) at[i] += i; }\n"
LAUNCH = """
import ctypes, sys
import spinio
from spinio import gaia

lib, mine = ctypes.CDLL(None), ctypes.CDLL(sys.argv[2])
lib.spinio_emulated_launch.argtypes = [ctypes.c_void_p] * 3
with gaia.open(sys.argv[1], "r+") as f, f.map(device="emulated") as m:
    with m.writing(0, 100):
        assert lib.spinio_emulated_launch(ctypes.cast(mine.kernel, ctypes.c_void_p), m.address, None) == 0
    info = (ctypes.c_uint64 * len(m.info()))()
    lib.spinio_gaia_info.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    # The map is one of the library's.
    # No reason is None in Python, and 0 in C.
    expected = [value or 0 for value in m.info().values()]
    assert lib.spinio_gaia_info(m.address, info, ctypes.sizeof(info)) == 0 and list(info) == expected
"""


def test_kernel_of_a_loaded_library_stores_to_a_map(mount, tmp_path):
    library = os.environ.get("SPINIO_LIBRARY")
    if library is None or shutil.which("cc") is None:
        pytest.skip("SPINIO_LIBRARY names no libspinio.so, or there is no cc")
    path, source, kernel = mount.file("kernel", b"\1" * PAGE), tmp_path / "kernel.c", tmp_path / "kernel.so"
    source.write_text(KERNEL)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", kernel, source], check=True)
    words, env = [sys.executable, "-c", LAUNCH, path, kernel], {**os.environ, "LD_PRELOAD": library}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    assert plain(path) == bytes(i + 1 for i in range(100)) + b"\1" * (PAGE - 100)


def test_example_runs(mount):
    example = os.path.join(os.path.dirname(__file__), "../../../examples/python/gaia.py")
    if not os.path.exists(example):
        pytest.skip("examples/python/gaia.py is not here")
    path = mount.file("counters", bytes(10000))
    for n in (1, 2):
        done = subprocess.run([sys.executable, example, path], capture_output=True, text=True, timeout=SECONDS)
        assert done.returncode == 0 and f"the CPU reads {n}" in done.stdout, done
        assert "10000 bytes of 3 pages" in done.stdout
    assert plain(path) == b"\2\2" + b"\2\0" * 4999


def test_checkpoint_example_runs(mount):
    example = os.path.join(os.path.dirname(__file__), "../../../examples/python/checkpoint.py")
    if not os.path.exists(example):
        pytest.skip("examples/python/checkpoint.py is not here")
    path = mount.file("model.ckpt", b"old")
    done = subprocess.run([sys.executable, example, path, "3"], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0 and done.stdout.count(" 3 MiB, for sha256sum after ") == 3, done
    assert os.path.getsize(path) == 3 << 20 and not os.path.exists(path + ".new")


# ---- without a mount


def test_files_and_devices_without_maps(data):
    with gaia.open(data) as f:
        assert isinstance(f, spinio.File)
        array = emulated.empty(100)
        assert f.pread(array, 5) == 100
        with raises(errno.ENOTSUP, data) as caught:
            f.map(device="emulated")
        assert "GAIA" in str(caught.value)
        absent = {"cuda:98": 98, 99: 99}
        if not os.path.exists("/dev/nvidiactl"):
            absent |= {"cuda": 0, "cuda:1": 1, 0: 0}
        for device, number in absent.items():
            with raises(errno.ENODEV, data) as caught:
                f.map(device=device)
            assert f"cuda:{number} is not the device in use" in str(caught.value)
        for device in ("cpu", "emulated:x", "tpu"):
            with pytest.raises(ValueError, match="no device"):
                f.map(device=device)
        with pytest.raises(ValueError, match="offset"):
            f.map(-1)


def test_no_device_in_use(data):
    code = f"""
import errno
from spinio import gaia
try:
    gaia.open({os.fspath(data)!r}).map()
except OSError as error:
    assert error.errno == errno.ENODEV and "No device is in use" in str(error), error
else:
    raise AssertionError
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0 or "cuda" in done.stderr, done.stderr
