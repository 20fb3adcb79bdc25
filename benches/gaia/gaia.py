#!/usr/bin/env python3
"""What GAIA costs: the mount against the file system below it, acquire and release, a killed server. Needs root.

    benches/gaia/gaia.py [--size MIB] [--rows NAME,...] [--bin DIR] [--scratch DIR] [--wheels DIR] [--out FILE.json]

in the repository, after `cargo build --release`, or in a pack (`cargo x gpu-pack`). Each row has a limit, measured in
the same run: what the same work takes without GAIA. Rates are GB/s (10^9 bytes), the best of several passes; times are
medians. Kernels run on the GPU if there are one and nvcc, else on the emulated device: then rates of acquire and release
are those of this machine's processors and memory. Goals are those for an H200.
"""
import argparse
import contextlib
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

from cpu_io import MIB, PAGE, cold_reads, evict, names, scattered, sequential, written

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent


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


def maps(program, what, file, *arguments):
    """The figures of one call of maps.cu."""
    command = [program, what, file, *map(str, arguments)]
    # A kernel that is loaded while another one waits for the CPU would wait for it.
    eager = {**os.environ, "CUDA_MODULE_LOADING": "EAGER"}
    return figures_of(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=eager).stdout)


def figures_of(output):
    return {name: float(value) for name, value in (line.split("=") for line in output.split())}


class Program:
    """A call of maps.cu that prints `ready` and then waits for a line."""

    def __init__(self, program, *arguments, **how):
        command = [program, *map(str, arguments)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **how)

    def wait(self):
        if self.process.stdout.readline() != "ready\n":
            fail("maps has ended")

    def go_on(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self):
        figures = figures_of(self.process.communicate()[0])
        if self.process.returncode != 0:
            fail("maps has failed")
        return figures


def cold(program, file, below):
    """The first acquire of a file that is not in host memory, and the disk."""
    process = Program(program, "first-cold", file, f"/proc/self/fd/{below}", pass_fds=[below])
    for _ in range(2 * 4):
        process.wait()
        evict(file, below)
        process.go_on()
    return process.end()


def gpu_memory():
    """Bytes of GPU memory in use by all processes; 0 without a GPU."""
    if not gpu():
        return 0
    query = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, check=True, capture_output=True, text=True).stdout) * MIB


def process_memory(*processes):
    """Bytes of host memory of processes, and seconds of the processor that they have used."""
    memory, seconds = 0, 0.0
    for process in processes:
        folder = pathlib.Path(f"/proc/{process}")
        lines = (folder / "smaps_rollup").read_text().splitlines()
        memory += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return memory, seconds


def metadata(program, mount, file, size, access):
    """Bytes of the daemon and of the GPU beside a file's pages, as a share of these. Access `released` is for writing, after another
    program has released all pages, and before they are written out: the pages of the release are there before."""
    # Pages that are written out meanwhile take memory for a time.
    with open(file, "rb+") as opened:
        os.fsync(opened)
    if access == "released":
        maps(program, "release-all", file)
        access = "write"
    process, daemon = Program(program, "held", file, access), (mount.server, mount.supervisor.pid)
    process.wait()
    before = process_memory(*daemon)[0], gpu_memory()
    process.go_on()
    process.wait()
    host, device = process_memory(*daemon)[0] - before[0], gpu_memory() - before[1] - size
    process.go_on()
    process.end()
    return max(host, 0) / size, device / size if gpu() else 0.0


def idle(program, mount, file, seconds=10):
    """Seconds of the processor that the daemon uses while a program has a map, and its open files of the GPU's driver."""
    process, daemon = Program(program, "held", file, "write"), (mount.server, mount.supervisor.pid)
    process.wait()
    process.go_on()
    process.wait()
    time.sleep(3)
    before = process_memory(*daemon)[1]
    time.sleep(seconds)
    used = process_memory(*daemon)[1] - before
    opened = [os.readlink(fd) for one in daemon for fd in pathlib.Path(f"/proc/{one}/fd").iterdir()]
    process.go_on()
    process.end()
    return used, sum(path.startswith("/dev/nvidia") for path in opened)


def lent(program, spinio, file, below, size):
    """The same of the file on disk, and of the file while a GPU program lends its memory; bytes that came from there."""
    def from_devices():
        command = [spinio, "gaia", "status", "--json", file.parent]
        status = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
        return sum(mount.get("cpu_read_bytes_from_devices", 0) for mount in json.loads(status))

    disk, before = cold_reads(file, below, size), from_devices()
    process = Program(program, "lent", file)
    process.wait()
    gpu = cold_reads(file, below, size)
    process.go_on()
    process.end()
    return disk, gpu, from_devices() - before


class Kvikio:
    """The peer of the row `changed`, where there is a GPU and its module is installed or among the wheels."""

    def __init__(self, wheels, site):
        self.environment = dict(os.environ)
        if wheels:
            pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--target", site]
            if subprocess.run([*pip, *wheels.glob("*.whl")]).returncode == 0:
                self.environment["PYTHONPATH"] = f"{site}:{os.environ.get('PYTHONPATH', '')}"

    def microseconds(self, file):
        """The median of three reads of a whole cached file by 16 threads; None if it cannot."""
        command, seen = [sys.executable, ROOT / "benches/gpu/peers.py", "kvikio", file, "threads=16"], []
        for _ in range(3):
            done = subprocess.run(command, capture_output=True, text=True, env=self.environment)
            if done.returncode:
                print(f"no KvikIO to compare with: {(done.stderr.strip().splitlines() or ['no reason'])[-1]}")
                return None
            seen.append(json.loads(done.stdout)["seconds"] * 1e6)
        return sorted(seen)[1]


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
    parser.add_argument("--wheels", type=pathlib.Path, metavar="DIR", help="of KvikIO, if it is not installed")
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
        content = os.urandom(min(size, 64 * MIB))
        for directory in (plain, below):
            directory.mkdir()
            with open(directory / "file", "wb") as file:
                for at in range(0, size, len(content)):
                    file.write(content[: size - at])
                # Else the rows run beside a disk that is written, and may wait for it.
                file.flush()
                os.fsync(file)
        # The file below the mount.
        hidden = os.open(below / "file", os.O_RDWR)
        stack.callback(os.close, hidden)
        mount = Mount(bin / "spinio", below)
        stack.callback(mount.close)
        table = Table(set(filter(None, options.rows.split(","))))
        if table.wants("changed"):
            pages = max(size // PAGE // 100, 1)
            seen = maps(program, "scattered", below / "file", pages)["median_us"]
            peer = Kvikio(options.wheels, work / "site").microseconds(plain / "file") if device else None
            table.time("changed", f"acquire, CPU changed 1 % of {options.size} MiB; KvikIO x16, all", seen, "2x of KvikIO", peer)
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
    if table.wants("cold"):
        seen = cold(program, file, hidden)
        table.time("cold", f"first acquire of {mib} MiB, not cached; O_DIRECT", seen["median_us"], "0.95 of O_DIRECT", seen["limit_us"])
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
    if table.wants("contiguous"):
        pages = min(size, 256 * MIB) // PAGE
        seen = maps(program, "contiguous", file, pages)
        rate = pages * PAGE / seen["median_us"] / 1e3
        table.add("contiguous", f"acquire, CPU changed {pages * PAGE // MIB} MiB in a row", "-", f"{rate:.4g} GB/s", "-", "2.5 GB/s")
    if table.wants("merge"):
        alone, merged = (maps(program, what, file, 1024) for what in ("release-mapped", "merge"))
        work = f"a page that a CPU program changed too ({merged['merged'] / 31 / 1024:.0%} merged)"
        table.time("merge", work, (merged["median_us"] - alone["median_us"]) / 1024, "0.5 us")
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
    if table.wants("metadata"):
        for access, goal in (("released", "1 %"), ("write", "1 %"), ("read", "0.5 %")):
            host, device = metadata(program, mount, file, size, access)
            what = "just released" if access == "released" else f"to {access}"
            work = f"metadata of a map of {mib} MiB, {what}"
            table.add("metadata", work, "-", f"{host + device:.2%}", "-", f"{goal}; {device:.2%} on the GPU")
    if table.wants("idle"):
        seconds, opened = idle(program, mount, file)
        table.add("idle", "the daemon beside a map that is not used, 10 s", "-", f"{seconds:.2f} cpu s", "-", f"0; {opened} files of the driver open")
    # Last: it leaves the file on disk only.
    if table.wants("lent"):
        disk, gpu, came = lent(program, spinio, file, hidden, size)
        share = f"2x of the disk; {came / (3 * (2000 * PAGE + size)):.0%} from the GPU"
        table.rate("lent", "cold reads of 4 KiB, from GPU memory; disk", "1/s", disk[0], gpu[0], share)
        table.rate("lent", "cold reads of 1 MiB in order", "GB/s", disk[1], gpu[1], "1.3x of the disk")


if __name__ == "__main__":
    main()
