"""llama.cpp's importance matrices: the mean square of every matmul's input, column by column.

GGUF files, legacy .dat files, and the diagonals of a .calib, which are the same numbers.
"""

from __future__ import annotations

import io
import struct
from pathlib import Path

import numpy as np

from . import gguf_file, gguf_types
from .calibration.store import Calibration
from .errors import TwobitError

_SUMS, _COUNTS = ".in_sum2", ".counts"
_MAX_ENTRIES = 1 << 20
# Columns that saw no input still get a little weight: a block of zero weights leaves a quantiser without any scale.
_FLOOR = 1e-6


class Imatrix:
    """Mean squares by tensor name; each (matrices × columns,) or (columns,) f32."""

    def __init__(self, path: Path) -> None:
        """Raises TwobitError: the file cannot be read or is not an imatrix."""
        self.path = path
        try:
            with open(path, "rb") as file:
                start = file.read(9)
            if start[:4] == gguf_file.MAGIC:
                self._means = _read_gguf(path)
            elif start[8:] == b"{":  # safetensors: a length, then JSON
                self._means = _read_calibration(path)
            else:
                self._means = _read_legacy(path)
        except OSError as error:
            raise TwobitError(f"{path}: cannot be read: {error.strerror}") from None
        for name, mean in self._means.items():
            if not (np.isfinite(mean).all() and (mean >= 0).all()):
                raise TwobitError(f"{path}: entry {name} holds negative numbers, NaN or Inf; make the imatrix again")

    def __len__(self) -> int:
        return len(self._means)

    def weights(self, names: tuple[str, ...], matrices: int, columns: int) -> np.ndarray | None:
        """(matrices, columns) f32, mean about 1, of the first of these tensors that has an entry; None if none has.

        Raises:
            TwobitError: the entry is of another shape: the imatrix is of another model.
        """
        for name in names:
            mean = self._means.get(name)
            if mean is None:
                continue
            if mean.size not in (columns, matrices * columns):
                raise TwobitError(
                    f"{self.path}: entry {name} has {mean.size} values for {matrices} × {columns} columns; "
                    "this imatrix is of another model"
                )
            table = np.broadcast_to(mean.reshape(-1, columns), (matrices, columns))
            average = table.mean(axis=1, keepdims=True)
            scaled = np.where(average > 0, table / np.where(average > 0, average, 1), 1)
            return np.ascontiguousarray(np.maximum(scaled, _FLOOR), np.float32)
        return None


def _read_gguf(path: Path) -> dict[str, np.ndarray]:
    file = gguf_file.open_gguf(path)
    means: dict[str, np.ndarray] = {}
    with open(path, "rb") as data:
        for tensor in file.tensors:
            name = tensor.name.removesuffix(_SUMS)
            counts = file.by_name.get(name + _COUNTS)
            if name == tensor.name or counts is None:
                continue
            if tensor.type != gguf_types.F32 or counts.type != gguf_types.F32:
                raise TwobitError(f"{path}: entry {name} is not f32; make the imatrix again")
            sums, count = (_floats(data, t) for t in (tensor, counts))
            if count.size == 0 or sums.size % count.size:
                raise TwobitError(f"{path}: entry {name} has {sums.size} sums for {count.size} counts; make the imatrix again")
            sums, count = sums.reshape(count.size, -1), count.reshape(-1, 1)
            # an expert that was never called: every column counts the same
            means[name] = np.where(count > 0, sums / np.where(count > 0, count, 1), 1).astype(np.float32).reshape(-1)
    if not means:
        raise TwobitError(f"{path}: a GGUF without imatrix entries (*.in_sum2, *.counts); give the output of llama-imatrix")
    return means


def _floats(data: io.BufferedReader, tensor: gguf_file.Tensor) -> np.ndarray:
    data.seek(tensor.offset)
    return np.frombuffer(data.read(tensor.nbytes), "<f4")


def _read_calibration(path: Path) -> dict[str, np.ndarray]:
    calibration = Calibration(path)
    diagonals = {name: calibration.diagonal(name) for name in calibration.info.columns}
    return {weight: diagonals[name] for weight, name in calibration.info.weights.items()}


def _read_legacy(path: Path) -> dict[str, np.ndarray]:
    """i32 n; n times: i32 length, name, i32 calls, i32 values, f32 values (sums over calls)."""
    means: dict[str, np.ndarray] = {}
    not_one = TwobitError(f"{path}: not an imatrix file (or cut off); give the output of llama-imatrix")
    with open(path, "rb") as file:
        left = file.seek(0, io.SEEK_END)
        file.seek(0)

        def number() -> int:
            data = file.read(4)
            if len(data) != 4:
                raise not_one
            return struct.unpack("<i", data)[0]

        entries = number()
        if not 1 <= entries <= _MAX_ENTRIES:
            raise not_one
        for _ in range(entries):
            length = number()
            if not 1 <= length <= 1024:
                raise not_one
            name = file.read(length).decode("utf-8", "replace")
            calls, values = number(), number()
            if values < 1 or values * 4 > left - file.tell():
                raise not_one
            sums = np.frombuffer(file.read(values * 4), "<f4")
            means[name] = (sums / max(calls, 1)).astype(np.float32)
    return means
