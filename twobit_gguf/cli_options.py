"""The options that every command which loads a model shares."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from .errors import TwobitError
from .speculative.options import Shape, SpeculationOptions

if TYPE_CHECKING:
    from .llama import Llama

MOST = 2**31 - 1  # llama.cpp's int


def add_model(parser: argparse.ArgumentParser) -> None:
    """FILE and how to load it."""
    parser.add_argument("file", metavar="FILE", type=Path, help="a paired GGUF; any other GGUF runs as llama.cpp runs it")
    parser.add_argument("--mode", choices=("speculative", "full", "draft"), default="speculative",
                        help="full: base + residual; draft: the 2-bit base alone; speculative (default): full's text, faster")  # fmt: skip
    parser.add_argument("-c", "--ctx", metavar="N", type=positive, default=4096, help="context in tokens (default %(default)s)")
    parser.add_argument("-t", "--threads", metavar="N", type=positive, help="default: all physical cores")
    parser.add_argument("-ngl", "--gpu-layers", metavar="N", type=whole(-1), help="layers on the device, -1 for all (default)")
    parser.add_argument("--device", metavar="NAME", help="TWOBIT0, …; several with commas (default: all TWOBITn)")
    parser.add_argument("--rpc", metavar="HOST:PORT", help="ggml RPC servers whose devices join, with commas")
    parser.add_argument("--residual", metavar="PATH", help="the residual's own file, if it is not beside FILE")
    parser.add_argument("--populate", action="store_true", help="read the residual into RAM while loading")
    parser.add_argument("--mlock", action="store_true", help="and keep it there")
    parser.add_argument("--no-verify", action="store_true", help="do not compare checksums while loading")
    parser.add_argument("-v", "--verbose", action="store_true", help="llama.cpp's own log")


def add_speculation(parser: argparse.ArgumentParser) -> None:
    """How to speculate."""
    group = parser.add_argument_group("speculation")
    defaults = SpeculationOptions()
    group.add_argument("--shape", choices=get_args(Shape), default=defaults.shape, help="of a draft (default %(default)s)")
    group.add_argument("--max-depth", metavar="N", type=positive, default=defaults.max_depth,
                       help="draft passes a step (default %(default)s)")  # fmt: skip
    group.add_argument("--max-nodes", metavar="N", type=positive, default=defaults.max_nodes,
                       help="drafted tokens a verification (default %(default)s)")  # fmt: skip
    group.add_argument("--fixed", action="store_true", help="always draft to the limits instead of following measured costs")
    group.add_argument("--lookup", metavar="N", type=whole(0), default=0,
                       help="also continue n-grams of this length seen before (0: off)")  # fmt: skip


def speculation(args: argparse.Namespace) -> SpeculationOptions:
    """The options of add_speculation."""
    return SpeculationOptions(
        shape=args.shape, max_depth=args.max_depth, max_nodes=args.max_nodes, adaptive=not args.fixed, lookup=args.lookup
    )


def load(args: argparse.Namespace, kind: type[Llama] | None = None, **more: Any) -> Llama:
    """The model of add_model and add_speculation, as a `kind` (a Llama).

    Raises:
        TwobitError, ValueError, MemoryError: it is refused; one line.
    """
    if not args.file.is_file():
        raise TwobitError(f"{args.file}: no such file")
    if not os.access(args.file, os.R_OK):
        raise TwobitError(f"{args.file}: cannot be read: permission denied")
    from .llama import Llama

    options: dict[str, Any] = {
        "mode": args.mode, "n_ctx": args.ctx, "n_threads": args.threads, "n_threads_batch": args.threads, "n_gpu_layers": args.gpu_layers,
        "device": args.device, "rpc_servers": args.rpc, "residual_path": args.residual, "populate": args.populate,
        "mlock_residual": args.mlock, "verify_checksums": not args.no_verify, "verbose": args.verbose,
    }  # fmt: skip
    return (kind or Llama)(str(args.file), **options, **more)


# ---- argparse types ----


def whole(least: int, most: int = MOST) -> Callable[[str], int]:
    """A whole number from `least` to `most`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} is not from {least} to {most}")
        return value

    return parse


positive = whole(1)


def number(text: str) -> float:
    """A finite number from 0 on."""
    value = _finite(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def positive_number(text: str) -> float:
    """A finite number above 0."""
    value = _finite(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _finite(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return value
