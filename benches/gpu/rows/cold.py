"""Reads of a file that is not in the page cache, or only partly."""

import statistics

from figures import GIB, KIB, MIB, all_of, mid, over, rate, ratio, shown, speed, under


# The engine where the Linux kernel refuses io_uring, as in most containers.
WORKERS = {"SPINIO_STORAGE_ENGINE": "workers"}


def trickle(b, what, block, goal, reach, times_direct=None, threads=1, each=512 * MIB):
    """Sequential reads of uncached data, compared with plain buffered reads and with O_DIRECT reads without read-ahead. Single
    runs differ by a third, so at least five of each are run by turns, in alternating order, each on a range of the file that
    no earlier run has used."""
    def run(mode, total):
        total = min(total, b.size // threads)
        start = b.stretch if b.stretch + threads * total <= b.size else 0
        b.stretch = start + threads * total
        # `from` is a Python keyword.
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
        trickle(b, f"cold sequential {block // KIB} KiB reads", block, "0.97 of plain", 0.97, 5 if block == 32 * KIB else None)
    b.warm()


def cold_par(b):
    """Four streams at once."""
    for block in (32 * KIB, 128 * KIB, 512 * KIB):
        trickle(b, f"cold sequential {block // KIB} KiB reads, 4 streams", block, "0.97 of plain", 0.97, threads=4, each=128 * MIB)
    b.warm()


def cold(b):
    limit, us, workers = [], [], []
    for _ in range(2):
        limit += b.run("cold", "limit")
        us += b.run("cold", "us")
        workers += b.run("cold", "us", env=WORKERS, label="workers")
    b.drop()
    peer = b.peer("kvikio", threads=16)
    r = ratio(mid(us, "gbps"), mid(limit, "gbps"))
    met = all_of(over(r, 0.97), under(mid(us, "cpu_per_gb"), 0.1))
    b.row(f"cold {b.size / GIB:g} GiB", "0.97 of O_DIRECT, 0.1 cpu s/GB", met, limit=rate(limit), peer="KvikIO x16 " + speed(peer), us=f"{speed(us)}; workers {rate(workers)}", ratio=f"{shown(r)} of limit")
    b.warm()


def mix(b):
    """All modes read the same blocks, and a virtual disk serves what was read before from the memory of its host: so one pass
    that does not count, and then each mode first once in turn."""
    modes = ["us", "direct", "cached", "random", "workers"]
    got = {mode: [] for mode in modes}
    b.drop()
    b.run("mix", "direct")
    for turn in range(max(2, b.args.reps - 1)):
        for mode in modes[turn % 5:] + modes[:turn % 5]:
            b.drop()
            got[mode] += b.run("mix", "us", env=WORKERS, label="workers") if mode == "workers" else b.run("mix", mode)
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
        b.row(f"1 MiB random reads, {percent} % cached in {what}", "0.97 of the better", r >= 0.97, limit="", peer=f"cached {cached:.2f}, direct {direct or 0:.2f} GB/s", us=f"{us:.2f}, workers {at['workers'] or 0:.2f} GB/s", ratio=f"{r:.3f} of better")
    if worst:
        b.row("  all levels of 64 KiB runs", ">= 0.97, above both in the middle", min(worst) >= 0.97 and all(above), us=f"worst {min(worst):.3f}", ratio=f"{sum(above)} of {len(above)} above")
    if worst_single:
        b.row("  all levels of single pages", ">= 0.97", min(worst_single) >= 0.97, us=f"worst {min(worst_single):.3f}")
    b.warm()
