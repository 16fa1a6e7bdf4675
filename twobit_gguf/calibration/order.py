"""The order in which columns are rounded: blocks of 256, the stock types' super-blocks, by how much their inputs matter.

Rounded first, a block's errors are made good by all that follow; the last ones' are made good by nothing. A super-block's columns share
their scales and stay together (act-order that keeps blocks).
"""

from __future__ import annotations

import numpy as np

from ..format import BLOCK_COLUMNS

NATURAL, ACTIVATION = "natural", "activation"
ORDERS = (NATURAL, ACTIVATION)


class BlockOrder:
    """A permutation of a row's whole blocks; columns left over behind the last whole block stay there."""

    def __init__(self, columns: int, blocks: np.ndarray) -> None:
        """blocks: (columns // 256,) the blocks in the order they are rounded."""
        self._blocks = blocks
        at = (blocks[:, None] * BLOCK_COLUMNS + np.arange(BLOCK_COLUMNS)).reshape(-1)
        self.columns = np.concatenate([at, np.arange(at.size, columns)])

    @classmethod
    def by_activation(cls, diagonal: np.ndarray) -> BlockOrder:
        """The largest mean square first. diagonal: (columns,) of XᵀX."""
        n = diagonal.size // BLOCK_COLUMNS
        mean = np.nan_to_num(diagonal[: n * BLOCK_COLUMNS]).reshape(n, BLOCK_COLUMNS).mean(axis=1)
        return cls(diagonal.size, np.argsort(-mean, kind="stable"))

    def apply(self, w: np.ndarray) -> np.ndarray:
        """(rows, columns) f32 in the order of rounding."""
        return np.ascontiguousarray(w[:, self.columns])

    def apply_both(self, h: np.ndarray) -> np.ndarray:
        """(columns, columns) f32, rows and columns in the order of rounding."""
        return np.ascontiguousarray(h[np.ix_(self.columns, self.columns)])

    def pack(self, data: np.ndarray, rows: int, block_nbytes: int) -> np.ndarray:
        """Packed rows (bytes,) u8 whose whole blocks take block_nbytes each, in the order of rounding."""
        return self._move(data, rows, block_nbytes, self._blocks)

    def unpack(self, data: np.ndarray, rows: int, block_nbytes: int) -> np.ndarray:
        """The other way: packed in the order of rounding, returned in the file's."""
        return self._move(data, rows, block_nbytes, np.argsort(self._blocks))

    def _move(self, data: np.ndarray, rows: int, block_nbytes: int, blocks: np.ndarray) -> np.ndarray:
        table = data.reshape(rows, -1)
        whole = blocks.size * block_nbytes
        moved = table[:, :whole].reshape(rows, blocks.size, block_nbytes)[:, blocks].reshape(rows, whole)
        return np.ascontiguousarray(np.concatenate([moved, table[:, whole:]], axis=1)).reshape(-1)
