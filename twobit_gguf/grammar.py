"""Grammars that llama.cpp refuses. llama_cpp puts its missing sampler (NULL) into the chain all the same, and the process dies."""

from __future__ import annotations

from typing import Any

import llama_cpp.llama_cpp as llama_c

_MOST = 8192  # rules, and parentheses: llama.cpp's parser goes into each with a call of its own and would leave the stack


def check(grammar: Any, vocab: Any) -> None:
    """Parses a llama_cpp.LlamaGrammar and forgets it.

    Raises:
        ValueError: llama.cpp cannot parse it; one line.
    """
    text: str = grammar._grammar
    if max(text.count("("), text.count("::=")) > _MOST:
        raise ValueError(f"the grammar has more than {_MOST} rules or parentheses")
    sampler = llama_c.llama_sampler_init_grammar(vocab, text.encode(), grammar._root.encode())
    if not sampler:
        raise ValueError(f"llama.cpp cannot parse the grammar {text if len(text) <= 80 else text[:80] + '…'!r}")
    llama_c.llama_sampler_free(sampler)
