"""`twobit calibrate MODEL -o OUT.calib`: runs the model over a text and keeps XᵀX of every matmul's input."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from tqdm import tqdm

from .._native import ffi, lib
from ..errors import TwobitError
from .collect import Collection, probe
from .model import CONTEXT, SEQUENCES, Runner, cut
from .store import Info
from .text import default_text, read_texts
from .units import size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL", help="a GGUF that llama.cpp runs, best f16 or the one you convert")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="OUT.calib")
    parser.add_argument("--text", type=Path, nargs="+", metavar="FILE",
                        help="text like what the model will see (default: what Python ships with)")  # fmt: skip
    parser.add_argument("--tokens", type=int, default=40960, help="tokens to run (default: %(default)s)")
    parser.add_argument("--ram", type=size, default=4 << 30, help="memory for the matrices; less means more passes (default: 4G)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--force", action="store_true", help="replace OUT.calib")


def calibrate(args: argparse.Namespace) -> None:
    """Raises TwobitError."""
    if args.output.exists() and not args.force:
        raise TwobitError(f"{args.output}: exists; give --force to replace it")
    text = read_texts(args.text) if args.text else default_text()
    with Runner(args.model, args.threads) as runner:
        sequences = cut(runner.tokenize(text), runner.bos, CONTEXT, max(1, args.tokens // CONTEXT))
        batches = [sequences[i : i + SEQUENCES] for i in range(0, len(sequences), SEQUENCES)]
        inputs = probe(runner)
        info = Info(
            model=f"{args.model.name} {args.model.stat().st_size}",
            tokens=int(sequences.size),
            context=CONTEXT,
            text_xxh64=f"{_xxh64(sequences.tobytes()):016x}",
            weights=inputs.weights,
            columns=inputs.columns,
        )
        try:
            work = Collection(args.output, info, batches, args.ram)
            _say(f"{len(inputs.columns)} inputs of {len(inputs.weights)} weights, {work.writer.nbytes / 1e9:.2f} GB; "
                 f"{sequences.size} tokens, {len(work.windows)} passes" + (" left of an earlier run" if work.resumed else ""))  # fmt: skip
            with tqdm(total=work.steps_left, unit="batch", desc="calibrate", disable=None) as bar:
                work.run(runner, bar.update)
        except OSError as error:
            raise TwobitError(f"{args.output}: cannot be written: {error.strerror or error}") from None
        for name, n in work.dropped.items():
            if n:
                _say(f"warning: {name}: {n} rows of activations with NaN or Inf were left out")


def main(argv: list[str] | None = None) -> int:
    """The command. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="twobit calibrate", description=__doc__)
    add_arguments(parser)
    args = parser.parse_args(argv)
    try:
        calibrate(args)
    except TwobitError as error:
        _say(str(error))
        return 2
    except KeyboardInterrupt:
        _say(f"interrupted; run the same command to go on from the last save beside {args.output}")
        return 130
    return 0


def _say(line: str) -> None:
    print(f"twobit calibrate: {line}", file=sys.stderr, flush=True)


def _xxh64(data: bytes) -> int:
    return int(lib().twobit_xxh64(ffi.from_buffer(data), len(data)))


if __name__ == "__main__":
    sys.exit(main())
