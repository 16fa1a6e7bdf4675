"""The llama.cpp calls of speculation on one context: batches, sequences, logits. Every result is checked.

Sequence 0 is the verified text. Sequences 1, 2, … mirror it and carry the branches of a tree for the length of one step.
The context must have kv_unified = true (a partial copy between separate caches aborts the process).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

import llama_cpp.llama_cpp as llama_cpp
import numpy as np
import numpy.typing as npt

from .candidates import top_candidates
from .tree import Candidate


class DecodeError(RuntimeError):
    """llama.cpp refused a batch or a sequence operation."""


class Batch:
    """A llama_batch for up to n_tokens tokens, each in up to n_seq sequences."""

    def __init__(self, n_tokens: int, n_seq: int) -> None:
        self._token = (llama_cpp.llama_token * n_tokens)()
        self._pos = (llama_cpp.llama_pos * n_tokens)()
        self._n_seq_id = (ctypes.c_int32 * n_tokens)()
        self._seq_id = (llama_cpp.llama_seq_id * (n_tokens * n_seq))()
        self._logits = (ctypes.c_int8 * n_tokens)()
        row, first = ctypes.sizeof(llama_cpp.llama_seq_id) * n_seq, ctypes.addressof(self._seq_id)
        self._rows = (ctypes.c_void_p * n_tokens)(*(first + i * row for i in range(n_tokens)))
        self._n_seq = n_seq

        self.struct = llama_cpp.llama_batch()
        for field, type_, array in (
            ("token", llama_cpp.llama_token, self._token),
            ("pos", llama_cpp.llama_pos, self._pos),
            ("n_seq_id", ctypes.c_int32, self._n_seq_id),
            ("seq_id", ctypes.POINTER(llama_cpp.llama_seq_id), self._rows),
            ("logits", ctypes.c_int8, self._logits),
        ):
            setattr(self.struct, field, ctypes.cast(array, ctypes.POINTER(type_)))
        self.capacity = n_tokens
        self.n_tokens = 0

    def clear(self) -> None:
        """Forgets all tokens."""
        self.n_tokens = 0

    def add(self, token: int, pos: int, seqs: Sequence[int], logits: bool = True) -> int:
        """Adds a token and returns its row."""
        row = self.n_tokens
        if row >= self.capacity:
            raise DecodeError(f"a batch of more than {self.capacity} tokens")
        self._token[row] = token
        self._pos[row] = pos
        self._n_seq_id[row] = len(seqs)
        self._logits[row] = logits
        at = row * self._n_seq
        for seq in seqs:
            self._seq_id[at] = seq
            at += 1
        self.n_tokens = row + 1
        return row


class Cells:
    """Sequences of one context's memory.

    With TWOBIT_CHECK=1 in the environment, llama.cpp's own positions are compared with ours after every copy and every step.

    Args:
        ctx: a llama_context.
        n_seq: sequences the context was made for (n_seq_max).
        n_vocab: length of a row of logits.
    """

    goes_back = True  # to any position; see states.py

    def __init__(self, ctx: llama_cpp.llama_context_p, n_seq: int, n_vocab: int) -> None:
        self.ctx = ctx
        self.n_seq = n_seq
        self._n_vocab = n_vocab
        self._memory = llama_cpp.llama_get_memory(ctx)
        self._row_type = ctypes.c_float * n_vocab
        self._mirrored = [0] * n_seq  # positions [0, _mirrored[s]) of sequence 0 are in s too
        self._checking = os.environ.get("TWOBIT_CHECK", "0") not in ("", "0")

    # ---- decoding ----

    def decode(self, batch: Batch) -> None:
        """Computes the batch and waits for it.

        Raises:
            DecodeError: llama_decode failed; 1 means that the cache is full.
        """
        batch.struct.n_tokens = batch.n_tokens
        result = llama_cpp.llama_decode(self.ctx, batch.struct)
        if result != 0:
            raise DecodeError(f"llama_decode returned {result}")
        llama_cpp.llama_synchronize(self.ctx)

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """Logits (n_vocab) of a row of the last batch: a view that the next decode overwrites."""
        return np.frombuffer(memoryview(self._row_type.from_address(self._address(row))), np.float32)

    def candidates(self, row: int, count: int, p_min: float) -> list[Candidate]:
        """The likely tokens behind a row of the last batch (top_candidates)."""
        return top_candidates(self._address(row), self._n_vocab, count, p_min)

    def _address(self, row: int) -> int:
        pointer = llama_cpp.llama_get_logits_ith(self.ctx, row)
        if not pointer:
            raise DecodeError(f"row {row} has no logits")
        return ctypes.addressof(pointer.contents)

    # ---- sequences ----

    def mark(self, n_past: int) -> None:
        """Sequence 0, which ends at n_past, will have to go back there: nothing to do where it can go anywhere."""

    def remove(self, seq: int, begin: int) -> None:
        """Removes the positions from `begin` on from one sequence."""
        if not llama_cpp.llama_memory_seq_rm(self._memory, seq, begin, -1):
            raise DecodeError(f"this model's memory cannot go back to position {begin}")
        if self._mirrored[seq] > begin:
            self._mirrored[seq] = begin

    def copy(self, source: int, target: int, begin: int, end: int) -> None:
        """Adds the positions [begin, end) of `source` to `target`, which must have none of them. llama.cpp gives no result to check."""
        llama_cpp.llama_memory_seq_cp(self._memory, source, target, begin, end)
        if self._checking:
            self._expect(target, end)

    def mirror(self, seq: int, n: int) -> None:
        """Makes the positions [0, n) of sequence 0 part of `seq`."""
        if self._mirrored[seq] < n:
            self.copy(0, seq, self._mirrored[seq], n)
            self._mirrored[seq] = n

    def unmirror(self) -> None:
        """Leaves only sequence 0, as everyone else who uses the context expects it."""
        for seq in range(1, self.n_seq):
            if self._mirrored[seq]:
                self.remove(seq, 0)

    # ---- checks ----

    def end(self, seq: int = 0) -> int:
        """The position behind the last one of a sequence."""
        return llama_cpp.llama_memory_seq_pos_max(self._memory, seq) + 1

    def check(self, n_past: int) -> None:
        """Compares llama.cpp's positions with ours, if asked to: n_past in sequence 0, in the others what mirrors it.

        Raises:
            DecodeError: they differ: a cell was left behind, or lost.
        """
        if self._checking:
            self._expect(0, n_past)
            for seq in range(1, self.n_seq):
                self._expect(seq, self._mirrored[seq])

    def _expect(self, seq: int, end: int) -> None:
        if self.end(seq) != end:
            raise DecodeError(f"sequence {seq} ends at position {self.end(seq)}, not at {end}")
