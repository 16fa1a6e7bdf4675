"""The plugin over a device with memory of its own: a real ggml RPC server in another process stands in for a GPU.

Weights and KV cache are there, the residual is here.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from conftest import ROOT
from low_level import kld

from twobit_gguf.format import open_paired

PROMPTS = ("The capital of France is", "Once upon a time there was a")
N_PREDICT = 24
# Attention sums in another order here than there, and a last digit turns a rounding to int8 now and then: two roundings of one model
# are some thousandths apart. A residual left out costs tenths.
SAME = 0.02
NEAR_TIE = 0.1  # between the two best log-probabilities


@dataclass
class Run:
    """What rpc_worker.py gave: texts and counters of each model, logits (tokens, vocabulary) of each, and llama.cpp's log."""

    models: list[dict]
    logits: list[np.ndarray]
    pairs_alive: int
    log: str


@pytest.fixture
def work(rpc_environment: dict[str, str], rpc_server: str, tmp_path: Path) -> Callable[..., Run]:
    """work(options of twobit_gguf.Llama, …): runs the models in one process; those without `local` join the RPC server."""

    def run(*models: dict[str, Any]) -> Run:
        environment = {**rpc_environment, "TWOBIT_REPACK": "0"}  # ggml's own base kernels here as there
        models = tuple(dict(model) for model in models)
        for model in models:
            if not model.pop("local", False):
                model["rpc_servers"] = rpc_server
        logits = tmp_path / "logits.npz"
        job = json.dumps({"models": models, "prompts": PROMPTS, "n_predict": N_PREDICT, "logits": str(logits)})
        command = [sys.executable, str(ROOT / "tests/rpc_worker.py"), job]
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=600, env=environment)
        assert result.returncode == 0, result.stderr[-4000:]
        answer = json.loads(result.stdout.splitlines()[-1])
        arrays = np.load(logits)
        return Run(answer["models"], [arrays[str(i)] for i in range(len(models))], answer["pairs_alive"], result.stderr)

    return run


def same_text(reference: dict, other: dict, tie: float = NEAR_TIE) -> bool:
    """Token for token, up to a near-tie of the reference: ggml rounds differently for other batch sizes, and more so on other devices."""
    for tokens, others, gaps in zip(reference["tokens"], other["tokens"], reference["gaps"], strict=True):
        differ = [i for i, (a, b) in enumerate(zip(tokens, others, strict=False)) if a != b]
        if differ and gaps[differ[0]] > tie:
            return False
    return True


def n_pairs(path: Path) -> int:
    return len(open_paired(path).pairs)


def test_modes(work: Callable[..., Run], paired_smollm2: Path) -> None:
    """Full, draft and speculative over RPC, and full on this process' CPU; three of them share one file in one process."""
    path = str(paired_smollm2)
    run = work({"model_path": path, "mode": "full"}, {"model_path": path, "mode": "draft"}, {"model_path": path, "mode": "speculative"})
    full, draft, speculative = run.models
    local = work({"model_path": path, "mode": "full", "local": True})
    assert same_text(full, local.models[0], tie=1.0)
    assert kld(local.logits[0], run.logits[0]) < SAME < kld(local.logits[0], run.logits[1])
    assert same_text(full, speculative)
    assert not same_text(full, draft)

    pairs = n_pairs(paired_smollm2)
    assert full["counters"]["matmuls_paired"] == pairs
    assert full["counters"]["matmuls_unpaired"] == 0
    assert pairs / 3 < full["counters"]["slices"] < 2 * pairs  # q, k, v share a slice, gate and up too
    assert draft["counters"]["matmuls_paired"] == 0
    assert run.pairs_alive == 0


def test_weights_and_cache_are_there(work: Callable[..., Run], paired_smollm2: Path) -> None:
    log = work({"model_path": str(paired_smollm2), "mode": "full"}).log
    on_server = r"(RPC|TWOBIT)0\S*\s+%s buffer size =\s+([0-9.]+) MiB"
    weights = [float(size) for _, size in re.findall(on_server % "model", log)]
    cache = [float(size) for _, size in re.findall(on_server % "KV", log)]
    assert sum(weights) > 30  # 39 MB of base
    assert sum(cache) > 5
    assert not re.search(r"CPU\s+KV buffer", log)


def test_draft_is_the_stock_2_bit_model(work: Callable[..., Run], paired_smollm2: Path) -> None:
    """Bit for bit: the same file on the RPC device itself, which knows nothing of residuals."""
    draft = work({"model_path": str(paired_smollm2), "mode": "draft"})
    stock = work({"model_path": str(paired_smollm2), "mode": "draft", "device": "RPC0"})
    assert np.array_equal(draft.logits[0], stock.logits[0])
    assert draft.models[0]["texts"] == stock.models[0]["texts"]
    assert "2-bit" in stock.log  # and it says so


@pytest.mark.parametrize("n_gpu_layers", [0, 1, 15])
def test_partial_offload(work: Callable[..., Run], paired_smollm2: Path, n_gpu_layers: int) -> None:
    """Layers here and layers there: every paired matmul has its residual."""
    run = work({"model_path": str(paired_smollm2), "mode": "full", "n_gpu_layers": n_gpu_layers})
    local = work({"model_path": str(paired_smollm2), "mode": "full", "local": True})
    assert run.models[0]["counters"]["matmuls_paired"] == n_pairs(paired_smollm2)
    assert kld(local.logits[0], run.logits[0]) < SAME
    assert same_text(local.models[0], run.models[0], tie=1.0)


@pytest.mark.parametrize("name", [name for name in tiny_models.MODELS])
def test_architectures(work: Callable[..., Run], paired_tiny: Callable[[str], Path], name: str) -> None:
    path = str(paired_tiny(name))
    run = work({"model_path": path, "mode": "full"}, {"model_path": path, "mode": "draft"})
    local = work({"model_path": path, "mode": "full", "local": True})
    assert run.models[0]["counters"]["matmuls_paired"] == n_pairs(Path(path))
    same = 0.3 if name.startswith("moe") else SAME  # a random router sends a token to another expert at the slightest difference
    assert kld(local.logits[0], run.logits[0]) < same < 0.5 < kld(local.logits[0], run.logits[1])


def test_two_models(work: Callable[..., Run], paired_tiny: Callable[[str], Path]) -> None:
    """Two models, used alternately over one server, answer as each does alone."""
    options = [{"model_path": str(paired_tiny(name)), "mode": "speculative"} for name in ("llama", "llama-320")]
    both = work(*options)
    alone = [work(option).models[0]["texts"] for option in options]
    assert [model["texts"] for model in both.models] == alone
    assert alone[0] != alone[1]


def test_no_server(rpc_environment: dict[str, str], paired_tiny: Callable[[str], Path]) -> None:
    code = "import sys; from twobit_gguf import Llama; Llama(sys.argv[1], rpc_servers='127.0.0.1:1')"
    command = [sys.executable, "-c", code, str(paired_tiny("llama"))]
    result = subprocess.run(command, capture_output=True, text=True, env=rpc_environment, timeout=120)
    assert result.returncode == 1
    assert "no RPC server answers at 127.0.0.1:1" in result.stderr.splitlines()[-1]
