#!/usr/bin/env python3
"""Twelve GPU programs, with their files moved by conventional copies and by NVMMU, in one run: Fig. 10 to 12 of the NVMMU paper.

    nvmmu.py [--programs FILE] [--library FILE] [--out DIR] [--scratch DIR] [--only name,name] [--scale X]
             [--rounds N] [--budget SECONDS] [--overwrite]

FILE is the program that nvcc builds from the sources in this directory; without it, this script runs nvcc. Prints a
table and writes README.md and raw.json to --out. --scale 0.25 takes a quarter of each program's input.

Each measurement is a process of its own that runs the whole program --rounds times, from opens to frees; medians of these
are shown. warm = input files in the page cache, cold = dropped from it before each round. The output is
a new file each time (--overwrite: the same one). Every output is checked against a CPU reference.
"""

import argparse
import concurrent.futures
import datetime
import json
import math
import os
import pathlib
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
MIB = 1 << 20
MODES = ("conventional", "nvmmu")


def nvcc():
    for directory in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if directory and (found := pathlib.Path(directory, "bin", "nvcc")).exists():
            return str(found)
    return shutil.which("nvcc")


def build(out, headers):
    """Compiles the programs for the GPU of this machine."""
    compiler = nvcc() or sys.exit("nvcc not found, and --programs not given")
    objects = out.parent / "objects"
    objects.mkdir(exist_ok=True)
    flags = ["-std=c++17", "-O3", "-arch=native", "-I", str(headers), "-I", str(HERE)]

    def compile_one(source):
        to = objects / (source.name + ".o")
        subprocess.run([compiler, *flags, "-c", str(source), "-o", str(to)], check=True)
        return str(to)

    sources = [*sorted(HERE.glob("*.cu")), HERE / "harness" / "main.cu"]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        made = list(pool.map(compile_one, sources))
    subprocess.run([compiler, *made, "-ldl", "-o", str(out)], check=True)


class Bench:
    def __init__(self, args):
        self.args = args
        self.began = time.monotonic()
        self.raw, self.notes, self.rows = [], [], []
        self.scratch = pathlib.Path(tempfile.mkdtemp(prefix="spinio-nvmmu.", dir=args.scratch))

    def left(self):
        return self.args.budget - (time.monotonic() - self.began)

    def note(self, text):
        print("note:", text, flush=True)
        self.notes.append(text)

    def run(self, what, name, *options, timeout=120):
        """The output lines of one process, None if it failed."""
        env = {k: v for k, v in os.environ.items() if not k.startswith("SPINIO_")}
        env["SPINIO_LIBRARY"] = str(self.args.library)
        env |= dict(pair.split("=", 1) for pair in self.args.env)
        command = [str(self.args.programs), what, name, str(self.scratch), *options]
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=max(5, min(timeout, self.left())))
        except subprocess.TimeoutExpired:
            self.note(f"{what} {name} {' '.join(options)}: timed out, killed")
            return None
        if done.returncode or done.stderr.strip():
            self.note(f"{what} {name} {' '.join(options)}: status {done.returncode}: " + " / ".join((done.stderr + done.stdout).strip().splitlines()[-3:]))
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        self.raw += [line | {"what": what} for line in lines if what != "make"]
        return lines if done.returncode == 0 else None

    def program(self, entry):
        name = entry["program"]
        size = f"bytes={int(entry['mib'] * MIB * self.args.scale)}"
        row = {"program": name, "suite": entry["suite"]}
        if self.run("make", name, size) is None:
            return
        overwrite = ["overwrite=1"] if self.args.overwrite else []
        checked = {}
        for cold in (False, True):
            rounds = max(2, self.args.rounds // 2) if cold else self.args.rounds
            if not cold:
                # Reads the files into the page cache, as an earlier program would have left them.
                for file in self.scratch.glob(f"{name}.[0-9]*"):
                    with open(file, "rb", buffering=0) as f:
                        buffer = bytearray(16 * MIB)
                        while f.readinto(buffer):
                            pass
            for mode in MODES:
                lines = self.run("run", name, size, f"mode={mode}", f"rounds={rounds}", f"cold={int(cold)}", *overwrite)
                if not lines:
                    continue
                each, whole = [l for l in lines if "round" in l], lines[-1]
                # The first round of both modes contains the process's one-time set-up.
                steady = each[1:] or each
                key = ("cold" if cold else "warm") + "_" + mode
                row[key] = {k: statistics.median(l[k] for l in steady) for k in ("upload", "download", "around", "movement", "compute", "total")}
                # Work deferred until after a return falls into the next round: hence the mean.
                row[key] |= {k: statistics.mean(l[k] for l in steady) for k in ("movement_cpu", "total_cpu")}
                row[key] |= {"first_movement": each[0]["movement"], "first_total": each[0]["total"], "input_bytes": whole["input_bytes"], "output_bytes": whole["output_bytes"]}
                for k in ("gpu_joules", "processor_joules"):
                    row[key][k] = None if whole[k] is None else whole[k] / whole["rounds"]
                if mode not in checked:
                    checked[mode] = self.run("check", name, size, f"mode={mode}") is not None
            for file in self.scratch.glob(f"{name}.[cn]*"):
                file.unlink()
        row["right"] = all(checked.get(mode) for mode in MODES)
        if not row["right"]:
            self.note(f"WRONG OUTPUT, or none, of {name}: {checked}")
        for file in self.scratch.glob(f"{name}.*"):
            file.unlink()
        self.rows.append(row)
        print(f"{name:<14} " + "   ".join(f"{state} {self.cell(row, state, 'movement')}" for state in ("warm", "cold")), flush=True)

    @staticmethod
    def cell(row, state, what):
        a, b = row.get(f"{state}_conventional"), row.get(f"{state}_nvmmu")
        return f"{a[what]:.3f} -> {b[what]:.3f} s ({a[what] / b[what]:.2f}x)" if a and b else "-"


def ratio(row, state, what):
    a, b = row.get(f"{state}_conventional"), row.get(f"{state}_nvmmu")
    return a[what] / b[what] if a and b and a.get(what) and b.get(what) else None


def mean(values):
    values = [v for v in values if v]
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def shown(value, form="{:.2f}"):
    return "-" if value is None else form.format(value)


def tables(b):
    """The paper's figures as lines of tables."""
    lines = []
    for state in ("warm", "cold"):
        lines += [f"## Fig. 10, {state}: moving the data", "",
                  "Seconds per round. The paper's bars show NVMMU's share of the conventional time.", "",
                  "| program | suite | in, MiB | out, MiB | conventional | nvmmu | share | GB/s | CPU s | first round | right |",
                  "|---|---|---|---|---|---|---|---|---|---|---|"]
        for r in b.rows:
            c, n = r.get(f"{state}_conventional"), r.get(f"{state}_nvmmu")
            if not c or not n:
                lines.append(f"| {r['program']} | {r['suite']} | - | - | - | - | - | - | - | - | {r['right']} |")
                continue
            moved = (n["input_bytes"] + n["output_bytes"]) / 1e9
            lines.append(f"| {r['program']} | {r['suite']} | {n['input_bytes'] / MIB:.0f} | {n['output_bytes'] / MIB:.1f} | {c['movement']:.4f} | {n['movement']:.4f} "
                         f"| {n['movement'] / c['movement']:.2f} | {moved / c['movement']:.1f} -> {moved / n['movement']:.1f} | {c['movement_cpu']:.3f} -> {n['movement_cpu']:.3f} "
                         f"| {c['first_movement']:.3f} -> {n['first_movement']:.3f} | {'yes' if r['right'] else 'NO'} |")
        lines += ["", f"## Fig. 11, {state}: the whole program", "",
                  "| program | conventional, s | nvmmu, s | kernels' part | speed-up | CPU s |", "|---|---|---|---|---|---|"]
        for r in b.rows:
            c, n = r.get(f"{state}_conventional"), r.get(f"{state}_nvmmu")
            if c and n:
                lines.append(f"| {r['program']} | {c['total']:.4f} | {n['total']:.4f} | {n['compute']:.4f} | {c['total'] / n['total']:.2f}x | {c['total_cpu']:.3f} -> {n['total_cpu']:.3f} |")
        lines += ["", f"## Fig. 12, {state}: speed-up, geometric means", "",
                  "| programs | data movement | worst | whole program | CPU seconds of movement | GPU joules | processor joules |", "|---|---|---|---|---|---|---|"]
        suites = list(dict.fromkeys(r["suite"] for r in b.rows))
        for name in [*suites, "all"]:
            rows = [r for r in b.rows if name in (r["suite"], "all")]
            moved = [ratio(r, state, "movement") for r in rows]
            cells = [mean(moved), min((m for m in moved if m), default=None)]
            cells += [mean([ratio(r, state, k) for r in rows]) for k in ("total", "movement_cpu", "gpu_joules", "processor_joules")]
            lines.append(f"| {name} | " + " | ".join(shown(c, "{:.2f}x") for c in cells) + " |")
        lines.append("")
    return lines


def verdicts(b):
    """The goals of the comparison."""
    warm = [ratio(r, "warm", "movement") for r in b.rows]
    every = warm + [ratio(r, "cold", "movement") for r in b.rows]
    cpu = mean([ratio(r, "warm", "movement_cpu") for r in b.rows])
    yield "data movement, warm, geometric mean: 3x faster", mean(warm), (mean(warm) or 0) >= 3
    yield "never slower on any program, warm and cold (1.00x at least)", min((v for v in every if v), default=None), all(v and v >= 1 for v in every)
    yield "CPU seconds of movement, warm, geometric mean: a third (3x less)", cpu, (cpu or 0) >= 3
    yield "every output right", None, bool(b.rows) and all(r["right"] for r in b.rows)


def machine():
    smi = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True) if shutil.which("nvidia-smi") else None
    return {
        "gpu": smi.stdout.strip() if smi and smi.returncode == 0 else "none: the emulated device",
        "date": datetime.date.today().isoformat(),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30,
    }


def report(b, info, out):
    energy = {k: any((r.get(f"warm_{m}") or {}).get(k) is not None for r in b.rows for m in MODES) for k in ("gpu_joules", "processor_joules")}
    lines = [f"# Moving the files of twelve GPU programs: {info['gpu']}, {info['date']}", "",
             f"{info['cpus']} processors, {info['memory_gib']} GiB of memory, Linux {info['kernel']}, file system {info['filesystem']}. Input: {b.args.scale:g} of each program's size.",
             f"Medians of {b.args.rounds} rounds without the first; the CPU seconds, user + system of all threads, are means. Raw figures: raw.json.", "",
             f"Energy of the GPU (NVML): {'read' if energy['gpu_joules'] else 'not available here'}. Energy of the processors (RAPL): {'read' if energy['processor_joules'] else 'not available here'}.", "",
             "| goal | reached | |", "|---|---|---|"]
    lines += [f"| {what} | {shown(value, '{:.2f}x')} | {'met' if met else 'MISSED'} |" for what, value, met in verdicts(b)]
    lines += ["", *tables(b)]
    if b.notes:
        lines += ["Notes printed during the run:", ""] + [f"- {n}" for n in b.notes]
    text = "\n".join(lines) + "\n"
    (out / "README.md").write_text(text)
    (out / "raw.json").write_text(json.dumps({"machine": info, "rows": b.rows, "notes": b.notes, "runs": b.raw}, indent=1) + "\n")
    return text


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--programs", type=pathlib.Path)
    p.add_argument("--library", type=pathlib.Path, default=HERE.parent.parent / "libspinio.so")
    p.add_argument("--headers", type=pathlib.Path, default=HERE.parent.parent / "device" / "include")
    p.add_argument("--out", default=os.environ.get("OUT", "."))
    p.add_argument("--scratch", default="/var/tmp")
    p.add_argument("--only")
    p.add_argument("--scale", type=float, default=1)
    p.add_argument("--rounds", type=int, default=6)
    p.add_argument("--budget", type=float, default=480)
    p.add_argument("--overwrite", action="store_true")
    p.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    args = p.parse_args()
    out = pathlib.Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    b = Bench(args)
    try:
        if not args.programs:
            args.programs = b.scratch / "programs"
            build(args.programs, args.headers)
            print(f"programs built in {time.monotonic() - b.began:.0f} s", flush=True)
        listed = subprocess.run([str(args.programs), "list"], capture_output=True, text=True, check=True)
        entries = sorted(map(json.loads, listed.stdout.splitlines()), key=lambda e: (e["suite"] != "PolyBench", e["suite"], e["program"]))
        only = args.only.split(",") if args.only else [e["program"] for e in entries]
        if unknown := set(only) - {e["program"] for e in entries}:
            sys.exit(f"unknown programs: {', '.join(sorted(unknown))}")
        info = machine()
        info["filesystem"] = subprocess.run(["stat", "-f", "-c", "%T", str(b.scratch)], capture_output=True, text=True).stdout.strip()
        for entry in entries:
            if entry["program"] in only:
                if b.left() < 10:
                    b.note(f"{entry['program']}: no time left")
                    continue
                b.program(entry)
                report(b, info, out)
        print(report(b, info, out))
    finally:
        shutil.rmtree(b.scratch, ignore_errors=True)
    sys.exit(0 if b.rows and all(r["right"] for r in b.rows) else 1)


if __name__ == "__main__":
    main()
