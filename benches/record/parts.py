"""The parts of the record, the steps of each, and their time limits.

`least`: the seconds below which a step is not worth starting. `most`: its time on an H200, with some margin.
"""

import dataclasses
import os
import sys
import typing


@dataclasses.dataclass
class Step:
    name: str  # also the name of its directory
    least: float
    most: float
    command: typing.Callable  # called with that directory and the time limit in seconds
    env: dict = dataclasses.field(default_factory=dict)
    skip: int | None = None  # the exit status that means: nothing to do


class Place:
    """Paths of the pack, and sizes."""

    def __init__(self, args, scratch):
        self.pack, self.scratch, self.tiny, self.reps = args.pack, scratch, args.tiny, args.reps
        self.library = self.pack / "libspinio.so"
        self.preload = {"LD_PRELOAD": str(self.library)}
        self.site = scratch / "site"
        neighbour = self.pack.parent / ".whl"
        self.wheels = self.pack / "wheels" if (self.pack / "wheels").exists() else neighbour if neighbour.exists() else None

    def python(self, script, *words):
        return [sys.executable, self.pack / "benches" / script, *words]


def machine(place):
    """A description of the machine, for later readers of the figures."""
    command = f"""cat {place.pack}/commit; date -u; uname -r; nproc; head -1 /proc/meminfo; stat -f -c 'file system %T, %a free blocks of %S' {place.scratch}
    id -u; nvidia-smi; nvidia-smi topo -m; python3 --version; nvcc --version | tail -2; cat /sys/kernel/mm/transparent_hugepage/enabled
    {place.pack}/spinio doctor"""
    return Step("machine", 5, 30, lambda *_: ["bash", "-c", command])


def two(place):
    return [Step("two-gpus", 40, 300, lambda directory, limit: [place.pack / "two", place.scratch], place.preload, skip=77)]


def suite(place):
    """All of the GPU suite. It has a scratch directory of its own."""
    return [Step("suite", 120, 400, lambda directory, limit: ["bash", place.pack / "run-gpu-suite", "suite"], {"OUT": str(place.scratch), "SCRATCH": str(place.scratch)})]


def rows(place, name, least, most, only):
    def command(directory, limit):
        # A row in progress may continue for some seconds, and 8 GiB have to be deleted.
        words = ["--bin", place.pack, "--out", directory, "--scratch", place.scratch, "--budget", max(30, limit - 18), "--reps", place.reps, "--only", only]
        words += ["--wheels", place.wheels] if place.wheels else []
        return place.python("gpu/h200.py", *words, *(["--gib", "0.125"] if place.tiny else []))

    return Step(name, least, most, command)


def speed(place):
    """The rows of the speed table that do not read cold files; the most important first."""
    return [rows(place, "speed", 60, 470, "big,again,seq64m,seq8m,par16,small,first,batch,hold,mix,folios,owner,host,writes")]


def cold(place):
    return [rows(place, "cold", 60, 330, "cold-small,cold-par,cold")]


def calls(place):
    """The cost of registering and of pinned memory, of counting a device read, and of the library for a host read."""
    return [
        Step("registering", 10, 40, lambda *_: [place.pack / "registering", place.scratch, *(["size=134217728"] if place.tiny else [])]),
        Step("growing", 5, 20, lambda *_: [place.pack / "growing"]),
        Step("device-call", 60, 120, lambda *_: [place.pack / "device_call", place.library, "cuda"]),
        Step("host-call", 30, 100, lambda *_: [place.pack / "host_call", place.library, "plain", "cuda"]),
    ]


def python(place):
    pip = ["-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--target", place.site]
    ours = {"PYTHONPATH": str(place.site)}
    loads = "safetensors/loads.py"
    wheels = ["--wheels", place.wheels] if place.wheels else []

    def tests(directory, limit):
        return [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", f"--basetemp={place.scratch / 'pytest'}", place.pack / "python" / "tests"]

    def load(gib, times, *words):
        return lambda directory, limit: place.python(loads, "--gib", "0.05" if place.tiny else gib, "--times", times, "--scratch", place.scratch, "--out", directory / "loads.json", *words)

    return [
        Step("wheel", 5, 60, lambda *_: [sys.executable, *pip, *sorted((place.pack / "python").glob("spinio-*.whl"))]),
        Step("loads", 70, 200, load(4, 4, *wheels), ours),
        Step("pytest", 60, 200, tests, ours),
        # Offsets above 32 bits.
        Step("loads-6-gib", 30, 90, load(6, 1, "--only", "spinio,spinio-held"), ours),
    ]


def nvmmu(place):
    pixels = [256, 128, 1] if place.tiny else [16384, 8192, 1]
    return [
        Step("moves", 10, 90, lambda *_: [place.pack / "nvmmu", place.scratch], place.preload),
        Step("example", 15, 90, lambda *_: ["bash", place.pack / "examples/nvmmu/compare", place.library, *pixels], {"TMPDIR": str(place.scratch)}),
    ]


def programs(place):
    """The twelve programs, with conventional copies and with NVMMU."""
    def command(directory, limit):
        words = ["--library", place.library, "--headers", place.pack / "device/include", "--out", directory, "--scratch", place.scratch, "--rounds", 3, "--budget", max(20, limit - 10)]
        return place.python("nvmmu/nvmmu.py", *words, *(["--scale", "0.01"] if place.tiny else []))

    return [Step("programs", 60, 210, command)]


def paper(place):
    """The paper's figures, with a cost model calibrated just before, and stress-ng running during Fig. 4d."""
    device = "cuda:0"
    env = {"XDG_STATE_HOME": str(place.scratch / "state"), "PATH": str(place.pack / "stress-ng") + os.pathsep + os.environ["PATH"]}
    size = ["--size", "16M", "--limit", "0.02", "--runs", "2"] if place.tiny else ["--size", "128M", "--limit", "0.08"]

    def bench(name):
        return lambda directory, limit: [place.pack / "spinio-lab", "bench", name, "--device", device, "--path", place.scratch, *size, "--out", directory]

    few = ["--runs", "1", "--size", "8M"] if place.tiny else []
    calibrate = Step("calibrate", 20, 90, lambda directory, limit: [place.pack / "spinio", "calibrate", place.scratch, "--device", device, *few], env)
    figures = [("fig4d", 40, 170), ("table3", 10, 40), ("fig4b", 20, 80), ("fig1", 15, 60), ("fig4a", 20, 80), ("fig5", 20, 120)]
    return [calibrate, *(Step(name, least, most, bench(name), env) for name, least, most in figures)]


PARTS = {"two": two, "speed": speed, "cold": cold, "calls": calls, "python": python, "nvmmu": nvmmu, "paper": paper, "programs": programs, "suite": suite}
