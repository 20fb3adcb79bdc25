#!/usr/bin/env python3
"""One peer, one measurement: prints a line of JSON.

    peers.py kvikio FILE [threads=16] [block=0] [total=0]     KvikIO; block 0: the whole file in one call
    peers.py kvikio_write FILE [threads=1] [block=8388608] [total=2147483648]   the same, a file FILE.kvikio written
    peers.py kvikio FILE threads=1 block=4096 count=100000    `count` random reads, one call each
    peers.py safetensors FILE [size=4294967296]               safetensors.torch.load_file of a file of that size

CPU time is user + system of the whole process. Contexts spin (CUDA's default).
"""

import json
import os
import resource
import sys
import time


def cpu():
    u = resource.getrusage(resource.RUSAGE_SELF)
    return u.ru_utime + u.ru_stime


def say(row, mode, size, seconds, used, **more):
    gb = size / 1e9
    print(json.dumps({"row": row, "mode": mode, "bytes": size, "seconds": seconds, "gbps": gb / seconds, "cpu": used, "cpu_per_gb": used / gb} | more), flush=True)


def kvikio(path, threads=16, block=0, total=0, count=0):
    os.environ["KVIKIO_COMPAT_MODE"] = "ON"  # no GPUDirect Storage here; KvikIO would choose this itself after a probe
    os.environ["KVIKIO_NTHREADS"] = str(threads)
    import cupy
    import kvikio as k

    size = os.path.getsize(path)
    room = block or size
    buffer = cupy.empty(room, dtype=cupy.uint8)
    buffer.fill(0)
    f = k.CuFile(path, "r")
    warm = min(room, 64 << 20)
    if not os.environ.get("PEER_COLD"):
        f.pread(buffer[:warm], warm, 0).get()
    cupy.cuda.runtime.deviceSynchronize()
    total = min(total or size, size)
    c0, t0 = cpu(), time.monotonic()
    if count:
        import random

        chosen = [random.randrange(size // block) * block for _ in range(count)]
        t0 = time.monotonic()
        done = sum(f.pread(buffer, block, at).get() for at in chosen)
    elif block:
        done = 0
        while done + block <= total:
            done += f.pread(buffer, block, done).get()
    else:
        done = f.pread(buffer, size, 0).get()
    cupy.cuda.runtime.deviceSynchronize()
    t, c = time.monotonic() - t0, cpu() - c0
    with open(path, "rb") as g:
        last = chosen[-1] if count else done - room
        g.seek(max(last, 0))
        right = bytes(buffer[:4096].get()) == g.read(4096)
    say("kvikio", f"x{threads}", done, t, c, block=block, right=right, task=os.environ.get("KVIKIO_TASK_SIZE"), version=getattr(k, "__version__", "?"))


def kvikio_write(path, threads=1, block=8 << 20, total=2 << 30):
    os.environ["KVIKIO_COMPAT_MODE"] = "ON"
    os.environ["KVIKIO_NTHREADS"] = str(threads)
    import cupy
    import kvikio as k

    name = path + ".kvikio"
    buffer = cupy.arange(block // 8, dtype=cupy.uint64).view(cupy.uint8)
    try:
        f = k.CuFile(name, "w")
        for _ in range(8):
            f.pwrite(buffer, block, 0).get()
        os.truncate(name, 0)
        cupy.cuda.runtime.deviceSynchronize()
        c0, t0 = cpu(), time.monotonic()
        done = 0
        while done < total:
            done += f.pwrite(buffer, block, done).get()
        t, c = time.monotonic() - t0, cpu() - c0
        f.close()
        with open(name, "rb") as g:
            g.seek(total - block)
            right = g.read(4096) == bytes(buffer[:4096].get())
        say("kvikio_write", f"x{threads}", done, t, c, block=block, right=right, version=getattr(k, "__version__", "?"))
    finally:
        os.unlink(name)


def safetensors(path, size=4 << 30):
    import torch
    from safetensors.torch import load_file, save_file

    name = path + ".safetensors"
    count = 32
    parts = {f"t{i}": torch.arange(i, i + size // count // 8).view(torch.uint8) for i in range(count)}
    save_file(parts, name)
    del parts
    try:
        torch.zeros(1, device="cuda")
        load_file(name, device="cuda")  # warm, and the allocator already has its memory
        torch.cuda.synchronize()
        for _ in range(2):
            c0, t0 = cpu(), time.monotonic()
            loaded = load_file(name, device="cuda")
            torch.cuda.synchronize()
            t, c = time.monotonic() - t0, cpu() - c0
            say("safetensors", "load_file", size, t, c)
            del loaded
    finally:
        os.unlink(name)


if __name__ == "__main__":
    values = {k: int(v) for k, v in (a.split("=") for a in sys.argv[3:])}
    {"kvikio": kvikio, "kvikio_write": kvikio_write, "safetensors": safetensors}[sys.argv[1]](sys.argv[2], **values)
