"""The dense twin of a paired file: an ordinary GGUF whose paired tensors are f32 base + residual, for stock llama.cpp."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from twobit_gguf import format, gguf_file, gguf_types
from twobit_gguf._native import check, ffi, lib

F32 = 0


def base_and_residual(path: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """name → (matrices, rows, columns) f32 of the base and of the residual."""
    paired = format.open_paired(path)
    result = {}
    for pair in paired.pairs:
        shape = (pair.matrices, pair.rows, pair.columns)
        base, residual = np.empty(shape, np.float32), np.empty(shape, np.float32)
        packed = np.memmap(paired.residual_path, np.uint8, "r", pair.residual_offset, pair.residual_nbytes)
        stock = np.memmap(path, np.uint8, "r", pair.base_offset, pair.base_nbytes)
        stock, packed = np.array(stock).reshape(pair.matrices, -1), np.array(packed).reshape(pair.matrices, -1)
        for i in range(pair.matrices):
            check(
                lib().twobit_base_dequantize(
                    pair.base_type, ffi.from_buffer(stock[i]), pair.rows, pair.columns, ffi.from_buffer("float[]", base[i])
                )
            )
            check(
                lib().twobit_residual_decode(
                    pair.bits, pair.factor, ffi.from_buffer(packed[i]), pair.rows, pair.columns, ffi.from_buffer("float[]", residual[i])
                )
            )
        result[pair.name] = base, residual
    return result


def write(paired: Path, out: Path) -> Path:
    """Writes the twin of `paired` to `out`."""
    main = format.open_paired(paired).main
    weights = base_and_residual(paired)
    kv = {key: value for key, value in main.kv.items() if not key.startswith("twobit.")}
    kinds = {t.name: F32 if t.name in weights else t.type for t in main.tensors}
    layout = gguf_file.lay_out(kv, [(t.name, t.shape, kinds[t.name]) for t in main.tensors], main.alignment)
    source = np.memmap(paired, np.uint8, "r")
    with out.open("wb") as file:
        file.write(layout.header)
        for tensor in main.tensors:
            file.seek(layout.offsets[tensor.name])
            if tensor.name in weights:
                base, residual = weights[tensor.name]
                file.write((base + residual).tobytes())
            else:
                file.write(source[tensor.offset : tensor.offset + gguf_types.nbytes(tensor.type, tensor.n_weights)].tobytes())
        file.truncate(layout.size)
    return out
