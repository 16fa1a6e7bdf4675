"""twobit bench kernels | decode | policies | overhead: what this machine does."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import bench_prompts, cli_options, llama_source
from .errors import TwobitError
from .machine import physical_cores

if TYPE_CHECKING:
    from .bench_decode import Settings

_USAGE = """usage: twobit bench kernels [...]     the residual's kernels, alone
       twobit bench decode [...]      decoding, and whole texts, beside llama.cpp's own
       twobit bench policies [...]    how to draft: chain, comb and tree on cost curves; shared and own KV
       twobit bench overhead [...]    what speculation costs beside llama.cpp

twobit bench WHAT --help explains it."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Exit status 0, or 2 for what is refused."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["kernels"]:
        return int(importlib.import_module(".bench_kernels", __package__).main(arguments[1:]) or 0)
    if arguments[:1] == ["overhead"]:
        return int(importlib.import_module(".bench_overhead", __package__).main(arguments[1:]) or 0)
    if arguments[:1] == ["decode"]:
        return _decode(arguments[1:])
    if arguments[:1] == ["policies"]:
        return _policies(arguments[1:])
    print(_USAGE, file=sys.stdout if arguments[:1] in (["-h"], ["--help"]) else sys.stderr)
    return 0 if arguments[:1] in (["-h"], ["--help"]) else 2


def _decode(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="twobit bench decode",
        description="Times the draft, and verifications of 1 to 32 tokens, in turns with llama.cpp's own decoding of another file of the "
        "same model. With --prompts: whole texts, plain and speculative, beside llama.cpp's own plain and speculative decoding.",
        epilog="example: twobit bench decode out.gguf --reference q8_0.gguf --draft-model q2_k.gguf --prompts --json-out runs.json",
    )
    _add_model(parser)
    parser.add_argument("--reference", metavar="GGUF", type=Path, help="the same model as llama.cpp runs it, for example in Q8_0")
    parser.add_argument("--past", metavar="N", type=cli_options.positive, default=64, help="tokens in the cache (default %(default)s)")
    parser.add_argument("--rounds", metavar="N", type=cli_options.positive, default=10, help="default %(default)s")
    group = parser.add_argument_group("whole texts")
    _add_prompts(group, None)
    group.add_argument("-n", "--tokens", metavar="N", type=cli_options.whole(2), default=128,
                       help="of each text (default %(default)s); its end does not stop it")  # fmt: skip
    group.add_argument("--temp", metavar="X", type=cli_options.number, nargs="+", default=[0.0, 0.7], help="temperatures (default 0 0.7)")
    group.add_argument("--shapes", nargs="+", choices=("comb", "chain", "tree"), default=["comb", "chain", "tree"], help="default: all")
    group.add_argument("--draft-model", metavar="GGUF", type=Path,
                       help="draft of llama.cpp's own speculation with --reference as its target, for example Q2_K")  # fmt: skip
    group.add_argument("--llama-speculative", metavar="PROGRAM", type=Path,
                       help="a stock llama-speculative-simple (default: in PATH, or what scripts/build_llama_tools.py built)")  # fmt: skip
    _add_output(group)
    group.add_argument("--plot", type=Path, metavar="IMAGE", help="also plot tokens a second and where the time goes")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    for path in (args.file, args.reference, args.prompts, args.draft_model, args.llama_speculative, args.context_text):
        _check(path)
    if args.prompts is None and (args.plot or args.json_out or args.draft_model or args.context_text):
        parser.error("--plot, --json-out, --draft-model and --context-text go with --prompts")
    if args.draft_model is not None and args.reference is None:
        parser.error("--draft-model drafts for --reference: name one")

    from . import bench_decode

    if args.prompts is None:
        with _bar(args.rounds + 1, "round") as bar:
            single = bench_decode.measure(_settings(args), bar.update)
        print(json.dumps(single, indent=2) if args.json else bench_decode.render(single))
        return 0

    from . import bench_plot, bench_texts, plotting

    if args.plot:
        plotting.require(args.plot)
    texts = bench_texts.Texts(_prompts(args), args.tokens, args.temp, args.shapes, _llama_speculative(args))
    with _bar(len(texts.prompts) * len(args.temp), "prompt") as bar:
        result = bench_texts.measure(_settings(args), texts, args.json_out, bar.update)
    print(json.dumps(result, indent=2) if args.json else bench_texts.render(result))
    if args.plot:
        bench_plot.texts(result, args.plot)
    return 0


def _policies(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="twobit bench policies",
        description="Decodes texts with chains, combs and trees of fixed limits and scores each on two cost curves, this machine's and a "
        "GPU's: which shape pays, with limits chosen on all prompts but the one that is scored. And a chain whose draft reads the "
        "verifier's keys and values against one that has its own.",
        epilog="example: twobit bench policies out.gguf --context-text book.txt --context 2000 --first 6 --json-out policies.json",
    )
    _add_model(parser)
    _add_prompts(parser, bench_prompts.BUILTIN)
    parser.add_argument("-n", "--tokens", metavar="N", type=cli_options.positive, default=64, help="of each text (default %(default)s)")
    parser.add_argument("--temp", metavar="X", type=cli_options.number, nargs="+", default=[0.0], help="temperatures (default: greedy)")
    parser.add_argument("--rounds", metavar="N", type=cli_options.positive, default=10,
                        help="of measuring this machine's curve (default %(default)s)")  # fmt: skip
    _add_output(parser)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    for path in (args.file, args.prompts, args.context_text):
        _check(path)
    args.reference, args.past = None, args.context if args.context_text else 64

    from . import bench_policies

    texts = bench_policies.Texts(_prompts(args), args.tokens, args.temp)
    with _bar(len(texts.prompts) * len(args.temp), "prompt") as bar:
        result = bench_policies.measure(_settings(args), texts, args.json_out, bar.update)
    print(json.dumps(result, indent=2) if args.json else bench_policies.render(result))
    return 0


# ---- options that both take ----


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", type=Path, help="a paired GGUF")
    parser.add_argument("-t", "--threads", metavar="N", type=cli_options.positive, help="default: all physical cores")
    parser.add_argument("--device", metavar="NAME", help="default: all TWOBITn")
    parser.add_argument("-ngl", "--gpu-layers", metavar="N", type=cli_options.whole(-1), help="default: all")


def _add_prompts(group: Any, default: Path | None) -> None:
    group.add_argument("--prompts", metavar="FILE", type=Path, nargs="?", const=bench_prompts.BUILTIN, default=default,
                       help="text with one prompt a paragraph, or a .json list; no FILE: the built-in 12 of code, 12 of prose")  # fmt: skip
    group.add_argument("--first", metavar="N", type=cli_options.positive, help="only the first N prompts of each kind")
    group.add_argument("--no-chat", action="store_true", help="prompts as they are, not through the model's chat template")
    group.add_argument("--context-text", metavar="FILE", type=Path, help="a long text: a passage of it goes in front of each prompt")
    group.add_argument("--context", metavar="N", type=cli_options.positive, default=2000, help="tokens of a passage (default %(default)s)")


def _add_output(group: Any) -> None:
    group.add_argument("--json-out", metavar="FILE", type=Path, help="keep each run in this file; started again, it goes on from there")


def _check(path: Path | None) -> None:
    if path is not None and not path.is_file():
        raise TwobitError(f"{path}: no such file")


def _bar(total: int, unit: str) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, unit=unit, disable=None, leave=False)


def _settings(args: argparse.Namespace) -> Settings:
    from .bench_decode import Settings

    options = {"device": args.device, "n_gpu_layers": args.gpu_layers}
    return Settings(args.file, args.reference, args.threads or physical_cores(), args.past, args.rounds, options)


def _prompts(args: argparse.Namespace) -> list[bench_prompts.Prompt]:
    prompts = bench_prompts.first(bench_prompts.read(args.prompts), args.first)
    return bench_prompts.prepare(prompts, args.file, chat=not args.no_chat, context_text=args.context_text, context=args.context)


def _llama_speculative(args: argparse.Namespace) -> tuple[Path, Path] | None:
    if args.draft_model is None:
        return None
    from .bench_reference import SPECULATIVE

    program = args.llama_speculative or llama_source.tool(SPECULATIVE)
    if program is None:
        raise TwobitError(f"{SPECULATIVE} is neither in PATH nor in the cache: scripts/build_llama_tools.py builds it")
    return program, args.draft_model
