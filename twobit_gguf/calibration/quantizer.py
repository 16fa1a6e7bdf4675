"""The converter's TensorQuantizer with error feedback: base and residual rounded for a calibration's XᵀX."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from .. import format, gguf_types
from .._native import check, ffi, lib
from ..convert_plan import Step
from ..convert_quantize import PlainQuantizer, TensorQuantizer
from ..errors import TwobitError
from .factorise import Factors, damping_for, factorise
from .order import ACTIVATION, NATURAL, BlockOrder
from .store import Calibration

SWEEPS = 4  # each gains about half of what the one before did (docs/quality.md)
_CACHE = 256 << 20  # bytes of factors kept for the next tensors with the same input


class FeedbackQuantizer:
    """Rounds one tensor for the calibration of its input. Experts share it."""

    def __init__(self, step: Step, factors: Factors, diagonal: np.ndarray, sweeps: int) -> None:
        assert step.spec.bits is not None
        self.bits, self.type, self.factors = step.spec.bits, step.spec.type, factors
        self.sweeps = sweeps if lib().twobit_sweep_supports(self.type) else 0
        # stock types without a feedback method of ours are rounded by ggml's quantisers, which take the diagonal
        weights = np.maximum(diagonal / max(float(diagonal.mean()), 1e-30), 1e-6).astype(np.float32)
        self._plain = PlainQuantizer(step, np.tile(weights, (step.matrices, 1)))

    def base(self, w: np.ndarray, matrix: int) -> np.ndarray:
        if not lib().twobit_feedback_supports(self.type):
            return self._plain.base(w, matrix)
        rows, columns = w.shape
        order = self.factors.order
        w = order.apply(w) if order else w
        out = np.empty(gguf_types.nbytes(self.type, rows * columns), np.uint8)
        check(
            lib().twobit_base_quantize_feedback(
                self.type, _floats(w), rows, columns, _floats(self.factors.u), _floats(self.factors.d), ffi.from_buffer(out)
            )
        )
        if self.sweeps:
            h = _floats(self.factors.h)
            check(lib().twobit_base_sweep(self.type, _floats(w), rows, columns, h, self.sweeps, ffi.from_buffer(out)))
        return order.unpack(out, rows, self._base_block) if order else out

    def residual(self, w: np.ndarray, base: np.ndarray, matrix: int, factor: float) -> np.ndarray:
        rows, columns = w.shape
        order = self.factors.order
        if order:
            w, base = order.apply(w), order.pack(base, rows, self._base_block)
        packed = np.empty(format.residual_nbytes(self.bits, rows, columns, 1), np.uint8)
        check(
            lib().twobit_residual_encode_feedback(
                self.bits, factor, _floats(w), self.type, ffi.from_buffer(base), rows, columns,
                _floats(self.factors.u), _floats(self.factors.d), ffi.from_buffer(packed),
            )
        )  # fmt: skip
        if not order:
            return packed
        tile = format.residual_nbytes(self.bits, format.TILE_ROWS, format.BLOCK_COLUMNS, 1)
        return order.unpack(packed, -(-rows // format.TILE_ROWS), tile)

    def output_error(self, error: np.ndarray) -> float:
        """tr(E H Eᵀ) over the calibration's rows, damped as it was used; error: (rows, columns) f32."""
        order = self.factors.order
        error = order.apply(error) if order else error
        return float((np.square(error @ self.factors.u) @ self.factors.d).sum())

    @property
    def _base_block(self) -> int:
        return gguf_types.nbytes(self.type, format.BLOCK_COLUMNS)


class FeedbackFactory:
    """A QuantizerFactory. Tensors the calibration does not know, or knows nothing of, are rounded plainly, with a warning."""

    def __init__(
        self,
        calibration: Calibration,
        warn: Callable[[str], object],
        damping: float | None = None,
        order: str = NATURAL,
        sweeps: int = SWEEPS,
    ) -> None:
        """damping: λ for all tensors; None chooses by the amount of text (factorise.damping_for). order: one of order.ORDERS.
        sweeps: how often a base is rounded anew."""
        self.calibration, self.warn, self.damping, self.order, self.sweeps = calibration, warn, damping, order, sweeps
        self._cache: OrderedDict[str, Factors | None] = OrderedDict()

    def __call__(self, step: Step, importance: np.ndarray | None) -> TensorQuantizer:
        name, columns = step.spec.name, step.source.columns
        source = self.calibration.input_of(name)
        if source is None:
            self.warn(f"{name}: not in {self.calibration.path.name}, rounded without it")
            return PlainQuantizer(step, importance)
        if self.calibration.info.columns[source] != columns:
            raise TwobitError(
                f"{self.calibration.path}: tensor {name} has {columns} columns here and {self.calibration.info.columns[source]} there; "
                "calibrate the model you convert"
            )
        factors = self._factors(source)
        if factors is None:
            self.warn(f"{name}: its input {source} was never seen, or was all zeros or NaN; rounded without calibration")
            return PlainQuantizer(step, importance)
        return FeedbackQuantizer(step, factors, np.nan_to_num(self.calibration.diagonal(source)), self.sweeps)

    def _factors(self, source: str) -> Factors | None:
        if source in self._cache:
            self._cache.move_to_end(source)
            return self._cache[source]
        info = self.calibration.info
        rows, columns = info.rows.get(source, 0), info.columns[source]
        # make room first: the new one may be large
        while self._cache and sum(f.nbytes for f in self._cache.values() if f) + 8 * columns**2 > _CACHE:
            self._cache.popitem(last=False)
        damping = damping_for(source, columns, rows) if self.damping is None else self.damping
        matrix = self.calibration.matrix(source)
        order = None
        if self.order == ACTIVATION and columns >= 2 * format.BLOCK_COLUMNS:
            order = BlockOrder.by_activation(self.calibration.diagonal(source))
            matrix = order.apply_both(matrix)
        factors = factorise(matrix, damping)
        if factors is not None:
            factors.order = order
        if 0 < rows < columns:
            self.warn(f"{source}: {rows} rows of text for {columns} columns is little; calibrate with more --tokens")
        for note in factors.notes if factors else []:
            self.warn(f"{source}: {note}")
        self._cache[source] = factors
        return factors


def _floats(array: np.ndarray) -> object:
    assert array.dtype == np.float32 and array.flags.c_contiguous
    return ffi.from_buffer("float[]", array)
