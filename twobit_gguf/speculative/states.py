"""Cells of a model whose memory is, all or in part, a state: recurrent and hybrid architectures.

A state is overwritten by every token, so such a memory cannot drop its last positions; it can go back to a copy. A step therefore marks
where it began, drafts, goes back, verifies, and goes back again unless every drafted token was accepted; what was accepted is then decoded
once more with the next step's tokens. llama.cpp copies a state only when one of two sequences that share it is decoded.

llama.cpp's own way back, n_rs_seq, does not serve here. It keeps states between the tokens of the last batch, for some architectures
(llm_arch_supports_rs_rollback in llama-arch.cpp); a draft is decoded one token a batch, and the states of earlier batches are stale
(build_recurrent_attn in models/delta-net-base.cpp), while llama_memory_recurrent::seq_rm would still go back to them.
"""

from __future__ import annotations

import llama_cpp.llama_cpp as llama_cpp

from .cells import Cells, DecodeError

_MARK = 1  # the sequence that holds the copy


class StateCells(Cells):
    """Two sequences: the text, and what it was at the mark."""

    goes_back = False

    def __init__(self, ctx: llama_cpp.llama_context_p, n_vocab: int) -> None:
        super().__init__(ctx, 2, n_vocab)

    def mark(self, n_past: int) -> None:
        """Makes n_past, where sequence 0 ends now, the position to which it can go back."""
        if self._mirrored[_MARK]:
            super().remove(_MARK, 0)
        self._copy_all(0, _MARK, n_past)
        self._mirrored[_MARK] = n_past

    def remove(self, seq: int, begin: int) -> None:
        """Removes the positions from `begin` on; of sequence 0 all, none, or those behind the mark."""
        if seq != 0 or begin == 0 or begin >= self.end():
            super().remove(seq, begin)
            return
        if begin != self._mirrored[_MARK]:
            raise DecodeError(f"this model's memory cannot go back to position {begin}")
        super().remove(0, 0)
        self._copy_all(_MARK, 0, begin)

    def _copy_all(self, source: int, target: int, end: int) -> None:
        llama_cpp.llama_memory_seq_cp(self._memory, source, target, -1, -1)
        if self._checking:
            self._expect(target, end)
