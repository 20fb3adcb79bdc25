#!/usr/bin/env python3
"""Trains the model of examples/net/stories from the grammar beside it. README.md says how the committed one was made.

    train.py [--steps N] [--seconds S] [--batch 256] [--stories 400000] [--rate 0.003] [--seed 1] [--device cuda] [--out DIR]

      grammar.py ── stories as bytes, sorted by length ── batches: neighbours, so of about one length
        0 story 0 ...                                     the ends that are missing to the longest are not learned

Training ends after --steps, or after --seconds, with the learning rate on its way from --rate to 0 by whichever is further. Stories are made
before that, by all processors, and their time does not count. With --steps alone, one machine gives the same file for the same seed, as far
as PyTorch's kernels do. The samples at the end are of the file's weights, rounded to bfloat16.
"""

import argparse
import math
import multiprocessing
import pathlib
import random
import time

import numpy
import torch
from torch.nn import functional

import grammar
import llama

CHUNK = 2000
# The part of the training in which the rate rises.
WARM_UP = 0.03
# Bytes of a padded row: 0, a story, 0.
ROW = grammar.MOST + 2


def chunk(seed):
    """Some stories as rows of bytes, padded with zeros."""
    rng = random.Random(seed)
    rows = numpy.zeros((CHUNK, ROW), numpy.uint8)
    for row in rows:
        text = grammar.story(rng).encode("ascii")
        row[1 : 1 + len(text)] = numpy.frombuffer(text, numpy.uint8)
    return rows


def corpus(count, seed):
    """Rows sorted by length, and their lengths with both zeros."""
    # Spawned, not forked: PyTorch has threads.
    with multiprocessing.get_context("spawn").Pool() as pool:
        rows = numpy.concatenate(pool.map(chunk, (f"{seed}/{i}" for i in range(-(-count // CHUNK)))))
    lengths = (rows != 0).sum(1) + 2
    order = numpy.argsort(lengths, kind="stable")
    return torch.from_numpy(rows[order]), torch.from_numpy(lengths[order])


def loss_of(model, rows, lengths):
    """The mean loss of a byte, the closing 0 included."""
    width = int(lengths[-1])
    ids = rows[:, :width].long()
    target = ids[:, 1:].masked_fill(torch.arange(1, width, device=ids.device) >= lengths[:, None].to(ids.device), -100)
    logits = model(ids[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten(), ignore_index=-100)


def new_model(seed):
    torch.manual_seed(seed)
    model = llama.Llama(llama.Config())
    scale = 0.02 / math.sqrt(2 * model.config.num_hidden_layers)
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            # The two that are added to the sum of all layers begin smaller, as in GPT-2.
            torch.nn.init.normal_(weight, std=scale if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02)
    return model


def train(model, options):
    device = torch.device(options.device)
    begun = time.monotonic()
    rows, lengths = corpus(options.stories, options.seed)
    rows = rows.to(device)
    print(f"{len(rows)} stories, {int(lengths.sum()) / 1e6:.1f} MB, made in {time.monotonic() - begun:.1f} s", flush=True)
    matrices = [weight for weight in model.parameters() if weight.dim() == 2]
    vectors = [weight for weight in model.parameters() if weight.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.95), fused=device.type == "cuda"
    )
    draw = random.Random(options.seed)
    begun, shown, step, part, loss = time.monotonic(), 0.0, 0, 0.0, None
    while part < 1:
        elapsed = time.monotonic() - begun
        part = max(step / options.steps if options.steps else 0, elapsed / options.seconds if options.seconds else 0)
        if part >= 1:
            break
        rate = options.rate * min(1, (part + 1e-3) / WARM_UP) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * part)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        first = draw.randrange(len(rows) - options.batch + 1)
        batch = slice(first, first + options.batch)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_of(model, rows[batch], lengths[batch])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        # Reading the loss waits for the GPU, so not at each step.
        if elapsed >= shown:
            shown = elapsed + 5
            print(f"step {step}, {time.monotonic() - begun:.0f} s: loss {loss.item():.4f} a byte, rate {rate:.2e}", flush=True)
    print(f"step {step}, {time.monotonic() - begun:.0f} s: loss {loss.item():.4f} a byte", flush=True)


@torch.no_grad()
def validate(model, options):
    """The loss on stories that training has not had."""
    rows, lengths = (torch.from_numpy(x) for x in unseen(options.seed))
    sums = [float(loss_of(model, rows[i : i + 100].to(options.device), lengths[i : i + 100])) for i in range(0, len(rows), 100)]
    return sum(sums) / len(sums)


def unseen(seed):
    rows = chunk(f"{seed}/unseen")[:500]
    lengths = (rows != 0).sum(1) + 2
    order = numpy.argsort(lengths, kind="stable")
    return rows[order], lengths[order]


def samples(model, count, temperature, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        text = model.complete([0], 511, lambda logits: torch.multinomial((logits.cpu() / temperature).softmax(-1), 1, generator=generator))
        yield bytes(text).rstrip(b"\0").decode("latin-1")


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=0)
    options.add_argument("--seconds", type=float, default=0)
    options.add_argument("--batch", type=int, default=256)
    options.add_argument("--stories", type=int, default=400_000)
    options.add_argument("--rate", type=float, default=3e-3)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--out", default=pathlib.Path(__file__).parent.parent / "model")
    options = options.parse_args()
    if not options.steps and not options.seconds:
        options.steps = 8000
    torch.backends.cuda.matmul.allow_tf32 = True
    model = new_model(options.seed).to(options.device)
    print(f"{sum(weight.numel() for weight in model.parameters())} weights, {options.device}", flush=True)
    train(model, options)
    llama.save(model, options.out)
    model = llama.load(options.out, options.device)
    print(f"loss on unseen stories {validate(model, options):.4f} a byte\n", flush=True)
    for text in samples(model, 4, 0.8, options.seed):
        print(text, end="\n\n", flush=True)


if __name__ == "__main__":
    main()
