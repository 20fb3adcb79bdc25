"""The part of CuPy that examples/net/cupy uses, on the emulated GPU: test_net_cupy.py runs the example with it as `cupy`.

RawModule compiles the source by the C++ compiler in place of NVRTC, with the same options. As CuPy does, a launch passes each
argument by the address of its bytes. As NVRTC does, the compilation leaves SA_RESTART at the handler of SIGINT.
"""

from __future__ import annotations

import ctypes
import signal
import subprocess
import tempfile

from numpy import asarray, int32  # noqa: F401
from spinio import emulated

_LAUNCH = """
extern "C" int launch(cudaStream_t stream, unsigned grid, unsigned block, void **arguments)
{
    launch_resident_on(stream, echo, grid, block, *static_cast<net::Handle *>(arguments[0]), *static_cast<int *>(arguments[1]));
    return cudaGetLastError();
}
"""


class _Stream(emulated.Stream):
    current = None

    def __init__(self, *, non_blocking):
        assert non_blocking, "a server needs a non-blocking stream"
        super().__init__()

    def __enter__(self):
        _Stream.current = self
        return self

    def __exit__(self, *_):
        _Stream.current = None


class cuda:
    Stream = _Stream


class RawModule:
    def __init__(self, *, code, options):
        with tempfile.TemporaryDirectory() as folder:
            words = ["c++", *options, "-O1", "-shared", "-fPIC", "-pthread", "-x", "c++", "-", "-o", f"{folder}/module.so"]
            subprocess.run(words, input=code + _LAUNCH, text=True, check=True)
            self._module = ctypes.CDLL(f"{folder}/module.so")
        signal.siginterrupt(signal.SIGINT, False)

    def get_function(self, name):
        assert name == "echo"

        def launch(grid, block, arguments):
            arrays = [asarray(a) for a in arguments]
            addresses = (ctypes.c_void_p * len(arrays))(*(a.ctypes.data for a in arrays))
            stream = ctypes.c_void_p(_Stream.current.handle)
            error = self._module.launch(stream, ctypes.c_uint(*grid), ctypes.c_uint(*block), addresses)
            assert error == 0, f"CUDA error {error}"

        return launch
