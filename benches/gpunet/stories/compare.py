#!/usr/bin/env python3
"""A language model server in one kernel beside PyTorch: tokens a second, gaps between tokens, processor time.

    compare.py --stories PROGRAM --load PROGRAM --model DIR [--clients 1,64] [--seconds 5] [--out FILE.json] [--peer-device cpu]

      load (64 clients) ── HTTP over TCP ──> examples/net/stories: one kernel, launched once
                                        └──> peer.py: asyncio, PyTorch, a CUDA graph a step

Both have the same model, one after the other. Processor time is that of the server's process, all its threads. Goals (the design's): twice the
tokens, a third of the p99 gap, a fifth of the processor time a token, with 64 clients. Status 1: a stream was wrong, or a server did not start.
"""

import argparse
import json
import pathlib
import signal
import socket
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
GOALS = {"tokens_s": 2.0, "gap_p99_us": 1 / 3, "server_us_a_token": 1 / 5}


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def wait_until_it_listens(server, port, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end and server.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.1)
    sys.exit(f"{server.args[0]}: does not listen (status {server.poll()})")


def measure(options, name, command):
    """The rows of one server."""
    port = free_port()
    server = subprocess.Popen([str(word).replace("PORT", str(port)) for word in command], stdin=subprocess.DEVNULL)
    rows = []
    try:
        wait_until_it_listens(server, port, 180)
        for clients in options.clients:
            load = [options.load.resolve(), f"tcp://127.0.0.1:{port}", "--clients", clients, "--seconds", options.seconds, "--threads", 4 if clients > 8 else 2, "--pid", server.pid]
            done = subprocess.run([str(word) for word in load], stdout=subprocess.PIPE, text=True, timeout=120 + options.seconds, check=True)
            rows.append({"server": name, "clients": clients, **json.loads(done.stdout)})
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
    return rows


def table(rows):
    columns = ["tokens_s", "first_token_p50_us", "gap_p50_us", "gap_p99_us", "gap_p999_us", "server_us_a_token"]
    print(f"{'server':<34}{'clients':>8}" + "".join(f"{column:>20}" for column in columns))
    for row in rows:
        print(f"{row['server']:<34}{row['clients']:>8}" + "".join(f"{row[column]:>20.1f}" for column in columns))
    for clients in sorted({row["clients"] for row in rows}):
        ours, peer = (next(row for row in rows if row["clients"] == clients and row["server"].startswith(name)) for name in ("SPIN", "PyTorch"))
        ratios = [f"{column} {ours[column] / peer[column]:.2f} (goal {goal:.2f})" for column, goal in GOALS.items() if peer[column]]
        print(f"of PyTorch, {clients} clients: " + ", ".join(ratios))


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--stories", required=True, type=pathlib.Path)
    options.add_argument("--load", required=True, type=pathlib.Path)
    options.add_argument("--model", required=True, type=pathlib.Path)
    options.add_argument("--clients", default="1,64", type=lambda text: [int(word) for word in text.split(",")])
    options.add_argument("--seconds", default=5.0, type=float)
    options.add_argument("--out", type=pathlib.Path)
    options.add_argument("--peer-device", default="cuda")
    options.add_argument("--blocks", help="of the kernel")
    options = options.parse_args()
    blocks = ["--blocks", options.blocks] if options.blocks else []
    rows = measure(options, "SPIN: one kernel", [options.stories.resolve(), "tcp://127.0.0.1:PORT", "--model", options.model, *blocks])
    peer = [sys.executable, HERE / "peer.py", "--model", options.model, "--port", "PORT", "--device", options.peer_device]
    rows += measure(options, "PyTorch: CUDA graphs, asyncio", peer)
    table(rows)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
