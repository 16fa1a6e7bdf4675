"""`twobit bench overhead`: what speculation itself costs, the Python and C around llama.cpp's decoding and sampling.

CPU time of the generating thread for each token, less what it spends in llama_decode, in waiting for it, and in the sampler. Most of it is
cold: a decode has pushed Python out of the caches, so a busy machine shows more than an idle one. Plain llama_cpp generation is beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from . import cli_options
from .errors import TwobitError
from .machine import physical_cores

if TYPE_CHECKING:
    from .llama import Llama

_LLAMA_CPP = ("llama_decode", "llama_synchronize", "llama_sampler_sample")
_SHAPES: tuple[Literal["comb", "chain", "tree"], ...] = ("comb", "chain", "tree")
_PROMPT = b"def fibonacci(n):"


@contextlib.contextmanager
def _llama_cpp_seconds() -> Iterator[Callable[[], float]]:
    """A function that gives the CPU seconds of this thread inside llama.cpp so far."""
    import llama_cpp.llama_cpp as module

    inside = 0.0

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal inside
            begin = time.thread_time()
            try:
                return function(*arguments)
            finally:
                inside += time.thread_time() - begin

        return call

    originals = {name: getattr(module, name) for name in _LLAMA_CPP}
    try:
        for name, function in originals.items():
            setattr(module, name, timed(function))
        yield lambda: inside
    finally:
        for name, function in originals.items():
            setattr(module, name, function)


def own_seconds(model: Llama, n_tokens: int) -> float:
    """CPU seconds a token outside llama.cpp, over n_tokens of one greedy text (the first token and the prompt left out)."""
    model.reset()
    tokens = model.generate(model.tokenize(_PROMPT, special=True), temp=0.0)
    next(tokens)
    with _llama_cpp_seconds() as inside:
        begin = time.thread_time()
        count = sum(1 for _ in itertools.islice(tokens, n_tokens))
        seconds = time.thread_time() - begin - inside()
    tokens.close()
    if count < n_tokens:
        raise TwobitError(f"the text ended after {count} tokens")
    return seconds / count


def measure(path: Path, n_tokens: int, n_threads: int, depth: int = 4) -> dict[str, Any]:
    """Milliseconds a token in plain decoding, as speculation is by default, and for each shape that drafts in every step; and how much
    work that was."""
    from .llama import Llama
    from .speculative import SpeculationOptions

    limits: dict[str, Any] = {"adaptive": False, "max_depth": depth, "max_nodes": 2 * depth - 1}
    shapes = {"default": SpeculationOptions()}
    shapes |= {str(shape): SpeculationOptions(shape=shape, **limits) for shape in _SHAPES}

    options: dict[str, Any] = {"n_ctx": n_tokens + 128, "n_threads": n_threads, "n_threads_batch": n_threads, "verbose": False}
    result: dict[str, Any] = {"file": str(path), "tokens": n_tokens, "threads": n_threads, "runs": []}
    for name in ("plain", *shapes):
        model = Llama(str(path), mode="speculative" if name in shapes else "full", speculation=shapes.get(name), **options)
        try:
            if model.paired is None:
                raise TwobitError(f"{path}: not a paired GGUF; make one with twobit-convert")
            result["vocabulary"] = model.n_vocab()
            own_seconds(model, 4)  # the first steps import, measure the costs and fill caches
            model.speculation_stats.reset()
            seconds = own_seconds(model, n_tokens)
            stats = model.speculation_stats
            result["runs"].append({
                "name": name, "ms": seconds * 1e3, "draft_passes": stats.draft_passes / n_tokens,
                "verifications": stats.verifications / n_tokens if name != "plain" else 1.0,
            })  # fmt: skip
        finally:
            model.close()
    return result


def render(result: dict[str, Any]) -> str:
    """The table."""
    lines = [
        f"{result['file']}, {result['vocabulary']} tokens in the vocabulary: CPU time a token outside llama.cpp, {result['tokens']} tokens",
        f"{'':<8} {'ms':>6} {'draft passes':>13} {'verifications':>14}",
    ]
    lines += [f"{run['name']:<8} {run['ms']:>6.3f} {run['draft_passes']:>13.2f} {run['verifications']:>14.2f}" for run in result["runs"]]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Exit status 0."""
    parser = argparse.ArgumentParser(
        prog="twobit bench overhead", description="Times what speculation adds to each token outside llama.cpp's decoding and sampling."
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="a paired GGUF")
    parser.add_argument("-n", "--tokens", metavar="N", type=cli_options.positive, default=64, help="default %(default)s")
    parser.add_argument("-t", "--threads", metavar="N", type=cli_options.positive, help="default: all physical cores")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    if not args.file.is_file():
        raise TwobitError(f"{args.file}: no such file")
    result = measure(args.file, args.tokens, args.threads or physical_cores())
    print(json.dumps(result, indent=2) if args.json else render(result))
    return 0
