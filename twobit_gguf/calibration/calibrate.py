"""`twobit calibrate MODEL -o OUT.calib`: runs the model over a text and keeps XᵀX of every matmul's input."""

from __future__ import annotations

import argparse
import os
import sys
import zipfile
from pathlib import Path

import numpy as np
from tqdm import tqdm

from .._native import ffi, lib
from ..cli_options import positive
from ..errors import TwobitError
from . import answers
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
    parser.add_argument("--answers", type=_share, metavar="SHARE",
                        help="share of the tokens that the model writes itself, as answers to built-in instructions "
                             "(default: 0.5, with --text 0)")  # fmt: skip
    parser.add_argument("--tokens", type=positive, default=40960, help="tokens to run (default: %(default)s)")
    parser.add_argument("--ram", type=size, default=4 << 30, help="memory for the matrices; less means more passes (default: 4G)")
    parser.add_argument("--threads", type=positive, default=os.cpu_count() or 1)
    parser.add_argument("--force", action="store_true", help="replace OUT.calib")


def calibrate(args: argparse.Namespace) -> None:
    """Raises TwobitError."""
    _check_output(args)
    text = read_texts(args.text) if args.text else default_text()
    share = args.answers if args.answers is not None else 0.0 if args.text else 0.5
    n_sequences = max(1, args.tokens // CONTEXT)
    n_answers = int(share * n_sequences)
    with Runner(args.model, args.threads) as runner:
        parts = [cut(runner.tokenize(text), runner.bos, CONTEXT, n_sequences - n_answers)] if n_answers < n_sequences else []
        parts += [_answers(runner, n_answers, args)] if n_answers else []
        sequences = np.concatenate(parts)
        batches = [sequences[i : i + SEQUENCES] for i in range(0, len(sequences), SEQUENCES)]
        inputs = probe(runner)
        info = Info(
            model=_model_id(args.model),
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
            _answers_path(args.output).unlink(missing_ok=True)
        except OSError as error:
            raise TwobitError(f"{args.output}: cannot be written: {error.strerror or error}") from None
        for name, n in work.dropped.items():
            if n:
                _say(f"warning: {name}: {n} rows of activations with NaN or Inf were left out")


def _check_output(args: argparse.Namespace) -> None:
    if args.output.is_dir():
        raise TwobitError(f"{args.output}: is a folder; name a file")
    if args.output.exists() and args.model.exists() and args.output.samefile(args.model):
        raise TwobitError(f"{args.output}: is the model itself; name another output")
    if args.output.exists() and not args.force:
        raise TwobitError(f"{args.output}: exists; give --force to replace it")


def _answers(runner: Runner, n_sequences: int, args: argparse.Namespace) -> np.ndarray:
    """answers.write(), or what an interrupted run of the same command has kept of it."""
    path = _answers_path(args.output)
    made_for = np.array([_model_id(args.model), args.threads], dtype=np.str_)
    try:
        with np.load(path) as kept:
            if np.array_equal(kept["made_for"], made_for) and kept["tokens"].shape == (n_sequences, CONTEXT):
                return np.asarray(kept["tokens"], np.int32)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        pass
    with tqdm(total=n_sequences * CONTEXT, unit="tok", desc="answers", disable=None) as bar:
        tokens = answers.write(runner, n_sequences, args.threads, bar.update)
    aside = path.with_suffix(".tmp.npz")
    np.savez(aside, made_for=made_for, tokens=tokens)
    os.replace(aside, path)
    return tokens


def _answers_path(output: Path) -> Path:
    return output.with_name(output.name + ".part.answers.npz")


def _model_id(model: Path) -> str:
    return f"{model.name} {model.stat().st_size}"


def _share(text: str) -> float:
    share = float(text)
    if not 0.0 <= share <= 1.0:
        raise argparse.ArgumentTypeError(f"{text}: not between 0 and 1")
    return share


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
