"""Speculation gives the verifier's text, token for token. (Sampling: test_speculative_sampling.py.)"""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from twobit_gguf import Llama, SpeculationOptions, TwobitError, bench_overhead, plugin
from twobit_gguf.speculative import memory
from twobit_gguf.speculative.acceptance import Acceptance
from twobit_gguf.speculative.candidates import top_candidates
from twobit_gguf.speculative.costs import KNOTS, Costs, Probes, Rate
from twobit_gguf.speculative.engine import _sequences
from twobit_gguf.speculative.tree import ROOT, Candidate, DraftTree
from twobit_gguf.speculative.worth import MeasuredWorth

SHAPES = ("chain", "comb", "tree")
NEAR_TIE = 0.1  # between the best two logits; ggml rounds differently for batches of different widths

PROMPTS = (
    "Once upon a time", "def fibonacci(n):", "The capital of France is", "In the beginning", "import numpy as np\n",
    "She opened the door and", "The three laws of", "A recipe for bread:", "class Stack:\n", "The weather today",
    "Dear Sir or Madam,", "1, 2, 3, 4,", "To be or not to be", "The mitochondria", "for i in range(10):",
    "It was a dark night", "Newton discovered", "SELECT name FROM", "The best way to learn", "Water boils at",
)  # fmt: skip

OPENINGS = ("", "Question: ", "# ", "Chapter 1\n\n", "Write on: ")


def fixed(shape: str, **changes: Any) -> SpeculationOptions:
    """Always drafts, so that a test does not depend on this machine's costs."""
    options = {"shape": shape, "adaptive": False, "max_depth": 6, "max_nodes": 12, "expand": 0.02, "leaf": 0.01}
    return SpeculationOptions(**{**options, **changes})


def load_model(path: Path, **options: Any) -> Llama:
    return Llama(str(path), **{"n_ctx": 512, "n_threads": 2, "n_threads_batch": 2, "verbose": False, "seed": 1, **options})


def greedy(model: Llama, prompt: str, count: int) -> list[int]:
    return list(itertools.islice(model.generate(model.tokenize(prompt.encode()), temp=0.0), count))


@pytest.fixture(scope="module")
def tiny(paired_tiny: Callable[[str], Path]) -> Iterator[Callable[..., Llama]]:
    """tiny(name, **options): models that are freed at the end."""
    models: list[Llama] = []

    def get(name: str = "llama", **options: Any) -> Llama:
        models.append(load_model(paired_tiny(name), **options))
        return models[-1]

    yield get
    for model in models:
        model.close()


def gap_at(model: Llama, prompt: str, tokens: Sequence[int]) -> float:
    """Difference of the best two logits of the plain run behind prompt and tokens."""
    model.reset()
    model.eval([*model.tokenize(prompt.encode()), *tokens])
    logits = np.ctypeslib.as_array(model._ctx.get_logits_ith(-1), shape=(model.n_vocab(),))
    best = np.sort(logits)[-2:]
    return float(best[1] - best[0])


def compare(full: Llama, speculative: Llama, prompts: Sequence[str], count: int, near_tie: float = NEAR_TIE) -> int:
    """Greedy texts of both; a difference must begin at a near tie. Returns how many do."""
    ties = 0
    for prompt in prompts:
        expected, found = greedy(full, prompt, count), greedy(speculative, prompt, count)
        if expected == found:
            continue
        at = next(i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b)
        gap = gap_at(full, prompt, expected[:at])
        assert gap < near_tie, f"{prompt!r}: token {at} differs, {expected[at]} and {found[at]}, and the best two are {gap:.3f} apart"
        ties += 1
    return ties


# ---- the same text ----


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_is_full_mode(shape: str, tiny: Callable[..., Llama]) -> None:
    full, speculative = tiny(mode="full"), tiny(speculation=fixed(shape))
    ties = compare(full, speculative, PROMPTS, 100)
    stats = speculative.speculation_stats
    print(f"{shape}: {ties} of {len(PROMPTS)} texts parted at a near tie, {stats.tokens_per_verification:.2f} tokens per verification")
    assert ties == 0  # by construction: flash attention, the CPU's reference paths, cells in the order of their positions
    assert stats.accepted > 100 and stats.tokens_per_verification > 1.1


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_behind_512_cells(shape: str, tiny: Callable[..., Llama]) -> None:
    """From there on ggml would split the attention of a single query over threads."""
    full, speculative = tiny(mode="full", n_ctx=1024), tiny(n_ctx=1024, speculation=fixed(shape))
    assert compare(full, speculative, ["".join(PROMPTS) * 2], 120) == 0
    assert full.n_tokens > 512


def test_logits_do_not_depend_on_the_width(tiny: Callable[..., Llama]) -> None:
    """The reason: bit-identical logits for 1 to 32 tokens at once."""
    model = tiny(mode="full", logits_all=True)
    tokens = [37 * i % 300 for i in range(96)]

    def logits(width: int) -> np.ndarray:
        model.reset()
        for i in range(0, len(tokens), width):
            model.eval(tokens[i : i + width])
        return model.scores[: len(tokens)].copy()

    one_by_one = logits(1)
    for width in (2, 7, 8, 16, 31, 32):
        np.testing.assert_array_equal(logits(width), one_by_one)


@pytest.mark.parametrize("name", ["llama-320", "qwen2", "gemma3", "moe"])
def test_greedy_on_other_architectures(name: str, tiny: Callable[..., Llama]) -> None:
    full, speculative = tiny(name, mode="full"), tiny(name, speculation=fixed("comb"))
    # experts: the router is an F32 matmul, whose rounding depends on the width, and a random router's choices are easily turned
    ties = compare(full, speculative, PROMPTS[:4], 50, near_tie=0.5 if name == "moe" else 0.0)
    print(f"{name}: {ties} of 4 texts parted at a near tie")
    assert speculative.speculation_stats.drafted > 50


@pytest.fixture(scope="module")
def smollm2_texts(request: pytest.FixtureRequest) -> Iterator[tuple[Path, list[str], list[list[int]]]]:
    """The model, prompts and their plain greedy texts."""
    chosen = os.environ.get("TWOBIT_TEST_MODEL")
    path = Path(chosen) if chosen else request.getfixturevalue("paired_smollm2")
    n_prompts, n_tokens = int(os.environ.get("TWOBIT_TEST_PROMPTS", "20")), int(os.environ.get("TWOBIT_TEST_TOKENS", "100"))
    prompts = [opening + prompt for opening in OPENINGS for prompt in PROMPTS][:n_prompts]
    model = load_model(path, mode="full")
    try:
        yield path, prompts, [greedy(model, prompt, n_tokens) for prompt in prompts]
    finally:
        model.close()


@pytest.mark.parametrize("shape", ("comb", "chain", "tree"))
def test_greedy_on_smollm2(shape: str, smollm2_texts: tuple[Path, list[str], list[list[int]]]) -> None:
    """No text may differ. The full test: TWOBIT_TEST_PROMPTS=100 TWOBIT_TEST_TOKENS=200, TWOBIT_TEST_MODEL a calibrated file."""
    path, prompts, texts = smollm2_texts
    if shape != "comb" and len(prompts) <= 20:
        prompts = prompts[::5]
    model = load_model(path, speculation=SpeculationOptions(shape=shape, adaptive=False, max_depth=4, max_nodes=12))
    try:
        expected = dict(zip(smollm2_texts[1], texts, strict=True))
        different = [prompt for prompt in prompts if greedy(model, prompt, len(expected[prompt])) != expected[prompt]]
        stats = model.speculation_stats
        print(f"SmolLM2, {shape}: {len(different)} of {len(prompts)} texts of {len(texts[0])} tokens differ; {stats.drafted} drafted, "
              f"{stats.accepted} accepted, {stats.tokens_per_verification:.2f} tokens per verification")  # fmt: skip
        assert not different
        assert stats.drafted > len(prompts) * len(texts[0]) and stats.plain_steps < stats.verifications
    finally:
        model.close()


def test_prompt_lookup_follows_repetition(tiny: Callable[..., Llama]) -> None:
    full, speculative = tiny(mode="full"), tiny(speculation=fixed("chain", lookup=2, leaf=0.0))
    assert compare(full, speculative, PROMPTS[:5], 150) <= 5
    assert speculative.speculation_stats.accepted > 0


# ---- llama_cpp's faces ----


@pytest.mark.parametrize("shape", SHAPES)
def test_streaming_stop_and_limits(shape: str, tiny: Callable[..., Llama]) -> None:
    full, speculative = tiny(mode="full"), tiny(speculation=fixed(shape))
    text = full("Once upon", max_tokens=40, temperature=0)["choices"][0]["text"]
    stop = text[len(text) // 2 :][:2]
    for options in ({"max_tokens": 17}, {"max_tokens": 40, "stop": [stop]}, {"max_tokens": 1}, {"max_tokens": 40, "echo": True}):
        expected = full("Once upon", temperature=0, **options)
        assert speculative("Once upon", temperature=0, **options)["choices"] == expected["choices"]
        pieces = [chunk["choices"][0]["text"] for chunk in speculative("Once upon", temperature=0, stream=True, **options)]
        plain_pieces = [chunk["choices"][0]["text"] for chunk in full("Once upon", temperature=0, stream=True, **options)]
        assert pieces == plain_pieces


def test_grammar_bias_processors_and_logprobs(tiny: Callable[..., Llama]) -> None:
    full, speculative = tiny(mode="full", logits_all=True), tiny(speculation=fixed("comb"), logits_all=True)
    seen: dict[str, list[list[int]]] = {"full": [], "speculative": []}

    def recorder(name: str) -> Any:
        def processor(ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
            seen[name].append(ids.tolist())
            scores = scores.copy()
            scores[ids[-1]] -= 5  # no token twice in a row
            return scores

        return llama_cpp.LogitsProcessorList([processor])

    for model, name in ((full, "full"), (speculative, "speculative")):
        model("in the", max_tokens=20, temperature=0, logits_processor=recorder(name))
    assert seen["full"] == seen["speculative"]  # every processor sees the verified text and nothing of the draft

    grammar = llama_cpp.LlamaGrammar.from_string('root ::= ("w" [0-9]+ " ")+', verbose=False)
    for options in ({"grammar": grammar}, {"logit_bias": {260: 8.0, 261: 8.0}}, {"repeat_penalty": 1.3}, {"mirostat_mode": 2, "seed": 3}):
        temperature = 0.8 if "seed" in options else 0
        expected = full("in the", max_tokens=24, temperature=temperature, logprobs=3, **options)["choices"][0]
        found = speculative("in the", max_tokens=24, temperature=temperature, logprobs=3, **options)["choices"][0]
        assert found["text"] == expected["text"]
        assert found["logprobs"]["tokens"] == expected["logprobs"]["tokens"]
        np.testing.assert_allclose(found["logprobs"]["token_logprobs"], expected["logprobs"]["token_logprobs"], atol=0.2)


def test_stopping_criteria(tiny: Callable[..., Llama]) -> None:
    full, speculative = tiny(mode="full"), tiny(speculation=fixed("comb"))

    def run(model: Llama) -> tuple[str, list[int]]:
        lengths: list[int] = []

        def enough(ids: np.ndarray, logits: np.ndarray) -> bool:
            lengths.append(len(ids))
            assert logits.shape == (model.n_vocab(),)
            return len(ids) >= 20

        text = model("in the", max_tokens=60, temperature=0, stopping_criteria=llama_cpp.StoppingCriteriaList([enough]))
        return text["choices"][0]["text"], lengths

    assert run(speculative) == run(full)


def test_state_saved_in_the_middle(tiny: Callable[..., Llama]) -> None:
    model = tiny(speculation=fixed("comb"))
    prompt = model.tokenize(b"in the")
    expected = list(itertools.islice(model.generate(prompt, temp=0.0), 40))
    generator = model.generate(prompt, temp=0.0)
    begin = list(itertools.islice(generator, 15))
    state = model.save_state()
    generator.close()
    model("something else", max_tokens=10)
    model.load_state(state)
    # the last token drawn has not been evaluated
    rest = list(itertools.islice(model.generate([*prompt, *begin], temp=0.0), 25))
    assert begin + rest == expected


def test_generators_of_two_models_alternate(tiny: Callable[..., Llama]) -> None:
    one, other = tiny(speculation=fixed("comb")), tiny("qwen2", speculation=fixed("tree"))
    expected = [greedy(one, "in the", 40), greedy(other, "in the", 40)]
    pair = zip(one.generate(one.tokenize(b"in the"), temp=0.0), other.generate(other.tokenize(b"in the"), temp=0.0), strict=False)
    found = list(itertools.islice(pair, 40))
    assert [list(tokens) for tokens in zip(*found, strict=True)] == expected


def test_a_full_context_ends_as_in_llama_cpp(tiny: Callable[..., Llama]) -> None:
    def run(model: Llama) -> tuple[list[int], str]:
        tokens: list[int] = []
        with pytest.raises(RuntimeError) as error:
            for token in model.generate(model.tokenize(b"in the"), temp=0.0):
                tokens.append(token)
        return tokens, str(error.value)

    expected = run(tiny(mode="full", n_ctx=256))
    for shape in SHAPES:
        model = tiny(n_ctx=256, speculation=fixed(shape))
        tokens, message = run(model)
        assert (len(tokens), message) == (len(expected[0]), expected[1])
        assert model("in the", max_tokens=5, temperature=0)["choices"][0]["text"]  # and it goes on


@pytest.mark.parametrize(("n_ctx", "n_batch"), [(300, 512), (64, 512), (1, 1), (600, 3)])
def test_contexts_and_batches_of_any_size(tiny: Callable[..., Llama], n_ctx: int, n_batch: int) -> None:
    """llama.cpp rounds contexts up to 256s and aborts where a batch has no room for the sequences; llama_cpp's arrays do not follow."""
    texts = []
    for options in ({"mode": "full"}, {"speculation": fixed("comb")}, {"speculation": fixed("tree")}):
        model = tiny(n_ctx=n_ctx, n_batch=n_batch, n_ubatch=n_batch, **options)
        prompt = model.tokenize(b"in the other one")
        made = list(itertools.islice(model.generate(prompt, temp=0.0), model.n_ctx() - len(prompt)))
        assert len(prompt) + len(made) == model.n_ctx() >= n_ctx
        answer = model("in the other one", max_tokens=4096, temperature=0.0)
        assert answer["choices"][0]["finish_reason"] == "length"
        texts.append((made, answer["choices"][0]["text"]))
    assert texts[0] == texts[1] == texts[2]


def test_ten_thousand_tokens(tiny: Callable[..., Llama], monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that slide through a context of 2,048 tokens: no cell is left behind, and no memory.

    TWOBIT_CHECK compares llama.cpp's positions with ours after every step. The full test: TWOBIT_TEST_LONG=10000, and TWOBIT_TEST_MODEL.
    """
    monkeypatch.setenv("TWOBIT_CHECK", "1")
    chosen, n_tokens, n_ctx = os.environ.get("TWOBIT_TEST_MODEL"), int(os.environ.get("TWOBIT_TEST_LONG", "3000")), 2048
    options = {"n_ctx": n_ctx, "speculation": fixed("comb", max_depth=3, max_nodes=8)}
    model, fresh = ((load_model(Path(chosen), **options) if chosen else tiny(**options)) for _ in range(2))
    text, made, resident = model.tokenize(b"in the other one"), 0, []
    while made < n_tokens:
        # as llama_cpp does it: a text ends where the context does, and the next one begins with a part of it
        prompt = text[-n_ctx // 2 :]
        room = min(n_ctx - len(prompt), n_tokens - made)
        drawn = list(itertools.islice(model.generate(prompt, temp=1.0, top_k=20), room))
        assert len(drawn) == room
        text += drawn
        made += room
        model._settle()
        assert model._engine().n_past == model.n_tokens <= n_ctx
        memory = llama_cpp.llama_get_memory(model.ctx)
        assert all(llama_cpp.llama_memory_seq_pos_max(memory, seq) == -1 for seq in range(1, fixed("comb").n_seq))
        resident.append(resident_bytes())
    fresh.eval(model._input_ids.tolist())
    assert n_cells_bytes(model) == n_cells_bytes(fresh)  # not a cell more than the text has tokens
    print(f"{made} tokens, {model.speculation_stats.accepted} accepted; resident MiB after each text: {[r >> 20 for r in resident]}")
    assert resident[-1] - resident[len(resident) // 3] < 16 << 20
    if chosen:
        model.close()
        fresh.close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def n_cells_bytes(model: Llama) -> int:
    """What llama.cpp saves of the cache: every cell that is in use, in whatever sequence."""
    return llama_cpp.llama_state_get_size(model.ctx)


# ---- it must pay ----


def test_drafting_that_does_not_pay_stops(tiny: Callable[..., Llama]) -> None:
    model = tiny(speculation=SpeculationOptions(shape="comb"))
    engine = model._engine()
    engine.costs = Costs(1e-9, [1e-9] * len(KNOTS))  # a draft pass as dear as a verification
    engine.costs.saw_draft = engine.costs.saw_verify = lambda *_: None  # type: ignore[method-assign]
    greedy(model, "in the", 150)
    assert model.speculation_stats.plain_steps > 120


def test_drafting_that_is_free_goes_deep(tiny: Callable[..., Llama]) -> None:
    model = tiny(speculation=SpeculationOptions(shape="comb"))
    engine = model._engine()
    engine.costs = Costs(1e-9, [1.0] * len(KNOTS))
    engine.costs.saw_draft = engine.costs.saw_verify = lambda *_: None  # type: ignore[method-assign]
    greedy(model, "in the", 150)
    assert model.speculation_stats.drafted > 5 * model.speculation_stats.verifications


def test_costs_are_measured_once_and_kept(tiny: Callable[..., Llama], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, second = tiny(), tiny()
    list(itertools.islice(first.generate(first.tokenize(b"in the"), temp=0.0), 60))
    assert first.speculation_stats.seconds["measure"] > 0
    gc.collect()  # ends the generator, which keeps what it has learnt
    assert list((tmp_path / "twobit").iterdir())
    greedy(second, "in the", 5)
    assert second.speculation_stats.seconds["measure"] == 0
    assert second.speculation_costs is not None


# ---- parts ----


def test_costs() -> None:
    costs = Costs(0.3, [1.0, 1.1, 1.2, 1.4, 2.0, 4.0])
    assert costs.verify(1) == 1.0 and costs.verify(3) == pytest.approx(1.15) and costs.verify(33) > 4.0
    assert [costs.widths()[n] for n in (2, 4, 8, 16, 32)] == pytest.approx([1.1, 1.2, 1.4, 2.0, 4.0])
    for _ in range(200):
        costs.saw_verify(8, 2.8)
    assert costs.verify(8) == costs.widths()[8] == pytest.approx(2.8, rel=0.01)
    for wrong in ([1.0] * 5 + [0.0], [1.0] * 7, []):
        with pytest.raises(ValueError, match="positive"):
            Costs(0.3, wrong)


def test_costs_beyond_the_measured_widths() -> None:
    """Twice as much for twice as many tokens, until they have been seen."""
    costs = Costs(0.4, [1.0, 1.2, 1.4])
    assert [costs.verify(n) for n in (4, 8, 16, 32)] == pytest.approx([1.4, 2.8, 5.6, 11.2])
    costs.saw_verify(7, 1.5)
    assert costs.verify(16) == pytest.approx(2 * costs.verify(8)) and costs.verify(16) < 4.0
    for _ in range(6):
        costs.saw_verify(14, 1.6)
    assert costs.verify(14) == pytest.approx(1.6, rel=0.1)


@pytest.mark.parametrize("busy", [3.0, 0.4])
def test_costs_of_a_busy_machine_are_soon_forgotten(busy: float) -> None:
    """All measured at once, so all wrong alike; then a run that takes widths by turns, as they come."""
    true = Costs(0.4, [1.0, 1.2, 1.4, 2.2, 3.8, 7.0])
    costs = Costs(0.4 * busy, [value * busy for value in (1.0, 1.2, 1.4, 2.2)])
    for width in (5, 1, 3, 7) * 8:
        costs.saw_verify(width, true.verify(width))
        costs.saw_draft(true.draft)
    for width in (1, 2, 3, 4, 5, 6, 7, 8):
        assert costs.verify(width) == pytest.approx(true.verify(width), rel=0.2)
    assert costs.draft == pytest.approx(true.draft, rel=0.25)


def test_one_bad_measurement_does_not_stop_drafting(tiny: Callable[..., Llama]) -> None:
    """A draft pass that was said to take as long as three tokens is tried nevertheless, and seen."""
    model = tiny(speculation=SpeculationOptions())
    engine = model._engine()
    engine.costs = Costs(0.3, [0.1, 0.11, 0.12, 0.16, 0.3, 0.6])
    engine.costs.saw_verify = lambda *_: None  # type: ignore[method-assign]
    greedy(model, "in the", 80)
    assert model.speculation_stats.draft_passes > 0 and engine.costs.draft < 0.25


def test_probes() -> None:
    probes = Probes()
    waits = []
    for _ in range(3):
        waits.append(0)
        while not probes.due:
            waits[-1] += 1
            probes.saw_plain()
        probes.saw_draft(1, 2.0, 1.0)
        assert probes.due  # two in a row
        probes.saw_draft(1, 2.0, 1.0)
    assert waits == [64, 128, 256]
    for _ in range(512):
        assert not probes.due
        probes.saw_plain()
    for _ in range(10):  # it goes on while it pays
        assert probes.due
        probes.saw_draft(3, 2.0, 1.0)
    probes.new_text()
    for _ in range(2):
        assert not probes.due
        probes.saw_plain()
    assert probes.due


def test_what_was_learnt_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert memory.load("key", Acceptance()) is None
    learnt = Acceptance()
    for _ in range(100):
        learnt.observe(0, 0.9, False)
    memory.save("key", Costs(0.5, range(1, 7)), learnt)
    acceptance = Acceptance()
    loaded = memory.load("key", acceptance)
    assert loaded is not None and loaded.draft == 0.5 and loaded.verify(32) == 6
    assert acceptance.chance(0, 0.9) < 0.3 and acceptance.mean_top == learnt.mean_top < 0.2
    for _ in range(40):
        acceptance.observe(0, 0.9, True)
    assert acceptance.chance(0, 0.9) > 0.6  # and it does not insist on it
    assert memory.load("another key", acceptance) is None
    (file,) = (tmp_path / "twobit").iterdir()
    for garbage in ('{"key": "key", "draft": "x"', '{"key": "key", "draft": 1, "verify": [1, 2, 3, 4, 5, 6]}', "[]", "null"):
        file.write_text(garbage)
        assert memory.load("key", Acceptance()) is None


def test_rate_pauses_and_comes_back() -> None:
    rate = Rate()
    for _ in range(6):
        assert rate.should_speculate()
        rate.saw_step(1, 2.0, plain=1.0)  # half as fast as plain decoding
    pause = 0
    while not rate.should_speculate():
        pause += 1
    assert pause >= 20
    for _ in range(40):
        rate.saw_step(3, 1.0, plain=1.0)
        assert rate.should_speculate()
    assert rate.speculative() == pytest.approx(3.0)


def test_worth_looks_ahead() -> None:
    acceptance = Acceptance()
    acceptance.mean_top = 0.9
    # the second token of a verification costs as much as the first, the others nothing: one pass does not pay, several do
    worth = MeasuredWorth(Costs(0.1, [1.0, 2.0, 2.0, 2.0, 2.0, 2.0]), acceptance)
    assert worth.draft_pass(1.0, 1) and not worth.draft_pass(0.05, 8)
    assert worth.node(0.01, 8) and not worth.node(0.4, 1)
    acceptance.mean_top = 0.4
    assert not MeasuredWorth(Costs(0.4, [1.0, 1.1, 1.2, 1.5, 2.0, 4.0]), acceptance).draft_pass(1.0, 1)


def test_acceptance_learns() -> None:
    acceptance = Acceptance()
    assert acceptance.chance(0, 0.45) == pytest.approx(0.45)
    for i in range(300):
        acceptance.observe(0, 0.45, i % 10 < 7)
    assert acceptance.chance(0, 0.45) == pytest.approx(0.7, abs=0.03)
    assert acceptance.chance(1, 0.45) == pytest.approx(0.45)


def best_of(logits: np.ndarray, count: int, p_min: float) -> list[Candidate]:
    return top_candidates(logits.ctypes.data, len(logits), count, p_min)


def test_candidates() -> None:
    logits = np.full(1000, -20.0, np.float32)
    logits[[3, 500, 999]] = (5.0, 5.0, 4.0)
    found = best_of(logits, 3, 0.02)
    assert [c.token for c in found] == [3, 500, 999] and [c.rank for c in found] == [0, 1, 2]
    assert found[0].p == pytest.approx(1 / (2 + np.exp(-1)), rel=1e-4)
    assert [c.token for c in best_of(logits, 2, 0.02)] == [3, 500]
    assert [c.token for c in best_of(logits, 3, 0.3)] == [3, 500] and [c.token for c in best_of(logits, 3, 0.5)] == [3]


@pytest.mark.parametrize("n_vocab", [1, 7, 31, 32, 33, 1000, 49152, 151_936, 262_144, 300_001])
def test_candidates_are_those_of_a_softmax(n_vocab: int) -> None:
    random = np.random.default_rng(n_vocab)
    for peak in (0.0, 4.0, 12.0):
        logits = random.normal(0, 2, n_vocab).astype(np.float32)
        logits[random.integers(0, n_vocab, 5)] += peak
        logits[random.integers(0, n_vocab, 5)] = logits.max()  # equal ones: the lower token first
        p = np.exp(logits.astype(np.float64) - logits.max())
        p = np.where(logits >= logits.max() - 12, p, 0) / p[logits >= logits.max() - 12].sum()
        order = np.argsort(-logits, kind="stable")[:8]
        expected = [int(token) for i, token in enumerate(order) if i == 0 or p[token] >= 0.01]
        found = best_of(logits, 8, 0.01)
        assert [c.token for c in found] == expected
        assert [c.p for c in found] == pytest.approx(p[expected].tolist(), rel=2e-5)


def test_candidates_of_bad_logits() -> None:
    assert best_of(np.full(1000, np.nan, np.float32), 3, 0.02) == []
    assert best_of(np.full(1000, -np.inf, np.float32), 3, 0.02) == []
    assert best_of(np.array([0, np.inf], np.float32), 3, 0.02) == []
    mixed = np.full(100, -np.inf, np.float32)
    mixed[[5, 40, 70]] = (1.0, np.nan, 2.0)
    assert [c.token for c in best_of(mixed, 3, 0.02)] == [70, 5]


def test_overhead_is_measured(paired_tiny: Callable[[str], Path]) -> None:
    result = bench_overhead.measure(paired_tiny("llama"), 30, 2)
    print(bench_overhead.render(result))  # how long it takes decides nothing here
    assert [run["name"] for run in result["runs"]] == ["plain", "default", "comb", "chain", "tree"]
    assert all(0 < run["ms"] < 50 for run in result["runs"])
    assert all(run["draft_passes"] > 0 for run in result["runs"][2:])


def test_sequences_of_a_tree() -> None:
    """root - a - b - c, with d beside b and e beside a: the trunk is sequence 0, each other leaf has one, inner nodes have all below."""
    tree = DraftTree()
    a = tree.add(ROOT, Candidate(1, 0, 0.9), 0.9)
    b = tree.add(a, Candidate(2, 0, 0.9), 0.8)
    c = tree.add(b, Candidate(3, 0, 0.9), 0.7)
    d = tree.add(a, Candidate(4, 1, 0.1), 0.1)
    e = tree.add(ROOT, Candidate(5, 1, 0.1), 0.1)
    assert tree.trunk() == [a, b, c]
    assert _sequences(tree, tree.trunk()) == [[0, 1], [0], [0], [1], [2]]
    assert tree.child(a, 4) == d and tree.child(ROOT, 5) == e and tree.child(c, 1) is None


@pytest.mark.parametrize("wrong", [{"shape": "bush"}, {"max_nodes": 32}, {"max_depth": 0}, {"lookup": -1}])
def test_options_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(TwobitError):
        SpeculationOptions(**wrong)


def test_mode_is_left_as_it_was(tiny: Callable[..., Llama]) -> None:
    from twobit_gguf import _native

    before = _native.lib().twobit_get_mode()
    greedy(tiny(speculation=fixed("comb")), "in the", 10)
    with pytest.raises(RuntimeError, match="inside"), plugin.mode("draft"):
        raise RuntimeError("inside")
    assert _native.lib().twobit_get_mode() == before
