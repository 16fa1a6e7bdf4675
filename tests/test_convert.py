"""twobit-convert on tiny models of every kind, on SmolLM2, and on Hugging Face folders where torch is installed."""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
import pytest
import tiny_models

from twobit_gguf import convert, convert_plan, convert_quantize, convert_run, format, gguf_file, gguf_types
from twobit_gguf._native import check, ffi, lib
from twobit_gguf.calibration.expand import quantize_stock
from twobit_gguf.convert import Job
from twobit_gguf.convert_plan import Options
from twobit_gguf.convert_source import Source
from twobit_gguf.errors import TwobitError
from twobit_gguf.format import PairedFile
from twobit_gguf.gguf_file import GGUFFile, Tensor

CHANGED_KEYS = {"general.file_type", "general.quantization_version"}


def run(source: Path, out: Path, **changes: object) -> PairedFile:
    """Converts in this process, then reads and verifies the result."""
    convert.convert(Job(source, out, quiet=True, **changes))  # type: ignore[arg-type]
    paired = format.open_paired(out)
    format.verify(paired)
    return paired


def data(path: Path, tensor: Tensor) -> bytes:
    return path.read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]


def f32(path: Path, tensor: Tensor) -> np.ndarray:
    """(rows of all matrices, columns)"""
    out = np.empty((tensor.n_rows, tensor.columns), np.float32)
    raw = data(path, tensor)
    check(lib().twobit_base_dequantize(tensor.type, raw, tensor.n_rows, tensor.columns, ffi.from_buffer("float[]", out)))
    return out


def reconstructed(paired: PairedFile, name: str) -> np.ndarray:
    """base + residual, (rows of all matrices, columns) f32."""
    pair = next(p for p in paired.pairs if p.name == name)
    w = f32(paired.path, paired.main.by_name[name]).reshape(pair.matrices, pair.rows, pair.columns)
    raw = paired.residual_path.read_bytes()[pair.residual_offset : pair.residual_offset + pair.residual_nbytes]
    size = len(raw) // pair.matrices
    residual = np.empty((pair.rows, pair.columns), np.float32)
    for matrix in range(pair.matrices):
        packed = raw[matrix * size : (matrix + 1) * size]
        target = ffi.from_buffer("float[]", residual)
        check(lib().twobit_residual_decode(pair.bits, pair.factor, packed, pair.rows, pair.columns, target))
        w[matrix] += residual
    return w.reshape(-1, pair.columns)


def relative_error(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.sqrt(np.mean((a - b) ** 2) / np.mean(b**2)))


def runs_in_stock_llama(path: Path) -> None:
    """llama.cpp without our plugin loads the file as a 2-bit model and its logits are numbers."""
    model = llama_cpp.Llama(str(path), n_ctx=64, n_threads=2, logits_all=True, verbose=False)
    try:
        model.eval([1, 2, 3, 4])
        assert np.isfinite(model.scores[:4]).all()
        assert model.scores[:4].std() > 0
    finally:
        model.close()


# ---- tiny models


@pytest.mark.parametrize("name", list(tiny_models.MODELS))
def test_tiny_models(name: str, tiny_gguf: Callable[[str], Path], tmp_path: Path) -> None:
    source_path = tiny_gguf(name)
    paired = run(source_path, tmp_path / "out.gguf")
    source = gguf_file.open_gguf(source_path)
    names = {pair.name for pair in paired.pairs}
    expected = {t.name for t in source.tensors if len(t.shape) > 1 and not re.search(r"token_embd|ffn_gate_inp", t.name)}
    assert names == expected | {"output.weight"}
    for pair in paired.pairs:
        assert pair.bits == 6
        assert pair.base_type == (gguf_types.Q2_K if pair.columns % 256 == 0 else gguf_types.Q2_0), pair.name
        origin = source.by_name.get(pair.name) or source.by_name["token_embd.weight"]
        original = f32(source_path, origin)
        assert relative_error(f32(paired.path, paired.main.by_name[pair.name]), original) > 0.1
        assert relative_error(reconstructed(paired, pair.name), original) < 0.012, pair.name
    check_unpaired(source_path, source, paired, names)
    runs_in_stock_llama(paired.path)


def check_unpaired(source_path: Path, source: GGUFFile, paired: PairedFile, names: set[str]) -> None:
    """Keys and tensors that are not paired are copied; the embedding is what ggml makes of it in Q8_0."""
    for key, value in source.kv.items():
        assert key in CHANGED_KEYS or paired.main.kv[key] == value, key
    for tensor in source.tensors:
        if tensor.name in names:
            continue
        written = paired.main.by_name[tensor.name]
        if tensor.name == "token_embd.weight":
            assert written.type == gguf_types.Q8_0
            expected = convert_quantize.quantize(gguf_types.Q8_0, f32(source_path, tensor)).tobytes()
        else:
            assert (written.type, written.shape) == (tensor.type, tensor.shape)
            expected = data(source_path, tensor)
        assert data(paired.path, written) == expected, tensor.name


@pytest.mark.parametrize("base", list(convert_plan.BASES))
@pytest.mark.parametrize("bits", [4, 8])
def test_bases_and_residuals(base: str, bits: int, tiny_gguf: Callable[[str], Path], tmp_path: Path) -> None:
    source = tiny_gguf("llama")
    paired = run(source, tmp_path / "out.gguf", options=Options(base, bits))
    assert {pair.base_type for pair in paired.pairs} == {convert_plan.BASES[base]}
    name = "blk.1.ffn_down.weight"
    error = relative_error(reconstructed(paired, name), f32(source, gguf_file.open_gguf(source).by_name[name]))
    assert error < {4: 0.06, 8: 0.004}[bits]
    runs_in_stock_llama(paired.path)


@pytest.mark.parametrize(("embedding", "written"), [("f16", gguf_types.F16), ("q6_k", gguf_types.Q6_K), ("q8_0", gguf_types.Q8_0)])
def test_embedding(embedding: str, written: int, tiny_gguf: Callable[[str], Path], tmp_path: Path) -> None:
    options = Options(embedding=convert_plan.EMBEDDINGS[embedding])
    assert run(tiny_gguf("llama"), tmp_path / "a.gguf", options=options).main.by_name["token_embd.weight"].type == written
    if embedding == "q6_k":  # 320 columns are no whole blocks of Q6_K
        narrow = run(tiny_gguf("llama-320"), tmp_path / "b.gguf", options=options)
        assert narrow.main.by_name["token_embd.weight"].type == gguf_types.Q8_0


def test_base_that_does_not_fit_names_the_tensor(tiny_gguf: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(TwobitError, match=r"blk\.0\.\S+ has rows of 320 weights.*--base auto"):
        run(tiny_gguf("llama-320"), tmp_path / "out.gguf", options=Options("iq2_s"))
    assert list(tmp_path.iterdir()) == []


def test_same_bytes_whatever_the_threads(tiny_gguf: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny_gguf("moe-192")
    one = run(source, tmp_path / "one.gguf", threads=1)
    monkeypatch.setattr(convert_run, "_LARGEST_PIECE", 32 * 320 * 4)  # one super-tile a piece
    four = run(source, tmp_path / "four.gguf", threads=4)
    assert one.path.read_bytes() == four.path.read_bytes()


def test_residual_file(tiny_gguf: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    single = run(tiny_gguf("llama"), tmp_path / "single.gguf")
    own = run(tiny_gguf("llama"), tmp_path / "own.gguf", residual_file=str(tmp_path / "r.gguf"))
    assert own.residual_path == tmp_path / "r.gguf"
    assert own.trailer.pair_id == single.trailer.pair_id
    runs_in_stock_llama(own.path)
    monkeypatch.setattr(convert, "OWN_FILE_ABOVE", 1000)
    auto = run(tiny_gguf("llama"), tmp_path / "auto.gguf")
    assert auto.residual_path == tmp_path / "auto.residual.gguf"
    assert auto.residual_path.read_bytes() == own.residual_path.read_bytes()


# ---- sources


def rewrite(source: Path, out: Path, *, arch: str | None = None, drop: str = "$^", kinds: int | None = None) -> Path:
    """A copy of a GGUF: under another architecture, without some tensors, or with its matrices in another type."""
    file = gguf_file.open_gguf(source)
    old = file.kv["general.architecture"].get()
    kv = {key.replace(f"{old}.", f"{arch or old}.", 1): value for key, value in file.kv.items()}
    kv["general.architecture"] = gguf_file.string(arch or old)
    tensors = [t for t in file.tensors if not re.search(drop, t.name)]
    types = {t.name: kinds if kinds is not None and len(t.shape) > 1 else t.type for t in tensors}
    layout = gguf_file.lay_out(kv, [(t.name, t.shape, types[t.name]) for t in tensors], 32)
    blob = bytearray(layout.header.ljust(layout.size, b"\0"))
    for t in tensors:
        raw = data(source, t) if types[t.name] == t.type else convert_quantize.quantize(types[t.name], f32(source, t)).tobytes()
        blob[layout.offsets[t.name] : layout.offsets[t.name] + len(raw)] = raw
    out.write_bytes(blob)
    return out


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0", "Q4_K", "IQ4_XS", "Q2_K"])
def test_sources_of_other_types(kind: str, tiny_gguf: Callable[[str], Path], tmp_path: Path) -> None:
    number = int(gguf.GGMLQuantizationType[kind])
    source = rewrite(tiny_gguf("llama"), tmp_path / "in.gguf", kinds=number)
    paired = run(source, tmp_path / "out.gguf")
    file = gguf_file.open_gguf(source)
    name = "blk.0.attn_q.weight"
    assert relative_error(reconstructed(paired, name), f32(source, file.by_name[name])) < 0.012
    embedding = paired.main.by_name["token_embd.weight"]
    if gguf_types.bpw(number) <= gguf_types.bpw(gguf_types.Q8_0):  # no larger than asked for: kept as it is
        assert data(paired.path, embedding) == data(source, file.by_name["token_embd.weight"])
    else:
        assert embedding.type == gguf_types.Q8_0


def test_split_source(tiny_gguf: Callable[[str], Path], tmp_path: Path) -> None:
    source = tiny_gguf("llama")
    shards = split(source, tmp_path, 3)
    whole = run(source, tmp_path / "whole.gguf")
    assert run(shards[0], tmp_path / "split.gguf").path.read_bytes() == whole.path.read_bytes()
    with pytest.raises(TwobitError, match=r"not the first shard; convert m-00001-of-00003\.gguf"):
        run(shards[1], tmp_path / "x.gguf")
    shards[2].unlink()
    with pytest.raises(TwobitError, match=r"1 of 3 shards are missing \(m-00003-of-00003\.gguf\)"):
        run(shards[0], tmp_path / "x.gguf")


def split(source: Path, folder: Path, count: int) -> list[Path]:
    """Shards as llama-gguf-split writes them: all keys in the first, split.* in each."""
    file = gguf_file.open_gguf(source)
    size = -(-len(file.tensors) // count)
    paths = []
    for i in range(count):
        part = file.tensors[i * size : (i + 1) * size]
        kv = dict(file.kv) if i == 0 else {}
        kv["split.no"] = gguf_file.scalar(gguf_file.U16, i)
        kv["split.count"] = gguf_file.scalar(gguf_file.U16, count)
        kv["split.tensors.count"] = gguf_file.scalar(gguf_file.I32, len(file.tensors))
        layout = gguf_file.lay_out(kv, [(t.name, t.shape, t.type) for t in part], 32)
        blob = bytearray(layout.header.ljust(layout.size, b"\0"))
        for t in part:
            blob[layout.offsets[t.name] : layout.offsets[t.name] + t.nbytes] = data(source, t)
        paths.append(folder / f"m-{i + 1:05}-of-{count:05}.gguf")
        paths[-1].write_bytes(blob)
    return paths


def gemma2(tiny_gguf: Callable[[str], Path], out: Path) -> Path:
    """An architecture that has no output.weight."""
    return rewrite(tiny_gguf("gemma3"), out, arch="gemma2", drop="attn_[qk]_norm")


def test_tied_model_that_refuses_an_output_stays_tied(tiny_gguf: Callable[[str], Path], tmp_path: Path) -> None:
    paired = run(gemma2(tiny_gguf, tmp_path / "in.gguf"), tmp_path / "out.gguf")
    assert "output.weight" not in paired.main.by_name
    runs_in_stock_llama(paired.path)


def test_llama_cpp_is_asked_about_architectures_that_are_not_listed(
    tiny_gguf: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert_plan, "TIED", frozenset())
    paired = run(gemma2(tiny_gguf, tmp_path / "in.gguf"), tmp_path / "out.gguf")
    assert "output.weight" not in paired.main.by_name


def test_tied_list_is_what_the_source_says(llama_source_tree: Path) -> None:
    """Every architecture of TIED makes no optional output.weight in the pinned llama.cpp."""
    models = llama_source_tree / "vendor/llama.cpp/src/models"
    optional = re.compile(r'^\s*output\s*=\s*create_tensor\(tn\(LLM_TENSOR_OUTPUT,\s*"weight"\).*TENSOR_NOT_REQUIRED', re.M)
    for arch in convert_plan.TIED:
        assert not optional.search((models / f"{arch}.cpp").read_text()), arch


def test_long_names_and_odd_rows_stay_unpaired(tiny_gguf: Callable[[str], Path], tmp_path: Path) -> None:
    """As a plan: llama.cpp itself has no such model."""
    source_path = tmp_path / "in.gguf"
    tensors = [
        ("blk.0.ffn_up.weight", (256, 32), gguf_types.F16),
        ("blk.0.ffn_down.weight", (96, 32), gguf_types.F16),  # not a multiple of 64
        ("blk.0.ffn_gate.weight", (40, 32), gguf_types.F16),  # not even of 32
        (f"blk.{'1' * 40}.attn_q.weight", (256, 32), gguf_types.F16),  # 59 bytes: no room for .residual
        ("blk.0.attn_k_b.weight", (64, 32, 4), gguf_types.F16),  # multiplied by head
        ("blk.0.ffn_gate_inp.weight", (256, 4), gguf_types.F32),
        ("blk.0.ssm_conv1d.weight", (4, 256), gguf_types.F32),
    ]
    layout = gguf_file.lay_out({"general.architecture": gguf_file.string("llama")}, tensors, 32)
    source_path.write_bytes(layout.header.ljust(layout.size, b"\0"))
    with Source(source_path) as source:
        steps = convert_plan.make_plan(source, Options(), untie=False)
    assert [(step.action.value, gguf_types.name(step.spec.type)) for step in steps] == [
        ("pair", "Q2_K"), ("quantize", "Q8_0"), ("copy", "F16"), ("quantize", "Q8_0"), ("quantize", "Q8_0"), ("copy", "F32"),
        ("copy", "F32"),
    ]  # fmt: skip


# ---- imatrix


def write_imatrix(path: Path, entries: dict[str, np.ndarray], legacy: bool) -> Path:
    """Mean squares (matrices, columns) as llama-imatrix stores them: sums over 7 calls."""
    if legacy:
        blob = struct.pack("<i", len(entries))
        for name, mean in entries.items():
            encoded = name.encode()
            blob += struct.pack("<i", len(encoded)) + encoded + struct.pack("<ii", 7, mean.size) + (mean * 7).astype("<f4").tobytes()
        path.write_bytes(blob + struct.pack("<ii", 7, 4) + b"text")
        return path
    writer = gguf.GGUFWriter(path, "imatrix")
    writer.add_type("imatrix")
    for name, mean in entries.items():
        writer.add_tensor(f"{name}.in_sum2", (mean * 7).astype(np.float32))
        writer.add_tensor(f"{name}.counts", np.full((mean.shape[0], 1), 7, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def importance(tiny_gguf: Callable[[str], Path]) -> dict[str, np.ndarray]:
    """Column i counts 8 where i % 4 == 0, else 1; one expert was never called."""
    entries = {}
    for tensor in gguf_file.open_gguf(tiny_gguf("moe")).tensors:
        if len(tensor.shape) > 1:
            columns = np.where(np.arange(tensor.columns) % 4 == 0, 8.0, 1.0)
            entries[tensor.name] = np.tile(columns, (tensor.dim(2), 1))
    return entries


def test_imatrix(tiny_gguf: Callable[[str], Path], tmp_path: Path, importance: dict[str, np.ndarray]) -> None:
    source = tiny_gguf("moe")
    without = run(source, tmp_path / "without.gguf")
    modern = write_imatrix(tmp_path / "imatrix.gguf", importance, legacy=False)
    legacy = write_imatrix(tmp_path / "imatrix.dat", importance, legacy=True)
    a = run(source, tmp_path / "a.gguf", imatrix=modern)
    b = run(source, tmp_path / "b.gguf", imatrix=legacy)
    assert a.main.kv["quantize.imatrix.file"].get() == "imatrix.gguf"
    assert [p.base_xxh64 for p in a.pairs] == [p.base_xxh64 for p in b.pairs]
    name = "blk.0.ffn_up_exps.weight"
    original = f32(source, gguf_file.open_gguf(source).by_name[name])
    errors = [np.mean((f32(p.path, p.main.by_name[name]) - original)[:, ::4] ** 2) for p in (a, without)]
    assert errors[0] < 0.9 * errors[1]  # the columns that count are better


def test_imatrix_of_another_model(tiny_gguf: Callable[[str], Path], tmp_path: Path, importance: dict[str, np.ndarray]) -> None:
    imatrix = write_imatrix(tmp_path / "imatrix.gguf", importance, legacy=False)
    with pytest.raises(TwobitError, match="this imatrix is of another model"):
        run(tiny_gguf("moe-192"), tmp_path / "out.gguf", imatrix=imatrix)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["imatrix.gguf"]


@pytest.mark.parametrize("legacy", [False, True])
def test_damaged_imatrix(legacy: bool, tmp_path: Path, importance: dict[str, np.ndarray], tiny_gguf: Callable[[str], Path]) -> None:
    whole = write_imatrix(tmp_path / "imatrix", importance, legacy).read_bytes()
    # a legacy file has no length: cut between two entries' ends it reads as far as it goes, so cut inside the entries only
    for cut in np.linspace(0, len(whole) - 100, 50).astype(int):
        (tmp_path / "imatrix").write_bytes(whole[:cut])
        with pytest.raises(TwobitError, match="imatrix"):
            run(tiny_gguf("moe"), tmp_path / "out.gguf", imatrix=tmp_path / "imatrix")
    nan = {name: mean * np.nan for name, mean in importance.items()}
    with pytest.raises(TwobitError, match="NaN"):
        run(tiny_gguf("moe"), tmp_path / "out.gguf", imatrix=write_imatrix(tmp_path / "imatrix", nan, legacy))


# ---- bases that exist already


def test_bases_of_another_file(tiny_gguf: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tiny_gguf("llama")
    two = run(source, tmp_path / "two.gguf")
    assert convert.main([str(source), str(tmp_path / "r4.gguf"), "--base-from", str(two.path), "--residual", "r4", "-q"]) == 0
    plain = run(source, tmp_path / "plain.gguf", options=Options(bits=4))
    taken = format.open_paired(tmp_path / "r4.gguf")
    format.verify(taken)
    # what was made of the same weights for the same base is the same
    assert [(p.name, p.bits, p.base_xxh64, p.residual_xxh64) for p in taken.pairs] == [
        (p.name, p.bits, p.base_xxh64, p.residual_xxh64) for p in plain.pairs
    ]

    stock = tmp_path / "stock.gguf"  # llama.cpp's own mix: more than two bits here and there
    quantize_stock(source, stock, 10)
    assert convert.main([str(source), str(tmp_path / "mixed.gguf"), "--base-from", str(stock), "-q"]) == 0
    mixed = format.open_paired(tmp_path / "mixed.gguf")
    format.verify(mixed)
    theirs = gguf_file.open_gguf(stock)
    for pair in mixed.pairs:
        tensor, original = theirs.by_name[pair.name], f32(source, gguf_file.open_gguf(source).by_name[pair.name])
        assert pair.base_type == tensor.type
        assert data(mixed.path, mixed.main.by_name[pair.name]) == data(stock, tensor)
        assert np.abs(reconstructed(mixed, pair.name) - original).max() < np.abs(f32(stock, tensor) - original).max()
    assert len({pair.base_type for pair in mixed.pairs}) > 1

    capsys.readouterr()
    assert convert.main([str(source), str(tmp_path / "out.gguf"), "--base-from", str(tiny_gguf("qwen2")), "-q"]) == 2
    assert "give a quantised GGUF of the same model" in capsys.readouterr().err
    assert convert.main([str(source), str(tmp_path / "out.gguf"), "--base-from", str(source), "-q"]) == 2  # f16: nothing to take
    assert "none of its tensors is a base" in capsys.readouterr().err
    assert not (tmp_path / "out.gguf").exists()


# ---- the command


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "twobit_gguf.convert", *map(str, args)]


def test_json_adds_up(tiny_gguf: Callable[[str], Path], tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    result = subprocess.run(command(tiny_gguf("moe"), out, "--json"), capture_output=True, text=True, check=True)
    about = json.loads(result.stdout)
    paired = format.open_paired(out)
    rows = {what: [r for r in about["rows"] if r["what"] == what] for what in ("base", "residual", "token embedding", "other")}
    assert sum(r["nbytes"] for r in rows["base"]) == sum(p.base_nbytes for p in paired.pairs)
    assert sum(r["nbytes"] for r in rows["residual"]) == sum(p.residual_nbytes for p in paired.pairs)
    assert about["vram_bytes"] + about["ram_bytes"] == sum(t.nbytes for t in paired.main.tensors) + sum(
        p.residual_nbytes for p in paired.pairs
    )
    assert about["pairs"] == len(paired.pairs) and about["disk_bytes"] == out.stat().st_size
    table = subprocess.run(command(tiny_gguf("moe"), out, "--force"), capture_output=True, text=True, check=True)
    assert "residual" in table.stdout and table.stderr == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(number: int, smollm2_gguf: Path, tmp_path: Path) -> None:
    args = command(smollm2_gguf, tmp_path / "out.gguf", "--residual-file", tmp_path / "r.gguf", "--threads", 1)
    process = subprocess.Popen(args, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while len([p for p in tmp_path.iterdir() if p.suffix == ".tmp"]) < 2 and time.monotonic() < end:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr == "twobit-convert: interrupted, nothing was written\n"
    assert list(tmp_path.iterdir()) == []


def test_memory(tmp_path: Path) -> None:
    """Peak memory stays under the largest tensor (in f32) × 4 + 500 MB, here and by far."""
    vocabulary = 1 << 16
    source = tiny_models.write(tmp_path / "in.gguf", "llama", n_vocab=vocabulary, n_layer=1)
    code = (  # not ru_maxrss: a child begins with its parent's, here pytest's
        "import re, sys; from twobit_gguf import convert; status = convert.main(sys.argv[1:]); "
        "print(re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1]); sys.exit(status)"
    )
    args = [sys.executable, "-c", code, str(source), str(tmp_path / "out.gguf"), "-q"]
    result = subprocess.run(args, capture_output=True, text=True, env=dict(os.environ), check=True)
    limit = 4 * (vocabulary * 256 * 4) + 500_000_000
    assert int(result.stdout) * 1024 < limit * 0.6


# ---- real models


def test_smollm2(smollm2_gguf: Path, paired_smollm2: Path) -> None:
    paired = format.open_paired(paired_smollm2)
    format.verify(paired)
    assert len(paired.pairs) == 211  # 7 in each of 30 layers, and the output
    source = gguf_file.open_gguf(smollm2_gguf)
    for name in ("blk.0.attn_q.weight", "blk.29.ffn_down.weight"):
        assert relative_error(reconstructed(paired, name), f32(smollm2_gguf, source.by_name[name])) < 0.012
    runs_in_stock_llama(paired_smollm2)


def test_hugging_face_folder(tmp_path: Path, smollm2_hf: Path) -> None:
    """model.safetensors → paired GGUF; the weights are those of the checkpoint."""
    paired = run(smollm2_hf / "model.safetensors", tmp_path / "out.gguf")
    assert len(paired.pairs) == 211
    from safetensors import safe_open

    with safe_open(smollm2_hf / "model.safetensors", "numpy") as tensors:
        # (q and k are permuted by the converter, ffn is not)
        original = tensors.get_tensor("model.layers.0.mlp.down_proj.weight").astype(np.float32)
    assert relative_error(reconstructed(paired, "blk.0.ffn_down.weight"), original) < 0.012
    runs_in_stock_llama(paired.path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.gguf"]


@pytest.mark.parametrize(
    ("kind", "dtype", "shards", "tied"),
    [("Llama", "float32", "200KB", False), ("Llama", "bfloat16", "1GB", True), ("Qwen3Moe", "float16", "300KB", True)],
)
def test_hugging_face_kinds(kind: str, dtype: str, shards: str, tied: bool, smollm2_hf: Path, tmp_path: Path) -> None:
    """Random models with SmolLM2's tokenizer: sharded and single, tied and not, all three precisions, experts."""
    import torch
    import transformers

    from twobit_gguf.hf import open_checkpoint

    sizes = dict(
        vocab_size=49152, hidden_size=128, intermediate_size=192, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        tie_word_embeddings=tied, head_dim=64, max_position_embeddings=256,
    )  # fmt: skip
    if kind == "Qwen3Moe":
        sizes |= dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(getattr(torch, dtype))
    folder = tmp_path / "folder"
    model.save_pretrained(folder, max_shard_size=shards)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((smollm2_hf / name).read_bytes())
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (shards != "1GB")
    assert open_checkpoint(folder).outtype == {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[dtype]

    paired = run(folder, tmp_path / "out.gguf")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "out.gguf"]
    assert next(p for p in paired.pairs if p.name == "output.weight").rows == 49152
    layer = model.model.layers[0]
    original = layer.self_attn.o_proj.weight
    assert relative_error(reconstructed(paired, "blk.0.attn_output.weight"), original.detach().float().numpy()) < 0.012
    if kind == "Qwen3Moe":
        assert next(p for p in paired.pairs if p.name == "blk.0.ffn_down_exps.weight").matrices == 4
    runs_in_stock_llama(paired.path)
