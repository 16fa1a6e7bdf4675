"""Models whose memory is a state speculate with chains, and their text is that of full mode."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lfm2_model
import llama_cpp
import mamba_model
import pytest
from conftest import convert

from twobit_gguf import Llama, SpeculationOptions, TwobitError
from twobit_gguf.speculative.draft_model import TwobitDraftModel

WRITERS = {"mamba": mamba_model.write, "lfm2": lfm2_model.write}
PROMPTS = ("Once upon a time", "def fibonacci(n):", "in the", "1, 2, 3, 4,")
ALWAYS = SpeculationOptions(shape="chain", adaptive=False, max_depth=4, max_nodes=4, expand=0.0, leaf=0.0)


@pytest.fixture(scope="module", params=WRITERS)
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return convert(WRITERS[request.param](folder / "f16.gguf"), folder / "paired.gguf")


def load(path: Path, **options: Any) -> Llama:
    return Llama(str(path), **{"n_ctx": 512, "n_threads": 2, "n_threads_batch": 2, "verbose": False, "seed": 1, **options})


@pytest.fixture(scope="module")
def pair(file: Path) -> Iterator[tuple[Llama, Llama]]:
    """Full mode, and speculation that always drafts, with llama.cpp's positions compared after every step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TWOBIT_CHECK", "1")
        full, speculative = load(file, mode="full"), load(file, speculation=ALWAYS)
        speculative._engine()
    yield full, speculative
    full.close()
    speculative.close()


def tokens(model: Llama, prompt: str, count: int, **options: Any) -> list[int]:
    generator = model.generate(model.tokenize(prompt.encode()), **{"temp": 0.0, **options})
    found = list(itertools.islice(generator, count))
    generator.close()
    return found


def test_greedy_is_full_mode(pair: tuple[Llama, Llama]) -> None:
    full, speculative = pair
    assert full.paired is not None and len(full.paired.pairs) >= 5
    for prompt in PROMPTS:
        expected = tokens(full, prompt, 80)
        assert tokens(speculative, prompt, 80) == expected
        assert len(set(expected)) > 5
    stats = speculative.speculation_stats
    assert stats.accepted > 20 and stats.drafted > 2 * stats.accepted  # both ways out of a step: kept whole, and gone back


def test_a_seed_gives_the_text_of_full_mode(pair: tuple[Llama, Llama]) -> None:
    full, speculative = pair
    for seed in range(1, 11):
        for model in pair:
            model.set_seed(seed)
        options = {"temp": 0.8, "top_k": 5, "repeat_penalty": 1.2}
        assert tokens(speculative, "in the", 20, **options) == tokens(full, "in the", 20, **options)


def test_ended_and_saved_anywhere(pair: tuple[Llama, Llama]) -> None:
    full, speculative = pair
    prompt = full.tokenize(b"in the")
    expected = tokens(full, "in the", 40)
    for count in range(1, 12):
        generator = speculative.generate(prompt, temp=0.0)
        begin = list(itertools.islice(generator, count))
        state = speculative.save_state()
        generator.close()
        speculative("something else", max_tokens=3)
        speculative.load_state(state)
        assert begin + list(itertools.islice(speculative.generate([*prompt, *begin], temp=0.0), 40 - count)) == expected


def test_interrupted_before_its_tokens_were_counted(pair: tuple[Llama, Llama], monkeypatch: pytest.MonkeyPatch) -> None:
    full, speculative = pair
    for at in (1, 2, 5, 9):
        calls = itertools.count()

        def append(token: int, at: int = at, calls: Iterator[int] = calls) -> None:
            if next(calls) == at:
                raise KeyboardInterrupt
            Llama._append(speculative, token)

        monkeypatch.setattr(speculative, "_append", append)
        with pytest.raises(KeyboardInterrupt):
            tokens(speculative, "in the", 40)
        monkeypatch.undo()
        assert speculative._engine().n_past == speculative.n_tokens
        assert tokens(speculative, "in the", 40) == tokens(full, "in the", 40)


def test_it_learns_and_pauses_as_others_do(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first, second, full = load(file), load(file), load(file, mode="full")
    try:
        assert capfd.readouterr().err.count("drafts are chains") == 1  # said once
        expected = tokens(full, "Once", 100)
        assert tokens(first, "Once", 100) == tokens(second, "Once", 100) == expected
        assert first.speculation_stats.verifications > 0 and first.speculation_costs is not None
    finally:
        for model in (first, second, full):
            model.close()


def test_a_plain_llama_cannot_use_it_as_a_draft(file: Path) -> None:
    draft = TwobitDraftModel()
    model = llama_cpp.Llama(str(file), n_ctx=64, n_threads=1, verbose=False, draft_model=draft)
    try:
        with pytest.raises(TwobitError, match="cannot drop"):
            draft.bind(model)
    finally:
        model.close()
