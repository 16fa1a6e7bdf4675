"""How one paired tensor is rounded: the seam between the converter, which streams rows, and calibration, which knows better scales.

The converter asks its QuantizerFactory for a TensorQuantizer once per tensor and calls it from several threads, with the rows of
one matrix in any order and in pieces of whole super-tiles (32 rows; the last piece of a matrix may have fewer). So a piece must
give the same bytes whatever the other pieces are: error feedback runs along the columns of a row, never across rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from . import format, gguf_types
from ._native import check, ffi, lib
from .convert_plan import Step


class TensorQuantizer(Protocol):
    """Rounds one tensor. w: (rows, columns) f32, finite; matrix: which of the tensor's matrices (experts) the rows are of."""

    def base(self, w: np.ndarray, matrix: int) -> np.ndarray:
        """The rows in the step's ggml type, (bytes,) u8."""

    def residual(self, w: np.ndarray, base: np.ndarray, matrix: int, factor: float) -> np.ndarray:
        """The packed residual of these rows to the base that base() gave, (bytes,) u8."""


# step: the tensor; importance: (matrices, columns) f32 weights of the columns' squared errors (imatrix), or None
QuantizerFactory = Callable[[Step, "np.ndarray | None"], TensorQuantizer]


class PlainQuantizer:
    """Round to nearest with searched scales, weighted by the imatrix where there is one: ggml's own quantisers, and ours for Q2_0."""

    def __init__(self, step: Step, importance: np.ndarray | None) -> None:
        assert step.spec.bits is not None
        self.bits, self.type = step.spec.bits, step.spec.type
        self.importance = importance

    def base(self, w: np.ndarray, matrix: int) -> np.ndarray:
        return quantize(self.type, w, None if self.importance is None else self.importance[matrix])

    def residual(self, w: np.ndarray, base: np.ndarray, matrix: int, factor: float) -> np.ndarray:
        weights = None if self.importance is None else self.importance[matrix]
        return encode(self.bits, factor, w, self.type, base, weights)


def quantize(kind: int, w: np.ndarray, importance: np.ndarray | None = None) -> np.ndarray:
    """Rows (rows, columns) f32 in a ggml type, (bytes,) u8."""
    rows, columns = w.shape
    out = np.empty(gguf_types.nbytes(kind, rows * columns), np.uint8)
    check(lib().twobit_base_quantize(kind, _floats(w), rows, columns, _floats(importance), ffi.from_buffer(out)))
    return out


def encode(
    bits: int, factor: float, w: np.ndarray, base_type: int, base: np.ndarray, importance: np.ndarray | None = None
) -> np.ndarray:
    """The packed residual w - base of rows (rows, columns) f32, (bytes,) u8."""
    rows, columns = w.shape
    out = np.empty(format.residual_nbytes(bits, rows, columns, 1), np.uint8)
    check(
        lib().twobit_residual_encode(
            bits, factor, _floats(w), base_type, ffi.from_buffer(base), rows, columns, _floats(importance), ffi.from_buffer(out)
        )
    )
    return out


def max_abs(w: np.ndarray, kind: int, base: np.ndarray) -> float:
    """The largest magnitude of w - base."""
    rows, columns = w.shape
    value = float(lib().twobit_residual_max_abs(_floats(w), kind, ffi.from_buffer(base), rows, columns))
    check(-1 if value < 0 else 0)
    return value


def factor(bits: int, largest: float) -> float:
    """The tensor's factor for this largest magnitude."""
    value = float(lib().twobit_residual_factor(bits, largest))
    check(-1 if value <= 0 else 0)
    return value


def _floats(array: np.ndarray | None) -> object:
    if array is None:
        return ffi.NULL
    assert array.dtype == np.float32 and array.flags.c_contiguous
    return ffi.from_buffer("float[]", array)
