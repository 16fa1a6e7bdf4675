"""The codec of libggml-twobit: quality, the packed layout, every refusal, and the product against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from numpy.typing import NDArray

from twobit_gguf import _native

ffi, lib = _native.ffi, _native.lib()

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

Q8_0, Q2_K, IQ2_XXS, IQ2_XS, IQ2_S, Q2_0 = 8, 10, 16, 17, 22, 42
BITS = (4, 5, 6, 8)


def floats(a: F32 | None):
    return ffi.NULL if a is None else ffi.cast("float *", a.ctypes.data)


def void(a: U8 | None):
    return ffi.NULL if a is None else ffi.cast("void *", a.ctypes.data)


def last_error() -> str:
    return ffi.string(lib.twobit_last_error()).decode()


def kernel_names() -> list[str]:
    names = []
    while (name := lib.twobit_kernel_name(len(names))) != ffi.NULL:
        names.append(ffi.string(name).decode())
    return names


def quantize(type_: int, w: F32, importance: F32 | None = None) -> U8:
    nbytes = lib.twobit_base_nbytes(type_, *w.shape)
    assert nbytes > 0, last_error()
    out = np.zeros(nbytes, np.uint8)
    assert lib.twobit_base_quantize(type_, floats(w), *w.shape, floats(importance), void(out)) == nbytes, last_error()
    return out


def dequantize(type_: int, data: U8, shape: tuple[int, int]) -> F32:
    out = np.zeros(shape, np.float32)
    assert lib.twobit_base_dequantize(type_, void(data), *shape, floats(out)) == 0, last_error()
    return out


def encode(bits: int, w: F32, type_: int = 0, base: U8 | None = None, importance: F32 | None = None) -> tuple[float, U8]:
    """(factor, packed residual)."""
    factor = lib.twobit_residual_factor(bits, lib.twobit_residual_max_abs(floats(w), type_, void(base), *w.shape))
    out = np.zeros(lib.twobit_residual_nbytes(bits, *w.shape, 1), np.uint8)
    assert lib.twobit_residual_encode(bits, factor, floats(w), type_, void(base), *w.shape, floats(importance), void(out)) == 0, (
        last_error()
    )
    return factor, out


def decode(bits: int, factor: float, packed: U8, shape: tuple[int, int]) -> F32:
    out = np.full(shape, np.nan, np.float32)
    assert lib.twobit_residual_decode(bits, factor, void(packed), *shape, floats(out)) == 0, last_error()
    return out


def multiply(bits: int, factor: float, packed: U8, rows: int, x: F32, y: F32, kernel: str | None = None) -> F32:
    out = y.copy()
    name = ffi.NULL if kernel is None else ffi.new("char[]", kernel.encode())
    result = lib.twobit_residual_mul(bits, factor, void(packed), rows, x.shape[1], floats(x), x.shape[0], floats(out), name)
    assert result == 0, last_error()
    return out


@pytest.fixture(scope="module")
def gaussian() -> F32:
    return (np.random.default_rng(0).standard_normal((128, 2048)) * 0.02).astype(np.float32)


# ---- quality --------------------------------------------------------------------------------------------------------

# mean square error of base + residual relative to Q8_0's, Gaussian weights, measured in a study before this code was written
QUALITY = {
    Q2_K: (15.6, 3.9, 0.99, 0.065),
    IQ2_S: (16.5, 4.2, 1.07, 0.070),
    IQ2_XS: (26.0, 6.7, 1.70, 0.112),
    IQ2_XXS: (34.0, 8.8, 2.22, 0.145),
}


@pytest.mark.parametrize("base_type", QUALITY)
def test_weight_error(gaussian: F32, base_type: int) -> None:
    w = gaussian if base_type == Q2_K else gaussian[:32]  # ggml's IQ2 search is slow
    q8_error = np.mean((w - dequantize(Q8_0, quantize(Q8_0, w), w.shape)) ** 2)
    base = quantize(base_type, w)
    b = dequantize(base_type, base, w.shape)
    for bits, expected in zip(BITS, QUALITY[base_type], strict=True):
        r = decode(bits, *encode(bits, w, base_type, base), w.shape)
        error = np.mean((w - b - r) ** 2) / q8_error
        print(f"type {base_type} R{bits}: {error:.4f} of Q8_0's error")
        assert error <= 1.05 * expected


def test_no_importance_means_equal_importance(gaussian: F32) -> None:
    """The table above holds for equal importance; without any, ggml's own Q2_K would leave a fifth more (codec_base.cpp)."""
    ones = np.ones(gaussian.shape[1], np.float32)
    assert np.array_equal(quantize(Q2_K, gaussian), quantize(Q2_K, gaussian, ones))


def test_q2_0_scale_is_searched(gaussian: F32) -> None:
    def error(q: F32) -> float:
        return float(np.mean((gaussian - q) ** 2) / np.var(gaussian))

    blocks = gaussian.reshape(-1, 64)
    d = np.abs(blocks).max(1, keepdims=True)  # what ggml's own quantizer does
    ggml = error((np.clip(np.round(blocks / d), -1, 2) * d).reshape(gaussian.shape))
    ours = error(dequantize(Q2_0, quantize(Q2_0, gaussian), gaussian.shape))
    print(f"Q2_0: {ours:.3f} of the variance, ggml's {ggml:.3f}")
    assert ours < 0.13 < ggml
    assert np.array_equal(
        dequantize(Q2_0, quantize(Q2_0, -gaussian), gaussian.shape), -dequantize(Q2_0, quantize(Q2_0, gaussian), gaussian.shape)
    )


def test_importance_moves_the_error(gaussian: F32) -> None:
    importance = np.ones(gaussian.shape[1], np.float32)
    importance[::2] = 100
    for type_, bits in ((Q2_0, 4), (Q2_K, 5)):
        base = quantize(type_, gaussian, importance)
        errors = []
        for imp in (None, importance):
            r = decode(bits, *encode(bits, gaussian, type_, base, imp), gaussian.shape)
            errors.append(np.mean((gaussian - dequantize(type_, base, gaussian.shape) - r)[:, ::2] ** 2))
        assert errors[1] < errors[0]


@pytest.mark.parametrize("bits", BITS)
def test_every_magnitude_is_coded_alike(gaussian: F32, bits: int) -> None:
    w = np.ascontiguousarray(gaussian[:32, :512])
    reference = decode(bits, *encode(bits, w), w.shape)
    for exponent in (-60, -20, 20, 60):
        scaled = np.ldexp(w, exponent)
        assert np.array_equal(np.ldexp(decode(bits, *encode(bits, scaled), w.shape), -exponent), reference)


@pytest.mark.parametrize("bits", BITS)
def test_rows_of_very_different_magnitude(bits: int) -> None:
    w = np.random.default_rng(1).standard_normal((64, 256)).astype(np.float32) * np.geomspace(1e-6, 1, 64, dtype=np.float32)[:, None]
    relative = np.linalg.norm(w - decode(bits, *encode(bits, w), w.shape), axis=1) / np.linalg.norm(w, axis=1)
    assert relative.max() < 1.5 * np.median(relative)


# ---- layout ---------------------------------------------------------------------------------------------------------


def scalar_decode(bits: int, factor: float, packed: U8, rows: int, cols: int) -> F32:
    """docs/format.md read once more, in Python."""
    tables = {  # step: (vector, bit of the vector, bit of the code, number of bits) …
        8: (4, 4, {j: [(j, 0, 0, 8)] for j in range(4)}),
        6: (4, 3, {0: [(0, 0, 0, 6)], 1: [(1, 0, 0, 6)], 2: [(2, 0, 0, 6)], 3: [(0, 6, 0, 2), (1, 6, 2, 2), (2, 6, 4, 2)]}),
        5: (8, 5, {**{j: [(j, 0, 0, 5)] for j in range(5)}, 5: [(0, 5, 0, 3), (1, 6, 3, 2)], 6: [(2, 5, 0, 3), (3, 6, 3, 2)],
                   7: [(4, 5, 0, 3), (1, 5, 3, 1), (3, 5, 4, 1)]}),
        4: (2, 1, {0: [(0, 0, 0, 4)], 1: [(0, 4, 0, 4)]}),
    }  # fmt: skip
    unit_steps, unit_vectors, table = tables[bits]
    out = np.zeros((-(-rows // 32) * 32, cols), np.float32)
    at = 0
    for row in range(0, len(out), 32):
        for col in range(0, cols, 256):
            code_s = packed[at : at + 128].view(np.int8).reshape(4, 32)
            supers = packed[at + 128 : at + 192].view(np.float16).astype(np.float32)
            at += 192
            for group in range(min(4, (cols - col) // 64)):
                for unit in range(16 // unit_steps):
                    for tile in range(2):
                        vectors = packed[at : at + 64 * unit_vectors].reshape(unit_vectors, 16, 4).astype(int)
                        at += 64 * unit_vectors
                        for step, fields in table.items():
                            q = sum((vectors[v] >> bit & (1 << n) - 1) << lo for v, bit, lo, n in fields)
                            r0, c0 = row + 16 * tile, col + 64 * group + 4 * (unit * unit_steps + step)
                            scale = supers[16 * tile :][:16] * code_s[group, 16 * tile :][:16]
                            out[r0 : r0 + 16, c0 : c0 + 4] = factor * scale[:, None] * (q - 2 ** (bits - 1))
    assert at == len(packed)
    return out[:rows]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", [(1, 64), (31, 128), (33, 320), (49, 576), (64, 896)])
def test_layout(bits: int, shape: tuple[int, int]) -> None:
    w = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    factor, packed = encode(bits, w)
    decoded = decode(bits, factor, packed, shape)
    assert np.array_equal(decoded, scalar_decode(bits, factor, packed, *shape))
    assert np.abs(w - decoded).max() < 1.1 * 2**-bits * np.abs(w).max() * 2


@pytest.mark.parametrize("bits", BITS)
def test_chunks_of_rows_give_the_same_bytes(bits: int) -> None:
    w = np.random.default_rng(3).standard_normal((100, 192)).astype(np.float32)
    factor, whole = encode(bits, w)
    parts = []
    for row in range(0, 100, 32):
        chunk = np.ascontiguousarray(w[row : row + 32])
        out = np.zeros(lib.twobit_residual_nbytes(bits, *chunk.shape, 1), np.uint8)
        assert lib.twobit_residual_encode(bits, factor, floats(chunk), 0, ffi.NULL, *chunk.shape, ffi.NULL, void(out)) == 0
        parts.append(out)
    assert np.array_equal(np.concatenate(parts), whole)


def test_zeros() -> None:
    for bits in BITS:
        factor, packed = encode(bits, np.zeros((33, 64), np.float32))
        assert factor == 1
        assert not decode(bits, factor, packed, (33, 64)).any()


# ---- product --------------------------------------------------------------------------------------------------------


def reference_product(w: F32, x: F32) -> NDArray[np.float64]:
    groups = x.reshape(len(x), -1, 32)
    scale = np.abs(groups).max(2, keepdims=True) / np.float32(127)
    return (np.round(groups / scale) * scale.astype(np.float64)).reshape(x.shape) @ w.astype(np.float64).T


@pytest.mark.parametrize("kernel", kernel_names())
@pytest.mark.parametrize("bits", BITS)
def test_product(bits: int, kernel: str) -> None:
    rng = np.random.default_rng(4)
    w, x = (rng.standard_normal(s).astype(np.float32) for s in ((49, 640), (19, 640)))
    y = rng.standard_normal((19, 49)).astype(np.float32)
    factor, packed = encode(bits, w)
    result = multiply(bits, factor, packed, 49, x, y, kernel)
    expected = y + reference_product(decode(bits, factor, packed, w.shape), x)
    assert np.abs(result - expected).max() < 1e-5 * np.abs(expected).max()
    assert np.array_equal(result, multiply(bits, factor, packed, 49, x, y, "scalar"))


# ---- refusals -------------------------------------------------------------------------------------------------------


IMPOSSIBLE = [
    (7, 1, 64, 1),
    (6, 0, 64, 1),
    (6, 1, 63, 1),
    (6, 1, 0, 1),
    (6, -1, 64, 1),
    (6, 1, 64, 0),
    (6, 2**40, 64, 1),
    (8, 2**31, 2**31 - 64, 2**40),
]


@pytest.mark.parametrize("shape", IMPOSSIBLE)
def test_shapes_the_format_cannot_hold(shape: tuple[int, int, int, int]) -> None:
    assert lib.twobit_residual_nbytes(*shape) < 0
    assert last_error() and "\n" not in last_error()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite(value: float) -> None:
    w = np.ones((40, 256), np.float32)
    w[39, 200] = value
    out = np.zeros(1 << 20, np.uint8)
    assert lib.twobit_residual_encode(6, 1.0, floats(w), 0, ffi.NULL, 40, 256, ffi.NULL, void(out)) < 0
    assert "NaN or Inf in rows 32 to 39" in last_error()
    assert lib.twobit_residual_max_abs(floats(w), 0, ffi.NULL, 40, 256) < 0
    assert lib.twobit_base_quantize(Q2_K, floats(w), 40, 256, ffi.NULL, void(out)) < 0
    assert lib.twobit_base_quantize(Q2_0, floats(w), 40, 256, ffi.NULL, void(out)) < 0
    good, importance = np.ones((1, 256), np.float32), np.full(256, value, np.float32)
    assert lib.twobit_base_quantize(Q2_K, floats(good), 1, 256, floats(importance), void(out)) < 0
    assert "importance" in last_error()


def test_other_refusals() -> None:
    w, out = np.ones((1, 256), np.float32), np.zeros(1 << 20, np.uint8)
    for factor in (0.0, 0.3, -1.0, np.inf, np.nan):
        assert lib.twobit_residual_encode(6, factor, floats(w), 0, ffi.NULL, 1, 256, ffi.NULL, void(out)) < 0
        assert "power of two" in last_error()
    for type_ in (-1, 4, 5, 31, 24, 10_000):  # not a type, removed ones, an integer type
        assert lib.twobit_base_quantize(type_, floats(w), 1, 256, ffi.NULL, void(out)) < 0
        assert lib.twobit_base_dequantize(type_, void(out), 1, 256, floats(w)) < 0
        assert lib.twobit_residual_encode(6, 1.0, floats(w), type_, void(out), 1, 256, ffi.NULL, void(out)) < 0
    assert lib.twobit_base_nbytes(Q2_K, 1, 576) < 0
    assert "blocks of 256" in last_error()
    name = ffi.new("char[]", b"abacus")
    assert lib.twobit_residual_mul(6, 1.0, void(out), 1, 256, floats(w), 1, floats(w), name) < 0
    assert "abacus" in last_error()


# ---- checksum -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 3, 4, 7, 8, 31, 32, 33, 63, 64, 1000])
def test_xxh64(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()
    assert lib.twobit_xxh64(data, size) == xxhash.xxh64(data).intdigest()
