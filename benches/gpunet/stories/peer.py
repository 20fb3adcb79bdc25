#!/usr/bin/env python3
"""The peer of examples/net/stories: a server of the same model with PyTorch, as one writes it for speed, on CPU threads and a GPU.

    peer.py --model DIR [--port 8000 | --unix PATH] [--batch 64] [--device cuda] [--compile]

      clients ── asyncio, one thread ── engine.py: CUDA graphs of prefills and steps ── one copy of tokens a step
                 parses HTTP, launches step n + 1, then sends the tokens of step n while the GPU runs

POST /v1/completions takes {"prompt": "...", "max_tokens": 16, "temperature": 1, "seed": 0, "stream": false}, as OpenAI's servers do. With
"stream" the answer has an event for each token, and is chunked. Clients join and leave between steps; those beyond --batch wait. With uvloop, if
it is installed. --compile has torch.compile fuse the kernels before they are captured. Prints the address when it is ready.
"""

import argparse
import asyncio
import collections
import gc
import itertools
import json
import os
import random
import time

import engine

LONGEST_HEAD, LONGEST_BODY = 16 << 10, 64 << 10
REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    413: "Content Too Large",
    431: "Request Header Fields Too Large",
}
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
NUMBER = "%08x"  # of a completion: of one length, so that chunks of a token are


def event(text, finish):
    """What comes before and after the number of the completion in the chunk of an event."""
    choice = {"index": 0, "text": text, "finish_reason": finish}
    whole = 'data: {"id":"cmpl-%s","object":"text_completion","model":"stories","choices":[%s]}\n\n' % (
        NUMBER,
        json.dumps(choice, separators=(",", ":")),
    )
    before, after = whole.split(NUMBER)
    return f"{len(whole) - len(NUMBER) + 8:x}\r\n{before}".encode(), f"{after}\r\n".encode()


TOKENS = [event(chr(token), None) for token in range(256)]
ENDS = {finish: event("", finish) for finish in ("stop", "length")}


class Refused(Exception):
    """A request that gets another status than 200."""

    def __init__(self, status, why):
        super().__init__(why)
        self.status = status


class Completion:
    """A request on its way through the engine."""

    numbers = itertools.count()

    def __init__(self, connection, body, length):
        try:
            body = json.loads(body)
            self.ids = [0, *body["prompt"].encode()]
            self.limit = int(body.get("max_tokens", 16))
            self.temperature = float(body.get("temperature", 1))
            self.seed = int(body["seed"]) if body.get("seed") is not None else random.getrandbits(63)
            self.streams = bool(body.get("stream", False))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise Refused(400, f"the body is not a request for a completion: {error!r}") from error
        if len(self.ids) >= length:
            raise Refused(400, f"a prompt of {len(self.ids) - 1} bytes; at most {length - 2}")
        if self.limit < 1 or not 0 <= self.temperature <= 100:
            raise Refused(400, "max_tokens is below 1, or temperature not from 0 to 100")
        self.limit = min(self.limit, length - len(self.ids))
        self.connection, self.number = connection, NUMBER % (next(self.numbers) & 0xFFFFFFFF)
        self.encoded = self.number.encode()
        self.launched = self.delivered = 0
        self.slot, self.finished = None, False
        self.text = bytearray()

    def take(self, token):
        """Sends a token; true if it was the last."""
        out = STREAM if self.delivered == 0 and self.streams else b""
        self.delivered += 1
        finish = "stop" if token == 0 else "length" if self.delivered == self.limit else None
        if not self.streams:
            if token:
                self.text.append(token)
            if finish:
                self.connection.reply(200, self.answer(finish))
            return finish is not None
        if token:
            before, after = TOKENS[token]
            out += before + self.encoded + after
        if finish:
            before, after = ENDS[finish]
            out += before + self.encoded + after + DONE
        self.connection.transport.write(out)
        return finish is not None

    def answer(self, finish):
        choice = {"index": 0, "text": self.text.decode("latin-1"), "finish_reason": finish}
        return {"id": f"cmpl-{self.number}", "object": "text_completion", "model": "stories", "choices": [choice]}


class Scheduler:
    """Which completion has which slot of the engine, and what the engine has not answered yet."""

    def __init__(self, engine):
        self.engine = engine
        self.slots = [None] * engine.slots
        self.waiting, self.results = collections.deque(), collections.deque()
        self.news = asyncio.Event()

    def add(self, completion):
        self.waiting.append(completion)
        self.news.set()

    def abandon(self, completion):
        """Its client has gone."""
        completion.finished = True
        if completion.slot is None:
            self.waiting.remove(completion)
        else:
            self.slots[completion.slot] = None

    def launch(self):
        """A prefill of those that wait, and a step of those that are there: results, and the completions that they are of."""
        launched, joined = [], []
        while self.waiting and len(joined) < engine.PROMPTS[-1] and None in self.slots:
            completion = self.waiting.popleft()
            completion.slot = self.slots.index(None)
            self.slots[completion.slot] = completion
            completion.launched = 1
            joined.append(completion)
        if joined:
            prompts = [(one.slot, one.ids, one.seed, one.temperature) for one in joined]
            launched.append((self.engine.prefill(prompts), list(enumerate(joined))))
        running = [(slot, one) for slot, one in enumerate(self.slots) if one is not None and one.launched < one.limit]
        if running:
            positions = max(len(one.ids) + one.launched for _, one in running)
            launched.append((self.engine.step(running[-1][0] + 1, positions), running))
            for _, one in running:
                one.launched += 1
        return launched

    def deliver(self, tokens, completions):
        for row, completion in completions:
            if not completion.finished and completion.take(tokens[row]):
                completion.finished = True
                self.slots[completion.slot] = None
                completion.connection.end()

    async def run(self):
        while True:
            launched = self.launch()
            # Those of the round before, while the GPU has work.
            for result, completions in self.results:
                while not result.is_there():
                    await asyncio.sleep(0)
                self.deliver(result.list(), completions)
            self.results = launched
            # For the loop to receive and accept.
            await asyncio.sleep(0)
            if not launched and not self.waiting:
                self.news.clear()
                await self.news.wait()


class Connection(asyncio.Protocol):
    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.received, self.completion, self.transport = b"", None, None
        self.closes = False

    def connection_made(self, transport):
        self.transport = transport

    def connection_lost(self, error):
        self.received = b""
        if self.completion:
            self.scheduler.abandon(self.completion)
            self.completion = None

    def data_received(self, data):
        self.received += data
        self.next()

    def end(self):
        """Of a completion."""
        self.completion = None
        if self.closes:
            self.transport.close()
        elif self.received:
            self.next()

    def next(self):
        """Takes requests from what has come, one at a time."""
        while self.received and not self.completion and not self.transport.is_closing():
            try:
                body = self.request()
                if body is None:
                    return
                self.completion = Completion(self, body, self.scheduler.engine.length)
                self.scheduler.add(self.completion)
            except Refused as refused:
                self.closes = True
                self.reply(refused.status, {"error": {"message": str(refused)}})
                self.transport.close()

    def request(self):
        """The body of the next request, None if it is not complete."""
        end = self.received.find(b"\r\n\r\n")
        if end < 0 or end > LONGEST_HEAD:
            if len(self.received) > LONGEST_HEAD:
                raise Refused(431, f"a head of more than {LONGEST_HEAD} bytes")
            return None
        line, *fields = self.received[:end].decode("latin-1").split("\r\n")
        fields = {name.strip().lower(): value.strip() for name, _, value in (field.partition(":") for field in fields)}
        method, _, rest = line.partition(" ")
        path, _, version = rest.partition(" ")
        length = fields.get("content-length", "")
        if version != "HTTP/1.1" or not length.isdecimal():
            raise Refused(400, "not HTTP/1.1 with Content-Length")
        if path != "/v1/completions":
            raise Refused(404, f"nothing at {path}")
        if method != "POST":
            raise Refused(405, "POST is what /v1/completions takes")
        if int(length) > LONGEST_BODY:
            raise Refused(413, f"a body of more than {LONGEST_BODY} bytes")
        begin, end = end + 4, end + 4 + int(length)
        if len(self.received) < end:
            return None
        body, self.received = self.received[begin:end], self.received[end:]
        self.closes = fields.get("connection", "").lower() == "close"
        return body

    def reply(self, status, content):
        body = json.dumps(content).encode()
        close = "Connection: close\r\n" if self.closes else ""
        head = f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{close}\r\n"
        self.transport.write(head.encode() + body)


async def serve(options, model):
    scheduler = Scheduler(model)
    loop = asyncio.get_running_loop()

    def connection():
        return Connection(scheduler)

    if options.unix:
        if os.path.exists(options.unix):
            os.unlink(options.unix)
        server = await loop.create_unix_server(connection, options.unix, backlog=1024)
        address = f"unix://{options.unix}"
    else:
        server = await loop.create_server(connection, "127.0.0.1", options.port, backlog=1024)
        address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    # The model is not garbage: no collection needs to look at it.
    gc.collect()
    gc.freeze()
    print(address, flush=True)
    async with server:
        await scheduler.run()


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--model", required=True)
    options.add_argument("--port", type=int, default=8000)
    options.add_argument("--unix")
    options.add_argument("--batch", type=int, default=64)
    options.add_argument("--device", default="cuda" if engine.torch.cuda.is_available() else "cpu")
    options.add_argument("--compile", action="store_true")
    options = options.parse_args()
    begun = time.monotonic()
    model = engine.Engine(options.model, options.batch, options.device, options.compile)
    try:
        import uvloop

        loop = uvloop.new_event_loop()
    except ImportError:
        loop = asyncio.new_event_loop()
    print(f"{options.device}, {type(loop).__module__.split('.')[0]}, ready after {time.monotonic() - begun:.1f} s", flush=True)
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(serve(options, model))
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
