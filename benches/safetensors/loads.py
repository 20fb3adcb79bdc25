#!/usr/bin/env python3
"""Loads one safetensors file into a GPU with several libraries, in one run, and compares them.

    loads.py [--gib 4] [--tensors 32] [--times 5] [--pause 0.05] [--scratch DIR] [--wheels DIR] [--out FILE] [--only NAME,NAME]

Needs PyTorch and a GPU, and `spinio` (its wheel may be in --wheels, as may fastsafetensors'). Rows:

    pinned           one cudaMemcpy of the same number of bytes from pinned memory: the limit of the machine
    safetensors      safetensors.torch.load_file(path, device="cuda")
    fastsafetensors  fastsafe_open(path, device="cuda:0", nogds=True) and every tensor of it
    spinio           spinio.safetensors.load_file(path, device="cuda")
    spinio-held      as spinio, of a pinned file: registered before the clock starts, once for all loads
    spinio-pread     one File.pread of the whole file, from its first byte, into one tensor: shows the cost of the header's odd size
    spinio-each      spinio.safetensors.safe_open, and every tensor into memory of its own

Each row runs in a process of its own. The CUDA context exists before the clock starts; the clock stops when the GPU has
finished. `first` is the process's first load: it includes cudaMalloc, pinned bounce buffers and all other one-time set-up
of the library. `again` is the median of the later loads, each a pause (--pause) after the tensors of the previous load
were freed, so PyTorch has the memory ready. `at once` is the same without the pause: spinio must then first unregister
the pages of the previous load, which it otherwise does during the pause. The file is in the page cache
(read once before every row). CPU time is user + system of the process, including the pause. Every row compares its tensors
with those of the safetensors library, on the GPU, afterwards.
"""

import argparse
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

ROWS = ["pinned", "safetensors", "fastsafetensors", "spinio", "spinio-held", "spinio-pread", "spinio-each"]


def cpu():
    u = resource.getrusage(resource.RUSAGE_SELF)
    return u.ru_utime + u.ru_stime


# ---- one row, in a process of its own


def pinned(path):
    import torch

    host = torch.empty(os.path.getsize(path), dtype=torch.uint8, pin_memory=True)
    host.zero_()
    return lambda: {"all": torch.empty_like(host, device="cuda").copy_(host, non_blocking=True)}, None


def safetensors(path):
    import safetensors as library
    from safetensors.torch import load_file

    return lambda: load_file(path, device="cuda"), library.__version__


def fastsafetensors(path):
    from importlib.metadata import version

    from fastsafetensors import fastsafe_open

    def load():
        with fastsafe_open(path, device="cuda:0", nogds=True) as f:
            return {name: f.get_tensor(name) for name in f.keys()}

    return load, version("fastsafetensors")


def spinio(path):
    import spinio as library
    from spinio.safetensors import load_file

    return lambda: load_file(path, device="cuda", library="torch"), library.__version__


def spinio_held(path):
    import spinio as library
    import torch

    load, version = spinio(path)
    file = library.open(path)
    pinned = file.pin(torch.zeros(1, device="cuda"))

    def checked():
        loaded = load()
        assert pinned.is_pinned
        return loaded

    return checked, version


def spinio_pread(path):
    import spinio as library
    import torch

    def load():
        whole = torch.empty(os.path.getsize(path), dtype=torch.uint8, device="cuda")
        with library.open(path) as f:
            assert f.pread(whole, 0) == whole.nbytes
        return {"all": whole}

    return load, library.__version__


def spinio_each(path):
    import spinio as library
    from spinio.safetensors import safe_open

    def load():
        with safe_open(path, device="cuda", library="torch") as f:
            return {name: f.get_tensor(name) for name in f.keys()}

    return load, library.__version__


def row(name, path, times, pause):
    import torch

    torch.zeros(1, device="cuda")
    load, version = globals()[name.replace("-", "_")](path)
    size = os.path.getsize(path)
    loads = [0.0] + [pause] * times + [0.0] * times
    taken = []
    for after in [*loads[1:], 0.0]:
        torch.cuda.synchronize()
        c0, t0 = cpu(), time.monotonic()
        loaded = load()
        torch.cuda.synchronize()
        seconds = time.monotonic() - t0
        if len(taken) < len(loads) - 1:
            del loaded
        time.sleep(after)
        taken.append({"seconds": seconds, "cpu": cpu() - c0})
    right = None
    if name == "spinio-pread":
        whole = torch.frombuffer(bytearray(pathlib.Path(path).read_bytes()), dtype=torch.uint8)
        right = bool(torch.equal(loaded["all"].cpu(), whole))
    elif name != "pinned":
        from safetensors import safe_open

        with safe_open(path, framework="pt", device="cuda") as f:
            wanted = set(f.keys())
            bits = torch.int16  # bits, not values: a NaN does not equal itself
            right = wanted == set(loaded) and all(torch.equal(loaded[k].view(bits), f.get_tensor(k).view(bits)) for k in wanted)
    again, at_once = taken[1 : 1 + times], taken[1 + times :]
    middle, hurried = (statistics.median(t["seconds"] for t in part) for part in (again, at_once))
    said = {"row": name, "version": version, "bytes": size, "right": right, "times": taken}
    said |= {"first_gbps": size / 1e9 / taken[0]["seconds"], "gbps": size / 1e9 / middle, "best_gbps": size / 1e9 / min(t["seconds"] for t in again)}
    said |= {"pause": pause, "at_once_gbps": size / 1e9 / hurried}
    said["cpu_per_gb"] = statistics.median(t["cpu"] for t in again) / (size / 1e9)
    if name.startswith("spinio"):
        import spinio as library

        said["routes"] = library.stats()["routes"]
    print(json.dumps(said), flush=True)


# ---- all of them


def make(path, size, count):
    """`count` tensors of bfloat16, in shapes of a model's weights."""
    import torch
    from safetensors.torch import save_file

    width = 4096
    rows = max(1, size // count // 2 // width)
    # Random numbers are the slowest part here: drawn once; the tensors still differ.
    drawn = torch.randint(-1000, 1000, (rows, width), dtype=torch.int16)
    tensors = {f"layers.{i}.weight": (drawn + i).view(torch.bfloat16) for i in range(count)}
    save_file(tensors, path)


def warm(path):
    with open(path, "rb", buffering=0) as f:
        buffer = bytearray(16 << 20)
        while f.readinto(buffer):
            pass


def install(wheels, site):
    found = sorted(map(str, pathlib.Path(wheels).glob("*.whl")))
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--target", site]
    return subprocess.run(pip + found, capture_output=True, text=True).returncode == 0 if found else False


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4)
    parser.add_argument("--tensors", type=int, default=32)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.05, help="seconds between two loads")
    parser.add_argument("--scratch", default=None)
    parser.add_argument("--wheels", default=None)
    parser.add_argument("--out", default=None)
    parser.add_argument("--only", default=",".join(ROWS))
    parser.add_argument("--row", nargs=2, metavar=("NAME", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        return row(*args.row, args.times, args.pause)

    with tempfile.TemporaryDirectory(prefix="spinio-safetensors.", dir=args.scratch) as scratch:
        env = dict(os.environ)
        if args.wheels and install(args.wheels, scratch + "/site"):
            env["PYTHONPATH"] = scratch + "/site" + os.pathsep + env.get("PYTHONPATH", "")
        path = scratch + "/model.safetensors"
        make(path, int(args.gib * (1 << 30)), args.tensors)
        results = []
        for name in args.only.split(","):
            warm(path)
            command = [sys.executable, os.path.abspath(__file__), "--times", str(args.times), "--pause", str(args.pause), "--row", name, path]
            try:
                done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
                lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
                one = json.loads(lines[-1]) if lines and not done.returncode else None
                why = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
            except subprocess.TimeoutExpired:
                one, why = None, "timed out"
            results.append(one or {"row": name, "skipped": why})
        show(results)
        if args.out:
            pathlib.Path(args.out).write_text(json.dumps(results, indent=1))
        # A peer may be missing; SPIN's rows may not.
        wrong = [r for r in results if r.get("right") is False or ("skipped" in r and r["row"].startswith("spinio"))]
        return 1 if wrong else 0


def show(results):
    speed = {r["row"]: r.get("gbps") for r in results}
    size = next((r["bytes"] for r in results if "bytes" in r), 0)
    print(f"{size / 1e9:.2f} GB, warm")
    print(f"{'':<18}{'again':>12}{'at once':>12}{'first':>12}{'CPU s/GB':>10}{'limit':>8}{'safet.':>8}{'fast':>8}  tensors")
    for r in results:
        if "skipped" in r:
            print(f"{r['row']:<18}not measured: {r['skipped']}")
            continue
        ratios = "".join(f"{r['gbps'] / speed[k]:>8.2f}" if speed.get(k) else f"{'-':>8}" for k in ("pinned", "safetensors", "fastsafetensors"))
        right = {True: "right", False: "WRONG", None: ""}[r["right"]]
        print(f"{r['row']:<18}{r['gbps']:>7.2f} GB/s{r['at_once_gbps']:>7.2f} GB/s{r['first_gbps']:>7.2f} GB/s{r['cpu_per_gb']:>10.3f}{ratios}  {right}")


if __name__ == "__main__":
    sys.exit(main())
