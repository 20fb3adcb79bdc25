#!/usr/bin/env python3
"""Completes a prompt with the model on the CPU, in float32: what the kernel's answers are compared with.

    reference.py [--prompt TEXT] [--max-tokens 64] [--model DIR] [--ids]     greedy: the likeliest byte each time
    reference.py --temperature 0.8 --seed 3                                  drawn: the same text for the same seed, but not the kernel's

A completion ends before a 0, the end of a story, as the servers' do. With --ids it prints a line for each token instead, the closing 0
included: its number, its id, its byte, and by how much its logit is above the second. The kernel computes with the same weights, but other
orders of sums, so it may take the second where that gap is less than its error; from there on the texts differ, rightly.
"""

import argparse
import pathlib
import sys

import torch

import llama


class Chooser:
    """Takes the next token, and notes the gap below the likeliest."""

    def __init__(self, temperature, seed):
        self.temperature, self.generator, self.gaps = temperature, torch.Generator().manual_seed(seed), []

    def __call__(self, logits):
        best = logits.topk(2)
        self.gaps.append(float(best.values[0] - best.values[1]))
        if not self.temperature:
            return best.indices[0]
        return torch.multinomial((logits / self.temperature).softmax(-1), 1, generator=self.generator)


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--prompt", default="Once upon a time")
    options.add_argument("--max-tokens", type=int, default=64)
    options.add_argument("--temperature", type=float, default=0)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--model", default=pathlib.Path(__file__).parent.parent / "model")
    options.add_argument("--ids", action="store_true")
    options = options.parse_args()
    model = llama.load(options.model)
    choose = Chooser(options.temperature, options.seed)
    tokens = model.complete([0, *options.prompt.encode()], options.max_tokens, choose)
    if options.ids:
        for number, (token, gap) in enumerate(zip(tokens, choose.gaps)):
            print(f"{number} {token} {bytes([token])!r} {gap:.5f}")
    else:
        sys.stdout.buffer.write(bytes(token for token in tokens if token))
        sys.stdout.buffer.write(b"\n")


if __name__ == "__main__":
    main()
