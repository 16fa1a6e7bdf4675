"""Carries a plan out: reads, rounds and writes tensor after tensor, in pieces of rows spread over a pool of threads.

A piece takes part in nothing but its own rows and results are taken in order, so the output does not depend on the number of threads.
Memory: the pieces in flight, and the base of the tensor at hand (its residual's factor needs the whole base first).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from . import convert_quantize, format, gguf_types
from .convert_bases import Bases
from .convert_imatrix import Imatrix
from .convert_plan import OUTPUT, TOKEN_EMBD, Action, Step
from .convert_quantize import QuantizerFactory, TensorQuantizer
from .convert_source import Source
from .format_write import PairedWriter

_IN_FLIGHT = 256 << 20  # bytes of f32 in all pieces that are being worked on
_LARGEST_PIECE = 16 << 20

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Piece:
    """Rows [row0, row0 + n_rows) counted through all matrices; they are all of one matrix."""

    matrix: int
    row0: int
    n_rows: int


def cut(step: Step, threads: int) -> list[Piece]:
    """Whole super-tiles of rows, small enough for memory."""
    row_nbytes = 4 * step.source.columns
    budget = min(_LARGEST_PIECE, _IN_FLIGHT // (2 * threads))
    rows = max(1, budget // row_nbytes // format.TILE_ROWS) * format.TILE_ROWS
    pieces = []
    for matrix in range(step.matrices):
        for row in range(0, step.rows, rows):
            pieces.append(Piece(matrix, matrix * step.rows + row, min(rows, step.rows - row)))
    return pieces


class Conversion:
    """Runs steps. progress is called with the source bytes just done; every paired tensor counts twice (base, then residual)."""

    def __init__(
        self,
        source: Source,
        writer: PairedWriter,
        pool: ThreadPoolExecutor,
        threads: int,
        factory: QuantizerFactory,
        imatrix: Imatrix | None,
        bases: Bases | None,
        progress: Callable[[int], object],
    ) -> None:
        self.source, self.writer, self.pool, self.threads = source, writer, pool, threads
        self.factory, self.imatrix, self.bases, self.progress = factory, imatrix, bases, progress
        self.without_importance: list[str] = []  # paired tensors that the imatrix does not know

    def run(self, step: Step) -> None:
        if step.action is Action.PAIR:
            self._pair(step)
            return
        sink, _ = self.writer.sinks(step.spec)
        convert = self._read if step.action is Action.COPY else self._requantize
        for piece, data in self._in_order(lambda piece: convert(step, piece), cut(step, self.threads)):
            sink.write(data)
            self._done(step, piece)

    def _pair(self, step: Step) -> None:
        quantizer = self.factory(step, self._importance(step))
        pieces = cut(step, self.threads)
        base_sink, residual_sink = self.writer.sinks(step.spec)
        assert residual_sink is not None and step.spec.bits is not None

        bases, largest = [], 0.0
        for piece, (base, magnitude) in self._in_order(lambda piece: self._base(step, quantizer, piece), pieces):
            base_sink.write(base.data)
            bases.append(base)
            largest = max(largest, magnitude)
            self._done(step, piece)
        factor = convert_quantize.factor(step.spec.bits, largest)
        self.writer.set_factor(step.spec, factor)

        def residual(numbered: tuple[Piece, np.ndarray]) -> np.ndarray:
            piece, base = numbered
            weights = self.source.read_f32(step.source, piece.row0, piece.n_rows)
            return quantizer.residual(weights, base, piece.matrix, factor)

        for (piece, _), packed in self._in_order(residual, zip(pieces, bases, strict=True)):
            residual_sink.write(packed.data)
            self._done(step, piece)

    def _base(self, step: Step, quantizer: TensorQuantizer, piece: Piece) -> tuple[np.ndarray, float]:
        weights = self.source.read_f32(step.source, piece.row0, piece.n_rows)
        base = self.bases.read(step, piece.row0, piece.n_rows) if self.bases is not None else None
        if base is None:
            base = quantizer.base(weights, piece.matrix)
        return base, convert_quantize.max_abs(weights, step.spec.type, base)

    def _requantize(self, step: Step, piece: Piece) -> memoryview:
        weights = self.source.read_f32(step.source, piece.row0, piece.n_rows)
        return convert_quantize.quantize(step.spec.type, weights).data

    def _read(self, step: Step, piece: Piece) -> memoryview:
        return memoryview(self.source.read(step.source, piece.row0, piece.n_rows))

    def _importance(self, step: Step) -> np.ndarray | None:
        if self.imatrix is None:
            return None
        # an output that shared its weights with the embedding was recorded under the embedding's name
        names = (OUTPUT, TOKEN_EMBD) if step.spec.name == OUTPUT else (step.spec.name,)
        weights = self.imatrix.weights(names, step.matrices, step.source.columns)
        if weights is None:
            self.without_importance.append(step.spec.name)
        return weights

    def _done(self, step: Step, piece: Piece) -> None:
        self.progress(gguf_types.nbytes(step.source.type, piece.n_rows * step.source.columns))

    def _in_order(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[tuple[Item, Result]]:
        """Results in the order of the items, at most two for each thread under way."""
        waiting: deque[tuple[Item, Future[Result]]] = deque()
        for item in items:
            if len(waiting) == 2 * self.threads:
                first, future = waiting.popleft()
                yield first, future.result()
            waiting.append((item, self.pool.submit(function, item)))
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
