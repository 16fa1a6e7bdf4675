"""twobit bench decode and policies: what they count and keep. What they time decides nothing here."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from twobit_gguf import bench_policies, bench_prompts, bench_texts, cli_bench
from twobit_gguf.bench_policies import OWN_KV, FixedCosts
from twobit_gguf.bench_reference import Reference
from twobit_gguf.bench_saved import Saved
from twobit_gguf.bench_texts import LLAMA_SPECULATIVE as LLAMA
from twobit_gguf.errors import TwobitError
from twobit_gguf.speculative.costs import KNOTS, Costs

PROMPTS = [{"kind": "code", "text": "in the other"}, {"kind": "prose", "text": "ab"}]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps(PROMPTS))
    return path


def bench(*arguments: object) -> str:
    command = [sys.executable, "-m", "twobit_gguf.cli", "bench", *map(str, arguments), "-t", "2"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_single_decodes(paired_tiny: Callable[[str], Path], tiny_gguf: Callable[[str], Path]) -> None:
    arguments = ("decode", paired_tiny("llama"), "--reference", tiny_gguf("llama"), "--rounds", 1)
    measured = json.loads(bench(*arguments, "--json"))
    assert {"draft", "verify 1", "verify 32", "reference 1", "reference 32"} <= set(measured["milliseconds"])
    assert all(value > 0 for value in measured["milliseconds"].values())
    ratio = measured["milliseconds"]["reference 1"] / measured["milliseconds"]["verify 1"]
    assert measured["plain_to_reference"] == pytest.approx(ratio)
    assert "plain decoding (verify 1) runs at" in bench(*arguments)


def test_whole_texts(paired_tiny: Callable[[str], Path], tiny_gguf: Callable[[str], Path], llama_tools: Path, prompts: Path) -> None:
    pytest.importorskip("matplotlib")
    reference, kept, plot = tiny_gguf("llama"), prompts.with_name("runs.json"), prompts.with_name("plot.png")
    arguments = [
        "decode", paired_tiny("llama"), "--reference", reference, "--draft-model", reference, "--llama-speculative",
        llama_tools / "llama-speculative-simple", "--prompts", prompts, "-n", 12, "--json-out", kept, "--plot", plot, "--json",
    ]  # fmt: skip
    result = json.loads(bench(*arguments))
    assert json.loads(kept.read_text()) == result and plot.read_bytes().startswith(b"\x89PNG")
    assert [(run["temperature"], run["kind"]) for run in result["runs"]] == [(t, k) for t in (0, 0.7) for k in ("code", "prose")]
    for run in result["runs"]:
        assert list(run["results"]) == ["reference", LLAMA, "plain", "comb", "chain", "tree"]
        for name in ("comb", "chain", "tree"):
            phases, seconds = run["results"][name]["phases"], run["results"][name]["seconds"]
            assert sum(phases.values()) == pytest.approx(seconds) and phases["verify"] > 0
    rows = {(row["temperature"], row["name"]): row for row in result["medians"]}
    assert all(rows[0, shape]["different_texts"] == 0 for shape in ("comb", "chain", "tree"))
    # the draft is the target itself: all of a draft of three is accepted
    assert rows[0, LLAMA]["acceptance"] == 1 and rows[0, LLAMA]["tokens_per_verification"] > 3
    assert set(rows[0, "comb"]["ratio_by_kind"]) == {"code", "prose"} and rows[0, "reference"]["ratio"] == 1

    # an interrupted benchmark goes on: one run is missing, only that is made again
    last = result["runs"].pop()
    kept.write_text(json.dumps(result))
    again = json.loads(bench(*arguments))
    assert again["runs"][:3] == result["runs"] and again["runs"][3]["prompt"] == last["prompt"]
    assert again["runs"][3]["results"]["plain"]["seconds"] != last["results"]["plain"]["seconds"]


def test_a_plot_that_cannot_be_written(paired_tiny: Callable[[str], Path], prompts: Path) -> None:
    pytest.importorskip("matplotlib")
    kept = prompts.with_name("runs.json")
    with pytest.raises(TwobitError, match="no such folder"):
        arguments = ["--prompts", str(prompts), "--json-out", str(kept), "--plot", "/nowhere/x.png"]
        cli_bench.main(["decode", str(paired_tiny("llama")), *arguments])
    assert not kept.exists()  # nothing was measured


def test_a_reference_that_dies_is_an_error(tiny_gguf: Callable[[str], Path]) -> None:
    reference = Reference(tiny_gguf("llama"), 1, 64)
    reference._process.kill()
    reference._process.join()
    with pytest.raises(TwobitError, match="has ended"):
        reference("decoder", 4)
    reference.close()


def test_policies(paired_tiny: Callable[[str], Path], prompts: Path) -> None:
    kept = prompts.with_name("policies.json")
    table = bench("policies", paired_tiny("llama"), "--prompts", prompts, "-n", 16, "--rounds", 1, "--json-out", kept)
    result = json.loads(kept.read_text())
    (part,) = result["scores"]
    assert part["prompts"] == 2 and OWN_KV in part["curves"]["GPU"] and "chain 8: shared KV gives" in table
    for run in result["runs"][1:]:
        assert run["policies"]["own 8"]["widths"].keys() == {"9"} and run["policies"]["chain 4"]["widths"].keys() <= set("12345")
        for name, counts in run["policies"].items():
            assert counts["tokens"] >= 16 and sum(counts["widths"].values()) == counts["verifications"] <= counts["tokens"]
            if name.startswith(("chain 1", "own")):  # a pass for each token, fewer than the limit only where the text would end
                assert counts["passes"] == sum((int(width) - 1) * count for width, count in counts["widths"].items())
    # a file of other settings is not taken for these
    with pytest.raises(TwobitError, match="other settings"):
        Saved(kept, result["settings"] | {"n_tokens": 17})


def test_a_score_is_of_the_policy_that_is_best_elsewhere() -> None:
    costs = bench_policies.curve(0.5, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    assert bench_policies.speed({"tokens": 12, "passes": 4, "widths": {"3": 2}}, costs) == pytest.approx(12 / (4 * 0.5 + 2))

    def text(**tokens: int) -> dict:
        counts = {"verifications": 1, "passes": 0, "widths": {"1": 1}}
        names = [name for family in bench_policies.FAMILIES.values() for name in family]
        names += [*(f"own {depth}" for depth in bench_policies.OWN_DEPTHS), f"{bench_policies.ADAPTIVE}, curve"]
        return {"temperature": 0, "policies": {name: counts | {"tokens": tokens.get(name.replace(" ", ""), 1)} for name in names}}

    # each text's own favourite is another one: left out, it is not seen
    runs = [text(chain2=9, chain4=3), text(chain2=3, chain4=9)]
    (part,) = bench_policies.scores(runs, {"curve": costs})
    assert part["curves"]["curve"]["chain"]["speed"]["mean"] == 3
    assert part["own_kv"]["4"]["mean"] == pytest.approx(5)


def test_fixed_costs_stay() -> None:
    costs = FixedCosts(Costs(0.05, [1, 1.1, 1.2, 1.3, 1.4, 2]))
    costs.saw_draft(100.0)
    costs.saw_verify(4, 100.0)
    assert costs.draft / costs.verify(1) == pytest.approx(0.05) and costs.verify(32) / costs.verify(1) == pytest.approx(2)
    assert len(KNOTS) == 6


def test_prompts(tiny_gguf: Callable[[str], Path], smollm2_gguf: Path, tmp_path: Path) -> None:
    builtin = bench_prompts.read()
    assert [prompt.kind for prompt in builtin] == ["code"] * 12 + ["prose"] * 12
    assert len({prompt.text for prompt in builtin}) == 24
    assert [prompt.kind for prompt in bench_prompts.first(builtin, 2)] == ["code", "code", "prose", "prose"]
    assert bench_prompts.in_turn(builtin)[:4] == [0, 12, 1, 13] and sorted(bench_prompts.in_turn(builtin)) == list(range(24))

    chat = bench_prompts.prepare(builtin[:1], smollm2_gguf)[0]
    assert "<|im_start|>user\n" + builtin[0].text.strip() in chat.text and chat.text.endswith("<|im_start|>assistant\n")
    assert bench_prompts.prepare(builtin[:1], smollm2_gguf, chat=False)[0].text == builtin[0].text
    assert bench_prompts.prepare(builtin[:1], tiny_gguf("llama"))[0].text == builtin[0].text  # no template in it

    book = tmp_path / "book.txt"
    book.write_text("".join(f"line {i} of a long text\n" for i in range(300)))
    bare = bench_prompts.prepare(builtin[:2], smollm2_gguf)
    long = bench_prompts.prepare(builtin[:2], smollm2_gguf, context_text=book, context=200)
    for short, longer in zip(bare, long, strict=True):
        assert abs(longer.n_tokens - short.n_tokens - 200) < 10
    assert long[0].text.split("\n\n")[0] != long[1].text.split("\n\n")[0]

    paragraphs = tmp_path / "prompts.txt"
    paragraphs.write_text("one\n\n\ntwo\nlines\n")
    assert [prompt.text for prompt in bench_prompts.read(paragraphs)] == ["one", "two\nlines"]


def test_medians_are_against_plain_without_a_reference() -> None:
    def run(index: int, plain: float, comb: float) -> dict:
        results = {"plain": {"tokens_per_second": plain}, "comb": {"tokens_per_second": comb, "same_text": index > 0}}
        return {"temperature": 0, "prompt": index, "kind": "", "results": results}

    rows = bench_texts.medians([run(0, 10, 5), run(1, 10, 20), run(2, 20, 30)])
    assert [row["against"] for row in rows] == ["plain", "plain"]
    assert (rows[1]["ratio"], rows[1]["worst_ratio"], rows[1]["different_texts"]) == (1.5, 0.5, 1)
