"""Writes a paired GGUF (docs/format.md), tensor by tensor, without holding more than the caller's chunks.

All sizes are known before the first byte, so every tensor has its place from the start and base and residual can be written side
by side. Checksums and factors are known at the end only: both headers are then written again, at the same length.
Everything goes to temporary files beside the output, which take their names in the end or are removed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import xxhash

from . import format, gguf_file, gguf_types
from .gguf_file import Layout, Value, pad


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of the main part, in ggml's terms: ne and type. bits: of its residual, or None."""

    name: str
    shape: tuple[int, ...]
    type: int
    bits: int | None = None


class _Sink:
    """One tensor's place in a file: takes its bytes in order."""

    def __init__(self, fd: int, offset: int, nbytes: int, hashed: bool) -> None:
        self._fd, self._at, self.left = fd, offset, nbytes
        self._digest = xxhash.xxh64() if hashed else None

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        assert len(view) <= self.left, "more bytes than the tensor has"
        if self._digest is not None:
            self._digest.update(view)
        self.left -= len(view)
        while view:
            written = os.pwrite(self._fd, view, self._at)
            self._at += written
            view = view[written:]

    @property
    def xxh64(self) -> int:
        return self._digest.intdigest() if self._digest is not None else 0


class PairedWriter:
    """with PairedWriter(out, kv, tensors) as writer: write every tensor, then writer.finish(). Leaving without finish removes all.

    kv: the main part's keys without twobit.* ones. residual_out: a file of its own for the residual, or None.
    """

    def __init__(
        self, out: Path, kv: Mapping[str, Value], tensors: Sequence[TensorSpec], residual_out: Path | None = None
    ) -> None:
        self.out, self.residual_out = out, residual_out
        self._kv, self._tensors = dict(kv), list(tensors)
        self._paired = [t for t in tensors if t.bits is not None]
        self._alignment = kv["general.alignment"].get() if "general.alignment" in kv else gguf_file.DEFAULT_ALIGNMENT
        self._factors = dict.fromkeys((t.name for t in self._paired), 1.0)
        self._base_hash = dict.fromkeys((t.name for t in self._paired), 0)
        self._residual_hash = dict.fromkeys((t.name for t in self._paired), 0)
        self._main = self._main_layout(0)
        self._section = self._section_layout(0)
        self._section_start = 0 if residual_out else pad(self._main.size, format.PAGE)
        self._sinks: list[tuple[TensorSpec, _Sink, _Sink | None]] = []
        self._temporary: list[tuple[int, Path, Path]] = []  # fd, temporary name, final name

    @property
    def main_header(self) -> bytes:
        """The main part's header, with a pair_id of 0."""
        return self._main.header

    @property
    def main_size(self) -> int:
        return self._main.size

    @property
    def section_size(self) -> int:
        return self._section.size

    def __enter__(self) -> PairedWriter:
        try:
            self._create(self.out)
            if self.residual_out is not None:
                self._create(self.residual_out)
            main_fd, residual_fd = self._temporary[0][0], self._temporary[-1][0]
            os.truncate(main_fd, self._main.size)
            os.truncate(residual_fd, self._section_start + self._section.size + format.TRAILER_SIZE)
            _write_at(main_fd, self._main.header, 0)
        except BaseException:
            self._discard()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._discard()

    def sinks(self, tensor: TensorSpec) -> tuple[_Sink, _Sink | None]:
        """Where the bytes of a tensor, and of its residual if it has one, go."""
        paired = tensor.bits is not None
        nbytes = gguf_types.nbytes(tensor.type, _n_weights(tensor))
        base = _Sink(self._temporary[0][0], self._main.offsets[tensor.name], nbytes, paired)
        residual = None
        if paired:
            offset = self._section_start + self._section.offsets[tensor.name + format.SUFFIX]
            residual = _Sink(self._temporary[-1][0], offset, _residual_nbytes(tensor), True)
        self._sinks.append((tensor, base, residual))
        return base, residual

    def set_factor(self, tensor: TensorSpec, factor: float) -> None:
        self._factors[tensor.name] = factor

    def finish(self) -> None:
        """Writes headers and trailer, and gives the files their names."""
        assert len(self._sinks) == len(self._tensors)
        for tensor, base, residual in self._sinks:
            assert base.left == 0 and (residual is None or residual.left == 0), f"{tensor.name} is not complete"
            if residual is not None:
                self._base_hash[tensor.name] = base.xxh64
                self._residual_hash[tensor.name] = residual.xxh64
        pair_id = format.pair_id(
            [self._base_hash[t.name] for t in self._paired], [self._residual_hash[t.name] for t in self._paired]
        )
        header = self._section_layout(pair_id).header
        trailer = format.Trailer(
            header_size=len(header),
            section_size=self._section.size,
            main_size=0 if self.residual_out else self._main.size,
            header_xxh64=xxhash.xxh64_intdigest(header),
            pair_id=pair_id,
        )
        main_fd, residual_fd = self._temporary[0][0], self._temporary[-1][0]
        _write_at(main_fd, self._main_layout(pair_id).header, 0)
        _write_at(residual_fd, header, self._section_start)
        _write_at(residual_fd, trailer.pack(), self._section_start + self._section.size)
        for fd, _, _ in self._temporary:
            os.fsync(fd)
        while self._temporary:  # the residual's own file first: a main part without it would be useless
            fd, temporary, final = self._temporary[-1]
            os.replace(temporary, final)
            self._temporary.pop()
            os.close(fd)

    def _create(self, final: Path) -> None:
        fd, name = tempfile.mkstemp(prefix=f".{final.name[:200]}.", suffix=".tmp", dir=final.parent)
        self._temporary.append((fd, Path(name), final))
        mask = os.umask(0)
        os.umask(mask)
        os.fchmod(fd, 0o666 & ~mask)  # mkstemp's 0600 is not what a model file should have

    def _discard(self) -> None:
        for fd, temporary, _ in self._temporary:
            os.close(fd)
            temporary.unlink(missing_ok=True)
        self._temporary.clear()

    def _main_layout(self, pair_id: int) -> Layout:
        ours = {
            "twobit.version": gguf_file.scalar(gguf_file.U32, format.VERSION),
            "twobit.pair_id": gguf_file.scalar(gguf_file.U64, pair_id),
            "twobit.n_pairs": gguf_file.scalar(gguf_file.U32, len(self._paired)),
        }
        if self.residual_out is not None:
            ours["twobit.residual_file"] = gguf_file.string(self.residual_out.name)
        # the architecture first, as every GGUF has it, ours next: whoever reads a little of the file sees what it is
        first = {key: self._kv[key] for key in ("general.architecture",) if key in self._kv}
        return gguf_file.lay_out(
            first | ours | self._kv, [(t.name, t.shape, t.type) for t in self._tensors], self._alignment
        )

    def _section_layout(self, pair_id: int) -> Layout:
        u32, u64, f32 = gguf_file.U32, gguf_file.U64, gguf_file.F32
        paired = self._paired
        kv = {
            "general.architecture": gguf_file.string(format.ARCHITECTURE),
            "general.alignment": gguf_file.scalar(u32, format.ALIGNMENT),
            "twobit.version": gguf_file.scalar(u32, format.VERSION),
            "twobit.layout_version": gguf_file.scalar(u32, format.LAYOUT_VERSION),
            "twobit.pair_id": gguf_file.scalar(u64, pair_id),
            "twobit.bits": gguf_file.array(u32, [t.bits or 0 for t in paired]),
            "twobit.rows": gguf_file.array(u64, [_dim(t, 1) for t in paired]),
            "twobit.columns": gguf_file.array(u64, [_dim(t, 0) for t in paired]),
            "twobit.matrices": gguf_file.array(u64, [_dim(t, 2) for t in paired]),
            "twobit.factor": gguf_file.array(f32, [self._factors[t.name] for t in paired]),
            "twobit.base_type": gguf_file.array(u32, [t.type for t in paired]),
            "twobit.base_xxh64": gguf_file.array(u64, [self._base_hash[t.name] for t in paired]),
            "twobit.residual_xxh64": gguf_file.array(u64, [self._residual_hash[t.name] for t in paired]),
        }
        tensors = [(t.name + format.SUFFIX, (_residual_nbytes(t),), gguf_types.I8) for t in paired]
        return gguf_file.lay_out(kv, tensors, format.ALIGNMENT)


def _dim(tensor: TensorSpec, i: int) -> int:
    return tensor.shape[i] if i < len(tensor.shape) else 1


def _n_weights(tensor: TensorSpec) -> int:
    return _dim(tensor, 0) * _dim(tensor, 1) * _dim(tensor, 2) * _dim(tensor, 3)


def _residual_nbytes(tensor: TensorSpec) -> int:
    assert tensor.bits is not None
    return format.residual_nbytes(tensor.bits, _dim(tensor, 1), _dim(tensor, 0), _dim(tensor, 2))


def _write_at(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        offset += written
        view = view[written:]
