#!/usr/bin/env python3
"""One model file on one GPU, loaded by several processes: `load_file(shared=True)` beside `load_file`.

    benches/gaia/shared.py [--size MIB] [--scratch DIR]

with the module `spinio` and PyTorch for CUDA, and `spinio` in PATH or in SPINIO_COMMAND. Starts a daemon of its own.
Prints the seconds of each load in a process that has PyTorch and CUDA started, and the GPU memory in use after it:
each process has a CUDA context besides. Every tensor's words are added up and compared. Then the first process is
killed, and a program writes to the file. On a machine with two GPUs the second one fills from the first, beside a bare
copy of as many bytes between the two, and the read of the file. Exit status 1: bytes were wrong, or memory was not shared.
"""
import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

TENSORS = 32

LOAD = """
import json, sys, time, torch
device = sys.argv[3]
torch.zeros(1, device=device)
torch.cuda.synchronize(device)
from spinio.safetensors import load_file
begun = time.perf_counter()
tensors = load_file(sys.argv[1], device=device, shared=sys.argv[2] == "shared")
torch.cuda.synchronize(device)
seconds = time.perf_counter() - begun
sums = {name: int(tensor.view(torch.int64).sum().item()) for name, tensor in tensors.items()}
print(json.dumps({"seconds": seconds, "sums": sums}), flush=True)
sys.stdin.readline()
"""


PEER_COPY = """
import sys, time, torch
source = torch.ones(int(sys.argv[1]) << 20, dtype=torch.uint8, device="cuda:0")
target = torch.empty_like(source, device="cuda:1")
for _ in range(3):
    torch.cuda.synchronize(0), torch.cuda.synchronize(1)
    begun = time.perf_counter()
    target.copy_(source)
    torch.cuda.synchronize(0), torch.cuda.synchronize(1)
    seconds = time.perf_counter() - begun
print(seconds)
"""


class Process:
    """A process that has loaded the file, and keeps it until it ends."""

    def __init__(self, path, kind, device="cuda:0"):
        words = [sys.executable, "-c", LOAD, path, kind, device]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"shared.py: a process could not load {path}")
        found = json.loads(line)
        self.seconds, self.sums = found["seconds"], found["sums"]

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def used():
    """MiB of the first GPU in use, once that has not changed for a moment."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    before, now = None, -1
    while before != now:
        time.sleep(0.3)
        before, now = now, int(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0])
    return now


def create(path, mib):
    size = (mib << 20) // TENSORS // 8 * 8
    header, at = {}, 0
    for number in range(TENSORS):
        header[f"t{number}"] = {"dtype": "F32", "shape": [size // 4], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    block = bytearray(os.urandom(size))
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for number in range(TENSORS):
            block[:8] = number.to_bytes(8, "little")
            file.write(block)


def row(work, seconds, note=""):
    print(f"{work:<44}{seconds * 1000:>10.1f} ms{used():>10} MiB  {note}", flush=True)


def measure(command, path, mib):
    print(f"{'work':<44}{'time':>13}{'GPU memory':>14}")
    plain = Process(path, "plain")
    row(f"load_file of {mib} MiB", plain.seconds, "a copy of its own")
    plain.end()
    all, right = [], True
    for number in range(3):
        all.append(Process(path, "shared"))
        right &= all[-1].sums == plain.sums
        row(f"load_file(shared=True), process {number + 1}", all[-1].seconds)
    shares = used() < 2 * mib
    all[0].process.kill()
    all[0].process.wait()
    all.append(Process(path, "shared"))
    right &= all[-1].sums == plain.sums
    row("the first process killed, one more", all[-1].seconds)
    begun = time.perf_counter()
    with open(path, "r+b", buffering=0) as file:
        opened = time.perf_counter() - begun
        os.pwrite(file.fileno(), b"\x55" * 8, (mib << 20) // 2)
    row("a program opens the file for writing", opened)
    all.append(Process(path, "shared"))
    right &= all[-1].sums != plain.sums
    row("after the write, one more", all[-1].seconds)
    for process in all[1:]:
        process.end()
    subprocess.run([command, "gaia", "drop"], check=True, stdout=subprocess.DEVNULL)
    begun = time.perf_counter()
    subprocess.run([command, "gaia", "cache", path], check=True, stdout=subprocess.DEVNULL)
    row("spinio gaia cache, the whole command", time.perf_counter() - begun)
    last = Process(path, "shared")
    row("the first process after it", last.seconds)
    if second_gpu():
        right &= measure_second_gpu(command, path, mib, last)
    last.end()
    print(f"every tensor {'right' if right else 'WRONG'}; memory {'shared' if shares else 'NOT SHARED'}")
    return right and shares


def second_gpu():
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    if listed.count("GPU ") >= 2:
        return True
    print("skipped: this machine has one GPU, and the second one would fill from the first")
    return False


def measure_second_gpu(command, path, mib, first):
    """The file on a second GPU, while `first` has it on the first one."""
    bare = subprocess.run([sys.executable, "-c", PEER_COPY, str(mib)], capture_output=True, text=True, check=True)
    row(f"a bare copy of {mib} MiB between two GPUs", float(bare.stdout), "torch")
    other = Process(path, "shared", "cuda:1")
    right = other.sums == first.sums
    status = subprocess.run([command, "gaia", "status", "--json"], capture_output=True, text=True, check=True).stdout
    peer = sum(file.get("bytes_from_peer", 0) for found in json.loads(status) for file in found["files"])
    row("load_file(shared=True) on the second GPU", other.seconds, f"{peer >> 20} MiB from the first")
    other.end()
    plain = Process(path, "plain", "cuda:1")
    row("load_file on the second GPU", plain.seconds, "the file")
    plain.end()
    return right and plain.sums == first.sums


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4096, metavar="MIB", help="of the file")
    parser.add_argument("--scratch", type=pathlib.Path, help="a directory on a disk [default: a temporary one]")
    options = parser.parse_args()
    command = os.environ.get("SPINIO_COMMAND") or shutil.which("spinio")
    if not command:
        sys.exit("shared.py: there is no command `spinio`: set SPINIO_COMMAND")
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        os.environ["SPINIO_GAIA_SOCKET"] = f"{scratch}/serve.sock"
        path = f"{scratch}/model.safetensors"
        create(path, options.size)
        subprocess.run([command, "gaia", "serve"], check=True)
        try:
            right = measure(command, path, options.size)
        finally:
            subprocess.run([command, "gaia", "serve", "--stop"], check=False)
    sys.exit(not right)


if __name__ == "__main__":
    main()
