"""The few likely tokens of a row of logits."""

from __future__ import annotations

import functools
from typing import Any

from .. import _native
from .tree import Candidate


@functools.cache
def _function() -> Any:
    return _native.lib().twobit_top_candidates


def top_candidates(address: int, n_vocab: int, count: int, p_min: float) -> list[Candidate]:
    """At most `count` tokens with p >= p_min, best first; the best one always. Equal logits: the lower token first.

    Empty if the best logit is not finite. address: of n_vocab f32 logits, which C (ggml-twobit/src/candidates.cpp) reads where they are.
    """
    out = _native.ffi.new("struct twobit_candidate[]", count)
    found = _function()(_native.ffi.cast("float *", address), n_vocab, count, p_min, out)
    return [Candidate(out[i].token, i, out[i].p) for i in range(found)]
