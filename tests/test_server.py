"""A stock llama-server, with nothing of ours but GGML_BACKEND_PATH, serves a paired file at full quality."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import free_port, wait_for_port

from twobit_gguf import Llama

PROMPTS = ("The capital of France is", "def fibonacci(n):", "Once upon a time there was a")
N_PREDICT = 32
# as twobit_gguf.Llama has them by default
SAME_AS_PYTHON = ("-ngl", "99", "-c", "512", "-b", "512", "-ub", "512", "-t", "2", "-fa", "on", "-np", "1", "--no-warmup", "-lv", "5")


@contextmanager
def server(command: list[str], environment: dict[str, str], log: Path) -> Iterator[int]:
    """A running llama-server; gives its port. Its log is complete once it has ended."""
    port = free_port()
    command = [*command, "--host", "127.0.0.1", "--port", str(port), *SAME_AS_PYTHON]
    with open(log, "w") as file:
        process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=file, stderr=file)
    try:
        wait_for_port(port, process)
        while json.loads(get(port, "/health")).get("status") != "ok":
            assert process.poll() is None, log.read_text()[-3000:]
        yield port
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def get(port: int, path: str, body: dict | None = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            return response.read()
    except urllib.error.HTTPError as error:
        return error.read()  # /health answers 503 while the model loads


def completions(port: int) -> list[str]:
    options = {"n_predict": N_PREDICT, "temperature": 0, "cache_prompt": False}
    return [json.loads(get(port, "/completion", {"prompt": prompt, **options}))["content"] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def verify_texts(paired_smollm2: Path) -> list[str]:
    """What verify mode answers in Python."""
    model = Llama(str(paired_smollm2), mode="full", n_ctx=512, n_threads=2, n_threads_batch=2, verbose=False)
    texts = [model(prompt, max_tokens=N_PREDICT, temperature=0)["choices"][0]["text"] for prompt in PROMPTS]
    model.close()
    return texts


@pytest.mark.parametrize("load", ["mmap", "none"])
def test_full_quality(
    llama_tools: Path, plugin_library: Path, paired_smollm2: Path, verify_texts: list[str], tmp_path: Path, load: str
) -> None:
    command = [str(llama_tools / "llama-server"), "-m", str(paired_smollm2), "-dev", "TWOBIT0", "--load-mode", load]
    with server(command, {"GGML_BACKEND_PATH": str(plugin_library)}, tmp_path / "log") as port:
        assert completions(port) == verify_texts
    log = (tmp_path / "log").read_text()
    assert "211 residuals" in log and "not in use" not in log


def test_draft_mode_differs(
    llama_tools: Path, plugin_library: Path, paired_smollm2: Path, verify_texts: list[str], tmp_path: Path
) -> None:
    """The comparison above would notice a residual that is left out."""
    command = [str(llama_tools / "llama-server"), "-m", str(paired_smollm2), "-dev", "TWOBIT0"]
    environment = {"GGML_BACKEND_PATH": str(plugin_library), "TWOBIT_MODE": "draft"}
    with server(command, environment, tmp_path / "log") as port:
        assert completions(port) != verify_texts


def test_twobit_exec(llama_tools: Path, paired_smollm2: Path, verify_texts: list[str], tmp_path: Path) -> None:
    """`twobit exec -- llama-server …` sets the environment up."""
    twobit = [sys.executable, "-m", "twobit_gguf.cli", "exec", "--"]
    command = [*twobit, str(llama_tools / "llama-server"), "-m", str(paired_smollm2), "-dev", "TWOBIT0"]
    with server(command, {}, tmp_path / "log") as port:
        assert completions(port) == verify_texts
