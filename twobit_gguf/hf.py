"""Hugging Face checkpoints: checked here, turned into a GGUF by llama.cpp's own converter from the pinned source tree.

The converter runs in a process of its own and needs the extra [hf] (torch, transformers, …). It writes the source's own precision, so
nothing is lost on the way; the GGUF is temporary. Note that it may run tokenizer code that the model's folder contains.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from . import llama_source
from .errors import TwobitError

_SHARD = re.compile(r".*-\d{5}-of-(\d{5})\.safetensors")
_TOKENIZERS = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json", "sentencepiece.bpe.model",
    "*.tiktoken", "rwkv_vocab_*.txt", "tokenizer.model.v*",
)  # fmt: skip
_MAX_HEADER = 100 << 20  # bytes, safetensors' own limit
# bits of every dtype safetensors has; only the sizes matter here
_DTYPE_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "I8": 8, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
_OUTTYPES = {"F32": "f32", "BF16": "bf16", "F16": "f16"}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files are all there."""

    path: Path  # what the user named
    folder: Path
    weights: list[Path]
    outtype: str  # llama.cpp's converter's name for the weights' precision

    @property
    def nbytes(self) -> int:
        return sum(path.stat().st_size for path in self.weights)


def is_checkpoint(path: Path) -> bool:
    return path.suffix == ".safetensors" or path.is_dir()


def open_checkpoint(path: Path) -> Checkpoint:
    """path: a .safetensors file beside its config.json and tokenizer, or their folder.

    Raises:
        TwobitError: something is missing or damaged.
    """
    try:
        folder = path if path.is_dir() else path.parent
        names = sorted(os.listdir(folder))
        _check_config(folder)
        if not any(match for pattern in _TOKENIZERS for match in folder.glob(pattern)):
            raise TwobitError(f"{folder}: no tokenizer files (tokenizer.json or tokenizer.model); put the model's into the folder")
        weights = _weight_files(path, folder, names)
        dtypes: Counter[str] = Counter()
        for file in weights:
            if file.suffix == ".safetensors":
                dtypes.update(_check_safetensors(file))
    except OSError as error:
        raise TwobitError(f"{error.filename or path}: cannot be read: {error.strerror}; check the path and its permissions") from None
    outtype = _OUTTYPES.get(dtypes.most_common(1)[0][0], "auto") if dtypes else "auto"
    return Checkpoint(path, folder, weights, outtype)


def to_gguf(checkpoint: Checkpoint, beside: Path, quiet: bool) -> Path:
    """Writes the checkpoint as a GGUF, in its own precision, into the folder `beside`, which the caller removes.

    Raises:
        TwobitError: the extra [hf] is missing, or llama.cpp's converter does not take the model.
        LlamaSourceError: the pinned source tree could not be had.
    """
    missing = [name for name in ("torch", "transformers", "sentencepiece") if importlib.util.find_spec(name) is None]
    if missing:
        raise TwobitError(
            f"{checkpoint.path}: reading Hugging Face checkpoints needs {', '.join(missing)}; pip install 'twobit-gguf[hf]'"
        )
    converter = llama_source.path() / "vendor/llama.cpp/convert_hf_to_gguf.py"
    out = beside / "model.gguf"
    folder = _linked(checkpoint, beside)
    command = [sys.executable, str(converter), str(folder), "--outfile", str(out), "--outtype", checkpoint.outtype]
    env = dict(os.environ, HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", PYTHONDONTWRITEBYTECODE="1")
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env)
        try:
            _watch(process, out, checkpoint.nbytes, quiet)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode < 0:
            raise TwobitError(
                f"{checkpoint.path}: llama.cpp's converter was killed by signal {-process.returncode}; free memory and try again"
            )
        if process.returncode != 0 or not out.is_file():
            log.seek(0)
            reason = _reason(log.read().decode("utf-8", "replace"))
            raise TwobitError(f"{checkpoint.path}: llama.cpp's converter does not take this model: {reason}")
    return out


def _watch(process: subprocess.Popen[bytes], out: Path, expected: int, quiet: bool) -> None:
    """A progress bar from the size of the growing file."""
    disable = True if quiet else None  # None: only on a terminal
    with tqdm(total=expected, desc="reading", unit="B", unit_scale=True, disable=disable) as bar:
        while True:
            try:
                process.wait(timeout=0.5)
                return
            except subprocess.TimeoutExpired:
                if out.exists():
                    bar.update(min(out.stat().st_size, expected) - bar.n)


def _reason(log: str) -> str:
    """The line of the converter's log that says what went wrong."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line.split(":", 2)[-1] for line in lines if line.startswith("ERROR:")]
    raised = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception|Interrupt)\b", line)]
    return (raised[-1:] or errors[-1:] or lines[-1:] or ["it gave no reason"])[0].strip()


def _check_config(folder: Path) -> None:
    config = folder / "config.json"
    if not config.is_file():
        raise TwobitError(f"{folder}: no config.json; give a Hugging Face folder, or a .safetensors file that lies in one")
    try:
        parsed = json.loads(config.read_text("utf-8"))
    except ValueError:
        raise TwobitError(f"{config}: not valid JSON; download it again") from None
    if not isinstance(parsed, dict) or not (parsed.get("architectures") or parsed.get("model_type")):
        raise TwobitError(f"{config}: names no architecture; download it again")


def _weight_files(path: Path, folder: Path, names: list[str]) -> list[Path]:
    if path.is_file():
        shard = _SHARD.fullmatch(path.name)
        if shard is None or int(shard[1]) == 1:
            return [path]
    elif not path.is_dir():
        raise TwobitError(f"{path}: no such file; give a .safetensors file, a Hugging Face folder or a GGUF")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        wanted = _indexed(index)
    else:
        wanted = [name for name in names if name.startswith("model") and name.endswith(".safetensors")]
        wanted = wanted or [name for name in names if name.startswith("pytorch_model") and name.endswith(".bin")]
        shards = [match for match in map(_SHARD.fullmatch, wanted) if match]
        if shards and len(shards) != int(shards[0][1]):
            raise TwobitError(f"{folder}: {len(shards)} of {int(shards[0][1])} shards are there; download the missing ones")
    if not wanted:
        raise TwobitError(f"{folder}: no model*.safetensors in it; give a Hugging Face folder, a .safetensors file or a GGUF")
    missing = [name for name in wanted if not (folder / name).is_file()]
    if missing:
        raise TwobitError(f"{folder / missing[0]}: this shard is missing, model.safetensors.index.json names it; download it")
    return [folder / name for name in wanted]


def _indexed(index: Path) -> list[str]:
    try:
        weight_map: Any = json.loads(index.read_text("utf-8"))["weight_map"]
        wanted = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise TwobitError(f"{index}: not a safetensors index; download it again") from None
    for name in wanted:
        if not isinstance(name, str) or not name or "/" in name or "\\" in name or name in (".", ".."):
            raise TwobitError(f"{index}: {name!r} is not the name of a shard; download it again")
    return wanted


def _check_safetensors(path: Path) -> Counter[str]:
    """Header and size agree: u64 length, JSON of that length, tensors one behind the other up to the file's end. Bytes by dtype."""
    bad = f"{path}: {{}}; the file is cut off or damaged, download it again"
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise TwobitError(bad.format(f"its header claims {length} bytes of {size}"))
        try:
            header = json.loads(file.read(length))
            tensors = [value for key, value in header.items() if key != "__metadata__"]
            spans = sorted((*tensor["data_offsets"], tensor["dtype"], tuple(tensor["shape"])) for tensor in tensors)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise TwobitError(bad.format("its header is not one of a safetensors file")) from None
    at, by_dtype = 0, Counter[str]()
    for begin, end, dtype, shape in spans:
        weights = 1
        for n in shape:
            weights *= n
        if begin != at or end < begin or weights * _DTYPE_BITS.get(dtype, 0) != 8 * (end - begin):
            raise TwobitError(bad.format(f"a tensor of type {dtype} and shape {list(shape)} lies at {begin} to {end}"))
        at = end
        by_dtype[dtype] += end - begin
    if 8 + length + at != size:
        raise TwobitError(bad.format(f"it has {size} bytes, its header describes {8 + length + at}"))
    return by_dtype


def _linked(checkpoint: Checkpoint, beside: Path) -> Path:
    """A folder of links that holds exactly this checkpoint, under its own name (from which the converter takes the model's)."""
    folder = beside / (checkpoint.folder.resolve().name or "model")
    folder.mkdir()
    others = (".safetensors", ".safetensors.index.json", ".bin", ".gguf")
    for file in checkpoint.folder.iterdir():
        if not file.name.endswith(others) and not file.name.startswith("."):
            (folder / file.name).symlink_to(file.resolve())
    if checkpoint.path.is_file() and len(checkpoint.weights) == 1:
        (folder / "model.safetensors").symlink_to(checkpoint.path.resolve())
        return folder
    for weights in checkpoint.weights:
        (folder / weights.name).symlink_to(weights.resolve())
    index = checkpoint.folder / "model.safetensors.index.json"
    if index.is_file():
        (folder / index.name).symlink_to(index.resolve())
    return folder
