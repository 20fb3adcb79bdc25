#!/usr/bin/env python3
"""Measures SPIN on a GPU machine beside the limit of the machine and the peers, in one run.

    h200.py --bin DIR [--out DIR] [--scratch DIR] [--wheels DIR] [--only row,row] [--reps N] [--budget SECONDS] [--gib N]

DIR holds `reads`, `writes`, `batch` and `libspinio.so` (`cargo x gpu-pack` makes it). Prints a table and writes README.md and raw.json to
--out. Rows: big, again, seq8m, par16, small, cold-small, cold-par, cold, mix, owner, first, host, writes, batch, hold. Root is needed for the row `owner` only.

Every program runs with CUDA's default, spinning contexts. A row is skipped, and says so, once the budget is spent.
"""

import argparse
import datetime
import json
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
GIB = 1 << 30
MIB = 1 << 20
KIB = 1 << 10


class Bench:
    def __init__(self, args):
        self.args = args
        self.began = time.monotonic()
        self.raw = []
        self.table = []
        self.notes = []
        self.scratch = pathlib.Path(tempfile.mkdtemp(prefix="spinio-bench.", dir=args.scratch))
        self.scratch.chmod(0o755)
        for name in ("reads", "writes", "batch", "gather.ptx", "libspinio.so"):  # where any user may run them
            shutil.copy(pathlib.Path(args.bin) / name, self.scratch / name)
            (self.scratch / name).chmod(0o755)
        self.file = self.scratch / "data"
        self.size = args.gib * GIB
        self.stretch = 0  # of the file: where the next run on a fresh one begins

    def left(self):
        return self.args.budget - (time.monotonic() - self.began)

    def note(self, text):
        print("note:", text, flush=True)
        self.notes.append(text)

    # ---- running

    def run(self, row, mode, *, user=None, env=None, times=1, file=None, label=None, program="reads", **values):
        """Runs `reads` (or another program) `times` times; returns the measurements, each also kept in the raw list."""
        got = []
        for _ in range(times):
            if self.left() < 5:
                self.note(f"{row} {mode}: no time left")
                break
            full = {k: v for k, v in os.environ.items() if not k.startswith("SPINIO_")} | (env or {})
            if mode.startswith(("us", "held")) or (program == "batch" and mode in ("stream", "random")):
                full["LD_PRELOAD"] = str(self.scratch / "libspinio.so")
            command = [str(self.scratch / program), row, mode, str(file or self.file)] + [f"{k}={v}" for k, v in values.items()]
            who = {} if user is None else {"user": user, "group": user, "extra_groups": []}
            try:
                done = subprocess.run(command, env=full, capture_output=True, text=True, timeout=max(5, min(120, self.left())), **who)
            except subprocess.TimeoutExpired:
                self.note(f"{row} {mode} {values}: took too long, ended")
                continue
            if done.stderr.strip():
                self.note(f"{row} {mode} {values}: " + " / ".join(done.stderr.strip().splitlines()[-3:]))
            if done.returncode:
                self.note(f"{row} {mode} {values}: ended with status {done.returncode}")
                continue
            for line in done.stdout.splitlines():
                try:
                    one = json.loads(line)
                except ValueError:
                    self.note(f"{row} {mode}: not understood: {line}")
                    continue
                one |= {"label": label or mode, "env": env or {}, "values": values}
                if one.get("right") is False:
                    self.note(f"WRONG BYTES in {row} {mode} {values}")
                self.raw.append(one)
                got.append(one)
        return got

    def peer(self, name, **values):
        """Runs one peer; see peers.py."""
        if self.left() < 10:
            self.note(f"{name}: no time left")
            return []
        env = os.environ | values.pop("env", {})
        if self.site:
            env["PYTHONPATH"] = str(self.site) + os.pathsep + env.get("PYTHONPATH", "")
        command = [sys.executable, str(HERE / "peers.py"), name, str(self.file)] + [f"{k}={v}" for k, v in values.items()]
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=max(5, min(90, self.left())))
        except subprocess.TimeoutExpired:
            self.note(f"{name}: took too long, ended")
            return []
        if done.returncode:
            self.note(f"{name}: status {done.returncode}: " + " / ".join(done.stderr.strip().splitlines()[-2:]))
            return []
        got = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        for one in got:
            one |= {"label": name, "values": values}
        self.raw += got
        return got

    def fio(self, block):
        """What fio reaches with as many reads in flight, in words; it is not on every machine."""
        if not shutil.which("fio") or self.left() < 20:
            return ""
        self.drop()
        command = ["fio", "--name=cold", f"--filename={self.file}", "--readonly", "--rw=randread", f"--bs={block}", "--iodepth=128", "--ioengine=io_uring", "--direct=1", "--runtime=5", "--time_based", "--output-format=json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if done.returncode:
            self.note("fio: " + done.stderr.strip()[-200:])
            return ""
        return f"fio {json.loads(done.stdout)['jobs'][0]['read']['bw_bytes'] / 1e9:.2f} GB/s"

    # ---- preparing

    def prepare(self):
        began = time.monotonic()
        block = os.urandom(16 * MIB)
        with open(self.file, "wb") as f:
            for i in range(self.size // len(block)):
                f.write(i.to_bytes(8, "little") + block[8:])
            os.fsync(f.fileno())
        with open(str(self.file) + ".warm", "wb") as f:
            f.write(os.urandom(64 * MIB))
            os.fsync(f.fileno())
        for path in (self.file, str(self.file) + ".warm"):
            os.chmod(path, 0o644)
        self.drop()
        self.warm()
        print(f"{self.size / GIB:.0f} GiB of data made and read back in {time.monotonic() - began:.1f} s", flush=True)
        self.site = None
        if self.args.wheels:
            wheels = sorted(map(str, pathlib.Path(self.args.wheels).glob("*.whl")))
            if wheels:
                self.site = self.scratch / "site"
                pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--target", str(self.site)]
                done = subprocess.run(pip + wheels, capture_output=True, text=True)
                if done.returncode:
                    self.note("wheels: " + done.stderr.strip()[-300:])

    def drop(self):
        with open(self.file, "rb") as f:
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def warm(self):
        """Brings the whole file into the page cache; called after every row that drops parts."""
        for path in (self.file, str(self.file) + ".warm"):
            with open(path, "rb", buffering=0) as f:
                buffer = bytearray(16 * MIB)
                while f.readinto(buffer):
                    pass

    # ---- reporting

    def row(self, work, goal, met, **cells):
        """One line of the table. goal: text; met: True, False or None (not measured)."""
        line = {"work": work, "goal": goal, "met": met} | {k: cells.get(k, "") for k in ("limit", "peer", "us", "ratio")}
        self.table.append(line)
        print(f"{work:<58.58} | limit {line['limit']:<14} | peer {line['peer']:<34} | us {line['us']:<34} | {line['ratio']:<18} | {goal:<30} | {verdict(met)}", flush=True)


def verdict(met):
    return "not measured" if met is None else "met" if met else "MISSED"


def mid(got, key):
    values = [g[key] for g in got if g.get(key) is not None]
    return statistics.median(values) if values else None


def speed(got):
    gbps, cpu = mid(got, "gbps"), mid(got, "cpu_per_gb")
    return "-" if gbps is None else f"{gbps:.2f} GB/s, {cpu:.3f} s/GB" if cpu is not None else f"{gbps:.2f} GB/s"


def rate(got):
    gbps = mid(got, "gbps")
    return "-" if gbps is None else f"{gbps:.2f} GB/s"


def ratio(a, b):
    return None if a is None or not b else a / b


def shown(r):
    return "-" if r is None else f"{r:.3f}"


def all_of(*conditions):
    return None if any(c is None for c in conditions) else all(conditions)


def over(value, bound):
    return None if value is None else value >= bound


def under(value, bound):
    return None if value is None else value <= bound


# ---- rows

def big(b):
    limit = b.run("big", "limit", times=2)
    us = b.run("big", "us", times=b.args.reps)
    whole = b.run("big", "us1", times=b.args.reps)
    peer = b.peer("kvikio", threads=16, env={"KVIKIO_TASK_SIZE": str(4 * MIB)}) + b.peer("kvikio", threads=16, env={"KVIKIO_TASK_SIZE": str(MIB)})
    peer = sorted(peer, key=lambda p: p["gbps"])[-1:]
    b.peer("kvikio", threads=1)
    b.peer("safetensors", size=min(4 * GIB, b.size))
    plain = b.run("big", "plain", size=min(2 * GIB, b.size), times=1)
    for name, got in (("plain pread, in calls of 2 GiB", us), ("spinio_pread, one call", whole)):
        r = ratio(mid(got, "gbps"), mid(limit, "gbps"))
        b.row(f"one read of {b.size // GIB} GiB, fresh mapping ({name})", "0.85 of the limit", over(r, 0.85), limit=rate(limit), peer="KvikIO x16 " + speed(peer), us=speed(got), ratio=f"{shown(r)} of limit")
    b.row("  (plain pread + cudaMemcpy)", "-", None, us=speed(plain))


def again(b):
    limit = b.run("again", "limit", times=1)
    for env, goal, cpu in (({}, 0.65, 0.035), ({"SPINIO_THREADS": "16"}, 0.88, None)):
        us = b.run("again", "us", times=max(1, b.args.reps // 2), env=env)
        r = ratio(mid(us, "gbps"), mid(limit, "gbps"))
        met = over(r, goal) if cpu is None else all_of(over(r, goal), under(mid(us, "cpu_per_gb"), cpu))
        text = f"{goal} of the limit" + (f", {cpu} cpu s/GB" if cpu else ", above KvikIO x16")
        b.row(f"{b.size // GIB} GiB reads back to back {' '.join(f'{k}={v}' for k, v in env.items())}", text, met, limit=rate(limit), us=speed(us), ratio=f"{shown(r)} of limit")


def seq8m(b):
    plain = b.run("seq", "plain", times=1, block=8 * MIB, total=2 * GIB)
    us = b.run("seq", "us", times=b.args.reps, block=8 * MIB, total=4 * GIB)
    peer = b.peer("kvikio", threads=1, block=8 * MIB, total=2 * GIB) + b.peer("kvikio", threads=4, block=8 * MIB, total=2 * GIB)
    best = sorted(peer, key=lambda p: p["gbps"])[-1:]
    met = all_of(over(mid(us, "gbps"), 18), under(mid(us, "cpu_per_gb"), 0.25))
    b.row("8 MiB reads, sequential, one thread", "18 GB/s, 0.25 cpu s/GB", met, peer=f"plain {rate(plain)}; KvikIO {rate(best)}", us=speed(us), ratio=f"{shown(ratio(mid(us, 'gbps'), mid(plain, 'gbps')))} of plain")


def par16(b):
    plain = b.run("par", "plain", times=1, block=8 * MIB, threads=16)
    us = b.run("par", "us", times=b.args.reps, block=8 * MIB, threads=16)
    b.row("8 MiB reads from 16 threads at once", "40 GB/s", over(mid(us, "gbps"), 40), peer="plain " + rate(plain), us=speed(us), ratio=f"{shown(ratio(mid(us, 'gbps'), mid(plain, 'gbps')))} of plain")


def small(b):
    for block, goal, total in ((4096, 2.2, 400 * MIB), (65536, 1.4, 2 * GIB)):
        plain, us = [], []
        for _ in range(b.args.reps):  # side by side, so that drift of the machine hits both
            plain += b.run("seq", "plain", block=block, total=total)
            us += b.run("seq", "us", block=block, total=total)
        peer = b.peer("kvikio", threads=1, block=block, total=total // 8)
        r = ratio(mid(us, "gbps"), mid(plain, "gbps"))
        b.row(f"sequential {block // 1024} KiB reads", f"{goal}x of plain", over(r, goal), peer=f"plain {rate(plain)}; KvikIO {rate(peer)}", us=speed(us), ratio=f"{shown(r)} of plain")


def trickle(b, what, block, goal, reach, times_direct=None, threads=1, each=512 * MIB):
    """Sequential reads of what is not cached, beside plain buffered reads and unassisted direct ones. Single runs differ by
    a third, so at least five of each stand side by side, now the one and now the other first, every one on a stretch of
    the file that no run before it was near."""
    def run(mode, total):
        total = min(total, b.size // threads)
        start = b.stretch if b.stretch + threads * total <= b.size else 0
        b.stretch = start + threads * total
        # `from` is a word of this language.
        return b.run("trickle", mode, block=block, total=total, threads=threads, **{"from": start})

    got = {"plain": [], "us": []}
    for turn in range(max(5, b.args.reps)):
        for mode in ("plain", "us") if turn % 2 == 0 else ("us", "plain"):
            got[mode] += run(mode, each)
    direct = run("direct", min(each, max(64 * MIB, 4096 * block)) // threads)
    pairs = [ratio(u["gbps"], p["gbps"]) for u, p in zip(got["us"], got["plain"])]
    of_plain = statistics.median(pairs) if pairs else None
    of_direct = ratio(mid(got["us"], "gbps"), mid(direct, "gbps"))
    met = over(of_plain, reach)
    if times_direct:
        goal, met = f"{goal}, {times_direct}x of direct", all_of(met, over(of_direct, times_direct))
    spread = f" ({min(pairs):.2f} to {max(pairs):.2f})" if pairs else ""
    b.row(what, goal, met, peer=f"plain {speed(got['plain'])}; direct {rate(direct)}", us=speed(got["us"]), ratio=f"{shown(of_plain)} of plain{spread}, {shown(of_direct)} of direct")


def cold_small(b):
    """One stream."""
    for block in (4 * KIB, 16 * KIB, 32 * KIB, 64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB):
        trickle(b, f"cold sequential {block // KIB} KiB reads", block, "0.95 of plain", 0.95, 5 if block == 32 * KIB else None)
    b.warm()


def cold_par(b):
    """Four at once."""
    for block in (32 * KIB, 128 * KIB, 512 * KIB):
        trickle(b, f"cold sequential {block // KIB} KiB reads, 4 streams", block, "0.95 of plain", 0.95, threads=4, each=128 * MIB)
    b.warm()


def cold(b):
    limit, us = [], []
    for _ in range(2):
        limit += b.run("cold", "limit")
        us += b.run("cold", "us")
    b.drop()
    peer = b.peer("kvikio", threads=16)
    r = ratio(mid(us, "gbps"), mid(limit, "gbps"))
    met = all_of(over(r, 0.95), under(mid(us, "cpu_per_gb"), 0.1))
    b.row(f"cold {b.size // GIB} GiB", "0.95 of O_DIRECT, 0.1 cpu s/GB", met, limit=rate(limit), peer="KvikIO x16 " + speed(peer), us=speed(us), ratio=f"{shown(r)} of limit")
    b.warm()


def mix(b):
    got = {mode: [] for mode in ("us", "cached", "random", "direct")}
    for _ in range(max(2, b.args.reps - 2)):
        for mode in got:
            b.drop()
            got[mode] += b.run("mix", mode)
    levels = sorted({(g["run"], g["percent"]) for g in got["us"]}, reverse=True)
    worst, worst_single, above = [], [], []
    for run, percent in sorted(levels, key=lambda l: (-l[0], l[1])):
        at = {m: mid([g for g in got[m] if (g["run"], g["percent"]) == (run, percent)], "gbps") for m in got}
        cached, direct, us = max(at["cached"] or 0, at["random"] or 0), at["direct"], at["us"]
        best = max(cached, direct or 0)
        r = ratio(us, best)
        if r is None:
            continue
        (worst if run > 4096 else worst_single).append(r)
        if run > 4096 and 30 <= percent <= 70:
            above.append(r > 1)
        what = f"runs of {run // 1024} KiB" if run > 4096 else "single pages"
        b.row(f"1 MiB random reads, {percent} % cached in {what}", "0.95 of the better", r >= 0.95, limit="", peer=f"cached {cached:.2f}, direct {direct or 0:.2f} GB/s", us=f"{us:.2f} GB/s", ratio=f"{r:.3f} of better")
    if worst:
        b.row("  all levels of 64 KiB runs", ">= 0.95, above both in the middle", min(worst) >= 0.95 and all(above), us=f"worst {min(worst):.3f}", ratio=f"{sum(above)} of {len(above)} above")
    if worst_single:
        b.row("  all levels of single pages", ">= 0.95", min(worst_single) >= 0.95, us=f"worst {min(worst_single):.3f}")
    b.warm()


def owner(b):
    if os.getuid() != 0:
        b.note("owner: needs root")
        return
    rs = []
    try:
        for row, values in (("seq", {"block": 8 * MIB, "total": 4 * GIB}), ("big", {})):
            ours, others = [], []
            for _ in range(b.args.reps):
                os.chown(b.file, 65534, 65534)
                ours += b.run(row, "us", user=65534, label="own file", **values)
                os.chown(b.file, 0, 0)
                others += b.run(row, "us", user=65534, label="another's file", **values)
            r = ratio(mid(others, "gbps"), mid(ours, "gbps"))
            rs.append(r)
            b.row(f"a warm file of another owner, {'8 MiB reads' if row == 'seq' else 'one read'}", "0.9 of the same file owned", over(r, 0.9), peer="own " + speed(ours), us=speed(others), ratio=f"{shown(r)} of own")
    finally:
        os.chown(b.file, 0, 0)


def first(b):
    for block in (4096, MIB, 8 * MIB):
        got = b.run("first", "us", times=b.args.reps, block=block)
        a, s = mid(got, "first_us"), mid(got, "second_us")
        more = None if a is None else (a - s) / 1000
        b.row(f"first device read of a process, {block // 1024} KiB", "within 5 ms of the second", under(more, 5), us="-" if a is None else f"{a / 1000:.2f} ms, second {s / 1000:.3f} ms", ratio="-" if more is None else f"+{more:.2f} ms")


def host(b):
    for block in (1, 4096):
        without, with_us = [], []
        for _ in range(b.args.reps):
            without += b.run("host", "plain", block=block)
            with_us += b.run("host", "us", block=block)
        a, u = mid(without, "ns"), mid(with_us, "ns")
        r = ratio(u, a)
        b.row(f"host pread of {block} B, with CUDA at work", "at most 1.05x", under(r, 1.05), peer=f"without {a or 0:.0f} ns", us=f"{u or 0:.0f} ns", ratio=f"{shown(r)}x")


def writes(b):
    """Into the page cache, and through O_DIRECT descriptors."""
    out = b.scratch / "out"

    def run(row, mode, **values):
        return b.run(row, mode, program="writes", file=out, **values)

    for cached in (0, 1):
        got = {mode: [] for mode in ("plain", "us", "pinned", "alone")}
        for _ in range(b.args.reps):  # side by side, so that drift of the machine hits all
            for mode in got:
                got[mode] += run("page", mode, block=8 * MIB, total=2 * GIB, over=cached)
        peer = b.peer("kvikio_write", threads=1, block=8 * MIB, total=2 * GIB) if not cached else []
        r = ratio(mid(got["us"], "gbps"), mid(got["plain"], "gbps"))
        what = "over cached pages" if cached else "new file"
        b.row(f"8 MiB writes into the page cache, sequential, {what}", "1.4x of cudaMemcpy + pwrite", over(r, 1.4), limit=f"pwrite alone {rate(got['alone'])}", peer=f"plain {rate(got['plain'])}; pinned {rate(got['pinned'])}" + (f"; KvikIO {rate(peer)}" if peer else ""), us=speed(got["us"]), ratio=f"{shown(r)} of plain")
    limit = [run("direct", "limit", block=4 * MIB, threads=4, total=2 * GIB) for _ in range(max(2, b.args.reps // 2))]
    limit = [one for got in limit for one in got]
    # One call of up to 128 MiB is copied first and then written, so one thread that makes such calls pays for the copy.
    for block, threads, goal in ((1024 * MIB, 1, 0.95), (16 * MIB, 4, 0.95), (64 * MIB, 1, None)):
        us = run("direct", "us", block=block, threads=threads, total=2 * GIB, times=b.args.reps)
        r = ratio(mid(us, "gbps"), mid(limit, "gbps"))
        b.row(f"O_DIRECT writes of {block // MIB} MiB from {threads} thread{'s' if threads > 1 else ''}", f"{goal} of pinned, 4 threads" if goal else "-", over(r, goal) if goal else None, limit=rate(limit), us=speed(us), ratio=f"{shown(r)} of limit")


def batch(b):
    on = {"program": "batch", "ptx": str(b.scratch / "gather.ptx"), "size": min(b.size, 8 * GIB)}
    for block, goal in ((4096, 20), (512, 3)):
        limit = b.run("random", "limit", block=block, **on)
        us = b.run("random", "us", times=b.args.reps, block=block, **on)
        each = b.run("random", "each", block=block, count=100000, env={"LD_PRELOAD": str(b.scratch / "libspinio.so")}, **on)
        peer = b.peer("kvikio", threads=1, block=block, count=100000)
        others = f"KvikIO each {rate(peer)}; our pread each {rate(each)}"
        b.row(f"1 M random reads of {block} B, warm, not held", f"{goal} GB/s", over(mid(us, "gbps"), goal), limit=rate(limit), peer=others, us=speed(us), ratio=f"{shown(ratio(mid(us, 'gbps'), mid(limit, 'gbps')))} of limit")
    for block, count in ((4096, 100000), (65536, 10000)):
        limit, us = [], []
        for _ in range(2):
            b.drop()
            limit += b.run("cold", "limit", block=block, count=count, **on)
            b.drop()
            us += b.run("cold", "us", block=block, count=count, **on)
        r = ratio(mid(us, "gbps"), mid(limit, "gbps"))
        fio = b.fio(block)
        b.row(f"{count} random reads of {block // 1024} KiB, cold", "0.95 of O_DIRECT at depth 128", over(r, 0.95), limit=rate(limit), peer=fio, us=speed(us), ratio=f"{shown(r)} of limit")
    b.warm()


def hold(b):
    on = {"program": "batch", "ptx": str(b.scratch / "gather.ptx"), "size": min(b.size, 8 * GIB)}
    limits = {(row, block): b.run(row, "limit", **on, **({"block": block} if block else {})) for row, block in (("hold", 8 * MIB), ("again", 0), ("map", 0), ("random", 4096), ("random", 512))}
    us = b.run("hold", "us", block=8 * MIB, **on)

    def row(what, goal, reach, name, mode, block, peer="", of_limit=False):
        got = b.run(name, mode, times=b.args.reps, **on, **({"block": block} if block else {}))
        limit = limits.get((name, block)) or limits["map", 0]
        r = ratio(mid(got, "gbps"), mid(limit, "gbps"))
        b.row(what, goal, over(r if of_limit else mid(got, "gbps"), reach), limit=rate(limit), peer=peer, us=speed(got), ratio=f"{shown(r)} of limit")

    row("8 MiB in sequence, held", "45 GB/s", 45, "hold", "held", 8 * MIB, peer="not held " + rate(us))
    row(f"{on['size'] // GIB} GiB again and again, held", "0.97 of the limit", 0.97, "again", "held", 0, of_limit=True)
    row("kernel streams the map", "0.9 of pinned memory", 0.9, "map", "stream", 0, of_limit=True)
    row("kernel reads 4 KiB of the map", "45 GB/s", 45, "map", "random", 0)
    row("1 M random 4 KiB, held", "45 GB/s", 45, "random", "held", 4096)
    row("1 M random 512 B, held", "12 GB/s", 12, "random", "held", 512)


ROWS = {"big": big, "again": again, "seq8m": seq8m, "par16": par16, "small": small, "first": first, "host": host, "owner": owner, "mix": mix, "cold-small": cold_small, "cold-par": cold_par, "cold": cold, "writes": writes, "batch": batch, "hold": hold}


def machine():
    def out(*command):
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return ""

    cpu = next((l.split(":", 1)[1].strip() for l in open("/proc/cpuinfo") if l.startswith("model name")), "?")
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "gpu": out("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"),
        "kernel": platform.release(),
        "cpus": f"{os.cpu_count()} x {cpu}",
        "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // GIB,
    }


def report(b, info, out):
    lines = [f"# {info['gpu']}, {info['date']}", ""]
    lines += [f"{info['cpus']}, {info['memory_gib']} GiB of memory, Linux {info['kernel']}, file system {info['filesystem']}. File of {b.size // GIB} GiB.",
              "Contexts spin (CUDA's default), for us and for the peers. CPU is user + system of the whole process for a GB, work",
              f"deferred behind a return included. Medians of {b.args.reps} runs, each in a process of its own. Raw figures: raw.json.", "",
              f"Command: `h200.py {' '.join(b.shown_args)}`", "",
              "| work | limit | peer | us | ratio | must reach | |", "|---|---|---|---|---|---|---|"]
    for t in b.table:
        lines.append(f"| {t['work'].strip()} | {t['limit']} | {t['peer']} | {t['us']} | {t['ratio']} | {t['goal']} | {'' if t['goal'] == '-' else verdict(t['met'])} |")
    if b.notes:
        lines += ["", "What was printed on the way:", ""] + [f"- {n}" for n in b.notes]
    (out / "README.md").write_text("\n".join(lines) + "\n")
    (out / "raw.json").write_text(json.dumps({"machine": info, "table": b.table, "notes": b.notes, "runs": b.raw}, indent=1) + "\n")


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--bin", default=str(HERE.parent))
    p.add_argument("--out", default=os.environ.get("OUT", "."))
    p.add_argument("--scratch", default="/var/tmp")
    p.add_argument("--wheels")
    p.add_argument("--only", default=",".join(ROWS))
    p.add_argument("--reps", type=int, default=5)
    p.add_argument("--budget", type=float, default=480)
    p.add_argument("--gib", type=int, default=8)
    args = p.parse_args()
    names = args.only.split(",")
    unknown = [n for n in names if n not in ROWS]
    if unknown:
        sys.exit(f"unknown rows: {', '.join(unknown)}; there are {', '.join(ROWS)}")
    b = Bench(args)
    b.shown_args = [a for a in (f"--only {args.only}" if args.only != ",".join(ROWS) else "", f"--reps {args.reps}", f"--gib {args.gib}") if a]
    out = pathlib.Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    info = machine()
    info["filesystem"] = subprocess.run(["stat", "-f", "-c", "%T", str(b.scratch)], capture_output=True, text=True).stdout.strip()
    try:
        b.prepare()
        for name in names:
            began = time.monotonic()
            try:
                ROWS[name](b)
            except Exception as e:  # one row must not cost the others
                b.note(f"{name}: {type(e).__name__}: {e}")
            print(f"[{name}: {time.monotonic() - began:.0f} s, {b.left():.0f} s left]", flush=True)
            report(b, info, out)
    finally:
        report(b, info, out)
        shutil.rmtree(b.scratch, ignore_errors=True)
    missed = [t["work"].strip() for t in b.table if t["met"] is False]
    print(f"{sum(t['met'] is True for t in b.table)} met, {len(missed)} missed" + (": " + "; ".join(missed) if missed else ""))


if __name__ == "__main__":
    main()
