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
    hashed = (np.arange(seed, seed + count, dtype=np.uint64) * np.uint64(2654435761)) % np.uint64(1 << 32)
    w = (hashed.astype(np.int64) - (1 << 31)).astype(np.float32) * np.float32(2.0**-36)
    w[:: 97] *= 4
    shape = (*tensor.shape[::-1],) if len(tensor.shape) == 3 else (1, *tensor.shape[::-1])
    return w.reshape(shape)


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
            bases = [convert_quantize.quantize(tensor.type, matrix) for matrix in w]
            largest = max(convert_quantize.max_abs(m, tensor.type, base) for m, base in zip(w, bases, strict=True))
            factor = convert_quantize.factor(tensor.bits, largest)
            writer.set_factor(tensor, factor)
            for matrix, base in zip(w, bases, strict=True):
                base_sink.write(base.data)
                residual_sink.write(convert_quantize.encode(tensor.bits, factor, matrix, tensor.type, base).data)
        writer.finish()


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else FILE
    write(path)
    format.verify(format.open_paired(path))
    print(path)


if __name__ == "__main__":
    main()
