"""What calls of a CPU program cost, on a mount and on the file system below it. Rates, the best of several passes."""
import ctypes
import os
import random
import sys
import time

MIB = 1 << 20
PAGE = 4096


def sequential(path):
    """GB/s of cached reads of 1 MiB, the best of five passes after a first."""
    buffer, best = bytearray(MIB), 0.0
    fd = os.open(path, os.O_RDONLY)
    for run in range(6):
        begun, at = time.perf_counter(), 0
        while got := os.preadv(fd, [buffer], at):
            at += got
        if run:
            best = max(best, at / (time.perf_counter() - begun) / 1e9)
    os.close(fd)
    return best


def scattered(path, size):
    """Cached reads of 4 KiB a second, the best of five passes."""
    buffer, best = bytearray(PAGE), 0.0
    offsets = [random.randrange(size // PAGE) * PAGE for _ in range(50000)]
    fd = os.open(path, os.O_RDONLY)
    for _ in range(5):
        begun = time.perf_counter()
        for offset in offsets:
            os.preadv(fd, [buffer], offset)
        best = max(best, len(offsets) / (time.perf_counter() - begun))
    os.close(fd)
    return best


def written(directory, size):
    """GB/s of writes of 1 MiB to a new file and fsync, the best of three."""
    block, best = os.urandom(MIB), 0.0
    for _ in range(3):
        begun = time.perf_counter()
        fd = os.open(directory / "new", os.O_RDWR | os.O_CREAT)
        for at in range(0, size, MIB):
            os.pwrite(fd, block, at)
        os.fsync(fd)
        best = max(best, size / (time.perf_counter() - begun) / 1e9)
        os.close(fd)
        os.unlink(directory / "new")
    return best


def names(directory, count=2000):
    """Files a second that are made, asked for and removed; the best of three."""
    best = 0.0
    for _ in range(3):
        begun = time.perf_counter()
        for i in range(count):
            os.close(os.open(directory / f"n{i}", os.O_WRONLY | os.O_CREAT))
        for i in range(count):
            os.stat(directory / f"n{i}")
        for i in range(count):
            os.unlink(directory / f"n{i}")
        best = max(best, count / (time.perf_counter() - begun))
    return best


def cached_pages(fd):
    """Pages of a file in host memory: cachestat(2)."""
    everything, found = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
    if ctypes.CDLL(None).syscall(451, fd, everything, found, 0) != 0:
        sys.exit("cpu_io.py: no cachestat(2)")
    return found[0]


def evict(path, below):
    """Removes a file from host memory: the pages of the mount's file and of the file below."""
    # A program that has just read the file into device memory may have its pages mapped for some seconds.
    give_up = time.monotonic() + 20
    while True:
        for fd in (os.open(path, os.O_RDWR), os.dup(below)):
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
        if cached_pages(below) == 0:
            return
        if time.monotonic() > give_up:
            sys.exit("cpu_io.py: the file stays in host memory")
        time.sleep(0.05)


def cold_reads(path, below, size, count=2000):
    """Reads of 4 KiB a second, and GB/s of reads of 1 MiB, of a file that is not in host memory."""
    # A part for each read, so that none finds what another one has read ahead.
    offsets = [(i * size // count) // PAGE * PAGE for i in range(count)]
    random.shuffle(offsets)
    best = [0.0, 0.0]
    for _ in range(3):
        evict(path, below)
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        os.posix_fadvise(below, 0, 0, os.POSIX_FADV_RANDOM)
        buffer = bytearray(PAGE)
        begun = time.perf_counter()
        for offset in offsets:
            os.preadv(fd, [buffer], offset)
        best[0] = max(best[0], count / (time.perf_counter() - begun))
        os.close(fd)
        evict(path, below)
        fd, at, buffer = os.open(path, os.O_RDONLY), 0, bytearray(MIB)
        begun = time.perf_counter()
        while got := os.preadv(fd, [buffer], at):
            at += got
        best[1] = max(best[1], at / (time.perf_counter() - begun) / 1e9)
        os.close(fd)
    return best
