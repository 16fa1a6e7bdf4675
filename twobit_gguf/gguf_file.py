"""A strict GGUF reader and a header writer.

gguf-py's reader believes the lengths it finds; this one checks every length against the file first, refuses what llama.cpp's own
reader (ggml/src/gguf.cpp) refuses, and keeps values as the bytes they are, so that a converter can copy them unchanged.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from . import gguf_types
from .errors import TwobitError

MAGIC = b"GGUF"
VERSION = 3
DEFAULT_ALIGNMENT = 32
MAX_NAME = 63  # bytes of a tensor's name (GGML_MAX_NAME less its zero)
MAX_DIMS = 4
MAX_VALUE = 1 << 30  # bytes of one value, elements of one array: llama.cpp's own limits

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_FORMATS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}


@dataclass(frozen=True)
class Value:
    """One value of the header: its type, the type of its items if it is an array, and its bytes as they stand in the file."""

    kind: int
    item: int | None
    raw: bytes

    def get(self) -> Any:
        """int, float, bool, str, or a list of them."""
        if self.kind == ARRAY:
            (count,) = struct.unpack_from("<Q", self.raw, 4)
            assert self.item is not None
            if self.item != STRING:
                return list(struct.unpack_from(f"<{count}{_FORMATS[self.item]}", self.raw, 12))
            strings, at = [], 12
            for _ in range(count):
                (length,) = struct.unpack_from("<Q", self.raw, at)
                strings.append(self.raw[at + 8 : at + 8 + length].decode("utf-8", "replace"))
                at += 8 + length
            return strings
        if self.kind == STRING:
            return self.raw[8:].decode("utf-8", "replace")
        return struct.unpack("<" + _FORMATS[self.kind], self.raw)[0]


def scalar(kind: int, value: float) -> Value:
    return Value(kind, None, struct.pack("<" + _FORMATS[kind], value))


def string(text: str) -> Value:
    data = text.encode("utf-8")
    return Value(STRING, None, struct.pack("<Q", len(data)) + data)


def array(item: int, values: Sequence[float]) -> Value:
    """An array of numbers."""
    return Value(ARRAY, item, struct.pack("<IQ", item, len(values)) + struct.pack(f"<{len(values)}{_FORMATS[item]}", *values))


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file. shape is ggml's ne: (columns, rows, matrices, …); offset counts from the file's start."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int
    nbytes: int

    def dim(self, i: int) -> int:
        return self.shape[i] if i < len(self.shape) else 1

    @property
    def columns(self) -> int:
        return self.dim(0)

    @property
    def n_rows(self) -> int:
        """Rows of all its matrices together."""
        return self.dim(1) * self.dim(2) * self.dim(3)

    @property
    def n_weights(self) -> int:
        return self.columns * self.n_rows


@dataclass
class GGUFFile:
    """The header of a GGUF. Its tensors' data ends at `end`, padding of the last one left out."""

    path: Path
    kv: dict[str, Value]
    tensors: list[Tensor]
    alignment: int
    data_offset: int
    by_name: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.by_name = {tensor.name: tensor for tensor in self.tensors}

    @property
    def end(self) -> int:
        return max((t.offset + t.nbytes for t in self.tensors), default=self.data_offset)

    def get(self, key: str, kind: int, item: int | None = None) -> Any:
        """The value of a key, None if it is missing; another type is refused."""
        value = self.kv.get(key)
        if value is None:
            return None
        if value.kind != kind or value.item != item:
            raise TwobitError(f"{self.path}: key {key} has another type than it should; the file is damaged or of another version")
        return value.get()


class _Cursor:
    """Reads a file forward and never past `end`."""

    def __init__(self, file: BinaryIO, start: int, end: int, path: Path) -> None:
        self.file, self.at, self.end, self.path = file, start, end, path
        file.seek(start)

    def bad(self, what: str) -> TwobitError:
        return TwobitError(f"{self.path}: {what}; copy or download the file again")

    def take(self, count: int, what: str) -> bytes:
        if count > self.end - self.at:
            raise self.bad(f"the file is cut off or damaged in its header ({what})")
        data = self.file.read(count)
        if len(data) != count:
            raise self.bad(f"the file is cut off in its header ({what})")
        self.at += count
        return data

    def number(self, fmt: str, what: str) -> int:
        return struct.unpack("<" + fmt, self.take(struct.calcsize("<" + fmt), what))[0]

    def text(self, limit: int, what: str) -> str:
        length = self.number("Q", what)
        if length > limit:
            raise self.bad(f"{what} claims {length} bytes")
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError:
            raise self.bad(f"{what} is not text") from None

    def value(self, key: str) -> Value:
        what = f"key {key}"
        start, item = self.at + 4, None
        kind = self.number("I", what)
        if kind == STRING:
            self._skip_strings(1, what)
        elif kind == ARRAY:
            item = self.number("I", what)
            count = self.number("Q", what)
            if count > MAX_VALUE:
                raise self.bad(f"{what} claims {count} elements")
            if item == STRING:
                self._skip_strings(count, what)
            elif item in _FORMATS:
                self._skip(count * struct.calcsize(_FORMATS[item]), what)
            else:
                raise self.bad(f"{what} is an array of the unknown type {item}")
        elif kind in _FORMATS:
            self._skip(struct.calcsize(_FORMATS[kind]), what)
        else:
            raise self.bad(f"{what} has the unknown type {kind}")
        end = self.at
        self.at = start
        self.file.seek(start)
        return Value(kind, item, self.take(end - start, what))

    def _skip(self, count: int, what: str) -> None:
        if count > MAX_VALUE or count > self.end - self.at:
            raise self.bad(f"the file is cut off or damaged in its header ({what})")
        self.at += count
        self.file.seek(count, io.SEEK_CUR)

    def _skip_strings(self, count: int, what: str) -> None:
        start = self.at
        for _ in range(count):
            self._skip(self.number("Q", what), what)
            if self.at - start > MAX_VALUE:
                raise self.bad(f"{what} is larger than {MAX_VALUE} bytes")


def read_gguf(file: BinaryIO, path: Path, start: int, end: int) -> GGUFFile:
    """The GGUF in the bytes [start, end) of a file.

    Raises:
        TwobitError: not a GGUF, cut off, or anything in it that llama.cpp would refuse.
    """
    cursor = _Cursor(file, start, end, path)
    if end - start < 4 or cursor.take(4, "magic") != MAGIC:
        raise TwobitError(f"{path}: not a GGUF file")
    version = cursor.number("I", "version")
    if version & 0xFFFF == 0:
        raise TwobitError(f"{path}: a big-endian GGUF; convert it to little-endian first (gguf-convert-endian)")
    if version not in (2, VERSION):
        raise TwobitError(f"{path}: GGUF version {version} is not supported (2 and 3 are); convert the model again")
    n_tensors = cursor.number("Q", "number of tensors")
    n_kv = cursor.number("Q", "number of keys")

    kv: dict[str, Value] = {}
    for _ in range(n_kv):
        key = cursor.text(65535, "a key")
        if not key or key in kv:
            raise cursor.bad(f"key {key!r} is empty or there twice")
        kv[key] = cursor.value(key)
    alignment = DEFAULT_ALIGNMENT
    if "general.alignment" in kv:
        value = kv["general.alignment"]
        alignment = value.get() if value.kind == U32 else 0
        if alignment == 0 or alignment & (alignment - 1):
            raise cursor.bad("general.alignment is not a power of two")

    infos: list[tuple[str, tuple[int, ...], int, int]] = []
    names: set[str] = set()
    for _ in range(n_tensors):
        name, shape, kind, offset = _tensor_info(cursor)
        if name in names:
            raise cursor.bad(f"tensor {name} is there twice")
        names.add(name)
        infos.append((name, shape, kind, offset))

    data_offset = start + pad(cursor.at - start, alignment)
    return GGUFFile(path, kv, _place(cursor, infos, data_offset, alignment), alignment, data_offset)


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.text(MAX_NAME, "a tensor's name")
    what = f"tensor {name}"
    n_dims = cursor.number("I", what)
    if n_dims > MAX_DIMS:
        raise cursor.bad(f"{what} claims {n_dims} dimensions")
    shape = tuple(cursor.number("Q", what) for _ in range(n_dims))
    weights = 1
    for n in shape:
        weights *= n
    if any(n >= 1 << 63 for n in shape) or weights >= 1 << 62:
        raise cursor.bad(f"{what} has an impossible shape {shape}")
    kind = cursor.number("I", what)
    if not gguf_types.known(kind):
        raise TwobitError(f"{cursor.path}: {what} has ggml type {kind}, which this version does not know; update twobit-gguf")
    if (shape[0] if shape else 1) % gguf_types.block(kind):
        raise cursor.bad(f"{what} has rows of {shape[0]} weights, not whole blocks of {gguf_types.name(kind)}")
    return name, shape or (1,), kind, cursor.number("Q", what)


def _place(
    cursor: _Cursor, infos: Iterable[tuple[str, tuple[int, ...], int, int]], data_offset: int, alignment: int
) -> list[Tensor]:
    """Tensors lie one behind the other in the order of the header; holes and overlaps are refused, as llama.cpp does."""
    tensors, expected = [], 0
    for name, shape, kind, offset in infos:
        if offset != expected:
            raise cursor.bad(f"tensor {name} is at {offset}, expected at {expected}")
        weights = 1
        for n in shape:
            weights *= n
        nbytes = gguf_types.nbytes(kind, weights)
        at = data_offset + offset
        if at + nbytes > cursor.end:
            raise cursor.bad(f"the file is cut off: tensor {name} needs {at + nbytes} bytes, there are {cursor.end}")
        tensors.append(Tensor(name, shape, kind, at, nbytes))
        expected += pad(nbytes, alignment)
    return tensors


def open_gguf(path: Path) -> GGUFFile:
    """The header of a GGUF file; whatever follows its last tensor is ignored.

    Raises:
        TwobitError: as read_gguf; or the file cannot be read.
    """
    try:
        if path.exists() and not path.is_file():
            raise TwobitError(f"{path}: a folder or a device, not a GGUF file; name the file")
        with open(path, "rb") as file:
            return read_gguf(file, path, 0, file.seek(0, io.SEEK_END))
    except OSError as error:
        raise TwobitError(f"{path}: cannot be read: {error.strerror}") from None


def pad(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


@dataclass(frozen=True)
class Layout:
    """A GGUF to be written: its header's bytes, padded, and where each tensor's data goes, all from the GGUF's own start."""

    header: bytes
    offsets: dict[str, int]
    size: int  # with the last tensor padded


def lay_out(kv: Mapping[str, Value], tensors: Iterable[tuple[str, Sequence[int], int]], alignment: int) -> Layout:
    """The header for (name, ne, type) tensors in this order. kv must hold general.alignment unless it is 32."""
    tensors = list(tensors)
    out = bytearray(MAGIC + struct.pack("<IQQ", VERSION, len(tensors), len(kv)))
    for key, value in kv.items():
        out += string(key).raw + struct.pack("<I", value.kind) + value.raw
    offsets, at = {}, 0
    for name, shape, kind in tensors:
        weights = 1
        for n in shape:
            weights *= n
        out += string(name).raw + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, at)
        offsets[name] = at
        at += pad(gguf_types.nbytes(kind, weights), alignment)
    out += bytes(pad(len(out), alignment) - len(out))
    return Layout(bytes(out), {name: len(out) + offset for name, offset in offsets.items()}, len(out) + at)
