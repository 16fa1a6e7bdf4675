"""Loads two paired models, uses them alternately, frees them in both orders and loads again; prints their texts as JSON.

    python two_models.py FIRST.gguf SECOND.gguf [BROKEN.gguf …]      BROKEN: files that must be refused

A program of its own, so that it can run under AddressSanitizer.
"""

from __future__ import annotations

import json
import sys

from twobit_gguf import Llama, plugin

PROMPT = "in the other one"
MODES = ("full", "draft", "speculative")


def load(path: str, mode: str) -> Llama:
    return Llama(path, mode=mode, n_ctx=256, n_threads=2, n_threads_batch=2, seed=1, verbose=False)


def text(model: Llama) -> str:
    return model(PROMPT, max_tokens=24, temperature=0)["choices"][0]["text"]


def main(first: str, second: str, *broken: str) -> None:
    texts: dict[str, list[str]] = {"first": [], "second": []}
    for mode in MODES:
        for free_first in ("first", "second"):
            models = {"first": load(first, mode), "second": load(second, mode)}
            for name in ("first", "second", "first", "second"):
                texts[name].append(text(models[name]))
            models.pop(free_first).close()
            (name, model), *_ = models.items()
            texts[name].append(text(model))
            model.close()
    refused = []
    for path in broken:
        try:
            load(path, "full").close()
        except Exception as error:
            refused.append(f"{type(error).__name__}: {error}")
    print(json.dumps({"texts": texts, "refused": refused, "pairs_alive": plugin.counters().pairs_alive}))


if __name__ == "__main__":
    main(*sys.argv[1:])
