"""Any GGUF, paired or not, as a plain one with f16 matrices: its weights without the quantised kernels' rounding of activations."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

import numpy as np

from .. import format, gguf_file, gguf_types
from .._native import check, ffi, lib
from ..errors import TwobitError
from ..format import Pair, PairedFile
from ..gguf_file import GGUFFile, Tensor

_F32, _F16 = 0, 1  # ggml types
_FTYPE_F16 = 1  # LLAMA_FTYPE_MOSTLY_F16
_ROWS = 512  # rows at a time
_HALF_MAX = 65504.0


def write_f16(source: Path, target: Path, residual: bool = True, output_residual: bool = False) -> None:
    """Writes base + residual (or the base alone) of a paired GGUF, or the dequantised weights of another, as f16.

    Args:
        residual: add the residuals of all matrices.
        output_residual: without `residual`, add those outside the layers all the same: the output matrix's.

    Raises:
        TwobitError: not a GGUF, or a damaged one.
    """
    main = gguf_file.open_gguf(source)
    paired = format.open_paired(source) if format.is_paired(main) else None
    paired_tensors = paired.pairs if paired else ()
    pairs = {p.name: p for p in paired_tensors if residual or (output_residual and not p.name.startswith("blk."))}
    kv = {key: value for key, value in main.kv.items() if not key.startswith("twobit.")}
    kv["general.file_type"] = gguf_file.scalar(gguf_file.U32, _FTYPE_F16)
    layout = gguf_file.lay_out(kv, [(t.name, t.shape, _type(t)) for t in main.tensors], main.alignment)
    with open(source, "rb") as file, open(paired.residual_path if paired else source, "rb") as section, open(target, "wb") as out:
        out.write(layout.header)
        for tensor in main.tensors:
            out.seek(layout.offsets[tensor.name])
            _write(file, section, tensor, pairs.get(tensor.name), out)
        out.truncate(layout.size)


def ram_bits(source: Path) -> float:
    """Bits a weight of what is in RAM: the residual of a paired GGUF (its base is on the GPU), another's matrices but the embedding."""
    main = gguf_file.open_gguf(source)
    if format.is_paired(main):
        pairs = format.open_paired(source).pairs
        return 8 * sum(p.residual_nbytes for p in pairs) / sum(p.n_weights for p in pairs)
    matrices = _matrices(main)
    return 8 * sum(t.nbytes for t in matrices) / sum(t.n_weights for t in matrices)


def base_bits(paired: PairedFile) -> float:
    """Bits a weight of the bases."""
    return 8 * sum(p.base_nbytes for p in paired.pairs) / sum(p.n_weights for p in paired.pairs)


def _matrices(main: GGUFFile) -> list[Tensor]:
    matrices = [t for t in main.tensors if len(t.shape) >= 2 and t.name != "token_embd.weight"]
    if not matrices:
        raise TwobitError(f"{main.path}: no matrices in it")
    return matrices


def _type(tensor: Tensor) -> int:
    return tensor.type if len(tensor.shape) == 1 or tensor.type in (_F32, _F16) else _F16


def _write(file: BinaryIO, section: BinaryIO, tensor: Tensor, pair: Pair | None, out: BinaryIO) -> None:
    if _type(tensor) == tensor.type:
        file.seek(tensor.offset)
        out.write(file.read(tensor.nbytes))
        return
    row_nbytes = gguf_types.nbytes(tensor.type, tensor.columns)
    rows, matrices = tensor.dim(1), tensor.dim(2) * tensor.dim(3)
    for matrix in range(matrices):
        for row in range(0, rows, _ROWS):
            n = min(_ROWS, rows - row)
            file.seek(tensor.offset + (matrix * rows + row) * row_nbytes)
            weights = dequantize(tensor.type, file.read(n * row_nbytes), n, tensor.columns)
            if pair is not None:
                tile = format.residual_nbytes(pair.bits, format.TILE_ROWS, pair.columns, 1)
                one = format.residual_nbytes(pair.bits, rows, pair.columns, 1)
                section.seek(pair.residual_offset + matrix * one + row // format.TILE_ROWS * tile)
                packed = section.read(format.residual_nbytes(pair.bits, n, pair.columns, 1))
                weights += residual_values(pair.bits, pair.factor, packed, n, pair.columns)
            out.write(np.clip(weights, -_HALF_MAX, _HALF_MAX).astype(np.float16).tobytes())


def dequantize(kind: int, data: bytes | np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Rows of a ggml type as f32, (rows, columns)."""
    out = np.empty((rows, columns), np.float32)
    check(lib().twobit_base_dequantize(kind, ffi.from_buffer(data), rows, columns, ffi.from_buffer("float[]", out)))
    return out


def residual_values(bits: int, factor: float, data: bytes | np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Rows of a packed residual (whole super-tiles) as f32, (rows, columns)."""
    out = np.empty((rows, columns), np.float32)
    check(lib().twobit_residual_decode(bits, factor, ffi.from_buffer(data), rows, columns, ffi.from_buffer("float[]", out)))
    return out


def quantize_stock(source: Path, target: Path, ftype: int) -> None:
    """llama.cpp's own quantiser, from whatever type the source has.

    Raises:
        TwobitError: llama.cpp refused.
    """
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = ftype
    params.nthread = 1 if os.environ.get("OMP_NUM_THREADS") == "1" else 0
    params.allow_requantize = True
    if llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(target), params) != 0:
        raise TwobitError(f"{source}: llama.cpp cannot quantise it")
