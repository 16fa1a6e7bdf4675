"""A tiny random LFM2: a hybrid, whose layers are short convolutions (a state) and attention (a KV cache) in turns."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import random_model

N_EMBD, N_FF, N_LAYER, N_VOCAB = 256, 256, 4, 320
N_HEAD, HEAD_DIM, N_HEAD_KV = 4, 64, 2
L_CACHE = 3  # columns of the convolution


def write(path: Path, seed: int = 0) -> Path:
    """Writes it as GGUF: matrices f16, the rest f32. Layers 1 and 3 are attention."""
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "lfm2")
    writer.add_name("random lfm2")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_context_length(2048)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEAD)
    writer.add_head_count_kv([N_HEAD_KV * (i % 2) for i in range(N_LAYER)])
    writer.add_block_count(N_LAYER)
    writer.add_shortconv_l_cache(L_CACHE)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    random_model._add_vocabulary(writer, N_VOCAB)

    def matrix(name: str, rows: int, columns: int, scale: float = 1.0) -> None:
        writer.add_tensor(f"{name}.weight", (random.standard_normal((rows, columns)) * scale * columns**-0.5).astype(np.float16))

    def norm(name: str, n: int) -> None:
        writer.add_tensor(f"{name}.weight", (1 + 0.1 * random.standard_normal(n)).astype(np.float32))

    matrix("token_embd", N_VOCAB, N_EMBD)
    norm("token_embd_norm", N_EMBD)
    matrix("output", N_VOCAB, N_EMBD, 3.0)
    for i in range(N_LAYER):
        block = f"blk.{i}."
        norm(block + "attn_norm", N_EMBD)
        norm(block + "ffn_norm", N_EMBD)
        if i % 2:
            matrix(block + "attn_q", N_HEAD * HEAD_DIM, N_EMBD)
            matrix(block + "attn_k", N_HEAD_KV * HEAD_DIM, N_EMBD)
            matrix(block + "attn_v", N_HEAD_KV * HEAD_DIM, N_EMBD)
            matrix(block + "attn_output", N_EMBD, N_HEAD * HEAD_DIM)
            norm(block + "attn_q_norm", HEAD_DIM)
            norm(block + "attn_k_norm", HEAD_DIM)
        else:
            writer.add_tensor(block + "shortconv.conv.weight", random.standard_normal((N_EMBD, L_CACHE)).astype(np.float32))
            matrix(block + "shortconv.in_proj", 3 * N_EMBD, N_EMBD)
            matrix(block + "shortconv.out_proj", N_EMBD, N_EMBD)
        matrix(block + "ffn_gate", N_FF, N_EMBD)
        matrix(block + "ffn_up", N_FF, N_EMBD)
        matrix(block + "ffn_down", N_EMBD, N_FF)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
