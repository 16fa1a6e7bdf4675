"""`twobit eval FILE --reference REF.gguf`: how much of the reference a paired GGUF keeps, as verifier and as draft.

KL divergence, same top token and perplexity are taken over the second half of sequences of 512 tokens. "verify" is the model as it
runs, "draft" its 2-bit base as it runs, "weights" either one's weights alone with f16 activations, "draft layers" the base in the layers
with the verifier's output matrix (as tables of stock 2-bit types have it). "bits in RAM" is what a step of decoding reads from RAM for
each weight: the residual of a pair (its base is on the GPU), all of a stock model.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from .. import bench_prompts, cli_options, format
from ..errors import TwobitError, first_line
from ..llama import Llama, Mode
from ..machine import physical_cores
from ..plotting import require, save
from . import acceptance, answers
from .divergence import Divergence, log_softmax
from .expand import base_bits, quantize_stock, ram_bits, write_f16
from .model import CONTEXT, Runner, Vocabulary, cut
from .text import default_text, read_texts

_ROWS = ("verify", "verify-weights", "draft", "draft-weights", "draft-layers-weights")
_FIRST = CONTEXT // 2  # first scored position
_STOCK = {"q8_0": 7, "q6_k": 18, "q5_k": 17, "q4_k": 15, "q3_k": 12, "q2_k": 10}  # llama_ftype


def logits(path: Path, mode: Mode, sequences: np.ndarray, threads: int | None) -> Iterator[np.ndarray]:
    """(positions, vocabulary) f32 of each sequence, valid until the next one."""
    model = Llama(str(path), mode=mode, n_ctx=CONTEXT, n_batch=CONTEXT, logits_all=True, n_threads=threads, verbose=False)
    try:
        for tokens in sequences:
            model.reset()
            model.eval(tokens.tolist())
            yield model.scores[_FIRST : CONTEXT - 1]
    finally:
        model.close()


class Reference:
    """The reference's log probabilities, kept in a temporary file."""

    def __init__(self, path: Path, sequences: np.ndarray, folder: Path, threads: int | None) -> None:
        self.sequences = sequences
        with Vocabulary(path) as vocabulary:
            shape = (len(sequences), CONTEXT - 1 - _FIRST, len(vocabulary))
        self.log_p = np.memmap(folder / "reference.f32", np.float32, "w+", shape=shape)
        self.threads = threads
        itself = Divergence()
        for i, rows in enumerate(_progress(logits(path, "full", self.sequences, threads), "reference", shape[0])):
            self.log_p[i] = log_softmax(rows)
            itself.add(self.log_p[i], rows, self.sequences[i, _FIRST + 1 :])
        self.summary = itself.summary()

    def compare(self, path: Path, mode: Mode, what: str) -> dict[str, object]:
        """The divergence of a model, of the same vocabulary, from the reference."""
        divergence = Divergence()
        for i, rows in enumerate(_progress(logits(path, mode, self.sequences, self.threads), what, len(self.sequences))):
            divergence.add(self.log_p[i], rows, self.sequences[i, _FIRST + 1 :])
        return divergence.summary()


def _progress(rows: Iterator[np.ndarray], what: str, total: int) -> Iterator[np.ndarray]:
    return iter(tqdm(rows, desc=what, total=total, unit="seq", disable=None))


def _sequences(args: argparse.Namespace) -> np.ndarray:
    """(n, CONTEXT) i32, what all are compared on."""
    if args.answers:
        threads = args.threads or physical_cores()
        with (
            Runner(args.reference, threads, sequences=1) as runner,
            tqdm(total=args.sequences * CONTEXT, desc="answers", unit="tok", disable=None) as bar,
        ):
            return answers.write(runner, args.sequences, threads, bar.update, bench_prompts.BUILTIN)
    text = read_texts(args.text) if args.text else default_text(held_out=True)
    with Vocabulary(args.reference) as vocabulary:
        return cut(vocabulary.tokenize(text), vocabulary.bos, CONTEXT, args.sequences)


def _check_vocabularies(path: Path, reference: Path) -> None:
    with Vocabulary(path) as ours, Vocabulary(reference) as theirs:
        if len(ours) != len(theirs):
            raise TwobitError(f"{path}: {len(ours)} tokens in its vocabulary, {len(theirs)} in the reference's")


def evaluate(args: argparse.Namespace) -> dict[str, Any]:
    """Raises TwobitError; OSError: the temporary files cannot be written."""
    paired = format.open_paired(args.model)
    _check_vocabularies(args.model, args.reference)
    sequences = _sequences(args)
    rows: dict[str, Any] = {}
    result: dict[str, Any] = {"model": str(args.model), "reference": str(args.reference), "base_bpw": base_bits(paired), "rows": rows}
    with tempfile.TemporaryDirectory(prefix=".twobit-eval-", dir=args.tmp or args.model.parent) as name:
        folder = Path(name)
        reference = Reference(args.reference, sequences, folder, args.threads)
        rows["reference"] = reference.summary | {"ram_bits": ram_bits(args.reference)}
        expanded = folder / "weights.gguf"
        for row in args.rows:
            name, of_weights = row.replace("-", " "), row.endswith("-weights")
            full = row.startswith("verify")
            if of_weights:
                write_f16(args.model, expanded, residual=full, output_residual=row.startswith("draft-layers"))
            divergence = reference.compare(expanded if of_weights else args.model, "full" if full or of_weights else "draft", name)
            rows[name] = divergence | {"ram_bits": ram_bits(args.model) if full else 0.0}
        for kind in args.beside:
            stock = folder / f"{kind}.gguf"
            quantize_stock(args.reference, stock, _STOCK[kind])
            if any(not row.endswith("-weights") for row in args.rows):
                rows[kind] = reference.compare(stock, "full", kind) | {"ram_bits": ram_bits(stock)}
            if any(row.endswith("-weights") for row in args.rows):
                write_f16(stock, expanded)
                rows[f"{kind} weights"] = reference.compare(expanded, "full", f"{kind} weights") | {"ram_bits": ram_bits(stock)}
            stock.unlink()
    if args.acceptance:
        result["acceptance"] = {
            f"{shape} t={temperature:g}": acceptance.tokens_per_verification(
                args.model, shape, temperature, args.acceptance_tokens, args.prompts, args.threads
            ).to_dict()
            for shape in args.acceptance
            for temperature in args.temperature
        }
    return result


def render(result: dict[str, Any]) -> str:
    """The table for people."""
    width = max(16, *map(len, result["rows"]))
    lines = [f"{'':{width}} {'bits in RAM':>11} {'KLD':>22} {'KLD 99.9 %':>10} {'same top, %':>15} {'perplexity':>17}"]
    for name, row in result["rows"].items():
        kld, top, ppl = row["kld"], row["same_top"], row["perplexity"]
        lines.append(
            f"{name:{width}} {row['ram_bits']:11.2f} {kld['mean']:11.6f} ± {kld['stderr']:.6f} {row['kld_99_9']:10.4f} "
            f"{100 * top['mean']:8.2f} ± {100 * top['stderr']:.2f} {ppl['mean']:10.4f} ± {ppl['stderr']:.3f}"
        )
    for name, row in result.get("acceptance", {}).items():
        error = "-" if row["stderr"] is None else f"{row['stderr']:.2f}"
        lines.append(f"{name}: {row['mean']:.2f} ± {error} tokens per verification")
    return "\n".join(lines)


def plot(result: dict[str, Any], path: Path) -> None:
    """KLD against the bits that a step of decoding reads from RAM, as an image.

    Raises:
        TwobitError: matplotlib is missing, or cannot write it.
    """
    require(path)
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for name, row in result["rows"].items():
        if name == "reference":
            continue
        axes.errorbar(row["ram_bits"], row["kld"]["mean"], yerr=row["kld"]["stderr"], fmt="o", capsize=3)
        axes.annotate(name, (row["ram_bits"], row["kld"]["mean"]), textcoords="offset points", xytext=(6, 4), fontsize=8)
    axes.set_yscale("log")
    axes.set_xlabel("bits a weight read from RAM for each step of decoding")
    axes.set_ylabel("mean KL divergence to the reference, nats")
    axes.set_title(Path(result["model"]).name)
    figure.tight_layout()
    save(figure, path)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="twobit eval", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="FILE", help="a paired GGUF")
    parser.add_argument("--reference", type=Path, required=True, metavar="REF.gguf", help="what it should be like, best its f16")
    parser.add_argument("--text", type=Path, nargs="+", metavar="FILE",
                        help="not the calibration's (default: passages of what Python ships with that calibrate leaves out)")  # fmt: skip
    parser.add_argument("--answers", action="store_true",
                        help="instead of a text, what the reference itself answers to the benchmarks' prompts")  # fmt: skip
    parser.add_argument("--sequences", type=cli_options.positive, default=16, help="of 512 tokens (default: %(default)s)")
    parser.add_argument("--beside", nargs="+", choices=_STOCK, default=[], help="stock types of the reference, for comparison")
    parser.add_argument("--rows", nargs="*", choices=_ROWS, default=_ROWS[:3],
                        help="what to measure (default: %(default)s); -weights needs disk space for an f16 copy")  # fmt: skip
    parser.add_argument("--acceptance", nargs="+", choices=acceptance.SHAPES, default=[], help="also measure tokens per verification")
    parser.add_argument("--temperature", nargs="+", type=cli_options.number, default=[0.0], help="for --acceptance (default: greedy)")
    parser.add_argument("--prompts", type=cli_options.whole(1, acceptance.N_PROMPTS), default=acceptance.N_PROMPTS,
                        help="for --acceptance (default: all %(default)s)")  # fmt: skip
    parser.add_argument("--acceptance-tokens", type=cli_options.positive, default=96,
                        help="generated behind each prompt (default: %(default)s)")  # fmt: skip
    parser.add_argument("--threads", type=cli_options.positive)
    parser.add_argument("--tmp", type=Path, metavar="FOLDER", help="for temporary files (default: beside FILE)")
    parser.add_argument("--plot", type=Path, metavar="IMAGE", help="write a plot of KLD against bits in RAM")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """The command. Exit status 0, 2 for what it refuses."""
    args = _parse(argv)
    signal.signal(signal.SIGTERM, _interrupt)  # so that a terminated run takes its temporary files along, too
    try:
        if args.plot:
            require(args.plot)
        try:
            result = evaluate(args)
        except OSError as error:
            raise TwobitError(f"{error.filename or args.tmp or args.model.parent}: {error.strerror}") from None
        print(json.dumps(result, indent=2) if args.json else render(result))
        if args.plot:
            plot(result, args.plot)
    except (TwobitError, ValueError, RuntimeError) as error:
        print(f"twobit eval: {first_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
