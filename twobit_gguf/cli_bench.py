"""twobit bench kernels | decode: what this machine does."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from . import cli_options
from .errors import TwobitError

_USAGE = """usage: twobit bench kernels [...]    the residual's kernels, alone
       twobit bench decode [...]     decoding, beside llama.cpp's own"""


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Exit status 0, or 2 for what is refused."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["kernels"]:
        return int(importlib.import_module(".bench_kernels", __package__).main(arguments[1:]) or 0)
    if arguments[:1] == ["decode"]:
        return _decode(arguments[1:])
    print(_USAGE, file=sys.stdout if arguments[:1] in (["-h"], ["--help"]) else sys.stderr)
    return 0 if arguments[:1] in (["-h"], ["--help"]) else 2


def _decode(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="twobit bench decode",
        description="Times the draft, and verifications of 1 to 32 tokens, in turns with llama.cpp's own decoding of another file of the "
        "same model. With --prompts: whole texts, plain and speculative.",
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="a paired GGUF")
    parser.add_argument("--reference", metavar="GGUF", type=Path, help="the same model as llama.cpp runs it, for example in Q8_0")
    parser.add_argument("--prompts", metavar="FILE", type=Path, help="text with one prompt a paragraph (or a .json list of strings)")
    parser.add_argument("-t", "--threads", metavar="N", type=cli_options.positive, help="default: all physical cores")
    parser.add_argument("--device", metavar="NAME", help="default: all TWOBITn")
    parser.add_argument("-ngl", "--gpu-layers", metavar="N", type=int, help="default: all")
    parser.add_argument("--past", metavar="N", type=cli_options.positive, default=64, help="tokens in the cache (default %(default)s)")
    parser.add_argument("--rounds", metavar="N", type=cli_options.positive, default=10, help="default %(default)s")
    parser.add_argument("-n", "--tokens", metavar="N", type=cli_options.positive, default=128,
                        help="of each text, with --prompts (default %(default)s)")  # fmt: skip
    parser.add_argument("--temp", metavar="X", type=float, nargs="+", default=[0.0, 0.7], help="with --prompts (default 0 0.7)")
    parser.add_argument("--shapes", nargs="+", choices=("comb", "chain", "tree"), default=["comb", "chain", "tree"], help="with --prompts")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    for path in (args.file, args.reference, args.prompts):
        if path is not None and not path.is_file():
            raise TwobitError(f"{path}: no such file")
    prompts = _prompts(args.prompts) if args.prompts is not None else None

    from tqdm import tqdm

    from . import bench_decode
    from .llama import physical_cores
    from .speculative import SpeculationOptions

    settings = bench_decode.Settings(
        args.file, args.reference, args.threads or physical_cores(), args.past, args.rounds,
        {"device": args.device, "n_gpu_layers": args.gpu_layers},
    )  # fmt: skip
    if prompts is None:
        with tqdm(total=args.rounds + 1, unit="round", disable=None, leave=False) as bar:
            result = bench_decode.measure(settings, bar.update)
        print(json.dumps(result, indent=2) if args.json else bench_decode.render(result))
        return 0
    shapes = {shape: SpeculationOptions(shape=shape) for shape in args.shapes}
    with tqdm(total=len(prompts) * len(args.temp), unit="prompt", disable=None, leave=False) as bar:
        result = bench_decode.measure_prompts(settings, prompts, args.tokens, args.temp, shapes, bar.update)
    print(json.dumps(result, indent=2) if args.json else bench_decode.render_prompts(result))
    return 0


def _prompts(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
        prompts = json.loads(text) if path.suffix == ".json" else [part.strip() for part in text.split("\n\n")]
    except (OSError, ValueError) as error:
        raise TwobitError(f"{path}: cannot be read: {error}") from None
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
        raise TwobitError(f"{path}: not a list of strings")
    prompts = [prompt for prompt in prompts if prompt]
    if not prompts:
        raise TwobitError(f"{path}: no prompts in it")
    return prompts
