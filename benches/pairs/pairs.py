#!/usr/bin/env python3
"""Compares two builds of the library on one machine: by turns, in changing order; prints medians and spread.

    pairs.py --a DIR --b DIR [--env-a NAME=VALUE,..] [--env-b ..] [--only ROW,..] [--rounds 10] [--gib 4] [--out DIR]

DIR is a directory that `cargo x gpu-pack` made (or any directory with `libspinio.so`); the programs `reads`, `batch` and `host_call` are taken from
A's directory for both, so that only the library differs. With two equal directories and different --env it compares two settings.

Prints one line per row: the median of A, the median of B, the median of the ratios B/A of all rounds with their minimum and
maximum (the first run of each is not counted), and the geometric mean of the ratios with its interval of 95 %. A row whose median is
below 0.97 is marked; if its interval includes 1, more rounds have to show whether that is more than chance: of 20 rows of equal
libraries one falls out of its interval. Times are inverted first, so that more is better everywhere. Files: pairs.json in --out.
"""

import argparse
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

MIB = 1 << 20

# name: (program, row, mode, values, preparation, key of the figure, is it a time (less is better)?)
ROWS = {
    "host": ("reads", "host", "us", {"block": 4096}, "warm", "ns", True),
    "4k": ("reads", "seq", "us", {"block": 4096, "total": 200 * MIB}, "warm", "gbps", False),
    "64k": ("reads", "seq", "us", {"block": 65536, "total": 1024 * MIB}, "warm", "gbps", False),
    "1m": ("reads", "seq", "us", {"block": MIB, "total": 2048 * MIB}, "warm", "gbps", False),
    "8m": ("reads", "seq", "us", {"block": 8 * MIB, "total": 4096 * MIB}, "warm", "gbps", False),
    "par16": ("reads", "par", "us", {"block": 8 * MIB, "threads": 16}, "warm", "gbps", False),
    "big": ("reads", "big", "us1", {}, "warm", "gbps", False),
    "again": ("reads", "again", "us", {}, "warm", "gbps", False),
    "first": ("reads", "first", "us", {"block": 8 * MIB}, "warm", "first_us", True),
    "cold": ("reads", "cold", "us", {"size": 2048 * MIB}, "cold", "gbps", False),
    "cold4k": ("reads", "trickle", "us", {"block": 4096, "total": 128 * MIB, "threads": 1}, "stretch", "gbps", False),
    "cold16k": ("reads", "trickle", "us", {"block": 16384, "total": 256 * MIB, "threads": 1}, "stretch", "gbps", False),
    "cold64k": ("reads", "trickle", "us", {"block": 65536, "total": 256 * MIB, "threads": 1}, "stretch", "gbps", False),
    "cold256k": ("reads", "trickle", "us", {"block": 262144, "total": 256 * MIB, "threads": 1}, "stretch", "gbps", False),
    "cold64k4": ("reads", "trickle", "us", {"block": 65536, "total": 64 * MIB, "threads": 4}, "stretch", "gbps", False),
    "mix": ("reads", "mix", "us", {}, "cold", "gbps", False),
    "batch4k": ("batch", "random", "us", {"count": 1000000}, "warm", "gbps", False),
    "batch512": ("batch", "random", "us", {"block": 512, "count": 1000000}, "warm", "gbps", False),
    "batchcold": ("batch", "cold", "us", {"block": 65536, "count": 10000}, "cold", "gbps", False),
    "held8m": ("batch", "hold", "held", {}, "warm", "gbps", False),
    "write8m": ("writes", "page", "us", {"block": 8 * MIB, "total": 1024 * MIB}, "any", "gbps", False),
    "odirect": ("writes", "direct", "us", {"block": 64 * MIB, "total": 2048 * MIB}, "any", "gbps", False),
}


def variables(text):
    return dict(pair.split("=", 1) for pair in text.split(",") if pair) if text else {}


class Side:
    def __init__(self, directory, env):
        self.library = pathlib.Path(directory).resolve() / "libspinio.so"
        if not self.library.exists():
            sys.exit(f"{self.library} not found")
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("SPINIO_")} | {"LD_PRELOAD": str(self.library)} | env


def drop(path):
    with open(path, "rb") as f:
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def warm(path):
    buffer = bytearray(16 * MIB)
    with open(path, "rb", buffering=0) as f:
        while f.readinto(buffer):
            pass


def interval(ratios):
    """The geometric mean, and the interval that has that of the libraries with 95 %."""
    logs = [math.log(r) for r in ratios]
    mean, n = statistics.fmean(logs), len(logs)
    # Student's t for so many rounds, within 4 %.
    half = (1.96 + 2.4 / (n - 1) + 8.6 / (n - 1) ** 3) * statistics.stdev(logs) / math.sqrt(n) if n > 1 else math.inf
    return tuple(math.exp(x) if x < 700 else math.inf for x in (mean, mean - half, mean + half))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--a", required=True)
    p.add_argument("--b", required=True)
    p.add_argument("--env-a", default="")
    p.add_argument("--env-b", default="")
    p.add_argument("--only", default=",".join(ROWS))
    p.add_argument("--rounds", type=int, default=10)
    p.add_argument("--gib", type=float, default=4)
    p.add_argument("--budget", type=float, default=500, help="seconds; later rows are skipped with a note")
    p.add_argument("--scratch", default="/var/tmp")
    p.add_argument("--out", default=os.environ.get("OUT", "."))
    args = p.parse_args()
    began = time.monotonic()
    sides = {"a": Side(args.a, variables(args.env_a)), "b": Side(args.b, variables(args.env_b))}
    programs = pathlib.Path(args.a).resolve()
    record = {"a": args.a, "b": args.b, "env_a": args.env_a, "env_b": args.env_b, "rounds": args.rounds, "rows": {}}
    for name in ("a", "b"):
        commit = pathlib.Path(getattr(args, name)) / "commit"
        record[f"commit_{name}"] = commit.read_text().strip() if commit.exists() else "unknown"
    below = []
    with tempfile.TemporaryDirectory(prefix="spinio-pairs.", dir=args.scratch) as scratch:
        file = pathlib.Path(scratch, "data")
        block = os.urandom(16 * MIB)
        size = int(args.gib * 64) * len(block)
        with open(file, "wb") as f:
            for i in range(size // len(block)):
                f.write(i.to_bytes(8, "little") + block[8:])
            os.fsync(f.fileno())
        written = pathlib.Path(scratch, "written")
        small = pathlib.Path(f"{file}.warm")
        small.write_bytes(os.urandom(64 * MIB))
        state, stretch = None, 0
        print(f"{'row':<10} {'A':>10} {'B':>10}   median of B/A (minimum to maximum), geometric mean", flush=True)
        for name in args.only.split(","):
            program, row, mode, values, prepare, key, less = ROWS[name]
            got = {"a": [], "b": []}
            if time.monotonic() - began > args.budget:
                print(f"{name:<10} skipped: no time left", flush=True)
                continue
            for turn in range(args.rounds + 1):
                for side in ("a", "b") if turn % 2 == 0 else ("b", "a"):
                    more = dict(values)
                    if prepare == "warm" and state != "warm":
                        warm(file)
                        state = "warm"
                    elif prepare == "cold":
                        drop(file)
                        state = "cold"
                    elif prepare == "stretch":
                        if state != "stretch":
                            drop(file)
                            state = "stretch"
                        total = more["total"] * more["threads"]
                        stretch = 0 if stretch + total > size else stretch
                        if stretch == 0:
                            drop(file)
                        more["from"], stretch = stretch, stretch + total
                    command = [str(programs / program), row, mode, str(written if program == "writes" else file)] + [f"{k}={v}" for k, v in more.items()]
                    done = subprocess.run(command, env=sides[side].env, capture_output=True, text=True, timeout=120, cwd=programs)
                    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
                    if done.returncode or not lines or any(line.get("right") is False for line in lines):
                        print(f"{name} {side}: status {done.returncode} {done.stderr.strip()[-200:]} {lines[-1:]}", flush=True)
                        continue
                    figure = statistics.fmean(line[key] for line in lines)
                    if turn:
                        got[side].append(1 / figure if less else figure)
            if not got["a"] or not got["b"]:
                print(f"{name:<10} nothing measured", flush=True)
                continue
            ratios = [b / a for a, b in zip(got["a"], got["b"])]
            a, b, r = (statistics.median(v) for v in (got["a"], got["b"], ratios))
            mean, low, high = interval(ratios)
            chance = " (may be chance)" if low < 1 < high else ""
            mark = "" if r >= 0.97 else f"   BELOW 0.97{chance}"
            if r < 0.97:
                below.append(name + chance)
            show = (lambda v: f"{1 / v:.4g}") if less else (lambda v: f"{v:.4g}")
            line = f"{name:<10} {show(a):>10} {show(b):>10}   {r:.3f} ({min(ratios):.3f} to {max(ratios):.3f}), mean {mean:.3f} (95 %: {low:.3f} to {high:.3f}){mark}"
            print(line, flush=True)
            record["rows"][name] = {"unit": key, "a": got["a"], "b": got["b"], "ratio": r, "mean": [mean, low, high], "less_is_better": less}
            pathlib.Path(args.out).mkdir(parents=True, exist_ok=True)
            pathlib.Path(args.out, "pairs.json").write_text(json.dumps(record, indent=1))
    print(f"below 0.97: {', '.join(below) if below else 'none'}")


if __name__ == "__main__":
    main()
