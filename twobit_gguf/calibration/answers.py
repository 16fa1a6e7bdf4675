"""Text that the model writes itself: answers to built-in instructions, in its own chat format.

A base that is fitted to other people's prose and code alone is better there and no better, or worse, at what a draft is for: foreseeing
what the model says (docs/quality.md, "What the text must be"). Base models, without a chat template, go on from the bare instruction.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

import llama_cpp
import numpy as np

from .. import bench_prompts
from ..errors import TwobitError
from .model import CONTEXT, Runner

INSTRUCTIONS = Path(__file__).resolve().parent.parent / "data" / "instructions.json"
_WIDTH = 16  # sequences written at once: the weights are read once for all of them
_TOP_K, _TOP_P, _TEMPERATURE = 40, 0.95, 0.8  # as people run such models


def write(
    runner: Runner, n_sequences: int, threads: int, progress: Callable[[int], object], instructions: Path = INSTRUCTIONS
) -> np.ndarray:
    """(n_sequences, CONTEXT) i32: dialogues one behind the other, cut at the end. The same for the same model, machine and threads.

    progress: called with the number of tokens that were added.
    instructions: a file of bench_prompts.

    Raises:
        TwobitError: llama.cpp cannot run the model so.
    """
    prompts = bench_prompts.prepare(bench_prompts.read(instructions), runner.path)
    prompt_tokens = itertools.cycle([runner.tokenize(prompt.text, special=True).tolist() for prompt in prompts])
    rows: list[list[int]] = []
    for first in range(0, n_sequences, _WIDTH):
        with _Writer(runner, threads, range(first, min(first + _WIDTH, n_sequences))) as writer:
            rows += writer.write(prompt_tokens, progress)
    return np.array(rows, np.int32).reshape(n_sequences, CONTEXT)


class _Writer:
    """A context and a sampler for each of the sequences. Use as a context manager."""

    def __init__(self, runner: Runner, threads: int, seeds: range) -> None:
        self._runner, self._n = runner, len(seeds)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = CONTEXT * self._n
        params.n_ubatch = CONTEXT
        params.n_seq_max = self._n
        params.n_threads = params.n_threads_batch = threads
        params.op_offload = params.offload_kqv = False
        self._context = llama_cpp.llama_init_from_model(runner.model, params)
        if not self._context:
            raise TwobitError(f"{runner.path}: llama.cpp cannot make a context of {CONTEXT * self._n} tokens; is there enough RAM?")
        self._batch = llama_cpp.llama_batch_init(CONTEXT * self._n, 0, 1)
        self._samplers = [_sampler(seed) for seed in seeds]

    def write(self, prompts: Iterator[list[int]], progress: Callable[[int], object]) -> list[list[int]]:
        bos = self._runner.bos
        texts: list[list[int]] = [[] if bos is None else [bos] for _ in range(self._n)]
        decoded = [0] * self._n
        for text in texts:
            text += next(prompts)
        while True:
            progress(sum(min(len(text), CONTEXT) - done for text, done in zip(texts, decoded, strict=True)))
            last = self._decode(texts, decoded)
            if not last:
                return [text[:CONTEXT] for text in texts]
            for s, at in last.items():
                token = llama_cpp.llama_sampler_sample(self._samplers[s], self._context, at)
                texts[s].append(token)
                if llama_cpp.llama_vocab_is_eog(self._runner.vocab, token):
                    texts[s] += next(prompts)

    def _decode(self, texts: list[list[int]], decoded: list[int]) -> dict[int, int]:
        """What is new of each text that is not full yet. Returns where in the batch each of these ends, by sequence."""
        batch, n, last = self._batch, 0, {}
        for s, text in enumerate(texts):
            new = text[decoded[s] : CONTEXT]
            decoded[s] += len(new)
            if len(text) >= CONTEXT:
                continue
            for i, token in enumerate(new, decoded[s] - len(new)):
                batch.token[n], batch.pos[n], batch.logits[n] = token, i, i + 1 == decoded[s]
                batch.n_seq_id[n], batch.seq_id[n][0] = 1, s
                n += 1
            last[s] = n - 1
        batch.n_tokens = n
        result = llama_cpp.llama_decode(self._context, batch) if n else 0
        if result != 0:
            raise TwobitError(f"{self._runner.path}: llama_decode failed ({result})")
        return last

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        for sampler in self._samplers:
            llama_cpp.llama_sampler_free(sampler)
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)


def _sampler(seed: int) -> ctypes.c_void_p:
    chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    for sampler in (
        llama_cpp.llama_sampler_init_top_k(_TOP_K),
        llama_cpp.llama_sampler_init_top_p(_TOP_P, 1),
        llama_cpp.llama_sampler_init_temp(_TEMPERATURE),
        llama_cpp.llama_sampler_init_dist(seed),
    ):
        llama_cpp.llama_sampler_chain_add(chain, sampler)
    return chain
