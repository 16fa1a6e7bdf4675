"""Which guesses are worth making: by measured costs and the price of time, or by fixed thresholds."""

from __future__ import annotations

from typing import Protocol

from .acceptance import Acceptance
from .costs import Costs
from .options import SpeculationOptions


class Worth(Protocol):
    """chance: that the verifier gets to a node; width: tokens that the verification has so far, roots included."""

    def draft_pass(self, chance: float, width: int) -> bool:
        """Whether to draft behind a node."""

    def node(self, chance: float, width: int) -> bool:
        """Whether a token that is known already should be verified."""


class MeasuredWorth:
    """By the price of time: decoding makes `rate` tokens a second, so a guess of chance c that takes t seconds must have c > rate * t.

    The rate is what the best fixed number of passes would make by the measured costs and the mean acceptance; with none it is
    plain decoding's.
    """

    _AHEAD = 8  # a single pass may not pay where a few do: the second token of a verification is the dear one

    def __init__(self, costs: Costs, acceptance: Acceptance) -> None:
        self._draft, self._verify = costs.draft, costs.widths()
        self._mean = min(acceptance.mean_top, 0.98)
        self._rate = self._best_rate()

    def _best_rate(self) -> float:
        best, tokens, chance = 0.0, 1.0, 1.0
        for passes in range(2 * self._AHEAD + 1):
            best = max(best, tokens / (passes * self._draft + self._verify[1 + passes]))
            chance *= self._mean
            tokens += chance
        return best

    def draft_pass(self, chance: float, width: int) -> bool:
        here = self._verify[width]
        gain = 0.0
        for passes in range(1, self._AHEAD + 1):
            chance *= self._mean
            gain += chance
            if gain > self._rate * (passes * self._draft + self._verify[width + passes] - here):
                return True
        return False

    def node(self, chance: float, width: int) -> bool:
        return chance > self._rate * (self._verify[width + 1] - self._verify[width])


class FixedWorth:
    """The thresholds of SpeculationOptions."""

    def __init__(self, options: SpeculationOptions) -> None:
        self._expand = 0.0 if options.shape == "chain" else options.expand
        self._leaf = options.leaf

    def draft_pass(self, chance: float, width: int) -> bool:
        return chance >= self._expand

    def node(self, chance: float, width: int) -> bool:
        return chance >= self._leaf


class ProbeWorth:
    """A few tokens behind each other, to see what they are worth."""

    def __init__(self, width: int) -> None:
        self._width = width

    def draft_pass(self, chance: float, width: int) -> bool:
        return width < self._width

    def node(self, chance: float, width: int) -> bool:
        return width < self._width
