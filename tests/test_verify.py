"""What the plugin computes: draft mode is the stock 2-bit model, verify mode is base + residual."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import dense_twin
import low_level
import numpy as np
import pytest
import tiny_models
from conftest import ROOT

from twobit_gguf import format, plugin

ACCEL = None  # the CPU's own layers, which our ACCEL device joins by itself
DEVICES = ["TWOBIT0", ACCEL]
PROSE = (ROOT / "docs/format.md").read_bytes()


@pytest.fixture(autouse=True)
def loaded() -> Iterator[None]:
    plugin.load()
    plugin.reset_counters()
    yield
    assert plugin.counters().pairs_alive == 0


@pytest.fixture
def stock(tmp_path: Path) -> Callable[..., np.ndarray]:
    """stock(kind, model, tokens, width): logits by llama.cpp in a process without the plugin (stock_worker.py)."""

    def run(kind: str, model: Path, tokens: list[int], width: int | None = None) -> np.ndarray:
        np.save(tmp_path / "tokens.npy", np.array(tokens))
        out = tmp_path / "logits.npy"
        command = [sys.executable, str(ROOT / "tests/stock_worker.py"), kind, str(model), str(tmp_path / "tokens.npy"), str(out)]
        environment = {k: v for k, v in os.environ.items() if k not in ("GGML_BACKEND_PATH", "TWOBIT_MODEL")}
        result = subprocess.run([*command, str(width or len(tokens))], capture_output=True, text=True, env=environment, timeout=600)
        assert result.returncode == 0, result.stderr[-3000:]
        return np.load(out)

    return run


def random_tokens(n_vocab: int, n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, n_vocab, n).tolist()


def text_tokens(model: low_level.Model, n: int) -> list[int]:
    api = low_level.api
    ids = (api.llama_token * len(PROSE))()
    count = api.llama_tokenize(api.llama_model_get_vocab(model.model), PROSE, len(PROSE), ids, len(PROSE), True, False)
    assert count >= n
    return list(ids[:n])


@pytest.mark.parametrize("name", tiny_models.MODELS)
@pytest.mark.parametrize("device", DEVICES)
def test_tiny_models(
    name: str,
    device: str | None,
    paired_tiny: Callable[[str], Path],
    stock: Callable[..., np.ndarray],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """llama, qwen2, gemma3 and experts: every paired matmul is counted, full equals the oracle, draft the stock model bit for bit."""
    monkeypatch.setenv("TWOBIT_REPACK", "0")  # the stock model's own arithmetic
    path = paired_tiny(name)
    pairs = len(format.open_paired(path).pairs)
    with low_level.Model(path, device, repack=False) as model:
        tokens = random_tokens(model.n_vocab, 24)
        full = model.logits(tokens)
        counters = plugin.counters()
        assert (counters.matmuls_paired, counters.matmuls_unpaired, counters.pairs_alive) == (pairs, 0, pairs)
        for width in (1, 7):
            assert low_level.kld(full, model.logits(tokens, width)) < 1e-3
        with plugin.mode("draft"):
            draft = model.logits(tokens)
        assert plugin.counters().matmuls_unpaired == pairs
    assert np.array_equal(draft, stock("plain", path, tokens))
    oracle = stock("oracle", path, tokens)
    # a last-digit difference may turn a rounding to int8, which random weights amplify; a residual left out costs 1e-2 and more
    assert low_level.kld(oracle, full) < 0.02 < 0.1 < low_level.kld(oracle, draft)


@pytest.mark.parametrize("mmap", [True, False])
def test_smollm2_is_base_plus_residual(mmap: bool, paired_smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Verify mode against an f32 model of dequantised base + residual, for 1 to 512 tokens at once."""
    twin = tmp_path_factory.getbasetemp() / "smollm2-twin.gguf"
    if not twin.is_file():
        dense_twin.write(paired_smollm2, twin)
    with low_level.Model(twin) as dense, low_level.Model(paired_smollm2, "TWOBIT0", mmap=mmap) as model:
        tokens = text_tokens(model, 512)
        reference = dense.logits(tokens)
        for width, n in ((1, 64), (2, 64), (7, 70), (16, 128), (33, 165), (512, 512)):
            assert low_level.kld(reference[:n], model.logits(tokens[:n], width)) < 0.005, f"{width} tokens at once"


def test_smollm2_oracle(paired_smollm2: Path, stock: Callable[..., np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOBIT_REPACK", "0")
    with low_level.Model(paired_smollm2, "TWOBIT0") as model:
        tokens = text_tokens(model, 48)
        full = model.logits(tokens, 16)
        with plugin.mode("draft"):
            draft = model.logits(tokens, 16)
    oracle = stock("oracle", paired_smollm2, tokens, 16)
    # A last digit turns a rounding to int8 here and there, and with it others: what remains over 30 layers is the distance of two
    # roundings of the same model. (The tiny models are compared to the last digits.) A residual left out costs a hundred times as much.
    assert low_level.kld(oracle, full) < 0.02 < 1 < low_level.kld(oracle, draft)
    assert np.array_equal(draft, stock("plain", paired_smollm2, tokens, 16))


@pytest.mark.parametrize("name", ["llama", "llama-320", "moe-192"])
def test_repacked_base(name: str, paired_tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The base as the CPU computes it by default is the stock one, up to the rounding of activations (in runs of 32, Q2_K's of 256)."""
    results = {}
    for repack in ("0", "1"):
        monkeypatch.setenv("TWOBIT_REPACK", repack)
        with low_level.Model(paired_tiny(name), "TWOBIT0") as model, plugin.mode("draft"):
            results[repack] = model.logits(random_tokens(model.n_vocab, 24))
    assert low_level.kld(results["0"], results["1"]) < 0.02


def test_graph_stays_whole(paired_tiny: Callable[[str], Path]) -> None:
    """One token on TWOBIT0 is one graph: the scheduler must not cut it at every layer."""
    with low_level.Model(paired_tiny("llama"), "TWOBIT0") as model:
        model.logits([1])
        assert plugin.counters().graphs_full == 1
