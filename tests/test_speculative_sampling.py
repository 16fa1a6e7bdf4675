"""Speculation draws tokens with the verifier's probabilities, whatever the sampler.

Two things are tested. A seed gives the very text of full mode; given a correct sampler, that alone makes the second true. The second
does not lean on it: the joint distribution of three tokens, drawn by speculation with a seed of their own for each draw, against the
exact probabilities, computed from plain full-mode logits with llama.cpp's sampler chain (mirostat, which draws as it filters: in numpy).

TWOBIT_TEST_DRAWS=200000 is the full test: 200,000 draws of each kind, a third with each shape. The default takes seconds.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import llama_cpp.llama_cpp as llama_c
import numpy as np
import pytest
import tiny_models
from conftest import convert
from scipy.stats import chisquare

from twobit_gguf import Llama, SpeculationOptions

DRAWS = int(os.environ.get("TWOBIT_TEST_DRAWS", "900"))
SHAPES = ("comb", "chain", "tree")
N_TOKENS = 3  # drawn together
PROMPT = (262, 97, 98)  # <|bos|>ab
PROMPTS = {"grammar": (262, 46, 73)}  # behind <|bos|>.I the draft names tokens that this grammar allows
ALL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temp": 1.0}  # nothing cut off
FEW = {**ALL, "top_k": 4}

Outcome = tuple[int, ...]
Processor = Callable[[Sequence[int], np.ndarray], np.ndarray]


def _no_neighbours(ids: Sequence[int], scores: np.ndarray) -> np.ndarray:
    """A logits processor that looks at the text: favours tokens by their distance from the last one."""
    return scores + 1.5 * ((np.arange(len(scores)) - int(ids[-1])) % 5 == 0).astype(np.float32)


def _bias(ids: Sequence[int], scores: np.ndarray) -> np.ndarray:
    """What llama_cpp makes of logit_bias."""
    scores = scores.copy()
    scores[[70, 80, 90, 100]] += (6.0, 5.0, 6.0, 7.0)
    return scores


KINDS: dict[str, dict[str, Any]] = {
    "temperature": {**ALL, "temp": 0.5},
    "top-k": {**FEW, "temp": 1.2},
    "top-p": {**ALL, "top_p": 0.6, "temp": 0.9},
    "min-p": {**ALL, "min_p": 0.2, "temp": 1.3},
    "typical": {**ALL, "typical_p": 0.5},
    "all-of-them": {"top_k": 10, "typical_p": 0.95, "top_p": 0.9, "min_p": 0.05, "temp": 0.8, "repeat_penalty": 1.1},
    "repeat-penalty": {**FEW, "repeat_penalty": 1.8},
    "presence-penalty": {**FEW, "presence_penalty": 1.5},
    "frequency-penalty": {**FEW, "frequency_penalty": 0.7},
    "grammar": {**ALL, "grammar": "root ::= [!-~] [ -Z] [!-~]"},
    "logit-bias": {**ALL, "processor": _bias, "top_k": 6},
    "logits-processor": {**ALL, "processor": _no_neighbours, "top_k": 6},
    "mirostat-1": {"temp": 1.0, "mirostat_mode": 1, "mirostat_tau": 2.0, "mirostat_eta": 0.3},
    "mirostat-2": {"temp": 1.0, "mirostat_mode": 2, "mirostat_tau": 2.0, "mirostat_eta": 0.3},
}


def options_of(kind: str) -> dict[str, Any]:
    """Keyword arguments of Llama.generate."""
    options = dict(KINDS[kind])
    if "grammar" in options:
        options["grammar"] = llama_cpp.LlamaGrammar.from_string(options["grammar"], verbose=False)
    if processor := options.pop("processor", None):
        options["logits_processor"] = llama_cpp.LogitsProcessorList([processor])
    return options


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer of 64 columns, of a seed with which base and full model often agree: a decode takes a tenth of a millisecond."""
    folder = tmp_path_factory.mktemp("one-layer")
    shape = {"n_embd": 64, "n_ff": 64, "n_layer": 1, "n_head": 1, "n_head_kv": 1, "head_dim": 64, "n_vocab": 264}
    source = tiny_models.write(folder / "f16.gguf", "llama", seed=2, **shape)
    return convert(source, folder / "paired.gguf")


@pytest.fixture(scope="module")
def models(file: Path) -> Iterator[dict[str, Llama]]:
    def load(**options: Any) -> Llama:
        return Llama(str(file), n_ctx=64, n_batch=32, n_threads=1, n_threads_batch=1, verbose=False, **options)

    made = {"full": load(mode="full"), "draft": load(mode="draft")}
    for shape in SHAPES:
        limits = {"max_depth": 2, "max_nodes": 6, "expand": 0.0, "leaf": 0.0}
        made[shape] = load(speculation=SpeculationOptions(shape=shape, adaptive=False, **limits))  # type: ignore[arg-type]
    yield made
    for model in made.values():
        model.close()


def drawn(model: Llama, kind: str, options: dict[str, Any], seed: int, count: int = N_TOKENS) -> Outcome:
    """The first tokens of a text with a seed of its own. options: options_of(kind)."""
    model.set_seed(seed)
    generator = model.generate(PROMPTS.get(kind, PROMPT), **options)
    tokens = tuple(itertools.islice(generator, count))
    generator.close()
    return tokens


# ---- exact probabilities ----


class Reference:
    """Probabilities of token sequences, from plain full-mode logits."""

    def __init__(self, model: Llama, kind: str) -> None:
        self._model = model
        self._options = options_of(kind)
        self._processor: Processor | None = KINDS[kind].get("processor")
        self._options.pop("logits_processor", None)
        self._prompt = PROMPTS.get(kind, PROMPT)

    def joint(self) -> dict[Outcome, float]:
        """Of all sequences of N_TOKENS tokens but the very unlikely."""
        found: dict[Outcome, float] = {(): 1.0}
        for _ in range(N_TOKENS):
            likely = ((prefix, chance) for prefix, chance in found.items() if chance > 1e-6)
            found = {(*prefix, token): chance * p for prefix, chance in likely for token, p in self.next(prefix).items()}
        return found

    def next(self, prefix: Outcome) -> dict[int, float]:
        """Of the token behind a prefix."""
        logits = self._logits(prefix)
        if mode := self._options.get("mirostat_mode"):
            return self._mirostat(prefix, logits, mode)
        return self._chain(prefix, logits)

    def _logits(self, prefix: Outcome) -> np.ndarray:
        model, text = self._model, [*self._prompt, *prefix]
        model.reset()
        model.eval(self._prompt)
        for token in prefix:
            model.eval([token])
        logits = np.ctypeslib.as_array(model._ctx.get_logits_ith(-1), shape=(model.n_vocab(),)).copy()
        return logits if self._processor is None else self._processor(text, logits)

    def _chain(self, prefix: Outcome, logits: np.ndarray) -> dict[int, float]:
        sampler = self._model._init_sampler(**self._options)
        llama_c.llama_sampler_free(llama_c.llama_sampler_chain_remove(sampler.sampler, llama_c.llama_sampler_chain_n(sampler.sampler) - 1))
        for token in prefix:
            sampler.accept(token)
        data = (llama_c.llama_token_data * len(logits))(*(llama_c.llama_token_data(i, float(x), 0.0) for i, x in enumerate(logits)))
        array = llama_c.llama_token_data_array(data, len(logits), -1, False)
        llama_c.llama_sampler_apply(sampler.sampler, ctypes.byref(array))
        kept = [(array.data[i].id, array.data[i].logit) for i in range(array.size)]
        sampler.close()
        weights = np.exp(np.array([logit for _, logit in kept]) - max(logit for _, logit in kept))
        return {token: float(p) for (token, _), p in zip(kept, weights / weights.sum(), strict=True) if p > 0}

    def _mirostat(self, prefix: Outcome, logits: np.ndarray, mode: int) -> dict[int, float]:
        """Mirostat (Basu et al., 2020) as llama.cpp has it: mu follows the surprise of each token of the prefix."""
        tau, eta = self._options["mirostat_tau"], self._options["mirostat_eta"]
        mu = 2 * tau
        for i, token in enumerate(prefix):
            mu -= eta * (-np.log2(self._mirostat_kept(self._logits(prefix[:i]), mode, mu)[token]) - tau)
        return self._mirostat_kept(logits, mode, mu)

    @staticmethod
    def _mirostat_kept(logits: np.ndarray, mode: int, mu: float) -> dict[int, float]:
        order = np.argsort(-logits, kind="stable")
        p = np.exp(logits[order].astype(np.float64) - logits.max())
        p /= p.sum()
        if mode == 2:
            n_kept = max(int((-np.log2(p) <= mu).argmin()) or len(p) * int(-np.log2(p[-1]) <= mu), 1)
        else:
            n = min(99, len(p) - 1)
            t, b = np.log(np.arange(2, n + 2) / np.arange(1, n + 1)), np.log(p[:n] / p[1 : n + 1])
            s = float((t * b).sum() / (t * t).sum())
            n_kept = max(int(((s - 1) * 2**mu / (1 - len(p) ** (1 - s))) ** (1 / s)), 1)
        kept = p[:n_kept] / p[:n_kept].sum()
        return {int(token): float(x) for token, x in zip(order[:n_kept], kept, strict=False)}


def p_value(expected: dict[Outcome, float], found: Counter[Outcome]) -> tuple[float, int]:
    """Of Pearson's chi-square test, and its number of cells; outcomes expected fewer than 5 times are one cell."""
    draws = found.total()
    if sum(expected.values()) > 1 - 1e-9:  # all that is possible has been enumerated
        impossible = [outcome for outcome in found if expected.get(outcome, 0) == 0]
        assert not impossible, f"{impossible[0]} cannot be drawn"
    common = [outcome for outcome, p in expected.items() if p * draws >= 5]
    cells = [(found[outcome], expected[outcome] * draws) for outcome in common]
    rest = draws - sum(f for f, _ in cells), draws - sum(e for _, e in cells)
    if rest[1] >= 1:
        cells.append(rest)
    assert len(cells) > 5, "too few outcomes to compare"
    observed, exact = np.array(cells, float).T
    return float(chisquare(observed, exact * observed.sum() / exact.sum()).pvalue), len(cells)


# ---- tests ----


@pytest.mark.parametrize("kind", KINDS)
def test_three_tokens_have_their_exact_distribution(kind: str, models: dict[str, Llama]) -> None:
    expected = Reference(models["full"], kind).joint()
    assert sum(expected.values()) == pytest.approx(1, abs=0.01)
    pooled: Counter[Outcome] = Counter()
    for first, shape in enumerate(SHAPES):
        options = options_of(kind)
        model = models[shape]
        model.speculation_stats.reset()
        # not 1, 2, 3, …: generators seeded with neighbours are not independent enough
        seeds = np.random.default_rng([list(KINDS).index(kind), first]).integers(1, 2**31, DRAWS // len(SHAPES)).tolist()
        found = Counter(drawn(model, kind, options, seed) for seed in seeds)
        assert model.speculation_stats.accepted > found.total() // 20  # it did speculate
        pooled += found
        p, cells = p_value(expected, found)
        print(f"{kind}, {shape}: {found.total()} draws, {cells} cells, p = {p:.3f}")
        assert p > 1e-4
    p, cells = p_value(expected, pooled)
    print(f"{kind}: {pooled.total()} draws, {cells} cells, p = {p:.3f}")
    assert p > 1e-4


def test_the_test_sees_the_draft(models: dict[str, Llama]) -> None:
    """A speculation that took the draft's word for it would not pass."""
    expected = Reference(models["full"], "temperature").joint()
    found = Counter(drawn(models["draft"], "temperature", options_of("temperature"), seed) for seed in range(1, 1200))
    assert p_value(expected, found)[0] < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_the_text_of_full_mode(kind: str, models: dict[str, Llama]) -> None:
    """More than the same distribution: the verifier's logits are the same bits, and the sampler draws at the same places."""
    length = 3 if kind == "grammar" else 12
    for seed in range(1, 21):
        expected = drawn(models["full"], kind, options_of(kind), seed, length)
        for shape in SHAPES:
            assert drawn(models[shape], kind, options_of(kind), seed, length) == expected
