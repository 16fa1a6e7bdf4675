"""What becomes of each tensor: paired (2-bit base + residual), requantised, or copied as it is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from . import format, gguf_types
from .convert_source import Source
from .errors import TwobitError
from .format_write import TensorSpec
from .gguf_file import Tensor

BASES = {
    "q2_k": gguf_types.Q2_K,
    "iq2_xxs": gguf_types.IQ2_XXS,
    "iq2_xs": gguf_types.IQ2_XS,
    "iq2_s": gguf_types.IQ2_S,
    "q2_0": gguf_types.Q2_0,
}
EMBEDDINGS = {"q8_0": gguf_types.Q8_0, "q6_k": gguf_types.Q6_K, "f16": gguf_types.F16}
RESIDUALS = {"r4": 4, "r5": 5, "r6": 6, "r8": 8}

OUTPUT, TOKEN_EMBD = "output.weight", "token_embd.weight"
_EMBEDDINGS = (TOKEN_EMBD, "per_layer_token_embd.weight")

# Weights that llama.cpp multiplies by with MUL_MAT or MUL_MAT_ID and uses for nothing else (llama-arch.cpp, LLM_TENSOR_INFOS). Left out:
# small ones (routers ffn_gate_inp, ssm_x, ssm_dt, low-rank time_mix_*), and those read through a view or by head
# (attn_k_b, attn_v_b, attn_output_a, indexers), whose product the plugin could not take for theirs.
_LAYER = r"(?:(?:enc|dec)\.)?blk\.\d+\."
_MATMULS = (
    r"(?:cross_)?attn_(?:q|k|v|o|qkv|output|gate|kv|q_a|q_b|kv_a_mqa|kv_b)",
    r"ffn_(?:gate|up|down)(?:_exps|_shexp|_chexps)?",
    r"ffn_gate_up_exps",
    r"ffn_(?:latent|routed)_(?:down|up)",
    r"ssm_(?:in|out)",
    r"shortconv\.(?:in|out)_proj",
    r"time_mix_(?:key|value|receptance|gate|output)",
    r"channel_mix_(?:key|value|receptance)",
    r"vis_(?:attn_qkv|attn_output|gate|up|down)",
)
_PAIRED = re.compile(rf"{_LAYER}(?:{'|'.join(_MATMULS)})\.weight|{re.escape(OUTPUT)}")
# by head, never paired, but large: 8 bits instead of 16
_EIGHT_BITS = re.compile(rf"{_LAYER}attn_[kv]_b\.weight")

# Architectures that share token_embd with the output and refuse a file with an output.weight (src/models/*.cpp of the pinned llama.cpp);
# others that do are found by asking llama.cpp (convert_probe.py).
TIED = frozenset({"command-r", "exaone-moe", "gemma", "gemma2", "openelm", "plm"})


class Action(Enum):
    PAIR = "pair"
    QUANTIZE = "quantize"
    COPY = "copy"


@dataclass(frozen=True)
class Step:
    """One tensor of the output, and the tensor of the source it is made from."""

    source: Tensor
    spec: TensorSpec
    action: Action

    @property
    def rows(self) -> int:
        """Rows of one matrix."""
        return self.source.dim(1)

    @property
    def matrices(self) -> int:
        return self.source.dim(2) * self.source.dim(3)


@dataclass(frozen=True)
class Options:
    base: str = "auto"
    bits: int = 6
    embedding: int = gguf_types.Q8_0


def wants_output(source: Source) -> bool:
    """Whether output and embedding share their weights, and an output of its own can be tried. Embedding models have no output."""
    return (
        OUTPUT not in source.by_name
        and TOKEN_EMBD in source.by_name
        and _pairable(source.by_name[TOKEN_EMBD])
        and source.architecture not in TIED
        and f"{source.architecture}.pooling_type" not in source.kv
    )


def make_plan(source: Source, options: Options, untie: bool) -> list[Step]:
    """The steps in the order of the source's tensors; untie: write a paired output.weight made from token_embd, too.

    Raises:
        TwobitError: no tensor can be paired, or --base does not fit the rows of one.
    """
    steps = [_step(source, tensor, options) for tensor in source.tensors]
    if untie:
        steps.append(_pair(source, source.by_name[TOKEN_EMBD], OUTPUT, options))
    if not any(step.action is Action.PAIR for step in steps):
        raise TwobitError(f"{source.path}: none of its tensors can be paired; twobit does not fit this model")
    return steps


def _step(source: Source, tensor: Tensor, options: Options) -> Step:
    # a model that uses output.weight as its embedding (codeshell) needs its rows at full quality
    is_embedding = tensor.name in _EMBEDDINGS or (tensor.name == OUTPUT and TOKEN_EMBD not in source.by_name)
    if is_embedding:
        return _requantize(tensor, options.embedding)
    if _PAIRED.fullmatch(tensor.name) and _pairable(tensor):
        return _pair(source, tensor, tensor.name, options)
    if _PAIRED.fullmatch(tensor.name) or _EIGHT_BITS.fullmatch(tensor.name):
        return _requantize(tensor, gguf_types.Q8_0)
    return _copy(tensor)


def _pairable(tensor: Tensor) -> bool:
    return (
        len(tensor.name.encode()) <= format.MAX_BASE_NAME
        and len(tensor.shape) >= 2
        and tensor.columns % format.GROUP == 0
        and tensor.dim(3) == 1
    )


def _pair(source: Source, tensor: Tensor, name: str, options: Options) -> Step:
    base = gguf_types.Q2_K if options.base == "auto" else BASES[options.base]
    if tensor.columns % gguf_types.block(base):
        if options.base != "auto":
            raise TwobitError(
                f"{source.path}: tensor {tensor.name} has rows of {tensor.columns} weights, not whole blocks of "
                f"{gguf_types.block(base)} as {options.base} needs; use --base auto or q2_0"
            )
        base = gguf_types.Q2_0
    return Step(tensor, TensorSpec(name, tensor.shape, base, options.bits), Action.PAIR)


def _requantize(tensor: Tensor, wanted: int) -> Step:
    """To the type, or to the next better one that rows of this length allow; a tensor that is no larger already stays as it is."""
    if wanted == gguf_types.Q6_K and tensor.columns % gguf_types.block(wanted):
        wanted = gguf_types.Q8_0
    if tensor.columns % gguf_types.block(wanted):
        wanted = gguf_types.F16
    if gguf_types.bpw(tensor.type) <= gguf_types.bpw(wanted):
        return _copy(tensor)
    return Step(tensor, TensorSpec(tensor.name, tensor.shape, wanted), Action.QUANTIZE)


def _copy(tensor: Tensor) -> Step:
    return Step(tensor, TensorSpec(tensor.name, tensor.shape, tensor.type), Action.COPY)
