"""ggml's tensor types: sizes and names, and the one that gguf-py does not know yet.

gguf 0.19.0 from PyPI ends at type 41, the ggml inside llama-cpp-python has Q2_0 (42: blocks of 64, 18 bytes). Importing this
module adds it to gguf's tables, so that `gguf.GGUFReader` lists our files in this process. A gguf-py on its own lists files whose
base is Q2_K or IQ2_*, and raises "42 is not a valid GGMLQuantizationType" on those with a Q2_0 base until it knows the type.
"""

from __future__ import annotations

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

F32, F16, Q8_0, Q2_K, Q6_K, I8, BF16 = 0, 1, 8, 10, 14, 24, 30
IQ2_XXS, IQ2_XS, IQ2_S = 16, 17, 22
Q2_0 = 42


def _register(value: int, name: str, block: int, nbytes: int) -> None:
    """Adds a member to gguf's enumeration, which Python's enum offers no public way to do."""
    if value in GGMLQuantizationType._value2member_map_:
        return
    member = int.__new__(GGMLQuantizationType, value)
    member._name_ = name
    member._value_ = value
    GGMLQuantizationType._member_map_[name] = member
    GGMLQuantizationType._value2member_map_[value] = member
    GGMLQuantizationType._member_names_.append(name)
    GGML_QUANT_SIZES[member] = (block, nbytes)


_register(Q2_0, "Q2_0", 64, 18)

_SIZES: dict[int, tuple[int, int]] = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
_NAMES: dict[int, str] = {int(kind): kind.name for kind in GGML_QUANT_SIZES}


def known(kind: int) -> bool:
    return kind in _SIZES


def name(kind: int) -> str:
    """llama.cpp's name of the type: "Q2_K"."""
    return _NAMES.get(kind, f"type {kind}")


def block(kind: int) -> int:
    """Weights in a block; a row is a whole number of blocks."""
    return _SIZES[kind][0]


def nbytes(kind: int, weights: int) -> int:
    """Bytes of so many weights, a whole number of blocks."""
    weights_in_block, bytes_in_block = _SIZES[kind]
    return weights // weights_in_block * bytes_in_block


def bpw(kind: int) -> float:
    """Bits a weight."""
    weights_in_block, bytes_in_block = _SIZES[kind]
    return 8 * bytes_in_block / weights_in_block
