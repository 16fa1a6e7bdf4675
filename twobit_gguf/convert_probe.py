"""Asks the stock llama.cpp whether it would load a GGUF, from the header alone: `refusal(path)` is None, or its reason.

It runs in a process of its own, because a file that llama.cpp does not expect can end in one of its asserts:

    python -m twobit_gguf.convert_probe FILE
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

_REASON = "error loading model: "
_REFUSED = 3  # exit status


def refusal(path: Path) -> str | None:
    """Why llama.cpp refuses to load the file; None if it takes it. Tensor data is not read, so it may be missing still."""
    env = {k: v for k, v in os.environ.items() if k != "GGML_BACKEND_PATH"}  # stock llama.cpp, without our plugin
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).resolve().parent.parent), env.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "twobit_gguf.convert_probe", str(path)]
    result = subprocess.run(command, env=env, capture_output=True)
    if result.returncode == 0:
        return None
    if result.returncode == _REFUSED:
        return result.stdout.decode("utf-8", "replace").strip() or "no reason given"
    lines = result.stderr.decode("utf-8", "replace").strip().splitlines() or ["no message"]
    asserts = [line for line in lines if "GGML_ASSERT" in line]
    return f"it crashed ({(asserts or lines[-1:])[0].strip()})"


def main(argv: list[str]) -> int:
    import llama_cpp

    lines: list[str] = []

    @llama_cpp.llama_log_callback
    def log(level: int, text: bytes, data: ctypes.c_void_p) -> None:
        lines.append(text.decode("utf-8", "replace"))

    llama_cpp.llama_log_set(log, ctypes.c_void_p(0))
    params = llama_cpp.llama_model_default_params()
    params.no_alloc = True  # sizes and names of all tensors are checked, no data is read
    params.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE  # no mmap: there is nothing to map
    params.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(os.fsencode(argv[0]), params)
    if model:
        llama_cpp.llama_model_free(model)
        return 0
    found = [line[line.index(_REASON) + len(_REASON) :] for line in lines if _REASON in line]
    print((found or lines or ["no reason given"])[-1].strip())
    return _REFUSED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
