"""Prompt lookup: what followed the last few tokens when they occurred before is a draft that costs nothing.

After "prompt lookup decoding" (A. Saxena, 2023). It pays where the answer repeats the question: edits, summaries, code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from .acceptance import Acceptance
from .tree import ROOT, Candidate, DraftTree
from .worth import Worth

_P = 0.5  # the prior for every token of a continuation


class PromptLookup:
    """A source of drafts beside BaseDraft.

    Args:
        n_gram: tokens that must match.
        history: gives the verified tokens (n_past).
    """

    def __init__(self, n_gram: int, history: Callable[[], npt.NDArray[np.intc]]) -> None:
        self._n_gram = n_gram
        self._history = history
        self.acceptance = Acceptance()

    def grow(self, tree: DraftTree, roots: Sequence[int], n_past: int, room: int, worth: Worth) -> None:
        """Adds the continuation of the latest match, as far as it is worth its verification."""
        node, chance = ROOT, 1.0
        for token in self._continuation(roots, n_past, room):
            candidate = Candidate(token, 0, _P)
            chance *= self.acceptance.chance(0, _P)
            if not worth.node(chance, len(roots) + len(tree)):
                break
            node = tree.add(node, candidate, chance)

    def _continuation(self, roots: Sequence[int], n_past: int, room: int) -> list[int]:
        text = np.concatenate([self._history()[:n_past], np.asarray(roots, np.intc)])
        n = self._n_gram
        if len(text) <= n:
            return []
        matches = np.ones(len(text) - n, bool)
        for i in range(n):
            matches &= text[i : len(text) - n + i] == text[len(text) - n + i]
        (found,) = np.nonzero(matches)
        if not len(found):
            return []
        begin = int(found[-1]) + n
        return text[begin : begin + room].tolist()
