"""The paired GGUF in Python and C++: the golden file byte for byte, the reader's checks, what other GGUF readers make of the file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import make_golden
import numpy as np
import pytest
import xxhash

from twobit_gguf import convert_quantize, format, gguf_file, gguf_types
from twobit_gguf._native import check, ffi, lib
from twobit_gguf.format import Pair, PairedFile
from twobit_gguf.format_write import PairedWriter, TensorSpec

GOLDEN = Path(__file__).parent / "golden/paired.gguf"

# docs/format.md: steps in a unit, and for each Z vector its pieces (step, first bit, bits), low bits first
PACKING = {
    8: (4, [[(0, 0, 8)], [(1, 0, 8)], [(2, 0, 8)], [(3, 0, 8)]]),
    6: (4, [[(0, 0, 6), (3, 0, 2)], [(1, 0, 6), (3, 2, 2)], [(2, 0, 6), (3, 4, 2)]]),
    5: (
        8,
        [
            [(0, 0, 5), (5, 0, 3)],
            [(1, 0, 5), (7, 3, 1), (5, 3, 2)],
            [(2, 0, 5), (6, 0, 3)],
            [(3, 0, 5), (7, 4, 1), (6, 3, 2)],
            [(4, 0, 5), (7, 0, 3)],
        ],
    ),
    4: (2, [[(0, 0, 4), (1, 0, 4)]]),
}


def unpack_group(bits: int, packed: np.ndarray) -> np.ndarray:
    """(256·bits,) bytes of a group → codes (32 rows, 64 columns), written from docs/format.md alone."""
    unit, vectors = PACKING[bits]
    z = packed.reshape(16 // unit, 2, len(vectors), 16, 4)  # unit, tile, vector, row, column of the step
    codes = np.zeros((16 // unit, unit, 2, 16, 4), np.uint8)  # unit, step, tile, row, column
    for i, pieces in enumerate(vectors):
        low = 0
        for step, first, count in pieces:
            codes[:, step] |= ((z[:, :, i] >> low) & ((1 << count) - 1)) << first
            low += count
        assert low == 8
    return codes.transpose(2, 3, 0, 1, 4).reshape(32, 64)


def decode(pair: Pair, packed: np.ndarray) -> np.ndarray:
    """Packed bytes of one matrix → (rows, columns) f32, written from docs/format.md alone."""
    tiles = -(-pair.rows // 32)
    out = np.zeros((tiles * 32, pair.columns), np.float32)
    at = 0
    for tile in range(tiles):
        for column in range(0, pair.columns, 256):
            groups = min(4, (pair.columns - column) // 64)
            scales = packed[at : at + 128].view(np.int8).reshape(4, 32)
            supers = packed[at + 128 : at + 192].view("<f2").astype(np.float32)
            at += 192
            for group in range(groups):
                codes = unpack_group(pair.bits, packed[at : at + 256 * pair.bits]).astype(np.float32) - (1 << (pair.bits - 1))
                at += 256 * pair.bits
                scale = np.float32(pair.factor) * (supers * scales[group].astype(np.float32))
                first = column + 64 * group
                out[tile * 32 : tile * 32 + 32, first : first + 64] = scale[:, None] * codes
    assert at == packed.size
    return out[: pair.rows]


@pytest.fixture(scope="module")
def golden() -> PairedFile:
    return format.open_paired(GOLDEN)


def stretch(path: Path, offset: int, nbytes: int) -> np.ndarray:
    return np.frombuffer(path.read_bytes()[offset : offset + nbytes], np.uint8)


def matrices(pair: Pair, path: Path = GOLDEN) -> np.ndarray:
    """(matrices, bytes of one) of a residual."""
    return stretch(path, pair.residual_offset, pair.residual_nbytes).reshape(pair.matrices, -1)


def test_golden_is_what_the_script_writes(tmp_path: Path) -> None:
    make_golden.write(tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == GOLDEN.read_bytes()


def test_golden_pairs(golden: PairedFile) -> None:
    assert [(p.name, p.bits, p.rows, p.columns, p.matrices) for p in golden.pairs] == [
        (t.name, t.bits, t.shape[1], t.shape[0], t.shape[2] if len(t.shape) == 3 else 1)
        for t in make_golden.TENSORS
        if t.bits is not None
    ]
    assert {p.bits for p in golden.pairs} == set(format.BITS)
    format.verify(golden)


def test_decode_agrees_bit_for_bit(golden: PairedFile) -> None:
    for pair in golden.pairs:
        for packed in matrices(pair):
            native = np.empty((pair.rows, pair.columns), np.float32)
            check(
                lib().twobit_residual_decode(
                    pair.bits, pair.factor, ffi.from_buffer(packed), pair.rows, pair.columns, ffi.from_buffer("float[]", native)
                )
            )
            assert native.tobytes() == decode(pair, packed).tobytes(), pair.name


def test_encode_agrees_byte_for_byte(golden: PairedFile) -> None:
    by_name = {t.name: t for t in make_golden.TENSORS}
    for pair in golden.pairs:
        w = make_golden.weights(by_name[pair.name])
        bases = stretch(GOLDEN, pair.base_offset, pair.base_nbytes).reshape(pair.matrices, -1)
        for matrix, base, packed in zip(w, bases, matrices(pair), strict=True):
            encoded = convert_quantize.encode(pair.bits, pair.factor, matrix, pair.base_type, base)
            assert encoded.tobytes() == packed.tobytes(), pair.name


def test_residual_repairs_the_base(golden: PairedFile) -> None:
    """base + residual is the weights, up to the residual's own bits: error below a step of the coarsest scale."""
    by_name = {t.name: t for t in make_golden.TENSORS}
    for pair in golden.pairs:
        w = make_golden.weights(by_name[pair.name])
        bases = stretch(GOLDEN, pair.base_offset, pair.base_nbytes).reshape(pair.matrices, -1)
        for matrix, base, packed in zip(w, bases, matrices(pair), strict=True):
            dequantised = np.empty_like(matrix)
            check(
                lib().twobit_base_dequantize(
                    pair.base_type, ffi.from_buffer(base), pair.rows, pair.columns, ffi.from_buffer("float[]", dequantised)
                )
            )
            before = np.sqrt(np.mean((matrix - dequantised) ** 2))
            after = np.sqrt(np.mean((matrix - dequantised - decode(pair, packed)) ** 2))
            # uniform rounding with 2^bits steps over the range of a group leaves about range / 2^bits / √12
            assert after < 2.5 * before / (1 << (pair.bits - 1)), pair.name


def test_padding_rows_are_neutral(golden: PairedFile) -> None:
    for pair in golden.pairs:
        padded = Pair(**{**vars(pair), "rows": -(-pair.rows // 32) * 32})
        for packed in matrices(pair):
            assert not decode(padded, packed)[pair.rows :].any(), pair.name


@pytest.mark.parametrize("bits", format.BITS)
@pytest.mark.parametrize(("rows", "columns", "n"), [(1, 64, 1), (31, 320, 2), (32, 256, 3), (33, 896, 1), (4096, 14336, 8)])
def test_sizes_agree(bits: int, rows: int, columns: int, n: int) -> None:
    assert format.residual_nbytes(bits, rows, columns, n) == lib().twobit_residual_nbytes(bits, rows, columns, n)


@pytest.mark.parametrize(("bits", "rows", "columns"), [(7, 32, 64), (6, 0, 64), (6, 32, 0), (6, 32, 96), (6, 32, 63)])
def test_shapes_that_both_refuse(bits: int, rows: int, columns: int) -> None:
    with pytest.raises(ValueError, match="no residual"):
        format.residual_nbytes(bits, rows, columns, 1)
    assert lib().twobit_residual_nbytes(bits, rows, columns, 1) < 0


@pytest.mark.parametrize("size", [0, 1, 3, 4, 7, 8, 31, 32, 33, 63, 64, 1000])
def test_xxh64_agrees(size: int) -> None:
    data = (np.arange(size) * 131 % 251).astype(np.uint8).tobytes()
    assert lib().twobit_xxh64(data, size) == xxhash.xxh64_intdigest(data)


def test_type_sizes_agree() -> None:
    """The type table of gguf-py, with Q2_0 added, is ggml's."""
    for kind in range(64):
        if gguf_types.known(kind) and lib().twobit_base_nbytes(kind, 1, 1024) >= 0:
            assert gguf_types.nbytes(kind, 1024) == lib().twobit_base_nbytes(kind, 1, 1024), gguf_types.name(kind)
    assert gguf_types.nbytes(gguf_types.Q2_0, 64) == 18


def write_pair(path: Path, kind: int, residual: Path | None = None) -> TensorSpec:
    """A file with one pair of arbitrary bytes."""
    tensor = TensorSpec("blk.0.ffn_up.weight", (256, 32), kind, 4)
    with PairedWriter(path, {"general.architecture": gguf_file.string("llama")}, [tensor], residual) as writer:
        for sink in writer.sinks(tensor):
            assert sink is not None
            sink.write(bytes(i % 250 for i in range(sink.left)))
        writer.finish()
    return tensor


def test_residual_in_a_file_of_its_own(tmp_path: Path) -> None:
    out, residual = tmp_path / "m.gguf", tmp_path / "m.residual.gguf"
    write_pair(out, gguf_types.Q2_K, residual)
    paired = format.open_paired(out)
    format.verify(paired)
    assert (paired.path, paired.residual_path, paired.trailer.main_size) == (out, residual, 0)
    assert gguf_file.open_gguf(residual).tensors[0].name == "blk.0.ffn_up.weight.residual"
    moved = residual.rename(tmp_path / "elsewhere.gguf")
    with pytest.raises(format.MissingResidual, match=r"m\.residual\.gguf"):
        format.open_paired(out)
    format.verify(format.open_paired(out, moved))


def test_writer_leaves_nothing_behind(tmp_path: Path) -> None:
    tensor = TensorSpec("blk.0.ffn_up.weight", (256, 32), gguf_types.Q2_K, 4)
    with pytest.raises(RuntimeError, match="halfway"):
        with PairedWriter(tmp_path / "m.gguf", {}, [tensor], tmp_path / "r.gguf") as writer:
            writer.sinks(tensor)[0].write(b"x")
            raise RuntimeError("halfway")
    assert list(tmp_path.iterdir()) == []


def list_with_stock_gguf(path: Path) -> subprocess.CompletedProcess[str]:
    """gguf-py in a process that never sees our package."""
    code = "import gguf, sys; print([t.name for t in gguf.GGUFReader(sys.argv[1]).tensors])"
    return subprocess.run([sys.executable, "-I", "-c", code, str(path)], capture_output=True, text=True)


def test_stock_gguf_py_lists_files_with_a_q2_k_base(tmp_path: Path) -> None:
    write_pair(tmp_path / "m.gguf", gguf_types.Q2_K)
    result = list_with_stock_gguf(tmp_path / "m.gguf")
    assert result.stdout.strip() == "['blk.0.ffn_up.weight']", result.stderr


def test_our_gguf_py_lists_files_with_a_q2_0_base(tmp_path: Path) -> None:
    import gguf

    write_pair(tmp_path / "m.gguf", gguf_types.Q2_0)
    tensor = gguf.GGUFReader(tmp_path / "m.gguf").tensors[0]
    assert (tensor.name, tensor.tensor_type.name, tensor.n_bytes) == ("blk.0.ffn_up.weight", "Q2_0", 256 * 32 // 64 * 18)


def test_values_survive_unchanged(tmp_path: Path) -> None:
    """Every kind of value, read from a file of gguf-py's writer, is copied byte for byte."""
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "in.gguf", "llama")
    for kind in (gguf.GGUFValueType(k) for k in range(13)):
        if kind == gguf.GGUFValueType.STRING:
            writer.add_string("a.string", "ein Text — 文")
        elif kind == gguf.GGUFValueType.ARRAY:
            writer.add_array("an.array", [1, 2, 3])
            writer.add_array("strings", ["x", "", "yy"])
            writer.add_array("bools", [True, False])
            writer.add_array("floats", [0.5, -1.25])
        else:
            writer.add_key_value(f"a.{kind.name}", 1, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    read = gguf_file.open_gguf(tmp_path / "in.gguf")
    assert read.kv["strings"].get() == ["x", "", "yy"]
    assert read.kv["a.string"].get() == "ein Text — 文"
    layout = gguf_file.lay_out(read.kv, [], 32)
    assert layout.header.rstrip(b"\0") == (tmp_path / "in.gguf").read_bytes().rstrip(b"\0")
