"""Reads a file into device memory with libc's pread, from Python.

    spinio run --stats -- python3 read.py FILE

The memory is PyTorch's if it has a GPU, else SPIN's software GPU.
"""
import ctypes
import os
import sys

libc = ctypes.CDLL(None, use_errno=True)  # the symbols of this process: libc's, and under `spinio run` SPIN's
libc.pread.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64]
libc.pread.restype = ctypes.c_ssize_t


def device_memory(size):
    """An address on a device, and a function that copies it back to the host."""
    try:
        import torch

        if torch.cuda.is_available():
            tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
            return tensor.data_ptr(), lambda: tensor.cpu().numpy().tobytes()
    except ImportError:
        pass
    if not hasattr(libc, "spinio_mem_alloc"):
        sys.exit("no CUDA tensor to read into, and SPIN is not loaded: start this with `spinio run -- python3 read.py FILE`")
    libc.spinio_mem_alloc.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint]
    libc.spinio_mem_alloc.restype = ctypes.c_void_p
    libc.spinio_mem_copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    address, back = libc.spinio_mem_alloc(b"emulated", size, 0), ctypes.create_string_buffer(size)
    return address, lambda: (libc.spinio_mem_copy(back, address, size), back.raw)[1]


if len(sys.argv) != 2:
    sys.exit(__doc__)
fd = os.open(sys.argv[1], os.O_RDONLY)
size = os.fstat(fd).st_size
address, copy_back = device_memory(size)
got = libc.pread(fd, address, size, 0)
if got < 0:
    sys.exit(f"pread: {os.strerror(ctypes.get_errno())}")
with open(sys.argv[1], "rb") as plain:
    print(f"{got} bytes are on the device; equal to the file: {copy_back() == plain.read()}")
