"""The few likely tokens of a row of logits."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from .tree import Candidate


class TopCandidates:
    """Picks the best tokens of rows of n_vocab logits; keeps its scratch.

    A comparison with p_min finds the likely ones, so only those few are sorted.
    """

    def __init__(self, n_vocab: int) -> None:
        self._scratch = np.empty(n_vocab, np.float32)

    def __call__(self, logits: npt.NDArray[np.float32], count: int, p_min: float) -> list[Candidate]:
        """At most `count` tokens with p >= p_min, best first; the best one always. Equal logits: the lower token first."""
        best = int(logits.argmax())
        top = float(logits[best])
        if not math.isfinite(top):
            return []  # NaN or all -inf: nothing to draft from
        np.subtract(logits, logits[best], out=self._scratch)
        np.exp(self._scratch, out=self._scratch)
        total = float(self._scratch.sum())
        first = Candidate(best, 0, 1.0 / total)
        if count == 1:
            return [first]
        (likely,) = np.nonzero(self._scratch >= p_min * total)
        likely = likely[likely != best]
        order = likely[np.argsort(-self._scratch[likely], kind="stable")][: count - 1]
        return [first] + [Candidate(int(token), rank, float(self._scratch[token]) / total) for rank, token in enumerate(order, 1)]
