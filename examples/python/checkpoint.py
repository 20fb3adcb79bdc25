"""Writes checkpoints from device memory to a file that ordinary programs read at once.

    spinio gaia mount DIR
    python3 checkpoint.py DIR/model.ckpt [MIB]

Each checkpoint is a new file, mapped into device memory and overwritten there: nothing is read first. After the release
`sha256sum`, which knows nothing of GPUs, sees every byte. After `sync` the bytes are on storage, and the new file takes
the name of the old one, so that a crash leaves one of the two whole. The release gives the device memory away instead of
copying it (handoff): the program goes on at once, and programs that read the file wait until the bytes are there. The device is the emulated one, a GPU in software.
"""
import hashlib
import os
import random
import subprocess
import sys
import time

from spinio import gaia

STEPS = 3


def train(step, size):
    """Stands for GPU kernels: the parameters after a step."""
    return random.Random(step).randbytes(size)


def checkpoint(path, parameters):
    """Writes one; returns the seconds until programs can read it, and until it is on storage."""
    new = path + ".new"
    begun = time.perf_counter()
    with open(new, "wb") as f:
        f.truncate(len(parameters))  # a map does not extend its file
    with gaia.open(new, "r+") as f, f.map(device="emulated") as m:
        with m.writing(overwrite=True, handoff=True) as memory:
            memory.set(parameters)  # a program with kernels stores here what it has computed
        released = time.perf_counter() - begun
        seen = subprocess.run(["sha256sum", new], capture_output=True, text=True, check=True).stdout.split()[0]
        assert seen == hashlib.sha256(parameters).hexdigest(), "the program saw other bytes"
        m.sync()
        assert m.info()["bytes_from_file"] == 0, "old bytes were fetched"
    os.rename(new, path)
    return released, time.perf_counter() - begun


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    path, size = sys.argv[1], int(sys.argv[2] if len(sys.argv) == 3 else 16) << 20
    for step in range(1, STEPS + 1):
        released, durable = checkpoint(path, train(step, size))
        print(f"step {step}: {size >> 20} MiB, for sha256sum after {released:.2f} s, on storage after {durable:.2f} s")


main()
