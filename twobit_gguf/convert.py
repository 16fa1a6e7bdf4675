"""twobit-convert IN OUT.gguf: any GGUF or Hugging Face checkpoint becomes a paired GGUF.

    from twobit_gguf.convert import Job, convert
    convert(Job(Path("model.safetensors"), Path("out.gguf")))
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from . import cli_options, convert_plan, convert_probe, convert_report, format, gguf_file, gguf_types, hf
from ._native import NativeError
from .calibration import mixed, order
from .calibration.quantizer import SWEEPS, FeedbackFactory
from .calibration.store import Calibration
from .calibration.units import size
from .cli_output import flushed
from .convert_bases import Bases
from .convert_imatrix import Imatrix
from .convert_plan import Action, Options, Step
from .convert_quantize import PlainQuantizer, QuantizerFactory
from .convert_run import Conversion
from .convert_source import Source
from .errors import TwobitError
from .format_write import PairedWriter
from .gguf_file import Value
from .llama_source import LlamaSourceError
from .machine import usable_cpus

OWN_FILE_ABOVE = 45_000_000_000  # bytes of residual from which it gets a file of its own by itself
_QUANTIZATION_VERSION = 2  # GGML_QNT_VERSION
# llama.h's llama_ftype of a model whose bases are mostly of this type
_FILE_TYPES = {
    gguf_types.Q2_K: 10, gguf_types.IQ2_XXS: 19, gguf_types.IQ2_XS: 20, gguf_types.IQ2_S: 28, gguf_types.Q2_0: 41,
    mixed.Q3_K: 12, mixed.Q4_K: 15, mixed.Q4_0: 2,
}  # fmt: skip


def default_threads() -> int:
    return len(usable_cpus())


@dataclass
class Job:
    """One conversion. residual_file: "off", "auto" (above 45 GB) or the path of the residual's own file."""

    source: Path
    out: Path
    options: Options = field(default_factory=Options)
    imatrix: Path | None = None
    residual_file: str = "auto"
    force: bool = False
    threads: int = field(default_factory=default_threads)
    quiet: bool = False
    quantizer: QuantizerFactory = PlainQuantizer
    refine: Callable[[Source, list[Step]], list[Step]] = field(default=lambda source, steps: steps)  # mixed bases
    bases: Bases | None = None  # those of another file, whose refine() is the refine above


def convert(job: Job) -> dict[str, Any]:
    """Writes job.out (and the residual's own file). Returns what went where, as --json prints it.

    Raises:
        TwobitError, NativeError, LlamaSourceError: nothing was written; one line says why and what to do.
    """
    started = time.monotonic()
    try:
        _check_output(job.out, job)
        imatrix = Imatrix(job.imatrix) if job.imatrix is not None else None
        if not hf.is_checkpoint(job.source):
            result = _convert_gguf(job, job.source, imatrix)
        else:
            checkpoint = hf.open_checkpoint(job.source)
            # the temporary GGUF is as large as the checkpoint, the result a little more than half of a 16-bit one
            _check_space(job.out.parent, checkpoint.nbytes + checkpoint.nbytes * 6 // 10)
            with tempfile.TemporaryDirectory(prefix=f".{job.out.name[:200]}.", dir=job.out.parent) as beside:
                result = _convert_gguf(job, hf.to_gguf(checkpoint, Path(beside), job.quiet), imatrix)
    except OSError as error:
        raise _explain(error, job) from None
    return result | {"seconds": time.monotonic() - started}


def _convert_gguf(job: Job, path: Path, imatrix: Imatrix | None) -> dict[str, Any]:
    with Source(path, shown_as=job.source) as source:
        steps, kv = _accepted_plan(job, source)
        residual_out = _residual_out(job, steps)
        writer = PairedWriter(job.out, kv, [step.spec for step in steps], residual_out)
        total = writer.main_size + writer.section_size + format.PAGE
        _check_space(job.out.parent, writer.main_size if residual_out else total)
        if residual_out:
            _check_space(residual_out.parent, total if residual_out.parent == job.out.parent else writer.section_size)
        with writer:
            _run(job, source, writer, steps, imatrix)
            writer.finish()
    table = convert_report.rows(steps)
    disk = job.out.stat().st_size + (residual_out.stat().st_size if residual_out else 0)
    return {
        "input": str(job.source),
        "output": str(job.out),
        "residual_file": str(residual_out) if residual_out else None,
        "architecture": source.architecture,
        "disk_bytes": disk,
        "table": convert_report.render(table, disk),
    } | convert_report.summary(table)


def _accepted_plan(job: Job, source: Source) -> tuple[list[Step], dict[str, Value]]:
    """The plan whose file llama.cpp takes. A shared output is untied if that architecture knows an output.weight."""
    reason = None
    for untie in (True, False) if convert_plan.wants_output(source) else (False,):
        steps = job.refine(source, convert_plan.make_plan(source, job.options, untie))
        kv = _keys(job, source, steps)
        reason = _probe(PairedWriter(job.out, kv, [step.spec for step in steps]))
        if reason is None:
            return steps, kv
    raise TwobitError(f"{job.source}: llama.cpp cannot load this model: {reason}")


def _probe(writer: PairedWriter) -> str | None:
    """llama.cpp's opinion on the main part, from a file that has its header and size (a hole, no space on disk)."""
    with tempfile.NamedTemporaryFile(prefix=f".{writer.out.name[:200]}.", suffix=".probe", dir=writer.out.parent) as file:
        file.write(writer.main_header)
        file.truncate(writer.main_size)
        file.flush()
        return convert_probe.refusal(Path(file.name))


def _keys(job: Job, source: Source, steps: Iterable[Step]) -> dict[str, Value]:
    """The source's keys as they are, but for those that describe the quantisation."""
    kv = {key: value for key, value in source.kv.items() if not key.startswith(("twobit.", "quantize.imatrix."))}
    types = Counter(step.spec.type for step in steps if step.action is Action.PAIR)
    kv["general.file_type"] = gguf_file.scalar(gguf_file.U32, _FILE_TYPES.get(types.most_common(1)[0][0], _FILE_TYPES[gguf_types.Q2_K]))
    kv["general.quantization_version"] = gguf_file.scalar(gguf_file.U32, _QUANTIZATION_VERSION)
    if job.imatrix is not None:
        kv["quantize.imatrix.file"] = gguf_file.string(job.imatrix.name)
    return kv


def _run(job: Job, source: Source, writer: PairedWriter, steps: list[Step], imatrix: Imatrix | None) -> None:
    total = sum(step.source.nbytes * (2 if step.action is Action.PAIR else 1) for step in steps)
    disable = True if job.quiet else None  # None: only on a terminal
    pool = ThreadPoolExecutor(job.threads)
    try:
        with tqdm(total=total, desc="converting", unit="B", unit_scale=True, disable=disable) as bar:
            conversion = Conversion(source, writer, pool, job.threads, job.quantizer, imatrix, job.bases, bar.update)
            for step in steps:
                bar.set_postfix_str(step.spec.name, refresh=False)
                try:
                    conversion.run(step)
                except NativeError as error:
                    raise TwobitError(f"{job.source}: tensor {step.spec.name}: {error}") from None
    finally:
        pool.shutdown(cancel_futures=True)
    unknown = conversion.without_importance
    if unknown and imatrix is not None:
        print(
            f"twobit-convert: {imatrix.path}: no entry for {len(unknown)} of the paired tensors ({unknown[0]} is the first); "
            "all their columns count the same",
            file=sys.stderr,
        )


def _residual_out(job: Job, steps: list[Step]) -> Path | None:
    if job.residual_file == "off":
        return None
    if job.residual_file != "auto":
        path = Path(job.residual_file)
    else:
        nbytes = sum(
            format.residual_nbytes(step.spec.bits, step.rows, step.source.columns, step.matrices)
            for step in steps
            if step.spec.bits is not None
        )
        if nbytes <= OWN_FILE_ABOVE:
            return None
        path = job.out.with_name(job.out.stem + ".residual.gguf")
    _check_output(path, job)
    if _same(path, job.out):
        raise TwobitError(f"{path}: output and residual file are the same; give another --residual-file")
    return path


def _check_output(path: Path, job: Job) -> None:
    if path.is_dir():
        raise TwobitError(f"{path}: is a folder; name the file to write")
    if _same(path, job.source) or (job.source.is_file() and path.exists() and path.samefile(job.source)):
        raise TwobitError(f"{path}: output and input are the same file; name another output")
    if not path.parent.is_dir():
        raise TwobitError(f"{path.parent}: no such folder; make it first")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise TwobitError(f"{path.parent}: cannot be written to; choose another folder or change its permissions")
    if (path.exists() or path.is_symlink()) and not job.force:
        raise TwobitError(f"{path}: exists already; choose another name or give --force")


def _same(a: Path, b: Path) -> bool:
    return os.path.abspath(a) == os.path.abspath(b)


def _check_space(folder: Path, nbytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise TwobitError(
            f"{folder}: not enough space on this disk: {nbytes / 1e9:.3f} GB needed, {free / 1e9:.3f} GB free; "
            "make room or write to another disk"
        )


def _explain(error: OSError, job: Job) -> TwobitError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return TwobitError(
            f"{job.out}: cannot be written: {error.strerror}; make room (or raise the file size limit) or write to another disk"
        )
    return TwobitError(f"{error.filename or job.out}: {error.strerror}; check the path and its permissions")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="twobit-convert",
        description="Converts a model to a paired GGUF: a 2-bit base for the GPU and its residual for system RAM, in one file.",
        epilog="Hugging Face input needs pip install 'twobit-gguf[hf]' and goes through llama.cpp's own converter, "
        "which may run tokenizer code that lies in the model's folder.",
    )
    parser.add_argument("source", metavar="IN", type=Path, help=".safetensors file, Hugging Face folder, or GGUF (first shard)")
    parser.add_argument("out", metavar="OUT.gguf", type=Path, help="the paired GGUF to write")
    parser.add_argument("--base", choices=["auto", *convert_plan.BASES], default="auto",
                        help="type of the base; auto: q2_k where the row length allows, else q2_0 (default)")  # fmt: skip
    parser.add_argument("--base-from", metavar="GGUF", type=Path,
                        help="take the bases from this quantised GGUF of the same model, make only the residual")  # fmt: skip
    parser.add_argument("--residual", choices=list(convert_plan.RESIDUALS), default="r6",
                        help="bits a weight of the residual (default r6)")  # fmt: skip
    parser.add_argument("--embedding", choices=list(convert_plan.EMBEDDINGS), default="q8_0",
                        help="type of the token embedding, which is not paired (default q8_0)")  # fmt: skip
    parser.add_argument("--imatrix", metavar="FILE", type=Path,
                        help="importance matrix of llama-imatrix (GGUF or .dat), or a .calib, whose diagonal it is")  # fmt: skip
    parser.add_argument("--calibration", metavar="FILE", type=Path,
                        help="XᵀX from `twobit calibrate`: base (q2_0, q2_k, iq2_xs) and residual get error feedback")  # fmt: skip
    parser.add_argument("--damping", metavar="X", type=cli_options.positive_number,
                        help="of the calibration, for example 0.01 (default: by the amount of text, input by input)")  # fmt: skip
    parser.add_argument("--order", choices=order.ORDERS, default=order.NATURAL,
                        help="with --calibration: columns as they stand (default), or those with the strongest inputs first")  # fmt: skip
    parser.add_argument("--sweeps", metavar="N", type=int, default=SWEEPS,
                        help="with --calibration: rounds that improve a base of q2_0, q2_k, iq2_xs (default %(default)s)")  # fmt: skip
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--vram", metavar="SIZE", type=size,
                        help="with --calibration: bases of 2 to 4 bits, where they buy most, in this much memory "
                        "(8192 tokens of KV cache and buffers taken off)")  # fmt: skip
    budget.add_argument("--base-bpw", metavar="X", type=cli_options.positive_number, help="the same, with X bits a weight on average")
    parser.add_argument("--residual-file", metavar="off|auto|PATH", default="auto",
                        help="put the residual into a file of its own; auto: above 45 GB (default)")  # fmt: skip
    parser.add_argument("--force", action="store_true", help="replace an existing output")
    parser.add_argument("--threads", metavar="N", type=int, default=default_threads(), help="default: all cores")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress bar and no table")
    args = parser.parse_args(argv)
    if not 1 <= args.threads <= 1024:
        parser.error("--threads must be 1 to 1024")
    if (args.vram or args.base_bpw) and args.calibration is None:
        parser.error("--vram and --base-bpw measure where bits count: give --calibration")
    if (args.vram or args.base_bpw) and args.base != "auto":
        parser.error("--vram and --base-bpw choose the bases themselves: leave --base out")
    if args.base_from is not None and (args.vram or args.base_bpw or args.base != "auto"):
        parser.error("--base-from brings the bases' types along: leave --base, --vram and --base-bpw out")
    if not 0 <= args.sweeps <= 100:
        parser.error("--sweeps must be 0 to 100")
    if args.damping is not None and args.damping > 10:
        parser.error("--damping must be at most 10")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Exit status 0, 2 for what it refuses (one line on stderr), 130 when interrupted."""
    return flushed("twobit-convert", lambda: _main(_parse(argv)))


def _main(args: argparse.Namespace) -> int:
    options = Options(args.base, convert_plan.RESIDUALS[args.residual], convert_plan.EMBEDDINGS[args.embedding])
    job = Job(args.source, args.out, options, args.imatrix, args.residual_file, args.force, args.threads, args.quiet)
    signal.signal(signal.SIGTERM, _interrupt)  # a terminated conversion cleans up as an interrupted one does
    try:
        if args.calibration is not None:
            job.quantizer = factory = FeedbackFactory(Calibration(args.calibration), _warn, args.damping, args.order, args.sweeps)
            if args.vram or args.base_bpw:
                job.refine = mixed.Mixer(factory, mixed.Budget(args.base_bpw, args.vram), args.threads, args.quiet)
        with Bases(args.base_from, _warn) if args.base_from is not None else contextlib.nullcontext() as bases:
            if bases is not None:
                job.bases, job.refine = bases, bases.refine
            result = convert(job)
    except (TwobitError, NativeError, LlamaSourceError) as error:
        print(f"twobit-convert: {error}", file=sys.stderr)
        return 2
    except MemoryError:
        print(f"twobit-convert: {args.source}: not enough memory; give fewer --threads", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("twobit-convert: interrupted, nothing was written", file=sys.stderr)
        return 130
    residual = result["residual_file"]
    if residual and Path(residual).resolve().parent != args.out.resolve().parent:
        print(
            f"twobit-convert: {residual} is not beside {args.out}: programs look for it there, so move it or name it to them",
            file=sys.stderr,
        )
    table = result.pop("table")
    if args.json:
        print(json.dumps(result, indent=2))
    elif not args.quiet:
        print(f"{result['output']}: {result['pairs']} of its matrices are pairs, {result['seconds']:.1f} s\n{table}")
    return 0


def _warn(line: str) -> None:
    tqdm.write(f"twobit-convert: warning: {line}", file=sys.stderr)


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
