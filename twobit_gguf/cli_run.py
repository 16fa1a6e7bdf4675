"""twobit run FILE: generate text behind a prompt, or chat."""

from __future__ import annotations

import argparse
import codecs
import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import cli_options
from .errors import TwobitError

if TYPE_CHECKING:
    from .llama import Llama


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="twobit run",
        description="Generates text behind a prompt. Without -p it chats in a terminal, or takes the prompt from a pipe.",
        epilog="In a chat, Ctrl-C stops the answer, Ctrl-D ends the program, /reset forgets the conversation.",
    )
    cli_options.add_model(parser)
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="text to go on from")
    parser.add_argument("-n", "--tokens", metavar="N", type=cli_options.positive, default=None,
                        help="at most this many (default 128; in a chat, to the end)")  # fmt: skip
    parser.add_argument("--temp", metavar="X", type=cli_options.number, help="temperature; 0 is greedy (default 0; in a chat 0.7)")
    parser.add_argument("--top-k", metavar="N", type=cli_options.whole(-1), default=40)
    parser.add_argument("--top-p", metavar="X", type=cli_options.number, default=0.95)
    parser.add_argument("--min-p", metavar="X", type=cli_options.number, default=0.05)
    parser.add_argument("--repeat-penalty", metavar="X", type=cli_options.positive_number, default=1.0)
    parser.add_argument("--seed", metavar="N", type=cli_options.whole(-1, 2**32 - 1))
    parser.add_argument("--system", metavar="TEXT", help="system message of a chat")
    parser.add_argument("--json", action="store_true", help="text, speed and counters as JSON")
    cli_options.add_speculation(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Exit status 0, or an exception that cli.main turns into 2 and one line."""
    args = _parse(argv)
    if args.prompt is None and sys.stdin is None:  # <&-
        raise TwobitError("no prompt: give one with -p, or on standard input")
    chat = args.prompt is None and sys.stdin.isatty() and not args.json
    model = cli_options.load(args, speculation=cli_options.speculation(args))
    try:
        if chat:
            from . import cli_chat

            return cli_chat.chat(model, args.system, sampling(args, 0.7), args.tokens)
        prompt = args.prompt if args.prompt is not None else sys.stdin.read()
        result = generate(model, prompt, args.tokens or 128, sampling(args, 0.0), live=not args.json)
        print(json.dumps(result, indent=2) if args.json else f"\n{summary(result)}", file=sys.stdout if args.json else sys.stderr)
    finally:
        model.close()
    return 0


def sampling(args: argparse.Namespace, temperature: float) -> dict[str, Any]:
    """llama_cpp's sampling arguments."""
    return {
        "temperature": temperature if args.temp is None else args.temp, "top_k": args.top_k, "top_p": args.top_p,
        "min_p": args.min_p, "repeat_penalty": args.repeat_penalty, "seed": args.seed,
    }  # fmt: skip


def generate(model: Llama, prompt: str, n_tokens: int, options: dict[str, Any], live: bool) -> dict[str, Any]:
    """One completion, printed while it comes if `live`. Seconds are wall time; tokens_per_second leaves the prompt out."""
    import llama_cpp.llama_cpp as llama_c

    options = dict(options)
    seed = options.pop("seed")
    if seed is not None:
        model.set_seed(seed)
    options["temp"] = options.pop("temperature")
    prompt_tokens = model.tokenize(prompt.encode(), special=True)
    if not prompt_tokens:
        raise TwobitError("an empty prompt")
    room = model.n_ctx() - len(prompt_tokens)
    if room <= 0:
        raise TwobitError(f"the prompt has {len(prompt_tokens)} tokens and the context holds {model.n_ctx()}; give a larger --ctx")

    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    pieces: list[str] = []
    tokens = 0
    begin = first = time.perf_counter()
    for token in model.generate(prompt_tokens, **options):
        if tokens == 0:
            first = time.perf_counter()
        tokens += 1
        if llama_c.llama_vocab_is_eog(model._model.vocab, token):
            break
        pieces.append(utf8.decode(model.detokenize([token])))
        if live:
            print(pieces[-1], end="", flush=True)
        if tokens == min(n_tokens, room):
            break
    end = time.perf_counter()
    result: dict[str, Any] = {
        "file": model.model_path,
        "mode": model.mode if model.paired is not None else "plain",
        "text": "".join(pieces),
        "prompt_tokens": len(prompt_tokens),
        "tokens": tokens,
        "prompt_seconds": first - begin,
        "seconds": end - begin,
        "tokens_per_second": (tokens - 1) / (end - first) if tokens > 1 else None,
    }
    if model.paired is not None:
        from . import plugin

        result["counters"] = vars(plugin.counters())
        result["bytes"] = {
            "base": sum(pair.base_nbytes for pair in model.paired.pairs),
            "residual": sum(pair.residual_nbytes for pair in model.paired.pairs),
            "file": sum(path.stat().st_size for path in {model.paired.path, model.paired.residual_path}),
        }
        if model.mode == "speculative":
            result["speculation"] = model.speculation_stats.to_dict()
            result["costs"] = model.speculation_costs
    return result


def summary(result: dict[str, Any]) -> str:
    """The line behind the text."""
    parts = [f"{result['tokens']} tokens", result["mode"]]
    if result["tokens_per_second"]:
        parts.append(f"{result['tokens_per_second']:.1f} tokens/s")
    if "speculation" in result:
        stats = result["speculation"]
        parts.append(f"{stats['tokens_per_verification']:.2f} tokens per verification")
        parts.append(f"{stats['accepted']} of {stats['drafted']} drafted tokens accepted")
    return f"[{', '.join(parts)}]"
