#!/usr/bin/env python3
"""Reads into memory of PyTorch and CuPy with plain pread, under LD_PRELOAD=libspinio.so.

    frameworks.py SCRATCH

Each case runs in a process of its own. Cases of a missing framework are skipped with a message.
"""

import ctypes
import os
import subprocess
import sys

SIZE = 48 << 20
libc = ctypes.CDLL(None, use_errno=True)
libc.pread.restype = ctypes.c_ssize_t
libc.pread.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64]


def noise():
    return (b"spinio" + bytes(range(251))) * (SIZE // 257 + 1)


def opened():
    fd = os.open(os.path.join(sys.argv[1], "frameworks.data"), os.O_RDONLY)
    return fd, noise()[:SIZE]


def pread(fd, pointer, size, offset):
    n = libc.pread(fd, pointer, size, offset)
    if n != size:
        libc.spinio_last_error.restype = ctypes.c_char_p
        raise AssertionError(f"pread of {size} at {offset} returned {n}, errno {ctypes.get_errno()}: {libc.spinio_last_error().decode()}")


def check_torch(tensor, fd, data):
    import torch

    for size, at, offset in ((1, 5, 9), (4096, 0, 0), (65536, 100, 4096), (1 << 20, 7, 12345), (20 << 20, 512, 1 << 20)):
        tensor.fill_(0xEE)
        pread(fd, tensor.data_ptr() + at, size, offset)
        now = tensor.cpu().numpy().tobytes()
        assert now[at : at + size] == data[offset : offset + size], f"wrong bytes, {size}"
        assert set(now[:at]) | set(now[at + size :]) <= {0xEE}, f"bytes around changed, {size}"
    torch.cuda.synchronize()


def torch_caching_allocator():
    import torch

    fd, data = opened()
    for _ in range(4):
        tensor = torch.empty(24 << 20, dtype=torch.uint8, device="cuda")
        check_torch(tensor, fd, data)
        del tensor


def torch_expandable_segments():
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    torch_caching_allocator()


def torch_async_allocator():
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "backend:cudaMallocAsync"
    os.environ["PYTORCH_ALLOC_CONF"] = "backend:cudaMallocAsync"
    torch_caching_allocator()


def torch_order_with_kernels():
    import torch

    fd, data = opened()
    want = torch.frombuffer(bytearray(data[: 16 << 20]), dtype=torch.uint8)
    weight = torch.randn(4096, 4096, device="cuda")
    tensor = torch.empty(16 << 20, dtype=torch.uint8, device="cuda")
    for size in (4096, 65536, 16 << 20) * 5:
        for _ in range(20):
            weight = (weight @ weight).clamp_(-1, 1)
        tensor.fill_(1)  # after some milliseconds of work
        pread(fd, tensor.data_ptr(), size, 0)
        double = tensor[:size].to(torch.int16) * 2
        assert torch.equal(double.cpu(), want[:size].to(torch.int16) * 2), f"order, {size}"


def torch_graph_capture():
    import torch

    fd, data = opened()
    x = torch.ones(1 << 20, device="cuda")
    tensor = torch.zeros(24 << 20, dtype=torch.uint8, device="cuda")
    y = x * 2 + 1
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2 + 1
        for size in (4096, 65536, 20 << 20):
            pread(fd, tensor.data_ptr(), size, 0)
        y = y * 3
    x.fill_(2)
    graph.replay()
    torch.cuda.synchronize()
    assert float(y[0]) == 15, f"the graph computed {float(y[0])}"
    assert tensor.cpu().numpy().tobytes()[: 20 << 20] == data[: 20 << 20]


def torch_dataloader_workers():
    """Workers are forked from a process that uses CUDA; they read host memory."""
    import torch

    fd, data = opened()
    tensor = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    pread(fd, tensor.data_ptr(), 1 << 20, 0)

    class Files(torch.utils.data.Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, i):
            host = bytearray(100000)
            assert os.preadv(fd, [host], i * 1000) == 100000
            return bytes(host) == data[i * 1000 : i * 1000 + 100000]

    assert all(bool(v) for v in torch.utils.data.DataLoader(Files(), num_workers=4, batch_size=None))
    pread(fd, tensor.data_ptr(), 1 << 20, 5)
    assert tensor.cpu().numpy().tobytes() == data[5 : 5 + (1 << 20)]


def check_cupy():
    import cupy

    fd, data = opened()
    for size in (1, 4096, 65537, 1 << 20, 20 << 20) * 2:
        array = cupy.full(size + 200, 0xEE, dtype=cupy.uint8)
        pread(fd, array.data.ptr + 100, size, 321)
        now = array.get().tobytes()
        assert now[100:-100] == data[321 : 321 + size] and set(now[:100] + now[-100:]) == {0xEE}, f"wrong bytes, {size}"


def cupy_default_pool():
    check_cupy()


def cupy_async_pool():
    import cupy

    cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool().malloc)
    check_cupy()


def cupy_managed():
    import cupy

    cupy.cuda.set_allocator(cupy.cuda.malloc_managed)
    check_cupy()


CASES = [torch_caching_allocator, torch_expandable_segments, torch_async_allocator, torch_order_with_kernels, torch_graph_capture, torch_dataloader_workers, cupy_default_pool, cupy_async_pool, cupy_managed]


def main():
    if len(sys.argv) == 3:
        next(c for c in CASES if c.__name__ == sys.argv[2])()
        return 0
    with open(os.path.join(sys.argv[1], "frameworks.data"), "wb") as f:
        f.write(noise()[:SIZE])
    failures = 0
    for case in CASES:
        framework = case.__name__.split("_")[0]
        have = subprocess.run([sys.executable, "-c", f"import importlib.util as u, sys; sys.exit(u.find_spec('{framework}') is None)"])
        if have.returncode:
            print(f"skip  {case.__name__}: no {framework} here", flush=True)
            continue
        try:
            done = subprocess.run([sys.executable, __file__, sys.argv[1], case.__name__], capture_output=True, text=True, timeout=120)
            good, why = done.returncode == 0, (done.stderr.strip() or f"status {done.returncode}")[-600:]
        except subprocess.TimeoutExpired:
            good, why = False, "hung"
        print(f"ok    {case.__name__}" if good else f"FAIL  {case.__name__}\n    " + why.replace("\n", "\n    "), flush=True)
        failures += not good
    print(f"{len(CASES)} cases, {failures} failures")
    return failures


if __name__ == "__main__":
    sys.exit(main())
