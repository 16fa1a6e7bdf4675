"""A tiny random Mamba: a model whose memory is a state and cannot go back."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import random_model

N_EMBD, N_LAYER, N_VOCAB = 256, 2, 320
D_INNER, D_STATE, D_CONV, DT_RANK = 2 * N_EMBD, 16, 4, 64


def write(path: Path, seed: int = 0) -> Path:
    """Writes it as GGUF: matrices f16, the rest f32."""
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_name("random mamba")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_context_length(2048)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(N_LAYER)
    writer.add_ssm_conv_kernel(D_CONV)
    writer.add_ssm_inner_size(D_INNER)
    writer.add_ssm_state_size(D_STATE)
    writer.add_ssm_time_step_rank(DT_RANK)
    writer.add_layer_norm_rms_eps(1e-5)
    random_model._add_vocabulary(writer, N_VOCAB)

    def matrix(name: str, rows: int, columns: int) -> None:
        writer.add_tensor(name, (random.standard_normal((rows, columns)) * columns**-0.5).astype(np.float16))

    def f32(name: str, values: np.ndarray) -> None:
        writer.add_tensor(name, values.astype(np.float32))

    matrix("token_embd.weight", N_VOCAB, N_EMBD)
    f32("output_norm.weight", 1 + 0.1 * random.standard_normal(N_EMBD))
    matrix("output.weight", N_VOCAB, N_EMBD)
    for i in range(N_LAYER):
        block = f"blk.{i}."
        f32(block + "attn_norm.weight", 1 + 0.1 * random.standard_normal(N_EMBD))
        matrix(block + "ssm_in.weight", 2 * D_INNER, N_EMBD)
        f32(block + "ssm_conv1d.weight", random.standard_normal((D_INNER, D_CONV)) * 0.5)
        f32(block + "ssm_conv1d.bias", 0.1 * random.standard_normal(D_INNER))
        matrix(block + "ssm_x.weight", DT_RANK + 2 * D_STATE, D_INNER)
        matrix(block + "ssm_dt.weight", D_INNER, DT_RANK)
        f32(block + "ssm_dt.bias", random.uniform(-4, -2, D_INNER))
        f32(block + "ssm_a", -np.tile(np.arange(1, D_STATE + 1), (D_INNER, 1)))
        f32(block + "ssm_d", np.ones(D_INNER))
        matrix(block + "ssm_out.weight", N_EMBD, D_INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
