#!/usr/bin/env python3
"""grpcio, the gRPC of Python, as a peer, for the row `grpc` of gpunet.cu: messages between two processes.

    grpc_peer.py [--seconds S]     prints a line of JSON for each result, as gpunet.cu does

      this process ── TCP or UNIX ── grpc_peer.py --serve       a process each, since Python runs one thread at a time
        unary: a call for each message; stream: one call, a message there and back at a time
        one way: a stream of messages, of which the server tells the number at its end

The calls are generic ones of bytes, without protocol buffers. Each message runs Python code in both processes, and is handed from thread
to thread by grpcio: all of that is in the figures, so they are no measure of gRPC's protocol. grpc_peer.cpp is the same with gRPC for C++,
and also has a GPU on the way. Bytes are compared in each round trip.
"""

import argparse
import json
import os
import queue
import resource
import subprocess
import sys
import time
from concurrent import futures

import grpc

MESSAGE = 64
SERVICE = "spinio.Peer"
# Longer than any call takes here: a server that does not answer is an error.
LIMIT = 20


def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def serve(address):
    """Serves until its standard input ends, which is when the process that started it does."""
    unary = grpc.unary_unary_rpc_method_handler
    methods = {
        "unary": unary(lambda message, _: message),
        "stream": grpc.stream_stream_rpc_method_handler(lambda messages, _: messages),
        "take": grpc.stream_unary_rpc_method_handler(lambda messages, _: str(sum(map(len, messages))).encode()),
        "cpu": unary(lambda *_: str(cpu()).encode()),
    }
    server = grpc.server(futures.ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    port = server.add_insecure_port(address)
    server.start()
    print(port, flush=True)
    sys.stdin.read()
    os._exit(0)


class Server:
    """A process that serves, and a channel to it."""

    def __init__(self, inet):
        address = "127.0.0.1:0" if inet else f"unix-abstract:spinio-bench-grpc-{os.getpid()}"
        command = [sys.executable, os.path.abspath(__file__), "--serve", address]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        port = self.process.stdout.readline().strip().decode()
        if not port:
            raise RuntimeError("the server did not start")
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}" if inet else address)
        grpc.channel_ready_future(self.channel).result(LIMIT)

    def cpu(self):
        return cpu() + float(self.channel.unary_unary(f"/{SERVICE}/cpu")(b"", timeout=LIMIT))

    def close(self):
        self.channel.close()
        self.process.stdin.close()
        self.process.wait(LIMIT)


class Stream:
    """One call with a message there and back at a time."""

    def __init__(self, channel):
        self.to_send = queue.SimpleQueue()
        self.answers = channel.stream_stream(f"/{SERVICE}/stream")(iter(self.to_send.get, None), timeout=LIMIT)

    def __call__(self, message):
        self.to_send.put(message)
        return next(self.answers)

    def close(self):
        self.to_send.put(None)
        for _ in self.answers:
            pass


def round_trips(call, seconds):
    """Microseconds of each."""
    times, message, end = [], bytearray(b"a" * MESSAGE), time.perf_counter() + seconds
    while (begun := time.perf_counter()) < end:
        message[0] = (message[0] + 1) % 256
        sent = bytes(message)
        if call(sent) != sent:
            raise RuntimeError("an echo with wrong bytes")
        times.append((time.perf_counter() - begun) * 1e6)
    return times


def result(what, **numbers):
    row = {"row": "grpc", "what": f"peer: gRPC (grpcio {grpc.__version__}, Python), CPU to CPU, {what}"}
    for name, value in numbers.items():
        row[name] = value if isinstance(value, int) else float(f"{value:.6g}")
    print(json.dumps(row), flush=True)


def latency(server, kind, seconds, where):
    if kind == "unary":
        method = server.channel.unary_unary(f"/{SERVICE}/unary")
        call, close = (lambda message: method(message, timeout=LIMIT)), (lambda: None)
    else:
        call = Stream(server.channel)
        close = call.close
    call(b"a" * MESSAGE)
    used = server.cpu()
    times = round_trips(call, seconds)
    used = server.cpu() - used
    close()
    all_of_them = len(times)
    # The first ones find cold caches, as in gpunet.cu.
    del times[: min(len(times) // 10, 100)]
    times.sort()
    at = {f"p{name}_us": times[min(len(times) - 1, int(len(times) * part))] for name, part in (("50", 0.5), ("99", 0.99), ("999", 0.999))}
    result(f"{where}, {kind}, {MESSAGE} bytes", **at, count=len(times), process_us_a_message=used * 1e6 / all_of_them)


def one_way(server, size, seconds, where):
    message, sent = b"a" * size, 0

    def messages():
        nonlocal sent
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            sent += size
            yield message

    used, begun = server.cpu(), time.perf_counter()
    taken = int(server.channel.stream_unary(f"/{SERVICE}/take")(messages(), timeout=LIMIT))
    elapsed, used = time.perf_counter() - begun, server.cpu() - used
    if taken != sent:
        raise RuntimeError("a stream that lost bytes")
    result(f"{where}, one way, messages of {size >> 10} KiB", GB_s=sent / elapsed * 1e-9, process_s_a_GB=used / sent * 1e9)


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--seconds", type=float, default=0.5)
    options.add_argument("--serve")
    options = options.parse_args()
    if options.serve:
        serve(options.serve)
    for inet in (False, True):
        server, where = Server(inet), "TCP" if inet else "UNIX"
        for kind in ("unary", "stream"):
            latency(server, kind, options.seconds, where)
        for size in (64 << 10, 1 << 20):
            one_way(server, size, options.seconds / 2, where)
        server.close()


if __name__ == "__main__":
    main()
