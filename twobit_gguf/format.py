"""The paired GGUF, read and checked as docs/format.md says. Independent of the native library.

    paired = open_paired(Path("out.gguf"))
    paired.pairs[0].name, paired.pairs[0].bits
    verify(paired)                       # every checksum
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import xxhash

from . import gguf_file, gguf_types
from .errors import MissingResidual, TwobitError
from .gguf_file import GGUFFile, pad

VERSION = 1
LAYOUT_VERSION = 1
MAGIC = b"TWOBIT\x00\x01"
PAGE = 4096  # the section starts at a multiple of it
ALIGNMENT = 64  # general.alignment of the section
ARCHITECTURE = "twobit-residual"
SUFFIX = ".residual"
MAX_BASE_NAME = gguf_file.MAX_NAME - len(SUFFIX)  # bytes
BITS = (4, 5, 6, 8)

TILE_ROWS, BLOCK_COLUMNS, GROUP = 32, 256, 64

_TRAILER = struct.Struct("<8sIIQQQQQ")  # all but its own checksum
TRAILER_SIZE = _TRAILER.size + 8

# arrays of the section, one entry a tensor
_ARRAYS = {
    "twobit.bits": gguf_file.U32,
    "twobit.rows": gguf_file.U64,
    "twobit.columns": gguf_file.U64,
    "twobit.matrices": gguf_file.U64,
    "twobit.factor": gguf_file.F32,
    "twobit.base_type": gguf_file.U32,
    "twobit.base_xxh64": gguf_file.U64,
    "twobit.residual_xxh64": gguf_file.U64,
}


@dataclass(frozen=True)
class Pair:
    """A base tensor and its residual. Offsets count from the start of the file each is in, sizes are bytes."""

    name: str
    bits: int
    rows: int  # of one matrix
    columns: int
    matrices: int
    factor: float
    base_type: int
    base_offset: int
    base_nbytes: int
    base_xxh64: int
    residual_offset: int
    residual_nbytes: int
    residual_xxh64: int

    @property
    def n_weights(self) -> int:
        return self.rows * self.columns * self.matrices


@dataclass(frozen=True)
class Trailer:
    """The last 64 bytes of the file with the residual."""

    header_size: int
    section_size: int
    main_size: int
    header_xxh64: int
    pair_id: int

    def pack(self) -> bytes:
        body = _TRAILER.pack(
            MAGIC, VERSION, self.header_size, self.section_size, self.main_size, self.header_xxh64, self.pair_id, 0
        )
        return body + struct.pack("<Q", xxhash.xxh64_intdigest(body))


@dataclass(frozen=True)
class PairedFile:
    """A paired GGUF whose structure has been checked; checksums of tensors are verify()'s."""

    path: Path
    residual_path: Path  # the same as path unless the residual has a file of its own
    main: GGUFFile
    section: GGUFFile
    trailer: Trailer
    pairs: list[Pair]


def residual_nbytes(bits: int, rows: int, columns: int, matrices: int) -> int:
    """Bytes of packed matrices (rows, columns).

    Raises:
        ValueError: a shape or a number of bits that the format cannot hold.
    """
    if bits not in BITS or rows < 1 or matrices < 1 or columns < GROUP or columns % GROUP:
        raise ValueError(f"no residual of {bits} bits for {matrices} matrices of {rows} rows and {columns} columns")
    super_tile = -(-columns // BLOCK_COLUMNS) * 192 + columns // GROUP * 256 * bits
    return matrices * -(-rows // TILE_ROWS) * super_tile


def pair_id(base_xxh64: list[int], residual_xxh64: list[int]) -> int:
    return xxhash.xxh64_intdigest(struct.pack(f"<{2 * len(base_xxh64)}Q", *base_xxh64, *residual_xxh64))


def is_paired(main: GGUFFile) -> bool:
    return "twobit.version" in main.kv


def open_paired(path: Path, residual_path: Path | None = None) -> PairedFile:
    """Reads and checks everything but the tensors' bytes. residual_path: where the residual's own file is, if not beside `path`.

    Raises:
        MissingResidual: the file was paired and has lost its residual.
        TwobitError: anything else docs/format.md tells a reader to refuse; the file cannot be read.
    """
    main = gguf_file.open_gguf(path)
    if not is_paired(main):
        raise TwobitError(f"{path}: not a paired GGUF (it has no twobit.version); make one with twobit-convert")
    version = main.get("twobit.version", gguf_file.U32)
    if version != VERSION:
        raise TwobitError(f"{path}: paired GGUF version {version}, this program knows version {VERSION}; update twobit-gguf")
    where = _residual_path(main, residual_path)
    try:
        with open(where, "rb") as file:
            trailer, section = _read_section(file, where, main, own_file=where != path)
    except FileNotFoundError:
        raise MissingResidual(f"{where}: the residual file of {path.name} is not there; put it beside {path.name}") from None
    except OSError as error:
        raise TwobitError(f"{where}: cannot be read: {error.strerror}") from None
    ids = {main.get("twobit.pair_id", gguf_file.U64), section.get("twobit.pair_id", gguf_file.U64), trailer.pair_id}
    if len(ids) != 1:
        raise TwobitError(f"{where}: this residual belongs to another model than {path.name} (pair_id differs); {_AGAIN}")
    pairs = _match(path, where, main, section)
    if ids != {pair_id([p.base_xxh64 for p in pairs], [p.residual_xxh64 for p in pairs])}:
        raise TwobitError(f"{where}: pair_id is not the one that the checksums give; {_AGAIN}")
    return PairedFile(path, where, main, section, trailer, pairs)


_AGAIN = "copy the file again or make it again with twobit-convert"


def _residual_path(main: GGUFFile, given: Path | None) -> Path:
    name = main.get("twobit.residual_file", gguf_file.STRING)
    if name is None:
        return main.path
    if given is not None:
        return given
    if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise TwobitError(f"{main.path}: twobit.residual_file is {name!r}, not the name of a file; {_AGAIN}")
    return main.path.parent / name


def _read_section(file: BinaryIO, path: Path, main: GGUFFile, own_file: bool) -> tuple[Trailer, GGUFFile]:
    size = file.seek(0, io.SEEK_END)
    trailer = _read_trailer(file, path, size)
    if trailer.section_size + TRAILER_SIZE > size:
        raise TwobitError(f"{path}: the residual section claims {trailer.section_size} bytes, more than the file has; {_AGAIN}")
    start = size - TRAILER_SIZE - trailer.section_size
    if own_file:
        if start != 0 or trailer.main_size != 0:
            raise TwobitError(f"{path}: not a residual file (something precedes the residual section); {_AGAIN}")
    elif start != pad(trailer.main_size, PAGE) or main.end > trailer.main_size:
        raise TwobitError(
            f"{path}: the main part is not what it was when the residual was made (its header was rewritten); "
            "undo that or make the file again with twobit-convert"
        )
    if not 0 < trailer.header_size <= trailer.section_size:
        raise TwobitError(f"{path}: the residual section's header claims {trailer.header_size} bytes; {_AGAIN}")
    if _checksum(file, start, trailer.header_size) != trailer.header_xxh64:
        raise TwobitError(f"{path}: the residual section's header is damaged (checksum differs); {_AGAIN}")
    section = gguf_file.read_gguf(file, path, start, start + trailer.section_size)
    if section.get("general.architecture", gguf_file.STRING) != ARCHITECTURE:
        raise TwobitError(f"{path}: the part behind the model is not a residual section; {_AGAIN}")
    for key, known in (("twobit.version", VERSION), ("twobit.layout_version", LAYOUT_VERSION)):
        found = section.get(key, gguf_file.U32)
        if found != known:
            raise TwobitError(f"{path}: residual section with {key} {found}, this program knows {known}; update twobit-gguf")
    if section.alignment != ALIGNMENT or section.data_offset != start + trailer.header_size:
        raise TwobitError(f"{path}: the residual section is not laid out as the format says; {_AGAIN}")
    return trailer, section


def _read_trailer(file: BinaryIO, path: Path, size: int) -> Trailer:
    lost = f"the residual is missing (the file was cut off or rewritten by another tool): only the 2-bit base is left; {_AGAIN}"
    if size < TRAILER_SIZE:
        raise MissingResidual(f"{path}: {lost}")
    file.seek(size - TRAILER_SIZE)
    data = file.read(TRAILER_SIZE)
    magic, version, header_size, section_size, main_size, header_xxh64, id_, _ = _TRAILER.unpack_from(data)
    if magic != MAGIC or struct.unpack_from("<Q", data, _TRAILER.size)[0] != xxhash.xxh64_intdigest(data[: _TRAILER.size]):
        raise MissingResidual(f"{path}: {lost}")
    if version != VERSION:
        raise TwobitError(f"{path}: residual of version {version}, this program knows version {VERSION}; update twobit-gguf")
    return Trailer(header_size, section_size, main_size, header_xxh64, id_)


def _match(path: Path, where: Path, main: GGUFFile, section: GGUFFile) -> list[Pair]:
    """One Pair for each tensor of the section, each checked against its base tensor."""
    columns = {}
    for key, item in _ARRAYS.items():
        values = section.get(key, gguf_file.ARRAY, item)
        if values is None or len(values) != len(section.tensors):
            raise TwobitError(f"{where}: {key} does not have one entry for each residual; {_AGAIN}")
        columns[key] = values
    n_pairs = main.get("twobit.n_pairs", gguf_file.U32)
    if n_pairs != len(section.tensors):
        raise TwobitError(f"{where}: {len(section.tensors)} residuals for {n_pairs} paired tensors of {path.name}; {_AGAIN}")
    pairs = []
    for tensor, bits, rows, cols, matrices, factor, base_type, base_hash, residual_hash in zip(
        section.tensors, *columns.values(), strict=True
    ):
        name = tensor.name.removesuffix(SUFFIX)
        base = main.by_name.get(name)
        try:
            expected = residual_nbytes(bits, rows, cols, matrices)
        except ValueError as error:
            raise TwobitError(f"{where}: {tensor.name}: {error}; {_AGAIN}") from None
        if tensor.type != gguf_types.I8 or len(tensor.shape) != 1 or tensor.nbytes != expected or name == tensor.name:
            raise TwobitError(f"{where}: {tensor.name} is not the tensor its size, rows and columns promise; {_AGAIN}")
        if not (factor > 0 and factor < float("inf")):
            raise TwobitError(f"{where}: {tensor.name} has the impossible factor {factor}; {_AGAIN}")
        if base is None or base.type != base_type or [base.dim(i) for i in range(4)] != [cols, rows, matrices, 1]:
            raise TwobitError(f"{path}: tensor {name} is missing or is not the one its residual was made for; {_AGAIN}")
        pairs.append(
            Pair(name, bits, rows, cols, matrices, factor, base_type, base.offset, base.nbytes, base_hash,
                 tensor.offset, tensor.nbytes, residual_hash)
        )  # fmt: skip
    return pairs


def verify(paired: PairedFile, progress: Callable[[int], object] | None = None) -> None:
    """Compares the checksum of every base and residual tensor. progress is called with the bytes just read.

    Raises:
        TwobitError: one differs (the message names the tensor), or the file cannot be read.
    """
    try:
        with open(paired.path, "rb") as main, open(paired.residual_path, "rb") as residual:
            for pair in paired.pairs:
                for file, what, offset, nbytes, expected in (
                    (main, "base", pair.base_offset, pair.base_nbytes, pair.base_xxh64),
                    (residual, "residual", pair.residual_offset, pair.residual_nbytes, pair.residual_xxh64),
                ):
                    if _checksum(file, offset, nbytes, progress) != expected:
                        path = paired.path if what == "base" else paired.residual_path
                        raise TwobitError(f"{path}: the {what} of {pair.name} is damaged (checksum differs); {_AGAIN}")
    except OSError as error:
        raise TwobitError(f"{paired.path}: cannot be read: {error.strerror}") from None


def _checksum(file: BinaryIO, offset: int, nbytes: int, progress: Callable[[int], object] | None = None) -> int:
    """XXH64 of a stretch of the file (of what there is of it, if it ends early)."""
    digest = xxhash.xxh64()
    file.seek(offset)
    while nbytes > 0:
        data = file.read(min(nbytes, 1 << 22))
        if not data:
            break
        digest.update(data)
        nbytes -= len(data)
        if progress is not None:
            progress(len(data))
    return digest.intdigest()
