"""What an error in a matrix does to the model's output: noise on the results of some matmuls, and the KL divergence it causes.

A base's rounding error reaches the output as noise on its matmul's result, Σ (W − B)x, of a relative size that mixed.py measures for each
tensor. Here noise of that size is put onto the results of one group of tensors (attention's output in the first quarter
of the layers, say) while the rest computes as it is. Small divergences add up over tensors and grow in proportion to the noise's power
(both by the expansion of KL to second order), so a group's divergence for each unit of error is what its tensors' errors weigh.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from .divergence import log_softmax
from .graph import Activations
from .model import Runner, cut
from .text import default_text

_CONTEXT, _SEQUENCES = 256, 2  # of the text that the divergence is taken on
_FIRST = 32  # first scored position of a sequence
_DEPTHS = 4  # parts of the stack of layers
_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.weight")


class _Noise:
    """A watcher that puts noise of a relative power onto the results of matmuls by these weights, the same at every run."""

    def __init__(self, power: Mapping[str, float]) -> None:
        self._power = power

    def wants(self, weight: str) -> bool:
        return weight in self._power

    def take(self, weight: str, x: Activations) -> bool:
        if x.result is not None:
            rows = x.result
            noise = np.random.default_rng(zlib.crc32(weight.encode())).standard_normal(rows.shape, np.float32)
            size = np.sqrt(self._power[weight] * np.square(rows).mean(axis=1, keepdims=True))
            rows += noise * size
        return True


def groups(weights: list[str]) -> dict[str, list[str]]:
    """Tensors that are measured together: one role in one quarter of the layers; those outside of layers each alone."""
    layers = 1 + max((int(match[1]) for match in map(_LAYER.fullmatch, weights) if match), default=0)
    result: dict[str, list[str]] = {}
    for weight in weights:
        match = _LAYER.fullmatch(weight)
        name = f"{match[2]} {int(match[1]) * _DEPTHS // layers}" if match else weight
        result.setdefault(name, []).append(weight)
    return result


def measure(model: Path, errors: Mapping[str, float], threads: int, progress: Callable[[], object]) -> dict[str, float]:
    """KL divergence at the output for each unit of a tensor's relative error.

    Args:
        model: a GGUF that llama.cpp runs.
        errors: relative output errors by tensor, of about the size they will have.
        progress: called after each of len(groups(errors)) + 1 runs.

    Raises:
        TwobitError: llama.cpp cannot run the model.
    """
    with Runner(model, threads, _CONTEXT, _SEQUENCES, logits=True) as runner:
        tokens = cut(runner.tokenize(default_text()), runner.bos, _CONTEXT, _SEQUENCES)

        def log_p(power: Mapping[str, float]) -> np.ndarray:
            runner.run(tokens, _Noise(power))
            rows = runner.logits(tokens.size).reshape(*tokens.shape, -1)[:, _FIRST:]
            progress()
            return log_softmax(rows.reshape(-1, rows.shape[-1]).copy())

        reference = log_p({})
        p = np.exp(reference)
        weights = {}
        for members in groups(list(errors)).values():
            power = {name: errors[name] for name in members}
            divergence = float((p * (reference - log_p(power))).sum(axis=1).mean())
            for name in members:
                weights[name] = max(divergence, 0.0) / max(sum(power.values()), 1e-30)
        return weights
