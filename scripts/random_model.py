"""Writes models of random weights as GGUF, tensor by tensor, with a byte-level BPE vocabulary: any size, no download.

The scales are such that the text neither repeats its last token nor is uniform, so that a wrong matmul changes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

ARCHITECTURES = ("llama", "qwen2", "gemma2", "gemma3", "qwen3moe")


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder; every one of n_embd, n_ff, n_head · head_dim is the number of columns of some matrix."""

    n_embd: int = 256
    n_ff: int = 512  # of one expert, where there are experts
    n_layer: int = 2
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 64
    n_vocab: int = 320
    n_ctx: int = 2048
    n_expert: int = 0
    n_expert_used: int = 0
    tied: bool = False  # no output.weight


Tensor = tuple[str, tuple[int, ...], float, float]  # name, (…, rows, columns), mean, standard deviation


def tensors(arch: str, shape: Shape) -> Iterator[Tensor]:
    """The tensors llama.cpp wants of this architecture. Norms have mean 1; of the output norm see write()."""
    e, ff, q, kv = shape.n_embd, shape.n_ff, shape.n_head * shape.head_dim, shape.n_head_kv * shape.head_dim

    def matrix(name: str, *dims: int) -> Tensor:
        return f"{name}.weight", dims, 0.0, dims[-1] ** -0.5

    def vector(name: str, n: int, mean: float) -> Tensor:
        return name, (n,), mean, 0.1

    yield "token_embd.weight", (shape.n_vocab, e), 0.0, 3 * e**-0.5
    for i in range(shape.n_layer):
        block = f"blk.{i}."
        yield vector(block + "attn_norm.weight", e, 1)
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            yield matrix(block + f"attn_{name}", rows, e)
            if arch == "qwen2":
                yield vector(block + f"attn_{name}.bias", rows, 0)
        yield matrix(block + "attn_output", e, q)
        if arch in ("gemma3", "qwen3moe"):
            yield vector(block + "attn_q_norm.weight", shape.head_dim, 1)
            yield vector(block + "attn_k_norm.weight", shape.head_dim, 1)
        if arch in ("gemma2", "gemma3"):
            yield vector(block + "post_attention_norm.weight", e, 1)
            yield vector(block + "post_ffw_norm.weight", e, 1)
        yield vector(block + "ffn_norm.weight", e, 1)
        if shape.n_expert:
            yield matrix(block + "ffn_gate_inp", shape.n_expert, e)
            yield matrix(block + "ffn_gate_exps", shape.n_expert, ff, e)
            yield matrix(block + "ffn_up_exps", shape.n_expert, ff, e)
            yield matrix(block + "ffn_down_exps", shape.n_expert, e, ff)
        else:
            yield matrix(block + "ffn_gate", ff, e)
            yield matrix(block + "ffn_up", ff, e)
            yield matrix(block + "ffn_down", e, ff)
    yield vector("output_norm.weight", e, 1)
    if not shape.tied:
        yield "output.weight", (shape.n_vocab, e), 0.0, 3 * e**-0.5


def write(path: Path, arch: str, shape: Shape, seed: int = 0) -> None:
    """Writes matrices as f16, vectors and the experts' router as f32."""
    if arch not in ARCHITECTURES:
        raise ValueError(f"{arch}: not one of {', '.join(ARCHITECTURES)}")
    writer = gguf.GGUFWriter(path, arch)
    _add_keys(writer, arch, shape)
    _add_vocabulary(writer, shape.n_vocab)
    plan = [(tensor, np.float16 if _is_matrix(tensor) else np.float32) for tensor in tensors(arch, shape)]
    for (name, dims, _, _), dtype in plan:
        writer.add_tensor_info(name, dims, np.dtype(dtype), int(np.prod(dims)) * np.dtype(dtype).itemsize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    random = np.random.default_rng(seed)
    for (name, dims, mean, deviation), dtype in plan:
        values = random.standard_normal(dims, dtype=np.float32)
        values *= deviation
        values += mean
        if name == "output_norm.weight":  # random signs: or a tied output would answer each token with itself
            values *= random.choice(np.array([-1, 1], np.float32), dims)
        writer.write_tensor_data(values.astype(dtype))
    writer.close()


def _is_matrix(tensor: Tensor) -> bool:
    return len(tensor[1]) > 1 and "ffn_gate_inp" not in tensor[0]


def _add_keys(writer: gguf.GGUFWriter, arch: str, shape: Shape) -> None:
    writer.add_name(f"random {arch}")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_context_length(shape.n_ctx)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layer)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    if arch in ("gemma2", "gemma3"):
        writer.add_sliding_window(512)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(5.0)  # low: or random scores would not come near it
        writer.add_final_logit_softcapping(30.0)
    if shape.n_expert:
        writer.add_expert_count(shape.n_expert)
        writer.add_expert_used_count(shape.n_expert_used)
        writer.add_expert_feed_forward_length(shape.n_ff)


def _add_vocabulary(writer: gguf.GGUFWriter, n_vocab: int) -> None:
    """GPT-2's 256 byte tokens, some merges, two control tokens, and words that only generation reaches."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    merges = ["t h", "th e", "i n", "e r", "a n", "o n"]
    tokens = [letters[byte] for byte in range(256)] + [merge.replace(" ", "") for merge in merges] + ["<|bos|>", "<|eos|>"]
    bos, eos = len(tokens) - 2, len(tokens) - 1
    if n_vocab < len(tokens):
        raise ValueError(f"a vocabulary of {n_vocab} tokens: {len(tokens)} are the fewest")
    tokens += [f"\u0120w{i}" for i in range(n_vocab - len(tokens))]
    types = [gguf.TokenType.NORMAL] * n_vocab
    types[bos] = types[eos] = gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(bos)
    writer.add_eos_token_id(eos)
    writer.add_add_bos_token(True)
