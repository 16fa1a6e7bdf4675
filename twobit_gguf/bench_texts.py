"""`twobit bench decode --prompts`: whole texts, by each way to decode, in turns.

plain, comb, chain and tree are one Llama whose mode and shape are changed between texts; the reference is llama.cpp in a process of
its own, "llama.cpp's own speculation" llama-speculative-simple with a draft model. For each prompt they follow one another.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .bench_decode import Settings
from .bench_prompts import Prompt, in_turn
from .bench_reference import LlamaSpeculative, Reference, generate
from .bench_saved import Saved
from .errors import TwobitError
from .machine import describe

REFERENCE, LLAMA_SPECULATIVE, PLAIN = "reference", "llama.cpp speculative", "plain"
PHASES = ("draft", "verify", "sample", "other")
_SEED = 1


@dataclass(frozen=True)
class Texts:
    """What is written. speculative: llama-speculative-simple and the draft model for it."""

    prompts: list[Prompt]
    n_tokens: int
    temperatures: list[float]
    shapes: list[str]
    speculative: tuple[Path, Path] | None = None


def measure(settings: Settings, texts: Texts, output: Path | None = None, progress: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """Tokens a second of every contestant on every prompt; the runs that `output` has already are not made again.

    Returns:
        {"settings", "runs": one for each temperature and prompt, "medians": see medians()}.
    """
    saved = Saved(output, _settings(settings, texts))
    todo = saved.left(texts.temperatures, in_turn(texts.prompts), progress)
    if todo:
        with _Contestants(settings, texts) as contestants:
            for temperature, index in todo:
                saved.add(contestants.run(index, temperature))
                progress()
    return saved.write({"medians": medians(saved.runs)})


def _settings(settings: Settings, texts: Texts) -> dict[str, Any]:
    return {
        "file": str(settings.file), "reference": str(settings.reference) if settings.reference else None, "cpu": describe(),
        "draft_model": str(texts.speculative[1]) if texts.speculative else None, "threads": settings.n_threads,
        "n_tokens": texts.n_tokens, "shapes": texts.shapes, "prompts": [prompt.text for prompt in texts.prompts],
        "model_options": settings.model_options,
    }  # fmt: skip


class _Contestants:
    """All that decode, loaded. Use as a context manager."""

    def __init__(self, settings: Settings, texts: Texts) -> None:
        from .llama import Llama
        from .speculative import SpeculationOptions

        self._texts = texts
        self._reference: Reference | None = None
        self._speculative: LlamaSpeculative | None = None
        self._shapes = {shape: SpeculationOptions(shape=shape) for shape in texts.shapes}  # type: ignore[arg-type]
        most = max(self._shapes.values(), key=lambda options: options.n_seq, default=SpeculationOptions())
        self._n_ctx = max(prompt.n_tokens for prompt in texts.prompts) + texts.n_tokens + 64
        self._model = Llama(
            str(settings.file), n_ctx=self._n_ctx, n_threads=settings.n_threads, n_threads_batch=settings.n_threads, speculation=most,
            verbose=False, **settings.model_options,
        )  # fmt: skip
        try:
            if self._model.paired is None:
                raise TwobitError(f"{settings.file}: not a paired GGUF, nothing to compare; make one with twobit-convert")
            if settings.reference is not None:
                self._reference = Reference(settings.reference, settings.n_threads, self._n_ctx)
                if texts.speculative is not None:
                    self._speculative = LlamaSpeculative(texts.speculative[0], settings.reference, texts.speculative[1], settings.n_threads)
            for options in self._shapes.values():
                self._model.speculation = options
                generate(self._model, texts.prompts[0].text, 4, 0.0, _SEED)  # measures the costs
        except BaseException:
            self.close()
            raise

    def run(self, index: int, temperature: float) -> dict[str, Any]:
        """One text of each."""
        prompt, n = self._texts.prompts[index], self._texts.n_tokens
        results: dict[str, dict[str, Any]] = {}
        if self._reference is not None:
            results[REFERENCE] = self._reference("generate", prompt.text, n, temperature, _SEED)
        if self._speculative is not None:
            results[LLAMA_SPECULATIVE] = self._speculative.generate(prompt.text, n, temperature, _SEED, self._n_ctx)
        self._model.mode = "full"
        results[PLAIN] = generate(self._model, prompt.text, n, temperature, _SEED)
        plain = results[PLAIN]["tokens"]
        self._model.mode = "speculative"
        for shape, options in self._shapes.items():
            self._model.speculation = options
            stats = self._model.speculation_stats
            stats.reset()
            made = generate(self._model, prompt.text, n, temperature, _SEED)
            phases = {phase: stats.seconds[phase] for phase in PHASES[:-1]}
            results[shape] = made | {
                # the first token came with the prompt
                "tokens_per_verification": (n - 1) / stats.verifications if stats.verifications else 1.0, "acceptance": stats.acceptance,
                "phases": phases | {"other": made["seconds"] - sum(phases.values())},
            }  # fmt: skip
        for name, result in results.items():
            tokens = result.pop("tokens", None)
            if temperature == 0 and name in self._shapes:
                result["same_text"] = tokens == plain
        return {"prompt": index, "kind": prompt.kind, "temperature": temperature, "results": results}

    def close(self) -> None:
        self._model.close()
        if self._reference is not None:
            self._reference.close()

    def __enter__(self) -> _Contestants:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


# ---- what comes out ----------------------------------------------------------------------------------------------------


def medians(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each temperature and contestant, over the prompts: medians of tokens a second, of the ratio to the reference (to plain, without
    one), of tokens per verification; the worst ratio; the ratio by kind of prompt; mean milliseconds a token by phase."""
    rows = []
    for temperature in sorted({run["temperature"] for run in runs}):
        here = [run for run in runs if run["temperature"] == temperature]
        names = list(here[0]["results"])
        base = REFERENCE if REFERENCE in names else PLAIN
        for name in names:
            results = [run["results"][name] for run in here]
            ratios = [run["results"][name]["tokens_per_second"] / run["results"][base]["tokens_per_second"] for run in here]
            kinds = {kind: [r for r, run in zip(ratios, here, strict=True) if run["kind"] == kind] for kind in _kinds(here)}
            row = {
                "temperature": temperature, "name": name, "against": base, "prompts": len(here),
                "tokens_per_second": _median(results, "tokens_per_second"), "ratio": statistics.median(ratios), "worst_ratio": min(ratios),
                "ratio_by_kind": {kind: statistics.median(values) for kind, values in kinds.items()},
                "tokens_per_verification": _median(results, "tokens_per_verification") or 1.0, "acceptance": _median(results, "acceptance"),
            }  # fmt: skip
            if "phases" in results[0]:
                tokens = sum(result["tokens_per_second"] * result["seconds"] for result in results)
                row["milliseconds"] = {phase: 1e3 * sum(result["phases"][phase] for result in results) / tokens for phase in PHASES}
            if "same_text" in results[0]:
                row["different_texts"] = sum(not result["same_text"] for result in results)
            rows.append(row)
    return rows


def _kinds(runs: list[dict[str, Any]]) -> list[str]:
    return sorted({run["kind"] for run in runs} - {""})


def _median(results: list[dict[str, Any]], key: str) -> float | None:
    return statistics.median(result[key] for result in results) if key in results[0] else None


def render(result: dict[str, Any]) -> str:
    """The table of measure()."""
    settings, rows = result["settings"], result["medians"]
    kinds = list(rows[0]["ratio_by_kind"])
    lines = [
        f"{settings['file']}, {settings['cpu']}, {settings['threads']} of them used; {settings['n_tokens']} tokens behind each of "
        f"{rows[0]['prompts']} prompts; medians, milliseconds a token are means; × is against {rows[0]['against']}",
        f"{'temp':>4} {'decoding':<22}{'tokens/s':>9}{'×':>6}{'worst':>7}{''.join(f'{kind:>7}' for kind in kinds)}{'per verification':>18}"
        f"{''.join(f'{phase:>8}' for phase in PHASES)}{'other text':>12}",
    ]
    for row in rows:
        phases = row.get("milliseconds", {})
        lines.append(
            f"{row['temperature']:>4g} {row['name']:<22}{row['tokens_per_second']:>9.1f}{row['ratio']:>6.2f}{row['worst_ratio']:>7.2f}"
            + "".join(f"{row['ratio_by_kind'][kind]:>7.2f}" for kind in kinds)
            + f"{row['tokens_per_verification']:>18.2f}"
            + "".join(f"{phases[phase]:>8.2f}" if phases else " " * 8 for phase in PHASES)
            + f"{row.get('different_texts', ''):>12}"
        )
    return "\n".join(lines)
