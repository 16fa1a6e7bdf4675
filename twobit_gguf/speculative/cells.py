"""The llama.cpp calls of speculation on one context: batches, sequences, logits. Every result is checked.

Sequence 0 is the verified text. Sequences 1, 2, … mirror it and carry the branches of a tree for the length of one step.
The context must have kv_unified = true (a partial copy between separate caches aborts the process).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import llama_cpp.llama_cpp as llama_cpp
import numpy as np
import numpy.typing as npt


class DecodeError(RuntimeError):
    """llama.cpp refused a batch or a sequence operation."""


class Batch:
    """A llama_batch over numpy arrays for up to n_tokens tokens, each in up to n_seq sequences."""

    def __init__(self, n_tokens: int, n_seq: int) -> None:
        self._token = np.zeros(n_tokens, np.int32)
        self._pos = np.zeros(n_tokens, np.int32)
        self._n_seq_id = np.zeros(n_tokens, np.int32)
        self._seq_id = np.zeros((n_tokens, n_seq), np.int32)
        self._logits = np.zeros(n_tokens, np.int8)
        rows = self._seq_id.ctypes.data + np.arange(n_tokens, dtype=np.uintp) * np.uintp(self._seq_id.strides[0])
        self._rows = rows.astype(np.uintp)

        self.struct = llama_cpp.llama_batch()
        for field, type_, array in (
            ("token", llama_cpp.llama_token, self._token),
            ("pos", llama_cpp.llama_pos, self._pos),
            ("n_seq_id", ctypes.c_int32, self._n_seq_id),
            ("seq_id", ctypes.POINTER(llama_cpp.llama_seq_id), self._rows),
            ("logits", ctypes.c_int8, self._logits),
        ):
            setattr(self.struct, field, ctypes.cast(array.ctypes.data, ctypes.POINTER(type_)))
        self.capacity = n_tokens

    def clear(self) -> None:
        """Forgets all tokens."""
        self.struct.n_tokens = 0

    def add(self, token: int, pos: int, seqs: Sequence[int], logits: bool = True) -> int:
        """Adds a token and returns its row."""
        row = self.struct.n_tokens
        if row >= self.capacity:
            raise DecodeError(f"a batch of more than {self.capacity} tokens")
        self._token[row] = token
        self._pos[row] = pos
        self._n_seq_id[row] = len(seqs)
        self._seq_id[row, : len(seqs)] = seqs
        self._logits[row] = logits
        self.struct.n_tokens = row + 1
        return row


class Cells:
    """Sequences of one context's memory.

    Args:
        ctx: a llama_context.
        n_seq: sequences the context was made for (n_seq_max).
        n_vocab: length of a row of logits.
    """

    def __init__(self, ctx: llama_cpp.llama_context_p, n_seq: int, n_vocab: int) -> None:
        self.ctx = ctx
        self.n_seq = n_seq
        self._memory = llama_cpp.llama_get_memory(ctx)
        self._row_type = ctypes.c_float * n_vocab
        self._mirrored = [0] * n_seq  # positions [0, _mirrored[s]) of sequence 0 are in s too

    def decode(self, batch: Batch) -> None:
        """Computes the batch and waits for it.

        Raises:
            DecodeError: llama_decode failed; 1 means that the cache is full.
        """
        result = llama_cpp.llama_decode(self.ctx, batch.struct)
        if result != 0:
            raise DecodeError(f"llama_decode returned {result}")
        llama_cpp.llama_synchronize(self.ctx)

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """Logits (n_vocab) of a row of the last batch: a view that the next decode overwrites."""
        pointer = llama_cpp.llama_get_logits_ith(self.ctx, row)
        if not pointer:
            raise DecodeError(f"row {row} has no logits")
        return np.frombuffer(memoryview(self._row_type.from_address(ctypes.addressof(pointer.contents))), np.float32)

    def remove(self, seq: int, begin: int) -> None:
        """Removes the positions from `begin` on from one sequence."""
        if not llama_cpp.llama_memory_seq_rm(self._memory, seq, begin, -1):
            raise DecodeError(f"this model's memory cannot go back to position {begin}")
        self._mirrored[seq] = min(self._mirrored[seq], begin)

    def copy(self, source: int, target: int, begin: int, end: int) -> None:
        """Adds the positions [begin, end) of `source` to `target`, which must have none of them."""
        llama_cpp.llama_memory_seq_cp(self._memory, source, target, begin, end)

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

    def end(self) -> int:
        """The position behind the last one of sequence 0."""
        return llama_cpp.llama_memory_seq_pos_max(self._memory, 0) + 1
