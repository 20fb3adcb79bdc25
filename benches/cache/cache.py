#!/usr/bin/env python3
"""The effect of streaming a file into a device on the page cache, and the speed of small sequential reads of an uncached file.

    cache.py --library libspinio.so [--out DIR] [--scratch DIR] [--gib N] [--working-set MIB] [--memory MIB] [--reps N] [--only row,row]

Works on any machine: the device is the emulated one. Rows:

  pollution   a memory cgroup holds a working set that another process has read, and then a process that streams a file
              larger than the cgroup through reads of 32 KiB. How much of the working set is still cached? Needs root, a
              memory controller (cgroup v1 or v2) and cachestat (Linux 6.5).
  cold-small  sequential reads of 4 to 512 KiB of an uncached file: with SPIN, as plain buffered reads and a copy, and as
              O_DIRECT reads one at a time and a copy.

--scratch must be on a disk. Prints tables; with --out also writes README.md and raw.json there.
"""

import argparse
import ctypes
import datetime
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PAGE = 4096
libc = ctypes.CDLL(None, use_errno=True)


def cached(path):
    """Bytes of a file in the page cache."""
    with open(path, "rb") as f:
        span = (ctypes.c_uint64 * 2)(0, os.fstat(f.fileno()).st_size)
        said = (ctypes.c_uint64 * 5)()
        if libc.syscall(451, f.fileno(), span, said, 0):
            raise OSError(ctypes.get_errno(), "cachestat")
        return said[0] * PAGE


def drop(path):
    with open(path, "rb") as f:
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def make(path, size):
    block = os.urandom(16 * MIB)
    with open(path, "wb") as f:
        for i in range(size // len(block)):
            f.write(i.to_bytes(8, "little") + block[8:])
        os.fsync(f.fileno())
    drop(path)


class Cgroup:
    """A cgroup: the memory of its processes, page cache included, is limited."""

    def __init__(self, limit):
        v1 = pathlib.Path("/sys/fs/cgroup/memory")
        v2 = pathlib.Path("/sys/fs/cgroup")
        if (v1 / "cgroup.procs").exists():
            self.path, knob = v1 / f"spinio-bench-{os.getpid()}", "memory.limit_in_bytes"
        elif "memory" in (v2 / "cgroup.controllers").read_text().split():
            (v2 / "cgroup.subtree_control").write_text("+memory")
            self.path, knob = v2 / f"spinio-bench-{os.getpid()}", "memory.max"
        else:
            sys.exit("cache.py: no cgroup memory controller here")
        self.path.mkdir()
        (self.path / knob).write_text(str(limit))

    def enter(self):
        (self.path / "cgroup.procs").write_text("0")

    def run(self, command, **more):
        return subprocess.run(command, preexec_fn=self.enter, check=True, capture_output=True, text=True, **more)

    def close(self):
        for _ in range(50):
            try:
                return self.path.rmdir()
            except OSError:  # file pages are still charged for a moment
                time.sleep(0.1)


class Bench:
    def __init__(self, args):
        self.args = args
        self.raw = []
        self.text = []
        self.scratch = pathlib.Path(tempfile.mkdtemp(prefix="spinio-cache.", dir=args.scratch))
        self.stream = self.scratch / "stream"
        build = ["cc", "-O2", f"-I{HERE.parents[1] / 'crates/capi/include'}", str(HERE / "stream.c"), "-o", str(self.stream)]
        subprocess.run(build, check=True)
        self.library = str(pathlib.Path(args.library).resolve())
        self.file = self.scratch / "file"
        make(self.file, args.gib * GIB)

    def say(self, line=""):
        print(line, flush=True)
        self.text.append(line)

    def read(self, mode, block, total, group=None, **settings):
        """One measurement, in a process of its own."""
        env = {k: v for k, v in os.environ.items() if not k.startswith("SPINIO_")} | settings | {"LD_PRELOAD": self.library}
        command = [str(self.stream), mode, str(self.file), str(block), str(total)]
        run = group.run if group else lambda c, **more: subprocess.run(c, check=True, capture_output=True, text=True, **more)
        got = json.loads(run(command, env=env).stdout)
        self.raw.append({"row": "read", "settings": settings} | got)
        return got


def pollution(b):
    total, size, limit = b.args.gib * GIB, b.args.working_set * MIB, b.args.memory * MIB
    working_set = b.scratch / "working-set"
    make(working_set, size)
    b.say(f"## A working set of {size // MIB} MiB during a stream of {total // GIB} GiB, {limit // MIB} MiB of memory")
    b.say()
    b.say("| the stream | working set read | cached before | cached after | of the stream's file | GB/s |")
    b.say("|---|---|---|---|---|---|")
    cases = [("plain pread into host memory + copy", "plain", {})] + [
        (f"pread into the device, SPINIO_READAHEAD_KEEP={mode}", "us", {"SPINIO_READAHEAD_KEEP": mode}) for mode in ("keep", "auto", "drop")
    ]
    for what, mode, settings in cases:
        for times in (1, 2):
            drop(working_set), drop(b.file)
            group = Cgroup(limit)
            try:
                for _ in range(times):
                    group.run(["dd", f"if={working_set}", "of=/dev/null", "bs=1M"])
                before = cached(working_set)
                got = b.read(mode, 32 * KIB, total, group, **settings)
                after, left = cached(working_set), cached(b.file)
            finally:
                group.close()
            b.raw.append({"row": "pollution", "mode": mode, "settings": settings, "times": times, "before": before, "after": after, "left": left, "size": size, "memory": limit, "gbps": got["gbps"]})
            often = "once" if times == 1 else "twice"
            b.say(f"| {what} | {often} | {before / size:.1%} | {after / size:.1%} | {left / MIB:.1f} MiB | {got['gbps']:.2f} |")
    b.say()


def cold_small(b):
    b.say("## Sequential reads of an uncached file")
    b.say()
    b.say("| block | plain + copy | O_DIRECT + copy | SPIN | of plain | of O_DIRECT | must reach | |")
    b.say("|---|---|---|---|---|---|---|---|")
    for block in (4 * KIB, 16 * KIB, 32 * KIB, 64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB):
        total = min(b.args.gib * GIB, GIB)
        got = {"plain": [], "us": [], "direct": []}
        for _ in range(b.args.reps):  # by turns, so that drift of the machine affects all
            got["plain"].append(b.read("plain", block, total)["gbps"])
            got["us"].append(b.read("us", block, total)["gbps"])
            got["direct"].append(b.read("direct", block, min(total, max(64 * MIB, block * 2000)))["gbps"])
        plain, us, direct = (statistics.median(got[m]) for m in ("plain", "us", "direct"))
        goal, met = "0.95 of plain", us >= 0.95 * plain
        if block == 32 * KIB:
            goal, met = goal + ", 5x of O_DIRECT", met and us >= 5 * direct
        b.say(f"| {block // KIB} KiB | {plain:.2f} GB/s | {direct:.2f} GB/s | {us:.2f} GB/s | {us / plain:.2f} | {us / direct:.1f} | {goal} | {'met' if met else 'MISSED'} |")
    b.say()


ROWS = {"pollution": pollution, "cold-small": cold_small}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--library", required=True)
    p.add_argument("--out", type=pathlib.Path)
    p.add_argument("--scratch", default=".")
    p.add_argument("--gib", type=int, default=10)
    p.add_argument("--working-set", type=int, default=256)
    p.add_argument("--memory", type=int, default=1024)
    p.add_argument("--reps", type=int, default=5)
    p.add_argument("--only", default=",".join(ROWS))
    args = p.parse_args()
    b = Bench(args)
    try:
        cpus = [l.split(":", 1)[1].strip() for l in open("/proc/cpuinfo") if l.startswith("model name")]
        memory = os.sysconf("SC_PHYS_PAGES") * PAGE / GIB
        window = pathlib.Path(f"/sys/dev/block/{os.major(os.stat(b.file).st_dev)}:{os.minor(os.stat(b.file).st_dev)}/queue/read_ahead_kb")
        b.say(f"# Page cache, emulated device, {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC")
        b.say()
        b.say(f"{len(cpus)} x {cpus[0] if cpus else platform.machine()}, {memory:.0f} GiB of memory, Linux {platform.release()}, read-ahead window {window.read_text().strip() + ' KiB' if window.exists() else 'unknown'}.")
        b.say(f"Command: `cache.py --gib {args.gib} --working-set {args.working_set} --memory {args.memory} --reps {args.reps} --only {args.only}`. Load of the machine when it began: {os.getloadavg()[0]:.1f}.")
        b.say()
        for name in args.only.split(","):
            ROWS[name](b)
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / "README.md").write_text("\n".join(b.text).rstrip() + "\n")
            (args.out / "raw.json").write_text(json.dumps(b.raw, indent=1) + "\n")
    finally:
        for path in sorted(b.scratch.iterdir()):
            path.unlink()
        b.scratch.rmdir()


if __name__ == "__main__":
    main()
