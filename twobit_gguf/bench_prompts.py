"""Prompts of the benchmarks: the built-in 24 of code and prose or the user's own, as the model expects them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import TwobitError

if TYPE_CHECKING:
    import llama_cpp

BUILTIN = Path(__file__).resolve().parent / "data" / "prompts.json"


@dataclass(frozen=True)
class Prompt:
    """What to write about. kind: "code" or "prose" in the built-in set, "" where nobody said. n_tokens: known once prepared."""

    text: str
    kind: str = ""
    n_tokens: int = 0


def read(path: Path = BUILTIN) -> list[Prompt]:
    """Prompts of a text with one a paragraph, or of a .json list of strings or of {"kind": …, "text": …}.

    Raises:
        TwobitError: it cannot be read, or there are none in it.
    """
    try:
        text = path.read_text(encoding="utf-8")
        entries = json.loads(text) if path.suffix == ".json" else [part.strip() for part in text.split("\n\n")]
    except (OSError, ValueError) as error:
        raise TwobitError(f"{path}: cannot be read: {error}") from None
    if not isinstance(entries, list):
        raise TwobitError(f"{path}: not a list of prompts")
    prompts = [_prompt(entry, path) for entry in entries if entry]
    if not prompts:
        raise TwobitError(f"{path}: no prompts in it")
    return prompts


def _prompt(entry: object, path: Path) -> Prompt:
    if isinstance(entry, str):
        return Prompt(entry)
    if isinstance(entry, dict) and isinstance(entry.get("text"), str):
        return Prompt(entry["text"], str(entry.get("kind", "")))
    raise TwobitError(f'{path}: neither a string nor {{"kind": …, "text": …}}: {str(entry)[:60]}')


def first(prompts: list[Prompt], count: int | None) -> list[Prompt]:
    """The first `count` of each kind; all, if it is None."""
    seen: dict[str, int] = {}
    chosen = []
    for prompt in prompts:
        seen[prompt.kind] = seen.get(prompt.kind, 0) + 1
        if count is None or seen[prompt.kind] <= count:
            chosen.append(prompt)
    return chosen


def in_turn(prompts: list[Prompt]) -> list[int]:
    """Their indices, the kinds by turns: a benchmark that is interrupted has seen each."""
    seen: dict[str, int] = {}
    turns = []
    for index, prompt in enumerate(prompts):
        seen[prompt.kind] = seen.get(prompt.kind, 0) + 1
        turns.append((seen[prompt.kind], index))
    return [index for _, index in sorted(turns)]


def prepare(prompts: list[Prompt], model: Path, *, chat: bool = True, context_text: Path | None = None, context: int = 0) -> list[Prompt]:
    """The prompts as `model` is to read them.

    Args:
        chat: put each through the model's chat template, where the file has one.
        context_text, context: put about this many tokens of that text in front of each prompt, another passage for each.

    Raises:
        TwobitError: the text is too short, or llama.cpp cannot read the model.
    """
    import llama_cpp
    from llama_cpp._utils import suppress_stdout_stderr

    try:
        with suppress_stdout_stderr(disable=False):  # a warning that a model without weights was trained on no context
            vocabulary = llama_cpp.Llama(str(model), vocab_only=True, verbose=False)
    except ValueError as error:
        raise TwobitError(f"{model}: {error}") from None
    try:
        texts = [prompt.text for prompt in prompts]
        if context_text is not None and context > 0:
            passages = _passages(vocabulary, context_text, context, len(prompts))
            texts = [f"{passage}\n\n{text}" for passage, text in zip(passages, texts, strict=True)]
        if chat:
            texts = _through_template(vocabulary, texts)
        lengths = [len(vocabulary.tokenize(text.encode(), special=True)) for text in texts]
        return [Prompt(text, prompt.kind, length) for text, prompt, length in zip(texts, prompts, lengths, strict=True)]
    finally:
        vocabulary.close()


def _passages(vocabulary: llama_cpp.Llama, path: Path, length: int, count: int) -> list[str]:
    """`count` passages of `length` tokens, spread evenly over the text."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TwobitError(f"{path}: cannot be read: {error.strerror}") from None
    tokens = vocabulary.tokenize(data, add_bos=False)
    if len(tokens) < length:
        raise TwobitError(f"{path}: has {len(tokens)} tokens, {length} are wanted in front of each prompt")
    step = (len(tokens) - length) // count
    pieces = (vocabulary.detokenize(tokens[i * step : i * step + length]) for i in range(count))
    return [piece.decode("utf-8", "ignore") for piece in pieces]


def _through_template(vocabulary: llama_cpp.Llama, texts: list[str]) -> list[str]:
    import llama_cpp.llama_cpp as llama_c
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    template = vocabulary.metadata.get("tokenizer.chat_template")
    if not template:
        return texts
    vocab = vocabulary._model.vocab
    bos, eos = (_piece(vocab, token) for token in (llama_c.llama_vocab_bos(vocab), llama_c.llama_vocab_eos(vocab)))
    formatter = Jinja2ChatFormatter(template, eos_token=eos, bos_token=bos)
    made = [formatter(messages=[{"role": "user", "content": text}]).prompt for text in texts]
    # whoever tokenises the prompt puts BOS in front of it where the model wants one
    return [text.removeprefix(bos) for text in made] if bos and llama_c.llama_vocab_get_add_bos(vocab) else made


def _piece(vocab: Any, token: int) -> str:
    import llama_cpp.llama_cpp as llama_c

    return str(llama_c.llama_vocab_get_text(vocab, token).decode("utf-8", "replace")) if token >= 0 else ""
