"""A chat in the terminal: the answer as it comes, speed in the window's title and behind each answer."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .llama import Llama

Message = dict[str, str]


def chat(model: Llama, system: str | None, options: dict[str, Any], max_tokens: int | None) -> int:
    """Until Ctrl-D or /exit. Ctrl-C stops an answer, and what there is of it stays in the conversation."""
    start: list[Message] = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    with _line_history():
        while True:
            try:
                question = input("> ").strip()
            except EOFError:
                print()
                return 0
            except KeyboardInterrupt:
                print("\n(Ctrl-D ends the program)")
                continue
            if question in ("/exit", "/quit"):
                return 0
            if question == "/reset":
                messages = list(start)
                model.reset()
                continue
            if not question:
                continue
            messages.append({"role": "user", "content": question})
            try:
                messages.append({"role": "assistant", "content": _answer(model, messages, options, max_tokens)})
            except ValueError as error:  # the conversation has outgrown the context
                messages.pop()
                print(f"twobit run: {error}; /reset starts again", file=sys.stderr)


def _answer(model: Llama, messages: list[Message], options: dict[str, Any], max_tokens: int | None) -> str:
    stats = model.speculation_stats
    before = (stats.tokens, stats.verifications, stats.drafted, stats.accepted)
    pieces: list[str] = []
    begin = first = time.perf_counter()
    count = 0

    def status() -> str:
        spent = time.perf_counter() - first
        line = f"{(count - 1) / spent:.1f} tokens/s" if count > 1 and spent > 0 else ""
        tokens, verifications, drafted, accepted = (
            now - then for now, then in zip((stats.tokens, stats.verifications, stats.drafted, stats.accepted), before, strict=True)
        )
        if verifications and drafted:
            line += f", {tokens / verifications:.2f} tokens per verification, {100 * accepted / drafted:.0f} % of the drafts accepted"
        return line

    stream: Any = model.create_chat_completion(messages, stream=True, max_tokens=max_tokens, **options)  # type: ignore[arg-type]
    try:
        for chunk in stream:
            piece = chunk["choices"][0]["delta"].get("content")
            if not piece:
                continue
            count += 1
            if count == 1:
                first = time.perf_counter()
            pieces.append(piece)
            print(piece, end="", flush=True)
            if sys.stdout.isatty() and count % 8 == 0:
                print(f"\x1b]0;{status()}\x07", end="", flush=True)
    except KeyboardInterrupt:
        stream.close()
        print(" [stopped]", end="")
    print(f"\n\x1b[2m[{status()}, first after {first - begin:.2f} s]\x1b[0m" if sys.stdout.isatty() else "")
    return "".join(pieces)


@contextlib.contextmanager
def _line_history() -> Any:
    """Editing and the questions of earlier sessions, where Python has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    path = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "twobit" / "history"
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(1000)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)
