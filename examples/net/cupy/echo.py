"""An echo server on a GPU, with CuPy: each block serves a connection after the other. `python echo.py`, and `nc 127.0.0.1 7007`."""

import contextlib
import sys

import cupy
import spinio

SOURCE = r"""
#include <spinio/net.h>
using namespace spinio;

extern "C" __global__ void echo(net::Handle handle, int listener)
{
    __shared__ char buffer[4096];
    for (int s; (s = net::accept(net::block(), handle, listener)) >= 0; net::close(net::block(), handle, s))
        for (long long got; (got = net::recv(net::block(), handle, s, buffer, sizeof buffer)) > 0;)
            net::send(net::block(), handle, s, buffer, got);
}
"""

echo = cupy.RawModule(code=SOURCE, options=("-std=c++17", "-I" + spinio.include())).get_function("echo")
with spinio.net.open() as net:  # its end stops the kernel and waits for the stream
    listener = net.listen(sys.argv[1] if len(sys.argv) > 1 else "tcp://127.0.0.1:7007")
    with net.runs_on(cupy.cuda.Stream(non_blocking=True)):  # work on the default stream would wait for the server
        echo((4,), (128,), (net.handle.numpy(), cupy.int32(listener)))  # 4 blocks: all run at the same time
    print(f"listening on {net.address(listener)}; Ctrl-C ends it", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        net.wait()
    print(f"{net.stats()['accepted']} connections, {net.stats()['bytes_sent']} bytes through Linux")
