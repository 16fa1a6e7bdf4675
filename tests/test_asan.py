"""Two models in one process, as the installed plugin runs them and in a build with AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import build_llama_tools
import pytest
from conftest import ROOT

from twobit_gguf import llama_source

Result = dict  # what two_models.py prints


@pytest.fixture(scope="module")
def arguments(paired_tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two models, and two files that must be refused: a flipped bit in the residual, the first tenth of a file."""
    first, second = paired_tiny("llama"), paired_tiny("llama-320")
    folder = tmp_path_factory.mktemp("broken")
    data = bytearray(first.read_bytes())
    (folder / "cut.gguf").write_bytes(data[: len(data) // 10])
    data[-4096] ^= 1
    (folder / "flipped.gguf").write_bytes(data)
    return [str(path) for path in (first, second, folder / "flipped.gguf", folder / "cut.gguf")]


def run(arguments: list[str], environment: dict[str, str]) -> Result:
    command = [sys.executable, str(ROOT / "tests/two_models.py"), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, env={**os.environ, **environment})
    assert result.returncode == 0 and result.stdout, result.stderr[-6000:]
    return json.loads(result.stdout.splitlines()[-1])


def check(result: Result) -> None:
    """Each model has a text of its own in draft mode, and one in the other two modes, whoever else is loaded."""
    for texts in result["texts"].values():
        full, draft, speculative = texts[0:5], texts[5:10], texts[10:15]
        assert len(set(full)) == len(set(draft)) == 1
        assert set(speculative) == set(full) != set(draft)
    assert result["texts"]["first"][0] != result["texts"]["second"][0]
    assert len(result["refused"]) == 2
    assert result["pairs_alive"] == 0


@pytest.fixture(scope="module")
def plain_result(arguments: list[str]) -> Result:
    return run(arguments, {})


def test_two_models(plain_result: Result) -> None:
    check(plain_result)


@pytest.fixture(scope="module")
def sanitizer_libraries() -> list[Path]:
    """What must be in the process before anything else: AddressSanitizer, and the C++ library whose throw it wraps."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or "g++"
    libraries = []
    for name in ("libasan.so", "libstdc++.so.6"):
        path = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
        if not Path(path).is_file():
            pytest.skip(f"{compiler} has no {name}")
        libraries.append(Path(path).resolve())
    return libraries


@pytest.fixture(scope="module")
def sanitized_plugin(sanitizer_libraries: list[Path]) -> Path:
    """libggml-twobit.so with sanitizers, built in the cache; a second run compiles what changed."""
    folder = llama_source.cache_dir() / f"asan-build-{hashlib.sha256(str(ROOT).encode()).hexdigest()[:8]}"  # CMake ties it to its source
    cmake = build_llama_tools.find_tool("cmake")
    assert cmake, "cmake is missing: pip install cmake"
    for command in (
        [cmake, "-S", str(ROOT), "-B", str(folder), "-DTWOBIT_SANITIZE=ON", f"-DPython_EXECUTABLE={sys.executable}"],
        [cmake, "--build", str(folder), "--target", "ggml-twobit", "--parallel", "2"],
    ):
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert result.returncode == 0, result.stdout[-6000:]
    return folder / "ggml-twobit" / "libggml-twobit.so"


def test_two_models_with_sanitizers(
    arguments: list[str], plain_result: Result, sanitizer_libraries: list[Path], sanitized_plugin: Path, tmp_path: Path
) -> None:
    reports = f"log_path={tmp_path / 'report'}"  # llama_cpp closes stderr while it loads
    environment = {
        "LD_PRELOAD": " ".join(map(str, sanitizer_libraries)),
        "TWOBIT_LIBRARY": str(sanitized_plugin),
        "ASAN_OPTIONS": f"{reports}:detect_leaks=1:strict_string_checks=1:detect_stack_use_after_return=1",
        "LSAN_OPTIONS": "exitcode=0",  # Python itself never frees all it has: those of the plugin are looked for below
        "UBSAN_OPTIONS": f"{reports}:print_stacktrace=1",
    }
    result = None
    with contextlib.suppress(AssertionError):
        result = run(arguments, environment)
    log = "\n".join(path.read_text(errors="replace") for path in tmp_path.glob("report*"))
    assert result, log[-6000:]
    check(result)
    assert result["texts"] == plain_result["texts"]
    assert "LeakSanitizer" in log  # it did look
    leaks = [block for block in log.split("\n\n") if "ggml-twobit" in block]
    # a buffer type lives as long as the process, as all of ggml's do
    assert not [block for block in leaks if "tb_paired_buft" not in block], leaks
    assert "runtime error" not in log
