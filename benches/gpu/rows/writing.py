"""Writes."""

from figures import GIB, MIB, mid, over, rate, ratio, shown, speed


def writes(b):
    """Into the page cache, and through O_DIRECT descriptors."""
    out = b.scratch / "out"

    total = b.most(2 * GIB)

    def run(row, mode, **values):
        return b.run(row, mode, program="writes", file=out, **values)

    for cached in (0, 1):
        got = {mode: [] for mode in ("plain", "us", "pinned", "alone")}
        for _ in range(b.args.reps):  # by turns, so that drift of the machine affects all
            for mode in got:
                got[mode] += run("page", mode, block=8 * MIB, total=total, over=cached)
        peer = b.peer("kvikio_write", threads=1, block=8 * MIB, total=total) if not cached else []
        r = ratio(mid(got["us"], "gbps"), mid(got["plain"], "gbps"))
        what = "over cached pages" if cached else "new file"
        b.row(f"8 MiB writes into the page cache, sequential, {what}", "1.4x of cudaMemcpy + pwrite", over(r, 1.4), limit=f"pwrite alone {rate(got['alone'])}", peer=f"plain {rate(got['plain'])}; pinned {rate(got['pinned'])}" + (f"; KvikIO {rate(peer)}" if peer else ""), us=speed(got["us"]), ratio=f"{shown(r)} of plain")
    limit = [run("direct", "limit", block=4 * MIB, threads=4, total=total) for _ in range(max(2, b.args.reps // 2))]
    limit = [one for got in limit for one in got]
    # A call of up to 128 MiB is copied completely and then written, so a single thread with such calls pays for the
    # copy.
    for block, threads, goal in ((1024 * MIB, 1, 0.95), (16 * MIB, 4, 0.95), (64 * MIB, 1, None)):
        us = run("direct", "us", block=block, threads=threads, total=total, times=b.args.reps)
        r = ratio(mid(us, "gbps"), mid(limit, "gbps"))
        b.row(f"O_DIRECT writes of {block // MIB} MiB from {threads} thread{'s' if threads > 1 else ''}", f"{goal} of pinned, 4 threads" if goal else "-", over(r, goal) if goal else None, limit=rate(limit), us=speed(us), ratio=f"{shown(r)} of limit")
