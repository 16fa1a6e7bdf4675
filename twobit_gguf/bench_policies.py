"""`twobit bench policies`: ways to draft, on real texts, scored on cost curves.

Every policy decodes the same texts for real, with the engine and its limits fixed; what is kept is how many draft passes it made, how wide
its verifications were and how many tokens they gave. A cost curve (the time of a draft pass, and of verifying T tokens, in units of
verifying one) turns these into tokens for each unit of time, in which plain decoding has 1: so curves of other machines can be tried.
A pass of a tree that drafts behind several nodes counts as one, which favours the tree.

"own KV" is a draft that has read the text itself, as a second model would, instead of reading the verifier's keys and values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from . import bench_decode, plugin
from .bench_decode import Settings
from .bench_prompts import Prompt, in_turn
from .bench_reference import SAMPLING, generate
from .bench_saved import Saved
from .calibration.divergence import mean
from .errors import TwobitError
from .machine import describe
from .speculative import SpeculationOptions
from .speculative.costs import KNOTS, Costs

if TYPE_CHECKING:
    from .llama import Llama

_SEED = 1
_DEEPEST = 16
_MOST = 31


def _chain(depth: int) -> SpeculationOptions:
    return SpeculationOptions(shape="chain", max_depth=depth, max_nodes=depth, adaptive=False, leaf=0.0)


def _confident(expand: float) -> SpeculationOptions:  # a comb without runner-ups
    return SpeculationOptions(shape="comb", branches=1, max_depth=_DEEPEST, max_nodes=_DEEPEST, adaptive=False, expand=expand, leaf=0.0)


def _tree(nodes: int, expand: float = 0.0, leaf: float = 0.0) -> SpeculationOptions:
    return SpeculationOptions(shape="tree", max_depth=_DEEPEST, max_nodes=nodes, adaptive=False, expand=expand, leaf=leaf)


def _comb(expand: float, leaf: float) -> SpeculationOptions:
    return SpeculationOptions(shape="comb", max_depth=_DEEPEST, max_nodes=_MOST, adaptive=False, expand=expand, leaf=leaf)


OWN_KV = "chain, own KV"
ADAPTIVE = "comb, adaptive"
OWN_DEPTHS = (4, 8)
FAMILIES: dict[str, dict[str, SpeculationOptions]] = {
    "chain": {f"chain {depth}": _chain(depth) for depth in (2, 4, 8, 16)},
    "chain, stopped by confidence": {f"chain p ≥ {p:g}": _confident(p) for p in (0.3, 0.6)},
    "tree": {f"tree {nodes}": _tree(nodes) for nodes in (16, 31)},
    "tree, thresholds": {f"tree {p:g} / {leaf:g}": _tree(_MOST, p, leaf) for p, leaf in ((0.2, 0.05), (0.5, 0.1))},
    "comb": {f"comb {p:g} / {leaf:g}": _comb(p, leaf) for p, leaf in ((0.2, 0.05), (0.4, 0.02), (0.4, 0.1), (0.6, 0.1), (0.8, 0.2))},
}
# a GPU with the residual on the CPU: a draft pass is nearly free, up to 16 tokens cost little more than one
GPU = ("GPU", Costs(0.05, [1 + 0.2 * (knot - 1) / 15 if knot <= 16 else 2.0 for knot in KNOTS]))
MACHINE = "this machine"


class FixedCosts(Costs):
    """A curve that the run does not change. In units so long that no real step looks slow, and the engine never pauses."""

    def __init__(self, curve: Costs) -> None:
        super().__init__(1e6 * curve.draft, [1e6 * curve.verify(knot) for knot in KNOTS])

    def saw_draft(self, seconds: float) -> None: ...

    def saw_verify(self, n_tokens: int, seconds: float) -> None: ...


@dataclass(frozen=True)
class Texts:
    """What is decoded: `n_tokens` behind each prompt, and to the end of the step in which they are reached."""

    prompts: list[Prompt]
    n_tokens: int
    temperatures: list[float]


def measure(settings: Settings, texts: Texts, output: Path | None = None, progress: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """Decodes; the runs that `output` has already are not made again.

    Returns:
        {"settings", "runs", "curves": {name: [draft pass, verify 1, 2, 4, …]}, "scores": see scores()}.
    """
    saved = Saved(output, {
        "file": str(settings.file), "cpu": describe(), "threads": settings.n_threads, "n_tokens": texts.n_tokens,
        "prompts": [prompt.text for prompt in texts.prompts], "model_options": settings.model_options,
        "policies": [*_policies(), *(f"own {depth}" for depth in OWN_DEPTHS)],
    })  # fmt: skip
    if not saved.has(what="costs"):
        times = bench_decode.measure(settings)["milliseconds"]
        saved.add({"what": "costs", "milliseconds": times})
    times = next(run["milliseconds"] for run in saved.runs if run.get("what") == "costs")
    curves = {MACHINE: curve(times["draft"], [times[f"verify {knot}"] for knot in KNOTS]), GPU[0]: GPU[1]}
    todo = saved.left(texts.temperatures, in_turn(texts.prompts), progress, what="texts")
    if todo:
        model = _load(settings, texts)
        try:
            for temperature, index in todo:
                prompt = texts.prompts[index]
                run = {"what": "texts", "temperature": temperature, "prompt": index, "kind": prompt.kind}
                saved.add(run | {"policies": _run(model, prompt, texts.n_tokens, temperature, curves)})
                progress()
        finally:
            model.close()
    runs = [run for run in saved.runs if run["what"] == "texts"]
    return saved.write({
        "curves": {name: [c.draft, *(c.verify(knot) for knot in KNOTS)] for name, c in curves.items()},
        "scores": scores(runs, curves),
    })  # fmt: skip


def curve(draft: float, verify: list[float]) -> Costs:
    """Times in any unit, of a draft pass and of verifying 1, 2, 4, … 32 tokens, as multiples of verifying one."""
    return Costs(draft / verify[0], [max(value, verify[0]) / verify[0] for value in verify])


def _policies() -> dict[str, SpeculationOptions]:
    return {name: options for family in FAMILIES.values() for name, options in family.items()}


# ---- decoding ----------------------------------------------------------------------------------------------------------


def _load(settings: Settings, texts: Texts) -> Llama:
    from .llama import Llama

    n_ctx = max(prompt.n_tokens for prompt in texts.prompts) + texts.n_tokens + 64
    model = Llama(
        str(settings.file), n_ctx=n_ctx, n_threads=settings.n_threads, n_threads_batch=settings.n_threads,
        speculation=SpeculationOptions(shape="tree"), verbose=False, **settings.model_options,
    )  # fmt: skip
    if not model._can_speculate:
        model.close()
        raise TwobitError(f"{settings.file}: cannot speculate: not a paired GGUF, or a model whose memory cannot go back")
    return model


def _run(model: Llama, prompt: Prompt, n: int, temperature: float, curves: dict[str, Costs]) -> dict[str, dict[str, Any]]:
    """The counts of every policy on one text."""
    tokens = model.tokenize(prompt.text.encode(), special=True)
    counts = {name: _decode(model, tokens, n, temperature, options) for name, options in _policies().items()}
    for name, costs in curves.items():
        counts[f"{ADAPTIVE}, {name}"] = _decode(model, tokens, n, temperature, SpeculationOptions(), FixedCosts(costs))
    model.mode = "full"
    text = generate(model, prompt.text, n + _DEEPEST + 1, temperature, _SEED)["tokens"]
    for depth in OWN_DEPTHS:
        counts[f"own {depth}"] = _own_kv(model, tokens, text, n, depth)
    return counts


def _decode(
    model: Llama, prompt: list[int], n: int, temperature: float, options: SpeculationOptions, costs: Costs | None = None
) -> dict[str, Any]:
    """One text by the engine, up to the end of a step: tokens, verifications, draft passes, verifications by width."""
    model.mode = "speculative"
    model.speculation = options
    engine = model._engine()
    if costs is not None:
        engine.costs = costs
    stats = engine.stats
    stats.reset()
    model.set_seed(_SEED)
    before = copy.deepcopy(stats)
    for token in model.generate(prompt, temp=temperature, repeat_penalty=1.0, **SAMPLING):
        del token
        if stats.verifications > before.verifications and before.tokens > n:
            break  # the first token of another step
        before = copy.deepcopy(stats)
    # the first token came with the prompt
    return {"tokens": before.tokens - 1, "verifications": before.verifications, "passes": before.draft_passes, "widths": before.widths}


def _own_kv(model: Llama, prompt: list[int], text: list[int], n: int, depth: int) -> dict[str, Any]:
    """The same for a chain of a draft with keys and values of its own, along a text that the verifier has written."""
    from .speculative.cells import Batch, Cells

    model.mode = "draft"
    model.reset()
    model.eval(prompt)
    cells, batch = Cells(model.ctx, 1, model.n_vocab()), Batch(1, 1)
    at = verifications = 0
    while at < n:
        past = len(prompt) + at
        token, accepted = text[at], 0
        drafted = []
        with plugin.mode("draft"):
            for i in range(depth):
                batch.clear()
                batch.add(token, past + i, (0,))
                cells.decode(batch)
                token = int(cells.logits(0).argmax())
                drafted.append(token)
        cells.remove(0, past)
        while accepted < depth and drafted[accepted] == text[at + 1 + accepted]:
            accepted += 1
        model.eval(text[at : at + 1 + accepted])
        at += 1 + accepted
        verifications += 1
    return {"tokens": at, "verifications": verifications, "passes": depth * verifications, "widths": {depth + 1: verifications}}


# ---- scoring -----------------------------------------------------------------------------------------------------------


def speed(counts: dict[str, Any], costs: Costs) -> float:
    """Tokens for each unit of time."""
    verify = sum(count * costs.verify(int(width)) for width, count in counts["widths"].items())
    return float(counts["tokens"] / (counts["passes"] * costs.draft + verify))


def scores(runs: list[dict[str, Any]], curves: dict[str, Costs]) -> list[dict[str, Any]]:
    """Means over the prompts with their standard errors.

    Returns:
        for each temperature {"temperature", "prompts", "policies": {name: {"per_verification", "passes", "nodes"}},
        "own_kv": gain of shared over own keys and values in tokens per verification, chain by chain, "curves": {curve: {family: {"speed",
        "of_comb": ratio to the comb, "policy": the one that is best on all prompts}}}}. A family's policy is chosen on all prompts but one
        and scored on that one.
    """
    result = []
    for temperature in sorted({run["temperature"] for run in runs}):
        texts = [run["policies"] for run in runs if run["temperature"] == temperature]
        rows: dict[str, Any] = {name: _summary([text[name] for text in texts]) for name in texts[0]}
        own = {
            str(depth): _mean([_per_verification(text[f"chain {depth}"]) / _per_verification(text[f"own {depth}"]) - 1 for text in texts])
            for depth in OWN_DEPTHS
        }
        by_curve = {}
        for name, costs in curves.items():
            families = {family: list(policies) for family, policies in FAMILIES.items()}
            families |= {OWN_KV: [f"own {depth}" for depth in OWN_DEPTHS], ADAPTIVE: [f"{ADAPTIVE}, {name}"]}
            left_out = {family: _left_out(texts, policies, costs) for family, policies in families.items()}
            by_curve[name] = {
                family: {
                    "speed": _mean(values),
                    "of_comb": _mean([value / comb for value, comb in zip(values, left_out["comb"], strict=True)]),
                    "policy": _best(texts, families[family], costs),
                }
                for family, values in left_out.items()
            }
        result.append({"temperature": temperature, "prompts": len(texts), "policies": rows, "own_kv": own, "curves": by_curve})
    return result


def _per_verification(counts: dict[str, Any]) -> float:
    return float(counts["tokens"] / counts["verifications"])


def _summary(counts: list[dict[str, Any]]) -> dict[str, Any]:
    nodes = [sum(int(width) * n for width, n in c["widths"].items()) / c["verifications"] - 1 for c in counts]
    return {
        "per_verification": _mean([_per_verification(c) for c in counts]),
        "passes": float(np.mean([c["passes"] / c["verifications"] for c in counts])), "nodes": float(np.mean(nodes)),
    }  # fmt: skip


def _left_out(texts: list[dict[str, Any]], policies: list[str], costs: Costs) -> list[float]:
    """For each text the speed of the policy that is best on the others."""
    if len(texts) == 1:
        return [speed(texts[0][_best(texts, policies, costs)], costs)]
    return [speed(text[_best(texts[:i] + texts[i + 1 :], policies, costs)], costs) for i, text in enumerate(texts)]


def _best(texts: list[dict[str, Any]], policies: list[str], costs: Costs) -> str:
    return max(policies, key=lambda policy: sum(speed(text[policy], costs) for text in texts))


def _mean(values: list[float]) -> dict[str, float | None]:
    return mean(np.array(values)).to_dict()


def render(result: dict[str, Any]) -> str:
    """The tables of measure()."""
    settings = result["settings"]
    lines = [
        f"{settings['file']}, {settings['cpu']}, {settings['threads']} of them used; {settings['n_tokens']} tokens behind each prompt; "
        "±: standard error over prompts"
    ]
    for name, (draft, *verify) in result["curves"].items():
        widths = ", ".join(f"{knot}: {value:.2f}" for knot, value in zip(KNOTS, verify, strict=True))
        lines.append(f"curve of {name}: a draft pass {draft:.2f}, verifying {widths}")
    for part in result["scores"]:
        lines += ["", f"temperature {part['temperature']:g}, {part['prompts']} prompts",
                  f"{'policy':<28}{'tokens per verification':>24}{'passes':>8}{'nodes':>7}"]  # fmt: skip
        for name, row in part["policies"].items():
            lines.append(f"{name:<28}{_pm(row['per_verification'], 2):>24}{row['passes']:>8.1f}{row['nodes']:>7.1f}")
        for depth, gain in part["own_kv"].items():
            lines.append(f"chain {depth}: shared KV gives {_pm(gain, 1, 100)} % more tokens per verification than own KV")
        for name, families in part["curves"].items():
            lines += ["", f"{'on the curve of ' + name:<30}{'× plain':>16}{'of the comb':>18}  best on all prompts"]
            for family, row in families.items():
                lines.append(f"{family:<30}{_pm(row['speed'], 2):>16}{_pm(row['of_comb'], 3):>18}  {row['policy']}")
    return "\n".join(lines)


def _pm(value: dict[str, float | None], digits: int, factor: float = 1.0) -> str:
    error = "" if value["stderr"] is None else f" ± {factor * value['stderr']:.{digits}f}"
    return f"{factor * (value['mean'] or 0.0):.{digits}f}{error}"
