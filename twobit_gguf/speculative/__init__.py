"""Speculative decoding with the model's own 2-bit base as the draft: chain, comb and tree in one llama.cpp context."""

from .engine import Speculator, Step
from .options import SpeculationOptions
from .stats import SpeculationStats

__all__ = ["SpeculationOptions", "SpeculationStats", "Speculator", "Step"]
