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
    """A guess of chance c that takes t seconds is worth making if c > rate * t."""

    def __init__(self, costs: Costs, acceptance: Acceptance, rate: float) -> None:
        self._costs = costs
        self._mean_top = acceptance.mean_top
        self._rate = rate

    def draft_pass(self, chance: float, width: int) -> bool:
        return chance * self._mean_top > self._rate * (self._costs.draft + self._costs.verify_more(width))

    def node(self, chance: float, width: int) -> bool:
        return chance > self._rate * self._costs.verify_more(width)


class FixedWorth:
    """The thresholds of SpeculationOptions."""

    def __init__(self, options: SpeculationOptions) -> None:
        self._expand = 0.0 if options.shape == "chain" else options.expand
        self._leaf = options.leaf

    def draft_pass(self, chance: float, width: int) -> bool:
        return chance >= self._expand

    def node(self, chance: float, width: int) -> bool:
        return chance >= self._leaf
