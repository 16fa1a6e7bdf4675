"""Makes a llama-shaped model of about 1.1B random weights (TinyLlama's shape), as Q8_0 and as a paired file, for measuring speed:

    python scripts/make_synthetic.py FOLDER
    twobit bench decode FOLDER/paired.gguf --reference FOLDER/q8_0.gguf

The weights are Gaussian: speed depends on shapes and types alone, and nothing about quality can be learnt from it.
Takes some minutes, 4.5 GB of disk while it runs and 2.4 GB after it. What is there already is kept.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import llama_cpp
import random_model
from random_model import Shape

SHAPE = Shape(n_embd=2048, n_ff=5632, n_layer=22, n_head=32, n_head_kv=4, head_dim=64, n_vocab=32000)


def make_f16(target: Path, layers: int) -> None:
    aside = target.with_suffix(".part")
    random_model.write(aside, "llama", Shape(**{**vars(SHAPE), "n_layer": layers}))
    os.replace(aside, target)


def make_q8_0(source: Path, target: Path) -> None:
    aside = target.with_suffix(".part")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0
    if llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(aside), params) != 0:
        raise SystemExit(f"{source}: llama.cpp could not quantise it to Q8_0")
    os.replace(aside, target)


def make_paired(source: Path, target: Path, base: str, residual: str) -> None:
    command = [sys.executable, "-m", "twobit_gguf.convert", str(source), str(target), "--base", base, "--residual", residual]
    subprocess.run(command, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=SHAPE.n_layer, help=f"default {SHAPE.n_layer}; fewer make a smaller model")
    parser.add_argument("--base", default="q2_k")
    parser.add_argument("--residual", default="r6")
    parser.add_argument("--keep-f16", action="store_true", help="keep the f16 source, 2.2 GB")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    f16, q8_0, paired = (args.folder / f"{name}.gguf" for name in ("f16", "q8_0", "paired"))
    if not f16.is_file() and not (q8_0.is_file() and paired.is_file()):
        make_f16(f16, args.layers)
    if not q8_0.is_file():
        make_q8_0(f16, q8_0)
    if not paired.is_file():
        make_paired(f16, paired, args.base, args.residual)
    if not args.keep_f16:
        f16.unlink(missing_ok=True)
    for path in (q8_0, paired):
        print(f"{path}  {path.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
