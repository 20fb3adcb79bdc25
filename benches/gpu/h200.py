#!/usr/bin/env python3
"""Measures SPIN on a GPU machine against the limit of the machine and against peers, in one run.

    h200.py --bin DIR [--out DIR] [--scratch DIR] [--wheels DIR] [--only row,row] [--reps N] [--budget SECONDS] [--gib N]
    h200.py --merge RUN,RUN [--out DIR]

DIR contains `reads`, `writes`, `batch` and `libspinio.so` (`cargo x gpu-pack` makes it). Prints a table and writes README.md and raw.json to
--out, again after each row. Rows (rows/): big, folios, states, again, seq8m, seq64m, par16, small, beside, busy, first, host, owner, mix, cold-small, cold-par, cold, writes, batch,
hold; measured in the order of --only. Only the row `owner` needs root.

Every program runs with CUDA's default, spinning contexts. After the budget is spent, rows are skipped with a note.
--merge makes one record of several runs: RUN is the directory of a run, or its raw.json. If two runs have the same row, the last one counts.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

import report
from bench import Bench
from rows import ROWS

HERE = pathlib.Path(__file__).resolve().parent


def merge(names, out):
    paths = [pathlib.Path(name) for name in names]
    paths = [path / "raw.json" if path.is_dir() else path for path in paths]
    whole = report.merged([json.loads(path.read_text()) for path in paths], ROWS)
    report.write(whole, out)
    print(f"{out / 'README.md'}: {report.verdicts(whole['table'])}")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--bin", default=str(HERE.parents[1]))
    p.add_argument("--out", default=os.environ.get("OUT", "."))
    p.add_argument("--scratch", default="/var/tmp")
    p.add_argument("--wheels")
    p.add_argument("--only", default=",".join(ROWS))
    p.add_argument("--reps", type=int, default=5)
    p.add_argument("--budget", type=float, default=480)
    p.add_argument("--gib", type=float, default=8, help="size of the file")
    p.add_argument("--merge", metavar="RUN,RUN")
    args = p.parse_args()
    out = pathlib.Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    if args.merge:
        return merge(args.merge.split(","), out)
    names = args.only.split(",")
    unknown = [n for n in names if n not in ROWS]
    if unknown:
        sys.exit(f"unknown rows: {', '.join(unknown)}; there are {', '.join(ROWS)}")
    b = Bench(args)
    info = report.machine()
    info["filesystem"] = subprocess.run(["stat", "-f", "-c", "%T", str(b.scratch)], capture_output=True, text=True).stdout.strip()
    only = f" --only {args.only}" if args.only != ",".join(ROWS) else ""
    info |= {"file_gib": args.gib, "reps": args.reps, "command": f"h200.py{only} --reps {args.reps} --gib {args.gib:g}", "seconds": {}}
    made_of = pathlib.Path(args.bin, "commit")
    info["commit"] = made_of.read_text().strip() if made_of.exists() else "unknown"
    try:
        b.prepare()
        for b.current in names:
            began = time.monotonic()
            try:
                ROWS[b.current](b)
            except Exception as e:  # a failed row must not stop the others
                b.note(f"{b.current}: {type(e).__name__}: {e}")
            info["seconds"][b.current] = round(time.monotonic() - began, 1)
            print(f"[{b.current}: {info['seconds'][b.current]:.0f} s, {b.left():.0f} s left]", flush=True)
            report.write(report.one(b, info), out)
    finally:
        report.write(report.one(b, info), out)
        shutil.rmtree(b.scratch, ignore_errors=True)
    print(report.verdicts(b.table))


if __name__ == "__main__":
    main()
