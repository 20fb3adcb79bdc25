"""Reads of a file that is in the page cache."""

import os
import re
import shutil
import statistics
import subprocess

from figures import GIB, MIB, all_of, mid, over, rate, ratio, shown, speed, under


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
        b.row(f"one read of {b.size / GIB:g} GiB, fresh mapping ({name})", "0.75 of the limit", over(r, 0.75), limit=rate(limit), peer="KvikIO x16 " + speed(peer), us=speed(got), ratio=f"{shown(r)} of limit")
    b.row("  (plain pread + cudaMemcpy)", "-", None, us=speed(plain))


def again(b):
    limit = b.run("again", "limit", times=1)
    for env, goal, cpu in (({}, 0.86, 0.2), ({"SPINIO_CPU": "low"}, 0.6, 0.05), ({"SPINIO_THREADS": "16"}, 0.88, None)):
        us = b.run("again", "us", times=max(1, b.args.reps // 2), env=env)
        r = ratio(mid(us, "gbps"), mid(limit, "gbps"))
        met = over(r, goal) if cpu is None else all_of(over(r, goal), under(mid(us, "cpu_per_gb"), cpu))
        text = f"{goal} of the limit" + (f", {cpu} cpu s/GB" if cpu else ", above KvikIO x16")
        b.row(f"{b.size / GIB:g} GiB reads back to back {' '.join(f'{k}={v}' for k, v in env.items())}", text, met, limit=rate(limit), us=speed(us), ratio=f"{shown(r)} of limit")


def folios(b):
    """The page cache holds a file in folios of the size of its writes, and the cost of registering depends on the number of folios too."""
    size = b.most(2 * GIB)
    path = b.scratch / "folios"
    os.link(f"{b.file}.warm", f"{path}.warm")
    for what, piece in (("in single pages", 4 << 10), ("in large folios", 16 * MIB)):
        path.unlink(missing_ok=True)
        block = os.urandom(piece)
        with open(path, "wb", buffering=0) as f:
            for i in range(size // piece):
                f.write(i.to_bytes(8, "little") + block[8:])
            os.fsync(f.fileno())
        limit = b.run("big", "limit", file=path, size=size)
        for name, got in (
            (f"one read of {size / GIB:g} GiB, {what}", b.run("big", "us1", times=b.args.reps, file=path, size=size)),
            (f"8 MiB reads, sequential, one thread, {what}", b.run("seq", "us", times=b.args.reps, file=path, block=8 * MIB, total=size)),
        ):
            b.row(name, "-", None, limit=rate(limit), us=speed(got), ratio=f"{shown(ratio(mid(got, 'gbps'), mid(limit, 'gbps')))} of limit")
    for name in (path, f"{path}.warm"):
        os.unlink(name)


def states(b):
    """4 GiB as a process's first read and as its later ones, for each way in which a file comes to be cached."""
    size = b.most(4 * GIB)
    path = b.scratch / "states"
    os.link(f"{b.file}.warm", f"{path}.warm")
    limit = b.run("again", "limit", size=size)
    for state, piece in (("just written", 16 * MIB), ("read back in sequence", 16 * MIB), ("in single pages", 4 << 10)):
        path.unlink(missing_ok=True)
        block = os.urandom(piece)
        with open(path, "wb", buffering=0) as f:
            for i in range(size // piece):
                f.write(i.to_bytes(8, "little") + block[8:])
            os.fsync(f.fileno())
            if state == "read back in sequence":
                os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                b.touch(path)
        for read, goal, cpu, got in (
            ("first read of a process", 0.75, None, b.run("start", "us", times=b.args.reps, file=path, size=size)),
            ("later reads", 0.86, 0.2, b.run("again", "us", times=b.args.reps, file=path, size=size)),
        ):
            r = ratio(mid(got, "gbps"), mid(limit, "gbps"))
            met = over(r, goal) if cpu is None else all_of(over(r, goal), under(mid(got, "cpu_per_gb"), cpu))
            b.row(f"{size / GIB:g} GiB {state}: {read}", f"{goal} of the limit" + (f", {cpu} cpu s/GB" if cpu else ""), met, limit=rate(limit), us=speed(got), ratio=f"{shown(r)} of limit")
    for name in (path, f"{path}.warm"):
        os.unlink(name)


def busy(b):
    """All processors have something else to do: what the reads get, and what the other program loses by them."""
    program = shutil.which("stress-ng") or shutil.which(b.args.bin + "/stress-ng/stress-ng")
    if not program:
        b.note("busy: no stress-ng")
        return
    seconds = 10

    def loaded(read):
        """Runs the reads beside a load that takes all processors for some seconds; returns them and the load's work."""
        load = subprocess.Popen([program, "--cpu", "0", "--cpu-method", "int64", "--timeout", f"{seconds}s", "--metrics-brief"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        got = read()
        work = re.search(r" cpu +(\d+) ", load.communicate()[0])
        return got, int(work[1]) if work else None

    size, times = b.most(2 * GIB), 4  # `again` reads its file four times
    by = {
        "us": lambda: b.run("again", "us", size=size, times=1),
        "registering": lambda: b.run("again", "us", size=size, times=1, env={"SPINIO_CPU": "low"}, label="registering"),
        "plain": lambda: b.run("again", "plain", size=size),
        "nothing": list,
    }
    got, work = {name: [] for name in by}, {name: [] for name in by}
    for turn in range(max(2, b.args.reps)):
        for name in list(by)[turn % 4:] + list(by)[:turn % 4]:
            one, done = loaded(by[name])
            got[name] += one
            work[name].append(done)
    free = statistics.median(w for w in work["nothing"] if w)

    def lost(name):
        """Processor seconds that the load has lost, a GB read."""
        return (1 - statistics.median(w for w in work[name] if w) / free) * seconds * os.cpu_count() / (times * size / 1e9)

    losses = {name: lost(name) for name in ("us", "registering", "plain")}
    r = ratio(mid(got["us"], "gbps"), mid(got["registering"], "gbps"))
    b.row(f"{size / GIB:g} GiB reads, all processors busy", "1.0 of registering", over(r, 1.0), peer=f"registering {speed(got['registering'])}; plain {speed(got['plain'])}", us=speed(got["us"]), ratio=f"{shown(r)} of registering")
    text = {name: f"{loss:.3f} s/GB" for name, loss in losses.items()}
    b.row("  what the busy program loses", "no more than with plain", under(losses["us"], losses["plain"]), peer=f"registering {text['registering']}; plain {text['plain']}", us=text["us"])


def seq8m(b):
    plain = b.run("seq", "plain", times=1, block=8 * MIB, total=b.most(2 * GIB))
    us = b.run("seq", "us", times=b.args.reps, block=8 * MIB, total=b.most(4 * GIB))
    peer = b.peer("kvikio", threads=1, block=8 * MIB, total=b.most(2 * GIB)) + b.peer("kvikio", threads=4, block=8 * MIB, total=b.most(2 * GIB))
    best = sorted(peer, key=lambda p: p["gbps"])[-1:]
    met = all_of(over(mid(us, "gbps"), 18), under(mid(us, "cpu_per_gb"), 0.25))
    b.row("8 MiB reads, sequential, one thread", "18 GB/s, 0.25 cpu s/GB", met, peer=f"plain {rate(plain)}; KvikIO {rate(best)}", us=speed(us), ratio=f"{shown(ratio(mid(us, 'gbps'), mid(plain, 'gbps')))} of plain")


def seq64m(b):
    plain = b.run("seq", "plain", times=1, block=64 * MIB, total=b.most(2 * GIB))
    us = b.run("seq", "us", times=b.args.reps, block=64 * MIB, total=b.most(8 * GIB))
    b.row("64 MiB reads, sequential, one thread", "33 GB/s", over(mid(us, "gbps"), 33), peer="plain " + rate(plain), us=speed(us), ratio=f"{shown(ratio(mid(us, 'gbps'), mid(plain, 'gbps')))} of plain")


def par16(b):
    plain = b.run("par", "plain", times=1, block=8 * MIB, threads=16)
    us = b.run("par", "us", times=b.args.reps, block=8 * MIB, threads=16)
    b.row("8 MiB reads from 16 threads at once", "40 GB/s", over(mid(us, "gbps"), 40), peer="plain " + rate(plain), us=speed(us), ratio=f"{shown(ratio(mid(us, 'gbps'), mid(plain, 'gbps')))} of plain")


def small(b):
    for block, goal, total in ((4096, 2.2, b.most(400 * MIB)), (65536, 1.5, b.most(2 * GIB))):
        plain, us = [], []
        for _ in range(b.args.reps):  # by turns, so that drift of the machine affects both
            plain += b.run("seq", "plain", block=block, total=total)
            us += b.run("seq", "us", block=block, total=total)
        peer = b.peer("kvikio", threads=1, block=block, total=total // 8)
        r = ratio(mid(us, "gbps"), mid(plain, "gbps"))
        b.row(f"sequential {block // 1024} KiB reads", f"{goal}x of plain", over(r, goal), peer=f"plain {rate(plain)}; KvikIO {rate(peer)}", us=speed(us), ratio=f"{shown(r)} of plain")


def beside(b):
    """What another thread of the program waits for its own launches and copies."""
    got = {mode: b.run("beside", mode, times=times, size=b.size if mode == "us" else min(b.size, 2 * GIB)) for mode, times in (("none", 4), ("plain", 1), ("us", b.args.reps))}
    got["SPINIO_CPU=low"] = b.run("beside", "us", times=b.args.reps, env={"SPINIO_CPU": "low"})
    for what in ("launch", "copy"):
        p99 = {mode: mid(g, f"{what}_p99_us") for mode, g in got.items()}
        text = lambda mode: "-" if p99[mode] is None else f"{p99[mode]:.0f} us"
        worst = mid(got["us"], f"{what}_max_us") or 0
        b.row(f"another thread's {'launches' if what == 'launch' else 'copies of 64 KiB'} beside reads of {b.size / GIB:g} GiB, p99", "1 ms", under(p99["us"], 1000), limit=f"nothing beside {text('none')}", peer=f"plain + copy {text('plain')}", us=f"{text('us')}, longest {worst:.0f} us; low {text('SPINIO_CPU=low')}")


def owner(b):
    if os.getuid() != 0:
        b.note("owner: needs root")
        return
    rs = []
    try:
        for row, values in (("seq", {"block": 8 * MIB, "total": b.most(4 * GIB)}), ("big", {})):
            ours, others = [], []
            for _ in range(b.args.reps):
                os.chown(b.file, 65534, 65534)
                ours += b.run(row, "us", user=65534, label="own file", **values)
                os.chown(b.file, 0, 0)
                others += b.run(row, "us", user=65534, label="other user's file", **values)
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
