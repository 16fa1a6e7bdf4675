"""Output errors of base and residual on text that the calibration has not seen, tensor by tensor; the table "Damping" of docs/quality.md.

    twobit calibrate MODEL -o model.calib --tokens 20480
    python -c "from twobit_gguf.calibration.text import default_text; print(default_text(held_out=True))" > held-out.txt
    twobit calibrate MODEL -o held-out.calib --tokens 8192 --text held-out.txt
    python scripts/held_out.py MODEL model.calib held-out.calib blk.0.attn_q.weight blk.12.ffn_down.weight --damping 0.01 0.05 0.15

Errors of bases are relative to the output, tr E H Eᵀ / tr W H Wᵀ; those of residuals relative to Q8_0's.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np

from twobit_gguf import convert_quantize, gguf_types
from twobit_gguf.calibration.expand import dequantize, residual_values
from twobit_gguf.calibration.quantizer import FeedbackFactory
from twobit_gguf.calibration.store import Calibration
from twobit_gguf.convert_plan import Action, Step
from twobit_gguf.convert_quantize import PlainQuantizer, TensorQuantizer
from twobit_gguf.convert_source import Source
from twobit_gguf.format_write import TensorSpec

ROWS = 256  # of each tensor


def output_error(error: np.ndarray, h: np.ndarray) -> float:
    return float(np.einsum("ij,ij->", error @ h, error))


def errors(w: np.ndarray, step: Step, quantizer: TensorQuantizer, h: np.ndarray) -> tuple[float, list[float]]:
    """Of the base, and of base + R4, R5, R6, R8."""
    kind = step.spec.type
    base = quantizer.base(w, 0)
    left = w - dequantize(kind, base, *w.shape)
    largest = convert_quantize.max_abs(w, kind, base)
    results = []
    for bits in (4, 5, 6, 8):
        quantizer.bits = bits  # type: ignore[attr-defined]
        factor = convert_quantize.factor(bits, largest)
        packed = quantizer.residual(w, base, 0, factor)
        results.append(output_error(left - residual_values(bits, factor, packed, *w.shape), h))
    return output_error(left, h), results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("calibration", type=Path)
    parser.add_argument("held_out", type=Path)
    parser.add_argument("tensors", nargs="+")
    parser.add_argument("--damping", type=float, nargs="+", default=[0.01, 0.05, 0.15])
    parser.add_argument("--sweeps", type=int, nargs="+", default=[0, 4])
    args = parser.parse_args()
    calibration, held_out = Calibration(args.calibration), Calibration(args.held_out)
    with Source(args.model) as source:
        for name in args.tensors:
            tensor, known = source.by_name[name], calibration.input_of(name)
            assert known is not None, f"{name} is not in {args.calibration}"
            h, rows = held_out.matrix(known), min(ROWS, tensor.dim(1))
            w = source.read_f32(tensor, 0, rows)
            kind = gguf_types.Q2_K if tensor.columns % 256 == 0 else gguf_types.Q2_0
            step = Step(replace(tensor, shape=(tensor.columns, rows)), TensorSpec(name, (tensor.columns, rows), kind, 6), Action.PAIR)
            output = output_error(w, h)
            eight = output_error(w - dequantize(gguf_types.Q8_0, convert_quantize.quantize(gguf_types.Q8_0, w), *w.shape), h)
            importance = np.maximum(calibration.diagonal(known) / calibration.diagonal(known).mean(), 1e-6).astype(np.float32)[None]
            rounders: dict[str, TensorQuantizer] = {"diagonal only": PlainQuantizer(step, importance)}
            for damping, sweeps in itertools.product(args.damping, args.sweeps):
                rounders[f"λ {damping:g}, {sweeps} sweeps"] = FeedbackFactory(calibration, print, damping, sweeps=sweeps)(step, None)
            print(f"{name} ({gguf_types.name(kind)}), Q8_0 {eight / output:.2e}")
            for what, quantizer in rounders.items():
                base, residuals = errors(w, step, quantizer, h)
                print(f"  {what:18} base {base / output:.4f}  R4 R5 R6 R8: " + " ".join(f"{x / eight:.2f}" for x in residuals))


if __name__ == "__main__":
    main()
