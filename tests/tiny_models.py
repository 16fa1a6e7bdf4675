"""Tiny random models, one for each kind of graph the plugin must get right."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import random_model  # noqa: E402
from random_model import Shape  # noqa: E402

MODELS: dict[str, tuple[str, Shape]] = {
    "llama": ("llama", Shape()),
    # 320 and 192 columns: multiples of 64, not of 256, so that the base is Q2_0
    "llama-320": ("llama", Shape(n_embd=320, n_ff=192, n_head=5, n_head_kv=1)),
    "qwen2": ("qwen2", Shape(n_ff=768)),  # biases behind q, k, v
    "gemma3": ("gemma3", Shape(n_embd=640, n_head=4, n_head_kv=1, head_dim=256, tied=True)),  # 270M's shapes, sliding window
    "moe": ("qwen3moe", Shape(n_ff=256, n_expert=8, n_expert_used=2)),  # MUL_MAT_ID
    "moe-192": ("qwen3moe", Shape(n_embd=320, n_head=5, n_head_kv=1, n_ff=192, n_expert=4, n_expert_used=2)),
}


def write(path: Path, name: str, seed: int = 0, **changes: object) -> Path:
    """Writes the model `name` of MODELS as an f16 GGUF; `changes` replaces fields of its Shape."""
    arch, shape = MODELS[name]
    random_model.write(path, arch, Shape(**{**vars(shape), **changes}), seed)  # type: ignore[arg-type]
    return path
