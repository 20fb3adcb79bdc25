"""Counts bytes of a file in device memory, while CPU programs use the same file.

    spinio gaia mount DIR
    head -c 4096 /dev/zero > DIR/counters
    python3 gaia.py DIR/counters

Every run adds 1 to the even bytes of the file. The odd bytes belong to other programs, which may change them at any
time with write() or mmap: no change is lost. The device is the emulated one, a GPU in software.
"""
import errno
import mmap
import sys

from spinio import gaia


def increment(memory):
    """Stands for a GPU kernel: adds 1 to each even byte of device memory."""
    counters = bytearray(memory.tobytes())
    counters[::2] = bytes((n + 1) % 256 for n in counters[::2])
    memory.set(counters)


def epoch(m):
    """Runs the kernel once. If the server is restarted meanwhile, nothing was published, and all is done again."""
    while True:
        try:
            with m.writing() as memory:
                increment(memory)
            return
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    with gaia.open(sys.argv[1], "r+") as f, f.map(device="emulated") as m:
        with mmap.mmap(f.fileno(), 0) as cpu:  # as any CPU program
            before = cpu[0]
            cpu[1] = (cpu[1] + 1) % 256  # seen by the epoch, since it was stored before
            epoch(m)
            print(f"byte 0 was {before}, and the CPU reads {cpu[0]} through a mapping that it had before")
        info = m.info()
        print(f"{info['bytes_published']} bytes of {info['pages_committed']} pages were published")


main()
