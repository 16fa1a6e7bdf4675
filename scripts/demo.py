"""make demo: SmolLM2-135M-Instruct from a Hugging Face folder to a calibrated paired GGUF, then text in three modes and a table.

What takes long is kept: the folder in the cache, the paired file in out/.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import smollm2

from twobit_gguf import _native
from twobit_gguf.machine import cpu_name

BIN = Path(sys.executable).parent
OUT = Path("out")
CALIBRATION = OUT / "SmolLM2-135M-Instruct.calib"
PAIRED = OUT / "SmolLM2-135M-Instruct.twobit.gguf"
PROMPT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWrite a Python class LRUCache with get and put, both in constant time, using an OrderedDict.<|im_end|>\n"
    "<|im_start|>assistant\n"
)
N_TOKENS = 96
RUNS = {
    "full": ["--mode", "full"],
    "draft": ["--mode", "draft"],
    "speculative": ["--mode", "speculative"],
    "speculative, always drafting": ["--mode", "speculative", "--fixed"],
}

REMARKS = """\
What this shows: one file and one context. Speculative text is the full model's, whatever the draft is worth, and the weights
a GPU would have to hold shrink to the base. Tokens per verification, always drafting, say what the draft is worth; how
much time that saves is another matter: on a CPU base and residual share one memory, and so small a base is often wrong. So
speculation drafts only where its measured costs make that pay. It pays with a base on a GPU, and the better the larger the
model is. Where the Q8 model fits into VRAM, plain llama.cpp is the right tool."""


def run(*command: str, capture: bool = False) -> str:
    """Runs a command and shows it as a user would type it."""
    shown = [Path(command[0]).name, *command[1:]]
    print(f"$ {' '.join(shlex.quote(part) if len(part) < 80 else '…' for part in shown)}", flush=True)
    result = subprocess.run(command, stdout=subprocess.PIPE if capture else None, text=True)
    if result.returncode != 0:
        sys.exit(result.returncode)
    return result.stdout or ""


def convert() -> None:
    """The paired file, calibrated, unless it is there and newer than the plugin and its source."""
    folder = smollm2.hf_folder()
    model = folder / "model.safetensors"
    if PAIRED.is_file() and PAIRED.stat().st_mtime > max(_native.library_path().stat().st_mtime, model.stat().st_mtime):
        print(f"{PAIRED} is there")
        return
    OUT.mkdir(exist_ok=True)
    # what the weights are multiplied with: without it 2 bits leave nothing that could draft. The GGUF's weights are the folder's.
    run(str(BIN / "twobit"), "calibrate", str(smollm2.gguf()), "-o", str(CALIBRATION), "--tokens", "8192", "--force")
    run(str(BIN / "twobit-convert"), str(model), str(PAIRED), "--calibration", str(CALIBRATION), "--force")
    CALIBRATION.unlink()  # 0.4 GB


def generate(file: Path, *options: str) -> dict:
    output = run(str(BIN / "twobit"), "run", str(file), "-n", str(N_TOKENS), "-c", "1024", *options, "--json", "-p", PROMPT, capture=True)
    return json.loads(output)


def main() -> None:
    start = time.perf_counter()
    convert()
    results = {name: generate(PAIRED, *options) for name, options in RUNS.items()}
    source = generate(smollm2.gguf())

    for name in ("full", "draft"):
        print(f"\n--- {name}\n{results[name]['text'].strip()}")
    same = all(result["text"] == results["full"]["text"] for result in results.values() if result["mode"] == "speculative")
    print(f"\nspeculative text is {'' if same else 'NOT '}that of full mode")

    print(f"\n{cpu_name()}, {os.cpu_count()} cores, CPU only, {N_TOKENS} tokens behind a prompt of "
          f"{results['full']['prompt_tokens']}")  # fmt: skip
    print(f"\n{'mode':<34}{'tokens/s':>9}{'tokens per verification':>25}{'VRAM, MB':>10}{'RAM, MB':>9}")
    size = {key: value / 1e6 for key, value in results["full"]["bytes"].items()}
    for name, result in results.items():
        per = f"{result['speculation']['tokens_per_verification']:.2f}" if "speculation" in result else "-" if name == "draft" else "1"
        ram = 0 if name == "draft" else size["residual"]
        print(f"{name:<34}{result['tokens_per_second']:>9.1f}{per:>25}{size['base']:>10.1f}{ram:>9.1f}")
    own = "llama.cpp itself, the Q4_1 source"
    print(f"{own:<34}{source['tokens_per_second']:>9.1f}{'1':>25}{smollm2.gguf().stat().st_size / 1e6:>10.1f}{0:>9.1f}")
    print("VRAM and RAM: the paired matrices where the base is on a GPU; the token embedding (30 MB) and the KV cache come on top.\n")
    print(REMARKS)
    print(f"\n{time.perf_counter() - start:.0f} s; the file is {PAIRED}: twobit run {PAIRED}")


if __name__ == "__main__":
    main()
