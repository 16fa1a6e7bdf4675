"""twobit_gguf.Llama is a llama_cpp.Llama: every call works, on paired files and on others; and the residual is really used."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

import twobit_gguf
from twobit_gguf import Llama, TwobitError, plugin
from twobit_gguf.speculative import SpeculationOptions

OPTIONS: dict[str, Any] = {"n_ctx": 256, "n_threads": 2, "n_threads_batch": 2, "verbose": False, "seed": 1}


@pytest.fixture
def load() -> Iterator[Callable[..., Llama]]:
    models: list[Llama] = []

    def get(path: Path, **options: Any) -> Llama:
        models.append(Llama(str(path), **{**OPTIONS, **options}))
        return models[-1]

    yield get
    for model in models:
        model.close()


def text(model: llama_cpp.Llama, prompt: str = "in the other", count: int = 24) -> str:
    return model(prompt, max_tokens=count, temperature=0)["choices"][0]["text"]


def python(program: str, *arguments: str) -> Any:
    """Runs a program in a process of its own, where nothing has been loaded yet; its last line is JSON."""
    result = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


# ---- the residual is used ----


def test_counters_show_every_pair(load: Callable[..., Llama], paired_tiny: Callable[[str], Path]) -> None:
    model = load(paired_tiny("llama"), mode="full")
    assert model.paired is not None
    n_pairs = len(model.paired.pairs)
    plugin.reset_counters()
    model.eval([5])
    counters = plugin.counters()
    assert (counters.graphs_full, counters.matmuls_paired, counters.matmuls_unpaired) == (1, n_pairs, 0)
    model.mode = "draft"
    plugin.reset_counters()
    model.eval([5])
    counters = plugin.counters()
    assert (counters.graphs_draft, counters.matmuls_paired, counters.matmuls_unpaired) == (1, 0, n_pairs)


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_a_part_of_the_layers_on_the_device(layers: int, load: Callable[..., Llama], paired_tiny: Callable[[str], Path]) -> None:
    whole, part = load(paired_tiny("llama"), mode="full"), load(paired_tiny("llama"), mode="full", n_gpu_layers=layers)
    assert part.paired is not None
    plugin.reset_counters()
    part.eval([5])
    assert plugin.counters().matmuls_paired == len(part.paired.pairs)
    assert text(part) == text(whole)
    assert text(load(paired_tiny("llama"), n_gpu_layers=layers)) == text(whole)


STOCK = """
import json, sys, llama_cpp
if sys.argv[2] == "install":
    import twobit_gguf
    Plain = llama_cpp.Llama
    twobit_gguf.install()
    twobit_gguf.install()
    from twobit_gguf import plugin
else:
    Plain = llama_cpp.Llama
model = Plain(sys.argv[1], n_ctx=256, n_threads=2, n_threads_batch=2, n_gpu_layers=int(sys.argv[3]), flash_attn=True, verbose=False)
text = model("in the other", max_tokens=24, temperature=0)["choices"][0]["text"]
counters = vars(plugin.counters()) if sys.argv[2] == "install" else {}
print(json.dumps({"text": text, "type": type(model).__module__, "later": llama_cpp.Llama.__module__, **counters}))
"""


@pytest.mark.parametrize("layers", [0, -1])
def test_stock_llama_after_install(layers: int, load: Callable[..., Llama], paired_tiny: Callable[[str], Path]) -> None:
    found = python(STOCK, str(paired_tiny("llama")), "install", str(layers))
    model = load(paired_tiny("llama"), mode="full")
    assert model.paired is not None
    assert found["type"] == "llama_cpp.llama" and found["later"] == "twobit_gguf.llama"
    assert found["text"] == text(model)
    assert found["matmuls_unpaired"] == 0
    assert found["matmuls_paired"] == len(model.paired.pairs) * found["graphs_full"] or layers == 0
    assert found["matmuls_paired"] >= 24 * len(model.paired.pairs)


def test_stock_llama_without_us_runs_the_base(
    load: Callable[..., Llama], paired_tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWOBIT_REPACK", "0")  # our copies of the base round in another order
    found = python(STOCK, str(paired_tiny("llama")), "stock", "0")
    assert found["text"] == text(load(paired_tiny("llama"), mode="draft"))
    assert found["text"] != text(load(paired_tiny("llama"), mode="full"))


# ---- llama_cpp's calls ----


def test_a_gguf_without_a_residual_is_left_alone(load: Callable[..., Llama], tiny_gguf: Callable[[str], Path]) -> None:
    path = tiny_gguf("llama")
    plain, ours = llama_cpp.Llama(str(path), **OPTIONS), load(path)
    assert ours.paired is None and text(ours) == text(plain)
    assert [list(g) for g in (_first(plain, 20), _first(ours, 20))][0] == _first(ours, 20)
    assert ours.speculation_stats.verifications == 0
    plain.close()


def _first(model: llama_cpp.Llama, count: int) -> list[int]:
    tokens = []
    for token in model.generate(model.tokenize(b"ab"), temp=0.0):
        tokens.append(token)
        if len(tokens) == count:
            break
    return tokens


def test_chat_and_json(load: Callable[..., Llama], paired_tiny: Callable[[str], Path]) -> None:
    full, model = load(paired_tiny("llama"), mode="full"), load(paired_tiny("llama"))
    messages = [{"role": "user", "content": "in the"}]
    expected = full.create_chat_completion(messages, max_tokens=12, temperature=0)["choices"][0]["message"]["content"]
    assert model.create_chat_completion(messages, max_tokens=12, temperature=0)["choices"][0]["message"]["content"] == expected
    chunks = model.create_chat_completion(messages, max_tokens=12, temperature=0, stream=True)
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == expected
    answer = model.create_chat_completion(
        messages, max_tokens=200, temperature=0,
        response_format={"type": "json_object", "schema": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}},
    )["choices"][0]["message"]["content"]  # fmt: skip
    assert isinstance(json.loads(answer)["a"], bool)


@pytest.mark.parametrize("mode", ["speculative", "full"])
@pytest.mark.parametrize("bad", ["root ::= (((", "root ::= root", 'other ::= "a"', "root ::= " + 200_000 * "("])
def test_a_bad_grammar(bad: str, mode: str, load: Callable[..., Llama], paired_tiny: Callable[[str], Path]) -> None:
    """llama_cpp would crash: its sampler chain does not expect that there is none."""
    model = load(paired_tiny("llama"), mode=mode)
    first = text(model)
    n_tokens, grammar = model.n_tokens, llama_cpp.LlamaGrammar.from_string(bad, verbose=False)
    for ask in (
        lambda: model("ab", grammar=grammar),
        lambda: next(model("ab", grammar=grammar, stream=True)),
        lambda: model.create_chat_completion([{"role": "user", "content": "in"}], grammar=grammar),
        lambda: next(model.generate([5], grammar=grammar)),
    ):
        with pytest.raises(ValueError, match="grammar") as error:
            ask()
        assert "\n" not in str(error.value) and model.n_tokens == n_tokens
    assert text(model) == first


def test_prompt_cache_and_states(load: Callable[..., Llama], paired_tiny: Callable[[str], Path]) -> None:
    model = load(paired_tiny("llama"))
    first = text(model)
    assert text(model, "something else") != first
    assert text(model) == first and text(model) == first  # prefix reuse in between
    model.set_cache(llama_cpp.LlamaRAMCache(capacity_bytes=1 << 26))
    assert text(model) == first
    text(model, "ab")
    assert text(model) == first
    again = pickle.loads(pickle.dumps(model))
    assert text(again) == first and again.mode == "speculative"
    again.close()


def test_embeddings(load: Callable[..., Llama], paired_tiny: Callable[[str], Path]) -> None:
    with pytest.raises(RuntimeError, match="embedding=True"):
        load(paired_tiny("llama")).embed("in the")
    vectors = {}
    for mode in ("full", "draft", "speculative"):
        model = load(paired_tiny("llama"), embedding=True, mode=mode, pooling_type=llama_cpp.LLAMA_POOLING_TYPE_MEAN)
        vectors[mode] = np.array(model.create_embedding("in the")["data"][0]["embedding"])
    assert vectors["full"].shape == (256,) and np.array_equal(vectors["full"], vectors["speculative"])
    assert not np.allclose(vectors["full"], vectors["draft"], rtol=1e-3)


def test_modes(load: Callable[..., Llama], paired_tiny: Callable[[str], Path]) -> None:
    model = load(paired_tiny("llama"))
    texts = {}
    for mode in ("full", "draft", "speculative", "draft", "full"):
        model.mode = mode
        texts.setdefault(mode, text(model))
        assert text(model) == texts[mode]
    assert texts["full"] == texts["speculative"] != texts["draft"]
    with pytest.raises(TwobitError, match="no mode 'fast'"):
        model.mode = "fast"
    with pytest.raises(TwobitError, match="no mode 'fast'"):
        load(paired_tiny("llama"), mode="fast")


def test_shapes_in_turn(load: Callable[..., Llama], paired_tiny: Callable[[str], Path]) -> None:
    model = load(paired_tiny("llama"), mode="full", speculation=SpeculationOptions(shape="tree"))
    plain = text(model)
    model.mode = "speculative"
    for shape in ("comb", "chain", "tree", "comb"):
        model.speculation = SpeculationOptions(shape=shape, adaptive=False)
        assert text(model) == plain
    assert model.speculation_stats.tokens == 48  # the comb's twice: what an engine has seen stays with it
    small = load(paired_tiny("llama"), speculation=SpeculationOptions(shape="chain"))
    with pytest.raises(TwobitError, match="17 sequences"):
        small.speculation = SpeculationOptions(shape="tree")


def test_two_models_in_turn(load: Callable[..., Llama], paired_tiny: Callable[[str], Path]) -> None:
    """Each gives its own text, whichever is freed first, and after loading again."""
    names = ("llama", "qwen2")
    alone = {}
    for name in names:
        model = load(paired_tiny(name))
        alone[name] = text(model)
        model.close()
    for order in (names, names[::-1]):
        models = {name: load(paired_tiny(name)) for name in names}
        for name in names * 2:
            assert text(models[name]) == alone[name]
        models[order[0]].close()
        assert text(models[order[1]]) == alone[order[1]]
        models[order[1]].close()
    assert plugin.counters().pairs_alive == 0


def test_llama_draft_model(load: Callable[..., Llama], paired_tiny: Callable[[str], Path]) -> None:
    """The draft for a plain llama_cpp.Llama that verifies by itself."""
    draft = twobit_gguf.TwobitDraftModel(4)
    model = load(paired_tiny("llama"), mode="full", draft_model=draft)
    draft.bind(model)
    assert text(model, count=60) == text(load(paired_tiny("llama"), mode="full"), count=60)
    assert draft.stats.drafted > 0 and draft.stats.draft_passes >= draft.stats.drafted


# ---- bad input ----


def cut(source: Path, target: Path, size: int) -> Path:
    shutil.copyfile(source, target)
    with open(target, "r+b") as file:
        file.truncate(size)
    return target


def test_a_lost_residual_is_said_aloud(
    load: Callable[..., Llama], paired_tiny: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = load(paired_tiny("llama"), mode="draft")
    assert whole.paired is not None
    model = load(cut(paired_tiny("llama"), tmp_path / "cut.gguf", whole.paired.main.end))
    assert "cut.gguf" in (said := capfd.readouterr().err) and "2-bit" in said
    assert model.paired is None and text(model, count=8)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6])
def test_a_file_cut_in_the_model(share: float, paired_tiny: Callable[[str], Path], tmp_path: Path, load: Callable[..., Llama]) -> None:
    path = paired_tiny("llama")
    broken = cut(path, tmp_path / "broken.gguf", int(share * 400_000))
    with pytest.raises((TwobitError, ValueError)) as error:
        load(broken)
    assert "broken.gguf" in str(error.value) and "\n" not in str(error.value)


def test_a_flipped_bit_is_refused(paired_tiny: Callable[[str], Path], tmp_path: Path, load: Callable[..., Llama]) -> None:
    path = tmp_path / "flipped.gguf"
    shutil.copyfile(paired_tiny("llama"), path)
    whole = load(path, mode="draft")
    assert whole.paired is not None
    offset = whole.paired.pairs[3].residual_offset + 100
    whole.close()
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.write_bytes(data)
    with pytest.raises((TwobitError, RuntimeError), match="flipped.gguf") as error:
        load(path, mode="full").eval([5])
    assert "\n" not in str(error.value)


def test_devices_and_memory(paired_tiny: Callable[[str], Path], load: Callable[..., Llama], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TwobitError, match=r"no device CUDA7: this ggml has .*TWOBIT0"):
        load(paired_tiny("llama"), device="CUDA7")
    load(paired_tiny("llama"), device="TWOBIT0")
    monkeypatch.setattr(plugin, "memory_available", lambda: 1 << 16)
    assert "0.0 GiB are free" in (plugin.memory_advice(1 << 20) or "")
    with pytest.raises(MemoryError, match="mlock"):
        load(paired_tiny("llama"), mlock_residual=True)
