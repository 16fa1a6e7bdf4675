"""A .calib file: XᵀX of every matmul's input in safetensors format.

    tensors    INPUT            (k, k) f32, the mean of x xᵀ over the calibration's rows x
               INPUT.diagonal   (k,) f32, its diagonal: the mean squares, what llama.cpp's imatrix has
    metadata   twobit.calibration  the version, 1
               model, tokens, context, text_xxh64
               weights          JSON {weight: INPUT}; weights that share their input share its matrix
               rows             JSON {INPUT: number of rows}
               dropped          JSON {INPUT: rows left out since they held NaN or Inf}

INPUT is the name of the first weight that is multiplied by it. Tensors lie without gaps in the header's order, 64-byte aligned.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..errors import TwobitError

VERSION = "1"
_MAX_HEADER = 100 << 20  # the safetensors library's own limit
_ALIGNMENT = 64
_DIAGONAL = ".diagonal"


@dataclass(frozen=True)
class Info:
    """What a .calib says of itself."""

    model: str
    tokens: int
    context: int
    text_xxh64: str
    weights: dict[str, str]  # weight: input
    columns: dict[str, int]  # input: columns
    rows: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)


class Writer:
    """A .calib under construction: sparse at first, input after input written to its place. The counts come last."""

    def __init__(self, path: Path, info: Info) -> None:
        self.path, self.info = path, info
        self._header, self._offsets = _layout(info)
        self.nbytes = len(self._header) + sum(4 * k * (k + 1) for k in info.columns.values())

    def create(self) -> None:
        with open(self.path, "wb") as file:
            file.write(self._header)
            file.truncate(self.nbytes)

    def matches(self) -> bool:
        """Whether the file is there with this very header and size."""
        try:
            with open(self.path, "rb") as file:
                return file.read(len(self._header)) == self._header and os.fstat(file.fileno()).st_size == self.nbytes
        except OSError:
            return False

    def put(self, name: str, matrix: np.ndarray) -> None:
        """matrix: (k, k) f32."""
        with open(self.path, "r+b") as file:
            file.seek(len(self._header) + self._offsets[name])
            matrix.tofile(file)
            np.ascontiguousarray(np.diagonal(matrix)).tofile(file)

    def set_counts(self, rows: Mapping[str, int], dropped: Mapping[str, int]) -> None:
        """Fills the counts in, into the room that the header keeps for them."""
        info = Info(**{**self.info.__dict__, "rows": dict(rows), "dropped": dict(dropped)})
        header, _ = _layout(info, len(self._header))
        with open(self.path, "r+b") as file:
            file.write(header)


def _layout(info: Info, size: int | None = None) -> tuple[bytes, dict[str, int]]:
    """The header, of `size` bytes if given, and the offset of each input's matrix behind it."""
    entries: dict[str, object] = {
        "__metadata__": {
            "twobit.calibration": VERSION,
            "model": info.model,
            "tokens": str(info.tokens),
            "context": str(info.context),
            "text_xxh64": info.text_xxh64,
            "weights": json.dumps(info.weights),
            "rows": json.dumps(info.rows),
            "dropped": json.dumps(info.dropped),
        }
    }
    offsets, at = {}, 0
    for name, k in info.columns.items():
        offsets[name] = at
        for key, shape in ((name, [k, k]), (name + _DIAGONAL, [k])):
            nbytes = 4 * int(np.prod(shape))
            entries[key] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + nbytes]}
            at += nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    if size is None:
        room = len(text) + sum(2 * len(name) + 64 for name in info.columns)  # for the counts
        size = (8 + room + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
    if 8 + len(text) > size:
        raise TwobitError("calibration: the header has no room for its counts")
    return struct.pack("<Q", size - 8) + text.ljust(size - 8), offsets


class Calibration:
    """A finished .calib, opened for reading."""

    def __init__(self, path: Path) -> None:
        """Raises TwobitError: cannot be read, cut off, or not a .calib."""
        self.path = path
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                start = file.read(8)
                length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
                if not 2 <= length <= min(_MAX_HEADER, size - 8):
                    raise TwobitError(f"{path}: not a calibration file; make one with: twobit calibrate MODEL -o {path.name}")
                header = file.read(length)
        except OSError as error:
            raise TwobitError(f"{path}: cannot be read: {error.strerror}") from None
        try:
            self._entries = json.loads(header)
            metadata = self._entries.pop("__metadata__")
            version = metadata["twobit.calibration"]
            self.info = Info(
                model=metadata["model"],
                tokens=int(metadata["tokens"]),
                context=int(metadata["context"]),
                text_xxh64=metadata["text_xxh64"],
                weights=json.loads(metadata["weights"]),
                columns={name: int(entry["shape"][0]) for name, entry in self._entries.items() if len(entry["shape"]) == 2},
                rows={name: int(n) for name, n in json.loads(metadata["rows"]).items()},
                dropped={name: int(n) for name, n in json.loads(metadata["dropped"]).items()},
            )
            self._offsets = {name: 8 + length + self._offset(name, k, size - 8 - length) for name, k in self.info.columns.items()}
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            raise TwobitError(f"{path}: not a calibration file, or a damaged one; make it again with twobit calibrate") from None
        if version != VERSION:
            raise TwobitError(f"{path}: calibration version {version}, this twobit reads {VERSION}; make it again")
        missing = sorted(set(self.info.weights.values()) - set(self.info.columns))
        if missing:
            raise TwobitError(f"{path}: the matrix of {missing[0]} is missing; make the calibration again")

    def _offset(self, name: str, columns: int, size: int) -> int:
        entry = self._entries[name]
        start, end = entry["data_offsets"]
        if entry["dtype"] != "F32" or entry["shape"] != [columns, columns] or start < 0 or end - start != 4 * columns**2 or end > size:
            raise ValueError(name)
        return int(start)

    def input_of(self, weight: str) -> str | None:
        """The input this weight is multiplied by, None if the calibration does not know the weight."""
        return self.info.weights.get(weight)

    def matrix(self, name: str) -> np.ndarray:
        """(k, k) f32, a copy in memory."""
        k = self.info.columns[name]
        return np.fromfile(self.path, np.float32, k * k, offset=self._offsets[name]).reshape(k, k)

    def diagonal(self, name: str) -> np.ndarray:
        """(k,) f32."""
        k = self.info.columns[name]
        return np.fromfile(self.path, np.float32, k, offset=self._offsets[name] + 4 * k * k)
