"""Logits of a GGUF by stock llama.cpp, in a process without the plugin:

    python stock_worker.py plain|oracle MODEL TOKENS.npy OUT.npy WIDTH

oracle: an independent check. The eval callback adds R·x to the result of every matmul by a weight that has a residual, from the
host, with x rounded to int8 as docs/format.md says. Nothing of the plugin takes part: only the residual's bytes, decoded, and numpy.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import low_level
import numpy as np

RUN = 32  # columns that share an activation scale
MUL_MAT, MUL_MAT_ID = "MUL_MAT", "MUL_MAT_ID"


class Tensor(ctypes.Structure):
    """struct ggml_tensor of the pinned ggml (ggml.h)."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
        ("extra", ctypes.c_void_p),
        ("padding", ctypes.c_char * 8),
    ]

    def array(self, kind: type, ndim: int) -> np.ndarray:
        """The tensor's memory, its first `ndim` dimensions reversed into numpy's order."""
        shape = tuple(self.ne[i] for i in reversed(range(ndim)))
        strides = tuple(self.nb[i] for i in reversed(range(ndim)))
        size = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + np.dtype(kind).itemsize
        memory = (ctypes.c_char * size).from_address(self.data)
        return np.ndarray(shape, kind, memory, 0, strides)


def rounded(x: np.ndarray) -> np.ndarray:
    """x (…, columns) as the verifier sees it: int8 in runs of 32 columns, times their scale."""
    runs = x.reshape(*x.shape[:-1], -1, RUN)
    largest = np.abs(runs).max(axis=-1, keepdims=True)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    return (np.rint(runs * inverse) * (largest / np.float32(127))).reshape(x.shape).astype(np.float32)


class Oracle:
    def __init__(self, residuals: dict[str, np.ndarray]) -> None:
        self.residuals = residuals
        self.added = 0
        name = low_level.api._lib.ggml_op_name
        name.restype, name.argtypes = ctypes.c_char_p, [ctypes.c_int]
        self.op_name = name
        self.callback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)(self._evaluated)

    def _evaluated(self, address: int, ask: bool, _: Any) -> bool:
        node = Tensor.from_address(address)
        op = self.op_name(node.op).decode()
        if op not in (MUL_MAT, MUL_MAT_ID):
            return not ask
        residual = self.residuals.get(Tensor.from_address(node.src[0]).name.decode())
        if residual is None:
            return not ask
        if ask:
            return True
        x = rounded(Tensor.from_address(node.src[1]).array(np.float32, 3))
        y = node.array(np.float32, 3)
        if op == MUL_MAT:
            y += x @ residual[0].T
        else:
            ids = Tensor.from_address(node.src[2]).array(np.int32, 2)  # (tokens, slots)
            for token, slot in np.ndindex(ids.shape):
                y[token, slot] += residual[ids[token, slot]] @ x[token, slot % x.shape[1]]
        self.added += 1
        return True


def main(kind: str, model: str, tokens: str, out: str, width: str) -> None:
    ids = [int(t) for t in np.load(tokens)]
    callback = None
    if kind == "oracle":
        import dense_twin

        oracle = Oracle({name: residual for name, (_, residual) in dense_twin.base_and_residual(Path(model)).items()})
        callback = oracle.callback
    with low_level.Model(Path(model), eval_callback=callback) as stock:
        np.save(out, stock.logits(ids, int(width)))
    if kind == "oracle":
        assert oracle.added > 0


if __name__ == "__main__":
    main(*sys.argv[1:])
