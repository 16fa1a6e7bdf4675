"""Tokens per verification: how many tokens one pass of the verifier yields, by shape of the draft, on prompts of code and prose."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..llama import Llama
from ..speculative import SpeculationOptions
from .divergence import Mean, mean

# without adaptation: every step drafts to its limit, so that figures of different bases compare
SHAPES = {
    "chain8": SpeculationOptions(shape="chain", max_depth=8, max_nodes=8, adaptive=False, expand=0.0),
    "chain16": SpeculationOptions(shape="chain", max_depth=16, max_nodes=16, adaptive=False, expand=0.0),
    "tree16": SpeculationOptions(shape="tree", max_depth=16, max_nodes=16, adaptive=False, expand=0.0),
}

PROMPTS = (
    "def quicksort(items):\n    ",
    "import argparse\n\ndef main():\n    parser = argparse.ArgumentParser(description=",
    "class LRUCache:\n    def __init__(self, capacity):\n        ",
    "#include <stdio.h>\n#include <stdlib.h>\n\nint main(int argc, char ** argv) {\n    ",
    "-- the ten customers with the largest orders of the last year\nSELECT ",
    "function debounce(callback, delay) {\n  ",
    "import numpy as np\n\ndef conjugate_gradient(A, b, tolerance=1e-8):\n    ",
    "impl Iterator for Fibonacci {\n    type Item = u64;\n\n    fn next(&mut self) -> Option<u64> {\n        ",
    "import unittest\n\nclass TestStack(unittest.TestCase):\n    def test_push(self):\n        ",
    "# Reads a CSV file and prints the mean of every numeric column.\nimport csv\n\n",
    "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n    <meta charset=\"utf-8\">\n",
    "def levenshtein(a: str, b: str) -> int:\n    \"\"\"Edit distance of two strings.\"\"\"\n    ",
    "The history of the printing press begins in",
    "Photosynthesis is the process by which plants",
    "It was a cold morning in November when the letter finally arrived.",
    "To make a simple vegetable soup, first",
    "The main difference between a virus and a bacterium is",
    "Dear members of the committee,\n\nI am writing to",
    "The three laws of thermodynamics can be summarised as follows.",
    "In this paper we describe a method for",
    "Once upon a time, in a village at the foot of a mountain, there lived",
    "Question: Why is the sky blue?\nAnswer:",
    "The advantages of public transport over private cars are",
    "Version 2.0 release notes\n\n- ",
)


def tokens_per_verification(path: Path, shape: str, temperature: float, tokens: int, n_prompts: int, threads: int | None) -> Mean:
    """Mean over prompts of tokens per verification when `tokens` are generated behind each.

    temperature 0 is greedy; otherwise plain sampling from the whole distribution, seeded.
    """
    model = Llama(str(path), n_ctx=tokens + 128, speculation=SHAPES[shape], n_threads=threads, verbose=False)
    try:
        rates = []
        for seed, prompt in enumerate(PROMPTS[:n_prompts]):
            model.reset()
            model.speculation_stats.reset()
            model.create_completion(
                prompt, max_tokens=tokens, temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0, seed=seed + 1
            )
            rates.append(model.speculation_stats.tokens_per_verification)
        return mean(np.array(rates))
    finally:
        model.close()
