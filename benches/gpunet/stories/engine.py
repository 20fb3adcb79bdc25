"""The model of peer.py on a GPU: continuous batching with CUDA graphs in PyTorch.

      slots            0      1      2     ...   `slots`        all state of a slot is on the GPU: its last token, its position,
      keys, values   [ ... 512 positions of each ... ]          its random state, its temperature, its keys and values
                       └── a step: a graph of the first 1, 8, 64, ... slots, a token for each
      prefill: a graph of up to 8 prompts of up to 32, 128 or 512 tokens, into any slots; it draws their first token too

A step takes its input from the state that the step before it left on the GPU. So the program may launch the next one before it has read the
last one's tokens, which come by one copy. Where a graph has more rows than there are requests, the others compute what is not read: prefill
writes their keys into a slot of its own, the last.

The CPU runs the same functions without graphs, for tests.
"""

import json
import pathlib
import struct

import torch
from torch.nn import functional

ROWS = (1, 8, 64, 256)  # of a step
SPANS = (256, 512)  # positions that a step looks at
PROMPTS = (1, 8)
LENGTHS = (32, 128, 512)  # of prompts, with the 0 that begins each
# Knuth's, for 64 bits. Products wrap around.
MULTIPLIER, INCREMENT = 6364136223846793005, 1442695040888963407


def first_above(sizes, count):
    return next(size for size in sizes if size >= count)


def scrambled(seed):
    """A random state from a seed, so that neighbours have nothing in common (splitmix64)."""
    x = (seed + 0x9E3779B97F4A7C15) & (1 << 64) - 1
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    x = (x ^ x >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
    return x ^ x >> 31


def signed(x):
    return x - (1 << 64) if x >> 63 else x


def load(folder):
    """config.json as a dict, and the tensors of model.safetensors, of bfloat16."""
    folder = pathlib.Path(folder)
    config = json.loads((folder / "config.json").read_text())
    content = (folder / "model.safetensors").read_bytes()
    length = struct.unpack_from("<Q", content)[0]
    body, tensors = bytearray(content[8 + length :]), {}
    for name, entry in json.loads(content[8 : 8 + length]).items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "BF16":
            raise ValueError(f"read {folder}/model.safetensors: {name} is {entry['dtype']}, not BF16")
        begin, end = entry["data_offsets"]
        tensors[name] = torch.frombuffer(body, dtype=torch.bfloat16, count=(end - begin) // 2, offset=begin).view(entry["shape"])
    return config, tensors


class Model:
    """The weights, with those that are multiplied by the same vector in one matrix, and the two functions that graphs are made of."""

    def __init__(self, folder, slots, device):
        config, tensors = load(folder)
        self.device = torch.device(device)
        self.type = torch.float16 if self.device.type == "cuda" else torch.float32
        self.slots, self.length = slots, config["max_position_embeddings"]
        self.heads, self.groups = config["num_attention_heads"], config["num_key_value_heads"]
        self.size, self.epsilon, self.vocabulary = config["hidden_size"], config["rms_norm_eps"], config["vocab_size"]
        self.head = self.size // self.heads

        def take(*names):
            return torch.cat([tensors[name] for name in names]).to(self.device, self.type)

        self.embedding, self.norm = take("model.embed_tokens.weight"), take("model.norm.weight")
        self.layers = []
        for i in range(config["num_hidden_layers"]):
            at = f"model.layers.{i}."
            self.layers.append(
                (
                    take(at + "input_layernorm.weight"),
                    take(*(f"{at}self_attn.{x}_proj.weight" for x in "qkv")),
                    take(at + "self_attn.o_proj.weight"),
                    take(at + "post_attention_layernorm.weight"),
                    take(at + "mlp.gate_proj.weight", at + "mlp.up_proj.weight"),
                    take(at + "mlp.down_proj.weight"),
                )
            )
        frequencies = config["rope_theta"] ** (-torch.arange(0, self.head, 2, dtype=torch.float32) / self.head)
        turns = torch.outer(torch.arange(self.length, dtype=torch.float32), frequencies)
        # For x * cos + (x with its halves exchanged) * sin.
        self.cos = torch.cat((turns.cos(), turns.cos()), 1).to(self.device, self.type)
        self.sin = torch.cat((-turns.sin(), turns.sin()), 1).to(self.device, self.type)

        self.nothing, self.never = (torch.tensor(x, dtype=self.type, device=self.device) for x in (0.0, -torch.inf))

        def state(kind, *shape):
            return torch.zeros(*shape, dtype=kind, device=self.device)

        rows = slots + 1
        self.cache = [state(self.type, rows, self.length, 2 * self.groups, self.head) for _ in self.layers]
        self.tokens, self.positions, self.random = (state(torch.int64, rows) for _ in range(3))
        self.temperatures = state(torch.float32, rows)
        self.all_rows = torch.arange(rows, device=self.device)
        self.all_positions = torch.arange(self.length, device=self.device)

    def turned(self, x, positions):
        """Queries and keys: ... x heads x head."""
        a, b = x.chunk(2, -1)
        return x * self.cos[positions].unsqueeze(-2) + torch.cat((b, a), -1) * self.sin[positions].unsqueeze(-2)

    def layer(self, x, weights, attend):
        first_norm, qkv, out, second_norm, gate_up, down = weights
        mixed = functional.linear(functional.rms_norm(x, (self.size,), first_norm, self.epsilon), qkv)
        mixed = mixed.unflatten(-1, (self.heads + 2 * self.groups, self.head))
        x = x + functional.linear(attend(mixed).flatten(-2), out)
        gate, up = functional.linear(functional.rms_norm(x, (self.size,), second_norm, self.epsilon), gate_up).chunk(2, -1)
        return x + functional.linear(functional.silu(gate) * up, down)

    def draw(self, x, random, temperatures):
        """The next token of each row of x, and the random state after it."""
        logits = functional.linear(functional.rms_norm(x, (self.size,), self.norm, self.epsilon), self.embedding).float()
        random = random * MULTIPLIER + INCREMENT
        uniform = (random >> 33 & 0x7FFFFFFF).float() * 2**-31
        sums = (logits / temperatures.clamp(min=1e-3)[:, None]).softmax(-1).cumsum(-1)
        # Rounded, the last sum may be below 1.
        drawn = (sums <= uniform[:, None] * sums[:, -1:]).sum(-1).clamp(max=self.vocabulary - 1)
        return torch.where(temperatures > 0, drawn, logits.argmax(-1)), random

    def step(self, rows, span):
        """A token for each of the first `rows` slots, from what is in their state."""
        positions, which = self.positions[:rows], self.all_rows[:rows]
        pair = self.heads // self.groups
        # To be added: attention would make that of booleans again in each layer.
        mask = torch.where(self.all_positions[:span] <= positions[:, None], self.nothing, self.never)
        mask = mask[:, None, None, :].expand(-1, self.groups, pair, -1)
        x = self.embedding[self.tokens[:rows]]
        for weights, cache in zip(self.layers, self.cache):

            def attend(mixed):
                turned = self.turned(mixed[:, : self.heads + self.groups], positions)
                cache[which, positions] = torch.cat((turned[:, self.heads :], mixed[:, self.heads + self.groups :]), 1)
                keys, values = cache[:rows, :span].transpose(1, 2).chunk(2, 1)
                # The queries that share keys are rows of one query, so that nothing is repeated.
                queries = turned[:, : self.heads].unflatten(1, (self.groups, pair))
                return functional.scaled_dot_product_attention(queries, keys, values, mask).flatten(1, 2)

            x = self.layer(x, weights, attend)
        tokens, random = self.draw(x, self.random[:rows], self.temperatures[:rows])
        self.tokens[:rows] = tokens
        self.random[:rows] = random
        # Slots without a request go on too.
        self.positions[:rows] = (positions + 1).clamp(max=self.length - 1)
        return tokens

    def prefill(self, packed):
        """The keys and values of prompts, and the first token after each.

        A row of `packed`: slot, tokens, random state, temperature in millionths, then the tokens.
        """
        slots, counts, random, temperatures = packed[:, :4].unbind(1)
        ids = packed[:, 4:]
        temperatures = temperatures.float() * 1e-6
        length = ids.shape[1]
        positions = self.all_positions[:length]
        pair = self.heads // self.groups
        x = self.embedding[ids]
        for weights, cache in zip(self.layers, self.cache):

            def attend(mixed):
                turned = self.turned(mixed[:, :, : self.heads + self.groups], positions)
                stored = torch.cat((turned[:, :, self.heads :], mixed[:, :, self.heads + self.groups :]), 2)
                cache[slots[:, None], positions] = stored
                keys, values = stored.transpose(1, 2).repeat_interleave(pair, 1).chunk(2, 1)
                queries = turned[:, :, : self.heads].transpose(1, 2)
                # Padding comes last, so that no token looks at it.
                return functional.scaled_dot_product_attention(queries, keys, values, is_causal=True).transpose(1, 2)

            x = self.layer(x, weights, attend)
        last = x.gather(1, (counts - 1)[:, None, None].expand(-1, 1, self.size))[:, 0]
        tokens, random = self.draw(last, random, temperatures)
        self.tokens[slots], self.positions[slots], self.random[slots], self.temperatures[slots] = tokens, counts, random, temperatures
        return tokens


class Result:
    """Tokens on their way to the CPU."""

    def __init__(self, tokens, event):
        self.tokens, self.event = tokens, event

    def is_there(self):
        return self.event is None or self.event.query()

    def list(self):
        return self.tokens.tolist()


class Engine:
    """Launches steps and prefills on one stream, in order. At most eight results may be unread."""

    def __init__(self, folder, slots, device, compiled=False):
        self.model = Model(folder, slots, device)
        self.slots, self.length, self.graphs = slots, self.model.length, {}
        self.row_sizes = (*(rows for rows in ROWS if rows < slots), slots)
        self.spans = (*(span for span in SPANS if span < self.length), self.length)
        self.lengths = (*(length for length in LENGTHS if length < self.length), self.length)
        self.has_graphs = self.model.device.type == "cuda"
        self.run_step, self.run_prefill = self.model.step, self.model.prefill
        if compiled:
            # A version for each size.
            torch._dynamo.config.recompile_limit = 64
            self.run_step = torch.compile(self.run_step, dynamic=False)
            self.run_prefill = torch.compile(self.run_prefill, dynamic=False)
        if self.has_graphs:
            self.stream = torch.cuda.Stream()
            self.host = [torch.empty(max(slots, PROMPTS[-1]), dtype=torch.int64, pin_memory=True) for _ in range(8)]
            self.inputs = [torch.empty(PROMPTS[-1] * (4 + self.length), dtype=torch.int64, pin_memory=True) for _ in range(8)]
            self.turn = 0
            with torch.inference_mode():
                self.capture_all()

    def capture_all(self):
        for rows in self.row_sizes:
            for span in self.spans:
                self.graphs["step", rows, span] = self.capture(lambda: self.run_step(rows, span))
        for count in PROMPTS:
            for length in self.lengths:
                packed = torch.zeros(count, 4 + length, dtype=torch.int64, device=self.model.device)
                packed[:, 0], packed[:, 1] = self.slots, 1
                self.graphs["prefill", count, length] = (packed, *self.capture(lambda: self.run_prefill(packed)))
        torch.cuda.synchronize()

    def capture(self, function):
        """A graph of the function, and its result, which each replay overwrites."""
        with torch.cuda.stream(self.stream):
            for _ in range(3):
                function()
        self.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            result = function()
        return graph, result

    def copied(self, result):
        host = self.host[self.turn % len(self.host)][: len(result)]
        self.turn += 1
        host.copy_(result, non_blocking=True)
        event = torch.cuda.Event()
        event.record(self.stream)
        return Result(host, event)

    def step(self, count, positions):
        """A token for each of the slots before `count`, none of which is beyond `positions`."""
        rows, span = first_above(self.row_sizes, count), first_above(self.spans, positions)
        with torch.inference_mode():
            if not self.has_graphs:
                return Result(self.run_step(rows, span), None)
            with torch.cuda.stream(self.stream):
                graph, result = self.graphs["step", rows, span]
                graph.replay()
                return self.copied(result)

    def prefill(self, prompts):
        """The first token of each prompt (slot, tokens, seed, temperature), of which there are at most PROMPTS[-1]."""
        count = first_above(PROMPTS, len(prompts))
        length = first_above(self.lengths, max(len(tokens) for _, tokens, _, _ in prompts))
        empty = [self.slots, 1, 0, 0, *[0] * length]
        rows = [[slot, len(ids), signed(scrambled(seed)), int(heat * 1e6), *ids, *[0] * (length - len(ids))] for slot, ids, seed, heat in prompts]
        rows = torch.tensor(rows + [empty] * (count - len(rows)))
        with torch.inference_mode():
            if not self.has_graphs:
                return Result(self.run_prefill(rows), None)
            # Pinned, and not used again before this copy has been made: eight results may be unread.
            staged = self.inputs[self.turn % len(self.inputs)][: rows.numel()].view(rows.shape)
            staged.copy_(rows)
            with torch.cuda.stream(self.stream):
                packed, graph, result = self.graphs["prefill", count, length]
                packed.copy_(staged, non_blocking=True)
                graph.replay()
                return self.copied(result)
