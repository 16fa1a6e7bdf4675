"""Verify mode on the CPU is batch-invariant: logits have the same bits whatever number of tokens is decoded at once, on any threads.

As a program, for a process with an environment of its own:  python test_invariant.py MODEL OUT.npy N_TOKENS FLASH WIDTH…
writes the logits (widths, tokens, vocabulary).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import low_level
import numpy as np
import pytest
import test_kernels
import tiny_models
from conftest import convert

from twobit_gguf import plugin

Q8_0 = 8  # GGML_TYPE_Q8_0
WIDTHS = (1, 2, 7, 16, 33)


@pytest.fixture(autouse=True)
def loaded() -> Iterator[None]:
    plugin.load()
    yield
    assert plugin.counters().pairs_alive == 0


def random_tokens(n_vocab: int, n: int) -> list[int]:
    return np.random.default_rng(0).integers(3, n_vocab, n).tolist()


def logits(path: Path, n: int, widths: tuple[int, ...], device: str | None = "TWOBIT0", **options: object) -> np.ndarray:
    """(widths, tokens, vocabulary) by one context."""
    with low_level.Model(path, device, **options) as model:  # type: ignore[arg-type]
        tokens = random_tokens(model.n_vocab, n)
        return np.stack([model.logits(tokens, width) for width in widths])


def assert_all_equal(*results: np.ndarray) -> None:
    first = results[0][0]
    assert np.isfinite(first).all() and first.std() > 0.1
    for result in results:
        for one in result:
            rows = np.flatnonzero((one != first).any(axis=-1))
            assert rows.size == 0, f"tokens {rows} differ by up to {np.abs(one - first).max()}"


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_tiny_models(name: str, paired_tiny: Callable[[str], Path]) -> None:
    """Every width, one and two threads, and flash attention or not: our attention's order is the same for both."""
    path = paired_tiny(name)
    one = logits(path, 40, WIDTHS)
    two = logits(path, 40, (1, 16), n_threads=2)
    flash = logits(path, 40, WIDTHS, flash_attn=True)
    flash_two = logits(path, 40, (1, 16), n_threads=2, flash_attn=True)
    assert_all_equal(one, two, flash, flash_two)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_long_context(name: str, paired_tiny: Callable[[str], Path]) -> None:
    """Over 512 cells ggml's flash attention splits one query by threads; gemma3's sliding window of 512 leaves cells behind."""
    path = paired_tiny(name)
    one = logits(path, 600, (1, 512), flash_attn=True)
    two = logits(path, 600, (33,), flash_attn=True, n_threads=2)
    transposed = logits(path, 600, (512,))
    assert_all_equal(one, two, transposed)


def test_on_the_accelerator_device(paired_tiny: Callable[[str], Path]) -> None:
    """Layers that stay on the CPU, with llama.cpp's repacking of unpaired weights allowed."""
    path = paired_tiny("moe")
    assert_all_equal(logits(path, 40, (1, 7, 33), device=None, repack=True))


def test_quantised_cache(paired_tiny: Callable[[str], Path]) -> None:
    assert_all_equal(logits(paired_tiny("llama"), 40, (1, 7, 33), flash_attn=True, cache_type=Q8_0))


@pytest.mark.parametrize("base", ["iq2_xs", "q2_k"])
def test_bases(base: str, tiny_gguf: Callable[[str], Path], tmp_path: Path) -> None:
    path = convert(tiny_gguf("llama"), tmp_path / "paired.gguf", "--base", base)
    assert_all_equal(logits(path, 40, (1, 7, 16, 33)))


def test_softcap(tmp_path: Path) -> None:
    """gemma2: tanh between K·q and SOFT_MAX, one node with flash attention and three without; an output tied to Q8_0 embeddings."""
    source = tmp_path / "gemma2.gguf"
    tiny_models.random_model.write(source, "gemma2", tiny_models.Shape(tied=True))
    path = convert(source, tmp_path / "paired.gguf")
    ours = logits(path, 40, WIDTHS)
    assert_all_equal(ours, logits(path, 40, (1, 33), flash_attn=True))
    assert low_level.kld(in_process(tmp_path, path, 40, False, (40,), TWOBIT_INVARIANT="0")[0], ours[0]) < 0.01


def in_process(folder: Path, path: Path, n: int, flash: bool, widths: tuple[int, ...], **environment: str) -> np.ndarray:
    """logits() in a process of its own."""
    out = folder / "logits.npy"
    command = [sys.executable, __file__, str(path), str(out), str(n), str(int(flash)), *map(str, widths)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, env={**os.environ, **environment})
    assert result.returncode == 0, result.stderr[-3000:]
    return np.load(out)


@pytest.mark.parametrize("flash", [False, True])
def test_switched_off(flash: bool, paired_tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """ggml's own attention is not invariant, or these tests could not fail; ours differs from it by rounding alone."""
    path = paired_tiny("llama")
    # one query of over 512 cells is split among the threads; widths of 64 and more are tiled
    n, widths = (600, (1, 512)) if flash else (40, (1, 16))
    theirs = in_process(tmp_path, path, n, flash, widths, TWOBIT_INVARIANT="0")
    assert not np.array_equal(theirs[0], theirs[1])
    ours = in_process(tmp_path, path, n, flash, widths)
    assert np.array_equal(ours[0], ours[1])
    assert not np.array_equal(ours[0], theirs[0])
    assert low_level.kld(theirs[0], ours[0]) < 0.01


def test_every_instruction_set(paired_tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Residual, base and attention are the same on all of them; what else there is is ggml's."""
    path = paired_tiny("llama")
    results = [in_process(tmp_path, path, 20, True, (1, 20), TWOBIT_KERNEL=name) for name in ("", "avx2", "scalar")]
    assert_all_equal(*results)


def build_attention_test(folder: Path, *options: str) -> str:
    test_kernels.run("cmake", "-S", str(test_kernels.SOURCE), "-B", str(folder), *options)
    test_kernels.run("cmake", "--build", str(folder), "--target", "test_attention", "-j2")
    return str(folder / "test_attention")


def test_attention_kernels(tmp_path: Path) -> None:
    """ggml-twobit/tests/test_attention.cpp: all kernels of this machine against f64 and each other."""
    assert " 0 failed" in test_kernels.run(build_attention_test(tmp_path))


def test_attention_on_arm(tmp_path: Path) -> None:
    for program in (test_kernels.ARM_COMPILER, test_kernels.ARM_EMULATOR):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    options = ("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={test_kernels.ARM_COMPILER}")
    assert " 0 failed" in test_kernels.run(test_kernels.ARM_EMULATOR, build_attention_test(tmp_path, *options), "--quick")


if __name__ == "__main__":
    plugin.load()
    arguments = sys.argv[1:]
    result = logits(Path(arguments[0]), int(arguments[2]), tuple(map(int, arguments[4:])), flash_attn=arguments[3] == "1", n_threads=2)
    np.save(arguments[1], result)
