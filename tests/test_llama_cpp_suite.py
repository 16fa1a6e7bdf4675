"""llama-cpp-python's own test suite, out of its sdist, with our class as llama_cpp.Llama and paired files as its models."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import mamba_model
import pytest
from conftest import convert

# Some tests expect the ids and texts of Qwen3.5-0.8B, which no package carries: they say nothing about another model.
CHOICE = "not test_real_model and not (test_real_llama and not embeddings)"


def test_their_suite(llama_source_tree: Path, paired_smollm2: Path, tmp_path: Path) -> None:
    for module in ("huggingface_hub", "scipy"):
        pytest.importorskip(module)
    mamba = convert(mamba_model.write(tmp_path / "mamba.gguf"), tmp_path / "mamba-paired.gguf")
    models = {"tinyllamas/stories15M-q4_0.gguf": paired_smollm2, "mamba-130m-hf.Q2_K.gguf": mamba}
    tests = Path(__file__).parent
    for name in ("tests", "vendor"):  # not the tree itself, where their sources would hide the installed llama_cpp
        (tmp_path / name).symlink_to(llama_source_tree / name)
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "suite_plugin", "-p", "no:cacheprovider", "-q", "-rs", "tests", "-k", CHOICE],
        cwd=tmp_path, capture_output=True, text=True, timeout=900,
        env={**os.environ, "TWOBIT_SUITE_MODELS": json.dumps({name: str(path) for name, path in models.items()}),
             "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")])},
    )  # fmt: skip
    print(result.stdout[-3000:])
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed and int(passed[1]) >= 16
