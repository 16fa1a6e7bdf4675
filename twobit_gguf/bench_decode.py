"""`twobit bench decode`: single decodes of a paired file beside llama.cpp's own on another file of the same model, measured in turns.

The reference runs in a process of its own that never loads the plugin. The two never compute at the same time: every round
measures each thing once, and the medians of the rounds are compared, so that a slow spell of the machine hits both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .bench_reference import Reference
from .errors import TwobitError
from .machine import describe
from .speculative.options import MAX_WIDTH

if TYPE_CHECKING:
    import llama_cpp

WIDTHS = (1, 2, 4, 8, 16, 32)  # tokens decoded at once
_TOKEN_MODULUS = 97  # token ids that every vocabulary has


@dataclass(frozen=True)
class Settings:
    """What is measured. n_past: tokens in the cache before each decode."""

    file: Path
    reference: Path | None
    n_threads: int
    n_past: int = 64
    rounds: int = 10
    model_options: dict[str, Any] = field(default_factory=dict)


class Decoder:
    """Times decodes of a loaded model at one place of its cache."""

    def __init__(self, model: llama_cpp.Llama, n_past: int) -> None:
        from .speculative.cells import Batch, Cells

        self.model = model
        self._n_past = n_past
        self._cells = Cells(model.ctx, 1, model.n_vocab())
        self._batch = Batch(MAX_WIDTH, 1)
        model.reset()
        model.eval([i % _TOKEN_MODULUS for i in range(n_past)])

    def seconds(self, width: int) -> float:
        """One decode of `width` tokens, whose cells are removed again."""
        self._batch.clear()
        for i in range(width):
            self._batch.add((7 * i + 3) % _TOKEN_MODULUS, self._n_past + i, (0,))
        begin = time.perf_counter()
        self._cells.decode(self._batch)
        self._cells.logits(width - 1)
        seconds = time.perf_counter() - begin
        self._cells.remove(0, self._n_past)
        return seconds


def measure(settings: Settings, progress: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """Milliseconds of plain, draft and verify decodes, medians over the rounds; each ratio is against the reference's one-token decode."""
    from . import plugin
    from .llama import Llama

    n_ctx = settings.n_past + MAX_WIDTH + 32
    model = Llama(str(settings.file), n_ctx=n_ctx, n_threads=settings.n_threads, n_threads_batch=settings.n_threads, mode="full",
                  verbose=False, **settings.model_options)  # fmt: skip
    reference = None
    try:
        if model.paired is None:
            raise TwobitError(f"{settings.file}: not a paired GGUF, nothing to compare; make one with twobit-convert")
        if settings.reference is not None:
            reference = Reference(settings.reference, settings.n_threads, n_ctx)
            reference("decoder", settings.n_past)
        decoder = Decoder(model, settings.n_past)

        def ours(mode: str, width: int) -> float:
            with plugin.mode(mode):
                return decoder.seconds(width)

        tasks: dict[str, Callable[[], float]] = {"draft": lambda: ours("draft", 1)}
        for width in WIDTHS:
            tasks[f"verify {width}"] = lambda width=width: ours("full", width)  # type: ignore[misc]
            if reference is not None:
                tasks[f"reference {width}"] = lambda width=width: reference("seconds", width)  # type: ignore[misc]
        samples: dict[str, list[float]] = {name: [] for name in tasks}
        for round_ in range(settings.rounds + 1):
            for name, task in tasks.items():
                task()  # the graph for this width is built again; what counts is the steady state
                seconds = task()
                if round_ > 0:
                    samples[name].append(seconds)
            progress()
    finally:
        model.close()
        if reference is not None:
            reference.close()
    milliseconds = {name: statistics.median(values) * 1e3 for name, values in samples.items()}
    base = milliseconds.get("reference 1")
    return {
        "file": str(settings.file),
        "reference": str(settings.reference) if settings.reference else None,
        "cpu": describe(),
        "threads": settings.n_threads,
        "n_past": settings.n_past,
        "rounds": settings.rounds,
        "milliseconds": milliseconds,
        "tokens_per_second": {"plain": 1e3 / milliseconds["verify 1"], "draft": 1e3 / milliseconds["draft"]}
        | ({"reference": 1e3 / base} if base else {}),
        "plain_to_reference": base / milliseconds["verify 1"] if base else None,
    }


def render(result: dict[str, Any]) -> str:
    """The table of measure()."""
    ms = result["milliseconds"]
    base = ms.get("reference 1")
    one = base or ms["verify 1"]
    lines = [
        f"{result['file']}, {result['threads']} threads, {result['n_past']} tokens in the cache, medians of {result['rounds']} rounds",
        f"{'decode':<12} {'ms':>9} {'tokens/s':>9} {'× 1 token of ' + ('the reference' if base else 'verify'):>26}"
        + (f" {'reference ms':>13}" if base else ""),
    ]
    for name, width in [("draft", 1), *((f"verify {width}", width) for width in WIDTHS)]:
        line = f"{name:<12} {ms[name]:>9.2f} {1e3 * width / ms[name]:>9.1f} {ms[name] / one:>26.2f}"
        if base and name != "draft":
            line += f" {ms[f'reference {width}']:>13.2f}"
        lines.append(line)
    if base:
        lines.append(f"plain decoding (verify 1) runs at {result['plain_to_reference']:.2f} of {result['reference']}")
    return "\n".join(lines)
