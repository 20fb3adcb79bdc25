#!/usr/bin/env python3
"""What GAIA costs: the mount against the file system below it, acquire and release, a killed server. Needs root.

    benches/gaia/gaia.py [--size MIB] [--rows NAME,...] [--bin DIR] [--scratch DIR] [--out FILE.json]

in the repository, after `cargo build --release`, or in a pack (`cargo x gpu-pack`). Each row has a limit, measured in
the same run: what the same work takes without GAIA. Rates are GB/s (10^9 bytes), the best of several passes; times are
medians. Kernels run on the GPU if there are one and nvcc, else on the emulated device: then rates of acquire and release
are those of this machine's processors and memory. Goals are those for an H200.
"""
import argparse
import contextlib
import ctypes
import json
import os
import pathlib
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
MIB = 1 << 20
PAGE = 4096


def fail(text):
    sys.exit(f"gaia.py: {text}")


def gpu():
    """The name of the first GPU, if nvcc can compile for it."""
    if not shutil.which("nvcc") or not shutil.which("nvidia-smi"):
        return None
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.partition("\n")[0] or None


def build(bin, work, on_gpu):
    """The measuring program, compiled for the GPU or for the emulated device."""
    library = next((path for path in (bin / "deps/libspinio.so", bin / "libspinio.so") if path.exists()), None)
    if library is None:
        fail(f"there is no libspinio.so in {bin}: run `cargo build --release`")
    include = [f"-I{path}" for path in (ROOT / "device/include", ROOT / "crates/capi/include", ROOT)]
    if on_gpu:
        command = ["nvcc", "-O2", "-std=c++17", "-arch=native", *include, HERE / "maps.cu", library]
        command += ["-Xlinker", f"-rpath={library.parent}"]
    else:
        command = ["c++", "-O2", "-std=c++17", "-pthread", *include, "-x", "c++", HERE / "maps.cu"]
        command += ["-x", "none", library, f"-Wl,-rpath,{library.parent}"]
    subprocess.run([*command, "-o", work / "maps"], check=True)
    return work / "maps"


class Mount:
    """A mount over a directory, served by a process of this one's."""

    def __init__(self, spinio, directory):
        self.directory = directory
        command = [spinio, "gaia", "mount", "--foreground", directory]
        self.supervisor = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        if not self.supervisor.stdout.readline().startswith("mounted"):
            fail("no mount")
        self.server = self.read_server()

    def read_server(self):
        return int(self.supervisor.stdout.readline().split()[1])

    def kill(self):
        """Kills the server; seconds until another one has answered."""
        begun = time.perf_counter()
        os.kill(self.server, signal.SIGKILL)
        os.statvfs(self.directory)
        seconds = time.perf_counter() - begun
        self.server = self.read_server()
        return seconds

    def close(self):
        self.supervisor.send_signal(signal.SIGTERM)
        self.supervisor.wait()


def sequential(path):
    """GB/s of cached reads of 1 MiB, the best of five passes after a first."""
    buffer, best = bytearray(MIB), 0.0
    fd = os.open(path, os.O_RDONLY)
    for run in range(6):
        begun, at = time.perf_counter(), 0
        while got := os.preadv(fd, [buffer], at):
            at += got
        if run:
            best = max(best, at / (time.perf_counter() - begun) / 1e9)
    os.close(fd)
    return best


def scattered(path, size):
    """Cached reads of 4 KiB a second, the best of five passes."""
    buffer, best = bytearray(PAGE), 0.0
    offsets = [random.randrange(size // PAGE) * PAGE for _ in range(50000)]
    fd = os.open(path, os.O_RDONLY)
    for _ in range(5):
        begun = time.perf_counter()
        for offset in offsets:
            os.preadv(fd, [buffer], offset)
        best = max(best, len(offsets) / (time.perf_counter() - begun))
    os.close(fd)
    return best


def written(directory, size):
    """GB/s of writes of 1 MiB to a new file and fsync, the best of three."""
    block, best = os.urandom(MIB), 0.0
    for _ in range(3):
        begun = time.perf_counter()
        fd = os.open(directory / "new", os.O_RDWR | os.O_CREAT)
        for at in range(0, size, MIB):
            os.pwrite(fd, block, at)
        os.fsync(fd)
        best = max(best, size / (time.perf_counter() - begun) / 1e9)
        os.close(fd)
        os.unlink(directory / "new")
    return best


def names(directory, count=2000):
    """Files a second that are made, asked for and removed; the best of three."""
    best = 0.0
    for _ in range(3):
        begun = time.perf_counter()
        for i in range(count):
            os.close(os.open(directory / f"n{i}", os.O_WRONLY | os.O_CREAT))
        for i in range(count):
            os.stat(directory / f"n{i}")
        for i in range(count):
            os.unlink(directory / f"n{i}")
        best = max(best, count / (time.perf_counter() - begun))
    return best


def maps(program, what, file, *arguments):
    """The figures of one call of maps.cu."""
    command = [program, what, file, *map(str, arguments)]
    # A kernel that is loaded while another one waits for the CPU would wait for it.
    eager = {**os.environ, "CUDA_MODULE_LOADING": "EAGER"}
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=eager).stdout.split()
    return {name: float(value) for name, value in (line.split("=") for line in lines)}


def cached_pages(fd):
    """Pages of a file in host memory: cachestat(2)."""
    everything, found = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
    if ctypes.CDLL(None).syscall(451, fd, everything, found, 0) != 0:
        fail("no cachestat(2)")
    return found[0]


def cold_reads(path, below, size, count=2000):
    """Reads of 4 KiB a second, and GB/s of reads of 1 MiB, of a file that is not in host memory."""
    def evict():
        # A program that has just read the file into device memory may have its pages mapped for some seconds.
        give_up = time.monotonic() + 20
        while True:
            for fd in (os.open(path, os.O_RDWR), os.dup(below)):
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)
            if cached_pages(below) == 0:
                return
            if time.monotonic() > give_up:
                fail("the file stays in host memory")
            time.sleep(0.05)

    # A part for each read, so that none finds what another one has read ahead.
    offsets = [(i * size // count) // PAGE * PAGE for i in range(count)]
    random.shuffle(offsets)
    best = [0.0, 0.0]
    for _ in range(3):
        evict()
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        os.posix_fadvise(below, 0, 0, os.POSIX_FADV_RANDOM)
        buffer = bytearray(PAGE)
        begun = time.perf_counter()
        for offset in offsets:
            os.preadv(fd, [buffer], offset)
        best[0] = max(best[0], count / (time.perf_counter() - begun))
        os.close(fd)
        evict()
        fd, at, buffer = os.open(path, os.O_RDONLY), 0, bytearray(MIB)
        begun = time.perf_counter()
        while got := os.preadv(fd, [buffer], at):
            at += got
        best[1] = max(best[1], at / (time.perf_counter() - begun) / 1e9)
        os.close(fd)
    return best


def lent(program, spinio, file, below, size):
    """The same of the file on disk, and of the file while a GPU program lends its memory; bytes that came from there."""
    def from_devices():
        command = [spinio, "gaia", "status", "--json", file.parent]
        status = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
        return sum(mount.get("cpu_read_bytes_from_devices", 0) for mount in json.loads(status))

    disk, before = cold_reads(file, below, size), from_devices()
    process = subprocess.Popen([program, "lent", file], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    if process.stdout.readline() != "ready\n":
        fail("no memory is lent")
    gpu = cold_reads(file, below, size)
    process.stdin.close()
    process.wait()
    return disk, gpu, from_devices() - before


class Table:
    def __init__(self, only):
        self.only, self.rows = only, []
        print(f"{'work':<44} {'limit':>12} {'GAIA':>12} {'of limit':>9}  goal")

    def wants(self, name):
        return not self.only or name in self.only

    def rate(self, name, work, unit, limit, seen, goal):
        self.add(name, work, f"{limit:.4g} {unit}", f"{seen:.4g} {unit}", f"{seen / limit:.2f}", goal)

    def time(self, name, work, seen_us, goal, limit_us=None):
        limit, share = ("-", "-") if limit_us is None else (f"{limit_us:.4g} us", f"{limit_us / seen_us:.2f}")
        self.add(name, work, limit, f"{seen_us:.4g} us", share, goal)

    def add(self, name, work, limit, seen, share, goal):
        self.rows.append({"row": name, "work": work, "limit": limit, "gaia": seen, "of_limit": share, "goal": goal})
        print(f"{work:<44} {limit:>12} {seen:>12} {share:>9}  {goal}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=256, metavar="MIB", help="of the file")
    parser.add_argument("--rows", default="", metavar="NAME,...", help="only these: see the first column of the JSON")
    parser.add_argument("--bin", type=pathlib.Path, metavar="DIR", help="where spinio and libspinio.so are")
    parser.add_argument("--scratch", type=pathlib.Path, help="a directory on a disk [default: a temporary one]")
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE.json")
    options = parser.parse_args()
    if os.geteuid():
        fail("mounting needs root")
    built = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release"
    bin, device = (options.bin or built).resolve(), gpu()
    print(f"kernels run on {device or 'the emulated device'}")
    size = options.size * MIB
    random.seed(1)
    with contextlib.ExitStack() as stack:
        work = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.scratch)))
        program = build(bin, work, device)
        plain, below = work / "plain", work / "mount"
        for directory in (plain, below):
            directory.mkdir()
            with open(directory / "file", "wb") as file:
                for _ in range(options.size):
                    file.write(os.urandom(MIB))
                # Else the rows run beside a disk that is written, and may wait for it.
                file.flush()
                os.fsync(file)
        # The file below the mount.
        hidden = os.open(below / "file", os.O_RDWR)
        stack.callback(os.close, hidden)
        mount = Mount(bin / "spinio", below)
        stack.callback(mount.close)
        table = Table(set(filter(None, options.rows.split(","))))
        measure(table, program, bin / "spinio", mount, plain, below, hidden, size)
    if options.out:
        machine = f"{platform.machine()}, {os.cpu_count()} processors, Linux {platform.release()}"
        record = {"command": " ".join(sys.argv), "date": time.strftime("%F %R"), "machine": machine, "gpu": device}
        record["rows"] = table.rows
        options.out.write_text(json.dumps(record, indent=1) + "\n")


def measure(table, program, spinio, mount, plain, below, hidden, size):
    file, mib = below / "file", size // MIB
    if table.wants("sequential"):
        work = "cached reads of 1 MiB"
        table.rate("sequential", work, "GB/s", sequential(plain / "file"), sequential(file), "0.88 of ext4")
    if table.wants("random"):
        work = "cached reads of 4 KiB at random"
        table.rate("random", work, "1/s", scattered(plain / "file", size), scattered(file, size), "")
    if table.wants("write"):
        work = f"a new file of {mib} MiB, and fsync"
        table.rate("write", work, "GB/s", written(plain, size), written(below, size), "")
    if table.wants("names"):
        table.rate("names", "make, stat and unlink a file", "1/s", names(plain), names(below), "")
    if table.wants("first"):
        seen = maps(program, "first", file)
        work = f"first acquire of {mib} MiB, cached"
        table.time("first", work, seen["median_us"], "0.95 of spinio_pread", seen["limit_us"])
    for what, work, goal in [
        ("reader", f"acquire of {mib} MiB, no writer, to read", "1 us"),
        ("unchanged", f"acquire of {mib} MiB, unchanged, to write", "40 us (64 MiB)"),
        ("writer", "the same, a CPU program has a mapping", "40 us (64 MiB)"),
    ]:
        if table.wants(what):
            table.time(what, work, maps(program, what, file)["median_us"], goal)
    if table.wants("reader-stream"):
        seen = maps(program, "reader-stream", plain / "file")
        table.time("reader-stream", f"a kernel reads {mib} MiB on demand; spinio_pread", seen["median_us"], "", seen["limit_us"])
    if table.wants("reader-random"):
        pages = min(size // PAGE // 4, 16384)
        seen = maps(program, "reader-random", plain / "file", pages)
        work = f"it reads {pages} pages in any order; spinio_batch"
        table.time("reader-random", work, seen["median_us"], "", seen["limit_us"])
    for pages in (16, 1024):
        if table.wants("scattered"):
            seen = maps(program, "scattered", file, pages)["median_us"]
            table.time("scattered", f"acquire, CPU changed {pages} pages", seen, f"{200 + 4 * pages} us")
    if table.wants("scattered-often"):
        # The server has large folios of the file below split, some seconds after they were written to by single pages often.
        seen = [maps(program, "scattered", file, 1024)["median_us"] for _ in range(3)]
        table.time("scattered-often", "the same, after 22 times before", seen[-1], f"{200 + 4 * 1024} us")
    if table.wants("release"):
        seen = maps(program, "release-unchanged", file)["median_us"]
        table.time("release", f"release of {mib} MiB, unchanged", seen, "2 ms for 1 GiB")
        seen = maps(program, "release-all", file)["median_us"]
        table.time("release", f"release of {mib} MiB, all changed", seen, "10 ms for 1 GiB")
        seen = maps(program, "release-mapped", file, 16)["median_us"]
        table.time("release", "release of 16 pages that a CPU maps", seen, "500 us")
    if table.wants("checkpoint"):
        seen = maps(program, "checkpoint", file, plain / "checkpoint")
        table.time("checkpoint", f"checkpoint of {mib} MiB, released", seen["median_us"], "30 ms for 8 GiB")
        work = "the same, on storage; cudaMemcpy and write"
        table.time("checkpoint", work, seen["durable_us"], "0.85 of the disk", seen["limit_us"])
    if table.wants("handoff"):
        seen = maps(program, "handoff", file, plain / "checkpoint")
        work = f"checkpoint of {mib} MiB, handed over ({seen['handed']:.0f} of 6)"
        table.time("handoff", work, seen["median_us"], "30 ms for 8 GiB")
        work = "the same, on storage; cudaMemcpy and write"
        table.time("handoff", work, seen["durable_us"], "0.85 of the disk", seen["limit_us"])
    if table.wants("kill"):
        seconds = max(mount.kill() for _ in range(20))
        table.time("kill", "server killed: longest of 20", seconds * 1e6, "2 s")
    # Last: it leaves the file on disk only.
    if table.wants("lent"):
        disk, gpu, came = lent(program, spinio, file, hidden, size)
        share = f"2x of the disk; {came / (3 * (2000 * PAGE + size)):.0%} from the GPU"
        table.rate("lent", "cold reads of 4 KiB, from GPU memory; disk", "1/s", disk[0], gpu[0], share)
        table.rate("lent", "cold reads of 1 MiB in order", "GB/s", disk[1], gpu[1], "1.3x of the disk")


if __name__ == "__main__":
    main()
