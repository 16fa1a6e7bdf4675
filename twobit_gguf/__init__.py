"""twobit: a model split by bits. The 2-bit base drafts, base + residual verifies; see README.md.

    from twobit_gguf import Llama          # instead of: from llama_cpp import Llama
    llm = Llama("out.gguf")

llama_cpp is imported only when one of these names is used: the converter and the format do without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import TwobitError

if TYPE_CHECKING:
    from ._install import install
    from .llama import Llama
    from .speculative import SpeculationOptions, SpeculationStats
    from .speculative.draft_model import TwobitDraftModel

__all__ = ["Llama", "SpeculationOptions", "SpeculationStats", "TwobitDraftModel", "TwobitError", "install"]

_HOMES = {
    "Llama": ".llama",
    "SpeculationOptions": ".speculative",
    "SpeculationStats": ".speculative",
    "TwobitDraftModel": ".speculative.draft_model",
    "install": "._install",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name], __name__), name)
    globals()[name] = value
    return value
