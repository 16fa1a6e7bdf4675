"""Tokens per verification: how many tokens one pass of the verifier yields, by shape of the draft, on prompts of code and prose."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tqdm import tqdm

from .. import bench_prompts
from ..llama import Llama
from ..speculative import SpeculationOptions
from .divergence import Mean, mean

# without adaptation: every step drafts to its limit, so that figures of different bases compare
SHAPES = {
    "chain8": SpeculationOptions(shape="chain", max_depth=8, max_nodes=8, adaptive=False, leaf=0.0),
    "chain16": SpeculationOptions(shape="chain", max_depth=16, max_nodes=16, adaptive=False, leaf=0.0),
    "tree16": SpeculationOptions(shape="tree", max_depth=16, max_nodes=16, adaptive=False, expand=0.0, leaf=0.0),
}

N_PROMPTS = len(bench_prompts.read())


def tokens_per_verification(path: Path, shape: str, temperature: float, tokens: int, n_prompts: int, threads: int | None) -> Mean:
    """Mean over prompts of tokens per verification when `tokens` are generated behind each of the benchmarks' prompts, half of them code.

    temperature 0 is greedy; otherwise plain sampling from the whole distribution, seeded.
    """
    prompts = bench_prompts.first(bench_prompts.read(), (n_prompts + 1) // 2)
    prompts = bench_prompts.prepare(prompts, path)[:n_prompts]
    n_ctx = max(prompt.n_tokens for prompt in prompts) + tokens + 32
    model = Llama(str(path), n_ctx=n_ctx, speculation=SHAPES[shape], n_threads=threads, verbose=False)
    try:
        rates = []
        for seed, prompt in enumerate(tqdm(prompts, desc=f"{shape} t={temperature:g}", unit="prompt", disable=None)):
            model.reset()
            model.speculation_stats.reset()
            model.create_completion(
                prompt.text, max_tokens=tokens, temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0, seed=seed + 1
            )
            rates.append(model.speculation_stats.tokens_per_verification)
        return mean(np.array(rates))
    finally:
        model.close()
