"""Decoding speed of a paired file beside llama.cpp's own on another file of the same model, measured in turns.

The reference runs in a process of its own that never loads the plugin. The two never compute at the same time: every round
measures each thing once, and the medians of the rounds are compared, so that a slow spell of the machine hits both.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import TwobitError
from .speculative.options import MAX_WIDTH

if TYPE_CHECKING:
    import llama_cpp

    from .speculative.options import SpeculationOptions

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


class Reference:
    """llama.cpp alone, in another process: a callable object there, called through a pipe."""

    def __init__(self, path: Path, n_threads: int, n_ctx: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_reference_process, args=(theirs, str(path), n_threads, n_ctx), daemon=True)
        self._process.start()
        theirs.close()
        self._receive()

    def __call__(self, name: str, *arguments: Any) -> Any:
        """decoder(n_past), seconds(width) or generate(prompt, n_tokens, temperature, seed)."""
        self._pipe.send((name, arguments))
        return self._receive()

    def _receive(self) -> Any:
        try:
            failed, value = self._pipe.recv()
        except EOFError:
            raise TwobitError("the process that runs the reference has ended") from None
        if failed:
            raise TwobitError(value)
        return value

    def close(self) -> None:
        self._pipe.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()


def _reference_process(pipe: Any, path: str, n_threads: int, n_ctx: int) -> None:
    import llama_cpp

    try:
        model = llama_cpp.Llama(path, n_ctx=n_ctx, n_threads=n_threads, n_threads_batch=n_threads, flash_attn=True, verbose=False)
        decoder: Decoder | None = None
        pipe.send((False, None))
        while True:
            name, arguments = pipe.recv()
            if name == "decoder":
                decoder = Decoder(model, *arguments)
                value: Any = None
            elif name == "seconds":
                assert decoder is not None
                value = decoder.seconds(*arguments)
            else:
                value = generate(model, *arguments)
            pipe.send((False, value))
    except (EOFError, KeyboardInterrupt):
        pass
    except Exception as error:
        pipe.send((True, f"{path}: {str(error).splitlines()[0] if str(error) else type(error).__name__}"))


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


# ---- whole texts -----------------------------------------------------------------------------------------------------


def generate(model: llama_cpp.Llama, prompt: str, n_tokens: int, temperature: float, seed: int) -> dict[str, Any]:
    """Tokens a second behind a prompt, the prompt itself left out; EOS does not stop it, so that all runs are as long."""
    model.reset()
    model._ctx.kv_cache_clear()
    model.set_seed(seed)
    tokens: list[int] = []
    first = 0.0
    for token in model.generate(model.tokenize(prompt.encode(), special=True), temp=temperature):
        if not tokens:
            first = time.perf_counter()
        tokens.append(token)
        if len(tokens) == n_tokens:
            break
    seconds = time.perf_counter() - first
    return {"tokens_per_second": (len(tokens) - 1) / seconds, "tokens": tokens}


def measure_prompts(
    settings: Settings,
    prompts: list[str],
    n_tokens: int,
    temperatures: Iterable[float],
    shapes: dict[str, SpeculationOptions],
    progress: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Tokens a second of plain decoding, of each shape of speculation and of the reference on every prompt, in turns."""
    from .llama import Llama

    n_ctx = max(len(prompt) for prompt in prompts) + n_tokens + 64
    options: dict[str, Any] = {"n_ctx": n_ctx, "n_threads": settings.n_threads, "n_threads_batch": settings.n_threads, "verbose": False}
    models: dict[str, Llama] = {}
    reference = None
    runs: list[dict[str, Any]] = []
    try:
        models["plain"] = Llama(str(settings.file), mode="full", **options, **settings.model_options)
        for name, shape in shapes.items():
            models[name] = Llama(str(settings.file), speculation=shape, **options, **settings.model_options)
            generate(models[name], prompts[0], 4, 0.0, 1)  # measures the costs
            models[name].speculation_stats.reset()
        if settings.reference is not None:
            reference = Reference(settings.reference, settings.n_threads, n_ctx)
        for temperature in temperatures:
            for index, prompt in enumerate(prompts):
                run: dict[str, Any] = {"prompt": index, "temperature": temperature, "tokens_per_second": {}, "speculation": {}}
                if reference is not None:
                    run["tokens_per_second"]["reference"] = reference("generate", prompt, n_tokens, temperature, 1)["tokens_per_second"]
                texts = {}
                for name, model in models.items():
                    model.speculation_stats.reset()
                    made = generate(model, prompt, n_tokens, temperature, 1)
                    run["tokens_per_second"][name] = made["tokens_per_second"]
                    texts[name] = made["tokens"]
                    if name != "plain":
                        run["speculation"][name] = model.speculation_stats.to_dict()
                run["same_text"] = {name: texts[name] == texts["plain"] for name in shapes} if temperature == 0 else None
                runs.append(run)
                progress()
    finally:
        for model in models.values():
            model.close()
        if reference is not None:
            reference.close()
    return {"file": str(settings.file), "reference": str(settings.reference) if settings.reference else None,
            "threads": settings.n_threads, "n_tokens": n_tokens, "runs": runs, "medians": _medians(runs)}  # fmt: skip


def _medians(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    medians = []
    for temperature in sorted({run["temperature"] for run in runs}):
        here = [run for run in runs if run["temperature"] == temperature]
        base = "reference" if "reference" in here[0]["tokens_per_second"] else "plain"
        for name in here[0]["tokens_per_second"]:
            ratios = [run["tokens_per_second"][name] / run["tokens_per_second"][base] for run in here]
            stats = [run["speculation"][name] for run in here if name in run["speculation"]]
            medians.append({
                "temperature": temperature, "name": name, "against": base,
                "tokens_per_second": statistics.median(run["tokens_per_second"][name] for run in here),
                "ratio": statistics.median(ratios), "worst_ratio": min(ratios),
                "tokens_per_verification": statistics.median(s["tokens_per_verification"] for s in stats) if stats else 1.0,
                "acceptance": statistics.median(s["acceptance"] for s in stats) if stats else None,
                "different_texts": sum(not run["same_text"][name] for run in here) if name in (here[0]["same_text"] or ()) else None,
            })  # fmt: skip
    return medians


def render_prompts(result: dict[str, Any]) -> str:
    """The table of measure_prompts()."""
    against = result["medians"][0]["against"]
    lines = [
        f"{result['file']}, {result['threads']} threads, {result['n_tokens']} tokens on each of "
        f"{len({run['prompt'] for run in result['runs']})} prompts, medians",
        f"{'temp':>4}  {'decoding':<10} {'tokens/s':>9} {'× ' + against:>12} {'worst':>7} {'per verification':>17} {'other text':>11}",
    ]
    for row in result["medians"]:
        other = "" if row["different_texts"] is None else str(row["different_texts"])
        lines.append(
            f"{row['temperature']:>4g}  {row['name']:<10} {row['tokens_per_second']:>9.1f} {row['ratio']:>12.2f} "
            f"{row['worst_ratio']:>7.2f} {row['tokens_per_verification']:>17.2f} {other:>11}"
        )
    return "\n".join(lines)
