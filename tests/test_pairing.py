"""How the plugin finds residuals by itself, and what it does with files that are not sound: never a 2-bit run in silence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import low_level
import numpy as np
import pytest
from conftest import convert

from twobit_gguf import format, plugin

TOKENS = [5, 9, 17, 3, 250, 44]


@pytest.fixture(autouse=True)
def loaded() -> Iterator[None]:
    plugin.load()
    plugin.reset_counters()
    yield
    assert plugin.counters().pairs_alive == 0


def damaged(path: Path, offset: int, out: Path) -> Path:
    """A copy with one bit flipped."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    out.write_bytes(data)
    return out


def decode_code(model: low_level.Model) -> int:
    """What llama_decode returns for one token."""
    api = low_level.api
    batch = api.llama_batch_get_one((api.llama_token * 1)(TOKENS[0]), 1)
    return int(api.llama_decode(model.context, batch))


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("device", ["TWOBIT0", None])
@pytest.mark.parametrize("part", ["base", "residual"])
def test_flipped_bit(
    part: str, device: str | None, mmap: bool, paired_tiny: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = paired_tiny("llama")
    pair = format.open_paired(path).pairs[3]
    offset = pair.base_offset + 100 if part == "base" else pair.residual_offset + 1000
    broken = damaged(path, offset, tmp_path / "broken.gguf")
    with low_level.Model(broken, device, mmap=mmap) as model:
        assert decode_code(model) < 0
    lines = [line for line in capfd.readouterr().err.splitlines() if "twobit: error:" in line]  # llama.cpp may have left dots before it
    assert lines and all("broken.gguf" in line and pair.name in line for line in lines)
    assert any("checksum" in line for line in lines)


def test_lost_tail_is_said(paired_tiny: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = paired_tiny("llama")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(path.read_bytes()[: format.open_paired(path).trailer.main_size])
    with low_level.Model(cut, "TWOBIT0") as model:
        model.logits(TOKENS)
        assert plugin.counters().matmuls_paired == 0
    err = capfd.readouterr().err
    assert "cut.gguf: has lost its residual" in err
    assert "runs as a plain 2-bit model" in err


def test_residual_in_its_own_file(tiny_gguf: Callable[[str], Path], paired_tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Found beside the model by the name in its header; the same logits as from one file."""
    own = tmp_path / "own.gguf"
    convert(tiny_gguf("llama"), own, "--residual-file", str(tmp_path / "own.residual"))
    with low_level.Model(own, "TWOBIT0") as model, low_level.Model(paired_tiny("llama"), "TWOBIT0") as other:
        assert np.array_equal(model.logits(TOKENS), other.logits(TOKENS))


def test_residual_of_another_model(tiny_gguf: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("llama", "qwen2"):
        convert(tiny_gguf(name), tmp_path / f"{name}.gguf", "--residual-file", str(tmp_path / f"{name}.residual"))
    (tmp_path / "llama.residual").write_bytes((tmp_path / "qwen2.residual").read_bytes())
    with low_level.Model(tmp_path / "llama.gguf", "TWOBIT0") as model:
        model.logits(TOKENS)
        assert plugin.counters().matmuls_paired == 0
    err = capfd.readouterr().err
    assert "is the residual of another model" in err and "runs as a plain 2-bit model" in err


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_models(order: tuple[int, int], paired_tiny: Callable[[str], Path]) -> None:
    """Used in turn and freed in any order each computes with its own residuals; so does a second load."""
    paths = [paired_tiny("llama"), paired_tiny("qwen2")]
    alone = []
    for path in paths:
        with low_level.Model(path, "TWOBIT0") as model:
            alone.append(model.logits(TOKENS))
    models = [low_level.Model(path, "TWOBIT0") for path in paths]
    for _ in range(2):
        for model, expected in zip(models, alone, strict=True):
            assert np.array_equal(model.logits(TOKENS), expected)
    models[order[0]].close()
    assert np.array_equal(models[order[1]].logits(TOKENS), alone[order[1]])
    models[order[1]].close()
    with low_level.Model(paths[0], "TWOBIT0") as model:
        assert np.array_equal(model.logits(TOKENS), alone[0])
