"""Writes tests/golden/paired.gguf: four small pairs that fill blocks, tiles and matrices in odd ways. The same bytes on every run.

    python scripts/make_golden.py [FILE]

The weights follow from a formula, so that a test can encode them again. The model is none that llama.cpp would run.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from twobit_gguf import convert_quantize, format, gguf_file, gguf_types
from twobit_gguf.format_write import PairedWriter, TensorSpec

FILE = Path(__file__).resolve().parent.parent / "tests/golden/paired.gguf"

TENSORS = (
    TensorSpec("output_norm.weight", (320,), gguf_types.F32),
    TensorSpec("blk.0.attn_q.weight", (320, 33), gguf_types.Q2_0, 4),  # a block of one group, a tile of one row
    TensorSpec("blk.0.ffn_up_exps.weight", (256, 5, 2), gguf_types.Q2_K, 5),  # two matrices
    TensorSpec("blk.0.ffn_down.weight", (576, 7), gguf_types.Q2_0, 6),
    TensorSpec("output.weight", (64, 40), gguf_types.Q2_0, 8),
)


def weights(tensor: TensorSpec) -> np.ndarray:
    """(matrices, rows, columns) f32, small as real weights are: a multiplicative hash of the index, and a few outliers."""
    count = int(np.prod(tensor.shape))
    seed = sum(tensor.name.encode())
    w = (_hashed(seed, count).astype(np.int64) - (1 << 31)).astype(np.float32) * np.float32(2.0**-36)
    w[::97] *= 4
    shape = (*tensor.shape[::-1],) if len(tensor.shape) == 3 else (1, *tensor.shape[::-1])
    return w.reshape(shape)


def base(tensor: TensorSpec, w: np.ndarray) -> np.ndarray:
    """The base of a matrix (rows, columns), (bytes,) u8, the same on every CPU.

    ggml's Q2_K quantiser is compiled for the machine and may round otherwise elsewhere, so that base is made up: any scales and
    codes, and super-scales that are powers of two, with which dequantising is exact.
    """
    if tensor.type != gguf_types.Q2_K:
        return convert_quantize.quantize(tensor.type, w)
    block = np.dtype([("scales", "u1", 16), ("codes", "u1", 64), ("d", "<f2"), ("dmin", "<f2")])
    blocks = np.zeros(w.size // 256, block)
    noise = (_hashed(7, blocks.size * 80) >> np.uint64(20)).astype(np.uint8).reshape(-1, 80)
    blocks["scales"], blocks["codes"] = noise[:, :16], noise[:, 16:]
    blocks["d"], blocks["dmin"] = 2.0**-11, 2.0**-11
    return blocks.view(np.uint8)


def _hashed(first: int, count: int) -> np.ndarray:
    """(count,) numbers of 32 bits."""
    return (np.arange(first, first + count, dtype=np.uint64) * np.uint64(2654435761)) % np.uint64(1 << 32)


def write(path: Path) -> None:
    kv = {
        "general.architecture": gguf_file.string("llama"),
        "general.name": gguf_file.string("golden"),
    }
    with PairedWriter(path, kv, TENSORS) as writer:
        for tensor in TENSORS:
            base_sink, residual_sink = writer.sinks(tensor)
            w = weights(tensor)
            if tensor.bits is None or residual_sink is None:
                base_sink.write(np.ascontiguousarray(w).data)
                continue
            bases = [base(tensor, matrix) for matrix in w]
            largest = max(convert_quantize.max_abs(m, tensor.type, b) for m, b in zip(w, bases, strict=True))
            factor = convert_quantize.factor(tensor.bits, largest)
            writer.set_factor(tensor, factor)
            for matrix, b in zip(w, bases, strict=True):
                base_sink.write(b.data)
                residual_sink.write(convert_quantize.encode(tensor.bits, factor, matrix, tensor.type, b).data)
        writer.finish()


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else FILE
    write(path)
    format.verify(format.open_paired(path))
    print(path)


if __name__ == "__main__":
    main()
