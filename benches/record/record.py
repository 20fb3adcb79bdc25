#!/usr/bin/env python3
"""Runs parts of the record on a GPU machine that is available for minutes, and loses no measurement.

    record.py PART... [--seconds N] [--out DIR] [--scratch DIR] [--pack DIR] [--only STEP,STEP] [--reps N] [--tiny]
    record.py --list

Parts and their steps (parts.py): two, speed, cold, calls, python, nvmmu, paper, programs, suite. Each step is a program with a time limit: at
most `most` seconds. A step that would get less than `least` seconds is skipped; the minimum of all later steps is reserved. --seconds is the
limit for all. A step that fails or times out does not affect the others.

    $OUT/record-PARTS.txt       the output: one line per step, and at the end the figures, with missed goals marked
    $OUT/record-PARTS.tar.gz    every step's log, tables and raw figures; packed again while a step runs, and after it

So a killed run leaves its state of half a minute earlier. --tiny uses sizes that only show that everything starts.
"""

import argparse
import json
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import time

import parts
import summary
from running import Packer, clean_up_after_killed_run, run

HERE = pathlib.Path(__file__).resolve().parent
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SPARE = 12  # seconds, for the table and the last packing


class Ended(Exception):
    """A signal that ends this program."""


def end(number, _frame):
    for other in SIGNALS:  # the rest is quick and has to complete
        signal.signal(other, signal.SIG_IGN)
    raise Ended(signal.Signals(number).name)


class Record:
    def __init__(self, args):
        self.args = args
        self.began = time.monotonic()
        name = "record-" + "-".join(args.parts)
        self.out = pathlib.Path(args.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.output_file = open(self.out / f"{name}.txt", "w", buffering=1)
        self.scratch = pathlib.Path(tempfile.mkdtemp(prefix="spinio-record.", dir=args.scratch))
        self.scratch.chmod(0o755)  # an unprivileged user reads there too
        (self.scratch / "pid").write_text(str(os.getpid()))
        self.directory = self.scratch / name
        self.directory.mkdir()
        self.packer = Packer(self.directory, self.out / f"{name}.tar.gz")
        self.results = []

    def print_line(self, line):
        print(line, flush=True)
        self.output_file.write(line + "\n")

    def left(self):
        return self.args.seconds - SPARE - (time.monotonic() - self.began)

    def step(self, step, later):
        """Runs one step and records its result. If time runs out, the last steps are skipped."""
        limit = min(step.most, max(self.left() - later, min(step.least, self.left())))
        result = {"step": step.name, "status": None, "ended": "did not end", "seconds": 0.0, "limit": round(limit, 1)}
        self.results.append(result)
        if limit < step.least:
            result["ended"] = "skipped: no time"
        else:
            directory = self.directory / step.name
            directory.mkdir()
            began = time.monotonic()
            result["status"], result["ended"] = run(step, directory, limit, self.packer)
            result["seconds"] = round(time.monotonic() - began, 1)
        self.print_line(f"[{time.monotonic() - self.began:4.0f} s] {step.name}: {result['ended']}, {result['seconds']:.0f} s of {max(limit, 0):.0f}")
        if result["status"] not in (0, None):
            for line in summary.tail(self.directory / step.name / "log.txt"):
                self.print_line("    " + line)
        self.keep()

    def keep(self):
        (self.directory / "steps.json").write_text(json.dumps(self.results, indent=1) + "\n")
        self.packer.pack()

    def all(self):
        place = parts.Place(self.args, self.scratch)
        steps = [step for name in self.args.parts for step in parts.PARTS[name](place)]
        if self.args.only:
            steps = [step for step in steps if step.name in self.args.only.split(",")]
        steps.insert(0, parts.machine(place))
        for step in steps if self.args.tiny else []:
            step.least /= 10
        for i, step in enumerate(steps):
            self.step(step, sum(s.least for s in steps[i + 1 :]))

    def close(self):
        """Prints the table, and packs everything into the archive."""
        for line in summary.table(self.directory, self.results):
            self.print_line(line)
        self.output_file.flush()
        shutil.copy(self.output_file.name, self.directory / "said.txt")
        self.keep()
        shutil.rmtree(self.scratch, ignore_errors=True)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("parts", nargs="*", metavar="PART", choices=[[], *parts.PARTS])
    p.add_argument("--list", action="store_true")
    p.add_argument("--seconds", type=float, default=540)
    p.add_argument("--out", default=os.environ.get("OUT") or tempfile.mkdtemp(prefix="spinio-out."))
    p.add_argument("--scratch", default="/var/tmp", help="a directory on the disk to be measured")
    p.add_argument("--pack", type=pathlib.Path, default=HERE.parents[1])
    p.add_argument("--only")
    p.add_argument("--reps", type=int, default=3)
    p.add_argument("--tiny", action="store_true")
    args = p.parse_args()
    args.pack = args.pack.resolve()
    if args.list or not args.parts:
        for name, part in parts.PARTS.items():
            steps = part(parts.Place(args, pathlib.Path("SCRATCH")))
            print(f"{name:<7} at most {sum(s.most for s in steps):4.0f} s, at least {sum(s.least for s in steps):4.0f} s: {', '.join(s.name for s in steps)}")
        return 0 if args.list else 2
    for number in SIGNALS:
        signal.signal(number, end)
    clean_up_after_killed_run(pathlib.Path(args.scratch).resolve())
    record = Record(args)
    try:
        record.all()
    except Ended as why:
        record.print_line(f"ended by {why}")
    except Exception as e:  # an error in this program must not lose the measurements
        record.print_line(f"record.py: {type(e).__name__}: {e}")
    record.close()
    return min(100, sum(r["status"] != 0 for r in record.results))


if __name__ == "__main__":
    sys.exit(main())
