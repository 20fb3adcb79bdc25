"""Many small reads in one call, and reads of a pinned file."""

from figures import GIB, MIB, mid, over, rate, ratio, shown, speed


def batch(b):
    on = {"program": "batch", "ptx": str(b.scratch / "gather.ptx"), "size": min(b.size, 8 * GIB)}
    for block, goal in ((4096, 20), (512, 3)):
        many = b.most(1000000 * block) // block
        limit = b.run("random", "limit", block=block, count=many, **on)
        us = b.run("random", "us", times=b.args.reps, block=block, count=many, **on)
        each = b.run("random", "each", block=block, count=100000, env={"LD_PRELOAD": str(b.scratch / "libspinio.so")}, **on)
        peer = b.peer("kvikio", threads=1, block=block, count=100000)
        others = f"KvikIO each {rate(peer)}; our pread each {rate(each)}"
        b.row(f"1 M random reads of {block} B, warm, not pinned", f"{goal} GB/s", over(mid(us, "gbps"), goal), limit=rate(limit), peer=others, us=speed(us), ratio=f"{shown(ratio(mid(us, 'gbps'), mid(limit, 'gbps')))} of limit")
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
    many = b.most(1000000 * 4096) // 4096
    on["count"] = many
    limits = {(row, block): b.run(row, "limit", **on, **({"block": block} if block else {})) for row, block in (("hold", 8 * MIB), ("again", 0), ("map", 0), ("random", 4096), ("random", 512))}
    us = b.run("hold", "us", block=8 * MIB, **on)

    def row(what, goal, reach, name, mode, block, peer="", of_limit=False):
        got = b.run(name, mode, times=b.args.reps, **on, **({"block": block} if block else {}))
        limit = limits.get((name, block)) or limits["map", 0]
        r = ratio(mid(got, "gbps"), mid(limit, "gbps"))
        b.row(what, goal, over(r if of_limit else mid(got, "gbps"), reach), limit=rate(limit), peer=peer, us=speed(got), ratio=f"{shown(r)} of limit")

    row("8 MiB in sequence, pinned file", "45 GB/s", 45, "hold", "held", 8 * MIB, peer="not pinned " + rate(us))
    row(f"{on['size'] / GIB:g} GiB repeatedly, pinned file", "0.97 of the limit", 0.97, "again", "held", 0, of_limit=True)
    row("GPU kernel streams the mapping", "0.9 of pinned memory", 0.9, "map", "stream", 0, of_limit=True)
    row("GPU kernel reads 4 KiB of the mapping", "45 GB/s", 45, "map", "random", 0)
    row("1 M random 4 KiB, pinned file", "45 GB/s", 45, "random", "held", 4096)
    row("1 M random 512 B, pinned file", "12 GB/s", 12, "random", "held", 512)
