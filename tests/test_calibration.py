"""Calibration: XᵀX through llama.cpp, its factors, rounding with error feedback, and twobit-convert --calibration."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import conftest
import numpy as np
import pytest
import tiny_models

from twobit_gguf import format, gguf_file, gguf_types
from twobit_gguf._native import NativeError, check, ffi, lib
from twobit_gguf.calibration import answers, calibrate, collect, evaluate
from twobit_gguf.calibration.divergence import Divergence, log_softmax, mean
from twobit_gguf.calibration.expand import base_bits, write_f16
from twobit_gguf.calibration.factorise import Factors, damping_for, factorise
from twobit_gguf.calibration.graph import Activations
from twobit_gguf.calibration.mixed import Level, allocate
from twobit_gguf.calibration.model import CONTEXT, Runner, cut
from twobit_gguf.calibration.order import BlockOrder
from twobit_gguf.calibration.sensitivity import measure
from twobit_gguf.calibration.store import Calibration
from twobit_gguf.calibration.text import default_text
from twobit_gguf.calibration.units import size
from twobit_gguf.convert_imatrix import Imatrix
from twobit_gguf.errors import TwobitError

BASES = {"q2_0": gguf_types.Q2_0, "q2_k": gguf_types.Q2_K, "iq2_xs": gguf_types.IQ2_XS, "q3_k": 11, "q4_k": 12, "q4_0": 2}
ROWS, COLUMNS = 70, 512  # more than one chunk of 64 rows, the last super-tile with 6


def floats(array: np.ndarray) -> object:
    assert array.dtype == np.float32 and array.flags.c_contiguous
    return ffi.from_buffer("float[]", array)


def correlated(columns: int, seed: int = 0) -> np.ndarray:
    """XᵀX as language models have it: a few strong directions, columns of very different size."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((2 * columns, columns)) * np.exp(-np.arange(columns) / (columns / 5))
    x = x @ np.linalg.qr(rng.standard_normal((columns, columns)))[0] + 0.05 * rng.standard_normal((2 * columns, columns))
    x *= np.exp(0.7 * rng.standard_normal(columns))
    return (x.T @ x / len(x)).astype(np.float32)


def weights(rows: int = ROWS, columns: int = COLUMNS, seed: int = 1) -> np.ndarray:
    return (0.02 * np.random.default_rng(seed).standard_t(5, (rows, columns))).astype(np.float32)


@pytest.fixture(scope="module")
def h() -> np.ndarray:
    return correlated(COLUMNS)


@pytest.fixture(scope="module")
def factors(h: np.ndarray) -> Factors:
    result = factorise(h.copy(), 0.01)
    assert result is not None and result.notes == []
    return result


def base_with_feedback(kind: int, w: np.ndarray, factors: Factors) -> np.ndarray:
    rows, columns = w.shape
    out = np.zeros(gguf_types.nbytes(kind, w.size), np.uint8)
    check(lib().twobit_base_quantize_feedback(kind, floats(w), rows, columns, floats(factors.u), floats(factors.d), ffi.from_buffer(out)))
    return out


def plain_base(kind: int, w: np.ndarray, importance: np.ndarray) -> np.ndarray:
    rows, columns = w.shape
    out = np.zeros(gguf_types.nbytes(kind, w.size), np.uint8)
    check(lib().twobit_base_quantize(kind, floats(w), rows, columns, floats(importance), ffi.from_buffer(out)))
    return out


def dequantize(kind: int, data: np.ndarray, rows: int, columns: int) -> np.ndarray:
    out = np.empty((rows, columns), np.float32)
    check(lib().twobit_base_dequantize(kind, ffi.from_buffer(data), rows, columns, floats(out)))
    return out


def residual_of(bits: int, w: np.ndarray, kind: int, base: np.ndarray, factors: Factors | None) -> tuple[np.ndarray, np.ndarray]:
    """The packed residual, with feedback or without, and its values."""
    rows, columns = w.shape
    factor = lib().twobit_residual_factor(bits, lib().twobit_residual_max_abs(floats(w), kind, ffi.from_buffer(base), rows, columns))
    packed = np.zeros(format.residual_nbytes(bits, rows, columns, 1), np.uint8)
    arguments = (bits, factor, floats(w), kind, ffi.from_buffer(base), rows, columns)
    if factors is None:
        check(lib().twobit_residual_encode(*arguments, ffi.NULL, ffi.from_buffer(packed)))
    else:
        check(lib().twobit_residual_encode_feedback(*arguments, floats(factors.u), floats(factors.d), ffi.from_buffer(packed)))
    values = np.empty((rows, columns), np.float32)
    check(lib().twobit_residual_decode(bits, factor, ffi.from_buffer(packed), rows, columns, floats(values)))
    return packed, values


def output_error(error: np.ndarray, h: np.ndarray) -> float:
    """tr E H Eᵀ"""
    return float(np.einsum("ij,ij->", error.astype(np.float64) @ h, error))


# ---- factors --------------------------------------------------------------------------------------------------------


def test_factors_multiply_to_the_damped_matrix(h: np.ndarray, factors: Factors) -> None:
    diagonal = np.diagonal(h)
    damped = h + np.diag(0.01 * (diagonal + np.median(diagonal)))
    product = (factors.u.astype(np.float64) * factors.d) @ factors.u.T.astype(np.float64)
    assert np.array_equal(np.triu(factors.u), factors.u) and np.allclose(np.diagonal(factors.u), 1)
    assert np.abs(product - damped).max() < 1e-4 * np.abs(damped).max()


def test_dead_and_broken_columns_give_usable_factors(h: np.ndarray) -> None:
    damaged = h.copy()
    damaged[5], damaged[:, 5] = 0, 0
    damaged[9, :], damaged[:, 9] = np.nan, np.nan
    result = factorise(damaged, 0.01)
    assert result is not None and np.isfinite(result.u).all() and (result.d > 0).all()
    assert any("NaN" in note for note in result.notes) and any("dead" in note for note in result.notes)


def test_a_matrix_that_says_nothing_has_no_factors() -> None:
    assert factorise(np.zeros((64, 64), np.float32), 0.01) is None
    assert factorise(np.full((64, 64), np.nan, np.float32), 0.01) is None


def test_a_matrix_of_little_text_is_damped_until_it_can_be_used() -> None:
    x = np.random.default_rng(0).standard_normal((3, 256)).astype(np.float32)
    result = factorise(x.T @ x, 1e-9)
    assert result is not None and np.isfinite(result.u).all() and (result.d > 0).all()


def test_damping_follows_the_amount_of_text() -> None:
    assert damping_for("blk.0.attn_q.weight", 1536, 200_000) == 0.05
    assert damping_for("blk.0.attn_q.weight", 1536, 5_000) > 0.1
    assert damping_for("blk.0.ffn_down.weight", 8960, 1_000_000) == 0.15


# ---- rounding -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BASES)
def test_feedback_halves_a_base_s_output_error(name: str, h: np.ndarray, factors: Factors) -> None:
    w, kind = weights(), BASES[name]
    plain = dequantize(kind, plain_base(kind, w, np.diagonal(h).copy()), ROWS, COLUMNS)
    fed = dequantize(kind, base_with_feedback(kind, w, factors), ROWS, COLUMNS)
    assert output_error(w - fed, h) < 0.5 * output_error(w - plain, h)


@pytest.mark.parametrize("bits", format.BITS)
def test_feedback_lowers_a_residual_s_output_error(bits: int, h: np.ndarray, factors: Factors) -> None:
    w = weights()
    base = base_with_feedback(gguf_types.Q2_K, w, factors)
    left = w - dequantize(gguf_types.Q2_K, base, ROWS, COLUMNS)
    _, plain = residual_of(bits, w, gguf_types.Q2_K, base, None)
    _, fed = residual_of(bits, w, gguf_types.Q2_K, base, factors)
    assert output_error(left - fed, h) < 0.65 * output_error(left - plain, h)


def test_every_weight_is_rounded_to_the_level_nearest_its_target(factors: Factors) -> None:
    """Q2_0's bytes against the definition: t_k = w_k + Σ_{j<k} (w_j − b_j) U_jk."""
    w = weights()
    blocks = base_with_feedback(gguf_types.Q2_0, w, factors).reshape(ROWS, COLUMNS // 64, 18)
    scale = np.repeat(blocks[:, :, :2].copy().view(np.float16).astype(np.float64)[:, :, 0], 64, axis=1)
    b = dequantize(gguf_types.Q2_0, blocks.reshape(-1), ROWS, COLUMNS).astype(np.float64)
    target = w + (w - b) @ (factors.u.astype(np.float64) - np.eye(COLUMNS))
    wanted = np.clip(np.rint(target / scale), -1, 2)
    # ties may go either way: f32 against f64
    off = np.abs(np.abs(target / scale - np.rint(target / scale)) - 0.5) > 1e-3
    assert np.array_equal(np.rint(b / scale)[off], wanted[off])
    assert off.mean() > 0.99


def test_residuals_are_rounded_to_the_level_nearest_their_target(factors: Factors) -> None:
    """R4 in the same way: levels of a group lie one scale apart."""
    w = weights()
    base = base_with_feedback(gguf_types.Q2_K, w, factors)
    left = (w - dequantize(gguf_types.Q2_K, base, ROWS, COLUMNS)).astype(np.float64)
    _, fed = residual_of(4, w, gguf_types.Q2_K, base, factors)
    target = left + (left - fed) @ (factors.u.astype(np.float64) - np.eye(COLUMNS))
    for r in range(ROWS):
        for k in range(0, COLUMNS, 64):
            levels = np.unique(fed[r, k : k + 64].astype(np.float64))
            step = np.diff(levels).min()
            miss = np.abs(target[r, k : k + 64] - fed[r, k : k + 64])
            inside = (target[r, k : k + 64] > levels[0]) & (target[r, k : k + 64] < levels[-1])
            assert (miss[inside] <= 0.501 * step).all()


@pytest.mark.parametrize("name", BASES)
def test_bytes_do_not_depend_on_the_pieces(name: str, factors: Factors) -> None:
    w, kind = weights(), BASES[name]
    whole = base_with_feedback(kind, w, factors)
    assert np.array_equal(whole, base_with_feedback(kind, w, factors))
    pieces = [base_with_feedback(kind, np.ascontiguousarray(w[r : r + 32]), factors) for r in range(0, ROWS, 32)]
    assert np.array_equal(whole, np.concatenate(pieces))
    packed, _ = residual_of(6, w, kind, whole, factors)
    assert np.array_equal(packed, residual_of(6, w, kind, whole, factors)[0])


@pytest.mark.parametrize("name", BASES)
def test_zero_rows_stay_zero_and_large_weights_stay_finite(name: str, factors: Factors) -> None:
    w, kind = weights(4), BASES[name]
    w[1] = 0
    w[2] *= 1e4
    w[3, 7] = 1e4
    base = base_with_feedback(kind, w, factors)
    values = dequantize(kind, base, 4, COLUMNS)
    assert (values[1] == 0).all() and np.isfinite(values).all()
    _, residual = residual_of(6, w, kind, base, factors)
    assert (residual[1] == 0).all() and np.isfinite(residual).all()


def test_bad_arguments_are_refused(factors: Factors) -> None:
    w = weights(4)
    with pytest.raises(NativeError, match="no method"):
        base_with_feedback(gguf_types.Q8_0, w, factors)
    w[0, 0] = np.nan
    with pytest.raises(NativeError, match="NaN"):
        base_with_feedback(gguf_types.Q2_0, w, factors)
    bad = Factors(factors.h, factors.u, factors.d.copy())
    bad.d[3] = 0
    with pytest.raises(NativeError, match=r"d\[3\]"):
        base_with_feedback(gguf_types.Q2_0, weights(4), bad)
    with pytest.raises(NativeError, match="multiple of 256"):
        identity = np.eye(320, dtype=np.float32)
        base_with_feedback(gguf_types.Q2_K, weights(4, 320), Factors(identity, identity, np.ones(320, np.float32)))


# ---- collecting -----------------------------------------------------------------------------------------------------

TEXT = "The quick brown fox jumps over the lazy dog; def f(x): return x + 1\n" * 60


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


def run_calibrate(model: Path, out: Path, text: Path, *options: str) -> Calibration:
    assert calibrate.main([str(model), "-o", str(out), "--text", str(text), "--tokens", "2048", "--threads", "2", *options]) == 0
    return Calibration(out)


@pytest.mark.parametrize("name", ["llama", "moe", "gemma3"])
def test_what_is_shared_and_what_it_holds(name: str, tiny_gguf: Callable[[str], Path], text_file: Path, tmp_path: Path) -> None:
    calibration = run_calibrate(tiny_gguf(name), tmp_path / "c", text_file)
    shared = calibration.info.weights
    assert shared["blk.0.attn_q.weight"] == shared["blk.0.attn_k.weight"] == shared["blk.0.attn_v.weight"]
    assert shared["blk.0.attn_output.weight"] != shared["blk.0.attn_q.weight"]
    assert "output.weight" in shared
    if name == "moe":  # experts share their layer input's matrix, and the router's
        assert shared["blk.1.ffn_gate_exps.weight"] == shared["blk.1.ffn_up_exps.weight"] == shared["blk.1.ffn_gate_inp.weight"]
        assert calibration.info.rows[shared["blk.1.ffn_down_exps.weight"]] == 2 * calibration.info.tokens
    else:
        assert shared["blk.1.ffn_gate.weight"] == shared["blk.1.ffn_up.weight"]
        assert set(calibration.info.rows.values()) == {calibration.info.tokens}
    # RMS norm: the mean square of the normalised input, divided by the norm's weights, is 1
    main = gguf_file.open_gguf(tiny_gguf(name))
    norm = main.by_name["blk.0.attn_norm.weight"]
    gain = np.fromfile(main.path, np.float32, norm.columns, offset=norm.offset)
    diagonal = calibration.diagonal("blk.0.attn_q.weight")
    assert np.isclose((diagonal / gain**2).mean(), 1, rtol=1e-3)
    for source in calibration.info.columns:
        matrix = calibration.matrix(source)
        assert np.array_equal(matrix, matrix.T) and np.array_equal(np.diagonal(matrix), calibration.diagonal(source))


def test_safetensors_layout(tiny_gguf: Callable[[str], Path], text_file: Path, tmp_path: Path) -> None:
    """The file as the safetensors specification has it: header, no holes, in order."""
    calibration = run_calibrate(tiny_gguf("llama"), tmp_path / "c", text_file)
    data = (tmp_path / "c").read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__")
    assert all(isinstance(value, str) for value in metadata.values())
    spans = sorted(tuple(entry["data_offsets"]) for entry in header.values())
    assert spans[0][0] == 0 and spans[-1][1] == len(data) - 8 - length
    assert all(a[1] == b[0] for a, b in zip(spans, spans[1:], strict=False))
    first = next(iter(calibration.info.columns))
    start = 8 + length + header[first]["data_offsets"][0]
    k = calibration.info.columns[first]
    assert np.array_equal(np.frombuffer(data, "<f4", k * k, start).reshape(k, k), calibration.matrix(first))


def test_windows_and_interruptions_do_not_change_the_bytes(
    tiny_gguf: Callable[[str], Path], text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_gguf("llama")
    run_calibrate(model, tmp_path / "one", text_file)
    run_calibrate(model, tmp_path / "windows", text_file, "--ram", "600K")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "windows").read_bytes()

    # saved after every batch, interrupted in the third window
    monkeypatch.setattr(collect, "_CHECKPOINT", 0.0)
    monkeypatch.setattr("twobit_gguf.calibration.calibrate.SEQUENCES", 1)
    run_calibrate(model, tmp_path / "single", text_file)
    calls, run = 0, Runner.run

    def interrupted(self: Runner, *args: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 12:  # the probe, two windows of four batches, two batches of the next
            raise KeyboardInterrupt
        run(self, *args)  # type: ignore[arg-type]

    command = [str(model), "-o", str(tmp_path / "resumed"), "--text", str(text_file), "--tokens", "2048", "--threads", "2", "--ram", "600K"]
    with monkeypatch.context() as patch:
        patch.setattr(Runner, "run", interrupted)
        assert calibrate.main(command) == 130
    assert not (tmp_path / "resumed").exists()
    calls = 0
    counting = Runner.run

    def counted(self: Runner, *args: object) -> None:
        nonlocal calls
        calls += 1
        counting(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Runner, "run", counted)
    assert calibrate.main(command) == 0
    n_windows = len(collect.windows(Calibration(tmp_path / "single").info.columns, 600 << 10))
    done = 10  # of which the last may have come too soon after a save to be saved itself
    assert calls - 1 in (4 * n_windows - done, 4 * n_windows - done + 1)
    assert (tmp_path / "resumed").read_bytes() == (tmp_path / "single").read_bytes()
    assert [p.name for p in tmp_path.iterdir() if ".part" in p.name] == []


def test_ctrl_c_inside_llama_cpp(smollm2_gguf: Path, text_file: Path, tmp_path: Path) -> None:
    """Python raises it on the way into the eval callback, where ctypes would drop it."""
    command = [sys.executable, "-m", "twobit_gguf.cli", "calibrate", str(smollm2_gguf), "-o", str(tmp_path / "c"), "--text", str(text_file)]
    process = subprocess.Popen([*command, "--tokens", "8192"], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while " passes" not in process.stderr.readline():
        assert process.poll() is None
    time.sleep(0.5)  # within the first batch of 2,048 tokens
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and "run the same command to go on" in rest and "Traceback" not in rest
    assert not (tmp_path / "c").exists()


def test_a_graph_that_ends_early_is_not_a_calibration(
    tiny_gguf: Callable[[str], Path], text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect._Sums, "take", lambda self, weight, x: False)
    command = [str(tiny_gguf("llama")), "-o", str(tmp_path / "c"), "--text", str(text_file), "--tokens", "2048"]
    assert calibrate.main(command) == 2
    assert not (tmp_path / "c").exists()


def test_answers(smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's own dialogues: full sequences, each from another instruction, the same every time; kept when interrupted."""
    with Runner(smollm2_gguf, 2) as runner:
        first, second = (answers.write(runner, 2, 2, lambda n: None) for _ in range(2))
        start = runner.tokenize("<|im_start|>user\nWrite a Python function that reverses", special=True)
    assert first.shape == (2, CONTEXT) and first.dtype == np.int32 and np.array_equal(first, second)
    assert not np.array_equal(first[0], first[1])
    text = first[0].tolist()
    assert any(text[i : i + len(start)] == start.tolist() for i in range(CONTEXT))

    monkeypatch.setattr(answers, "write", lambda *_: first)
    command = [str(smollm2_gguf), "-o", str(tmp_path / "c"), "--tokens", "1024", "--answers", "1", "--threads", "2"]
    with monkeypatch.context() as patch:
        patch.setattr(Runner, "run", raising(KeyboardInterrupt()))
        assert calibrate.main(command) == 130
    monkeypatch.setattr(answers, "write", raising(AssertionError("written again")))
    assert calibrate.main(command) == 0
    assert Calibration(tmp_path / "c").info.tokens == 1024
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def raising(error: BaseException) -> Callable[..., None]:
    def function(*_: object) -> None:
        raise error

    return function


def test_activations_with_nan_are_left_out(
    tiny_gguf: Callable[[str], Path], text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One row of the embedding is NaN: every text that has this token loses it (and what attends to it)."""
    model = tmp_path / "nan.gguf"
    data = bytearray(tiny_gguf("llama").read_bytes())
    main = gguf_file.open_gguf(tiny_gguf("llama"))
    embedding = main.by_name["token_embd.weight"]
    row_nbytes = gguf_types.nbytes(embedding.type, embedding.columns)
    with Runner(tiny_gguf("llama"), 1, 64, 1) as runner:
        token = int(runner.tokenize(TEXT)[1000])
    at = embedding.offset + token * row_nbytes
    data[at : at + row_nbytes] = np.full(embedding.columns, np.nan, np.float16).tobytes()
    model.write_bytes(data)
    calibration = run_calibrate(model, tmp_path / "c", text_file)
    warnings = capsys.readouterr().err
    assert calibration.info.dropped and re.search(r"warning: blk\.0\.attn_\w+\.weight: \d+ rows of activations with NaN", warnings)
    assert all(np.isfinite(calibration.matrix(source)).all() for source in calibration.info.columns)


@pytest.mark.parametrize("damage", ["empty", "cut", "garbage", "gguf", "version"])
def test_damaged_files_are_refused(damage: str, tiny_gguf: Callable[[str], Path], text_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "c"
    run_calibrate(tiny_gguf("llama"), path, text_file)
    data = path.read_bytes()
    path.write_bytes({
        "empty": b"",
        "cut": data[: len(data) // 2],
        "garbage": bytes(range(256)) * 64,
        "gguf": tiny_gguf("llama").read_bytes(),
        "version": data.replace(b'"twobit.calibration":"1"', b'"twobit.calibration":"7"'),
    }[damage])  # fmt: skip
    with pytest.raises(TwobitError, match=re.escape(str(path))):
        Calibration(path)


def test_refusals(tiny_gguf: Callable[[str], Path], text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = str(tiny_gguf("llama")), str(tmp_path / "c")
    short = tmp_path / "short.txt"
    short.write_text("too short")
    assert calibrate.main([model, "-o", out, "--text", str(short)]) == 2
    assert calibrate.main([model, "-o", out, "--text", str(tmp_path / "missing")]) == 2
    assert calibrate.main([str(short), "-o", out, "--text", str(text_file)]) == 2
    assert calibrate.main([model, "-o", model, "--text", str(text_file)]) == 2
    before = Path(model).read_bytes()
    assert calibrate.main([model, "-o", model, "--text", str(text_file), "--force"]) == 2
    assert Path(model).read_bytes() == before
    assert calibrate.main([model, "-o", str(tmp_path), "--text", str(text_file), "--force"]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("twobit calibrate:")]
    assert len(lines) == 6 and not (tmp_path / "c").exists()


@pytest.mark.parametrize("kind", ["q2_0", "q2_k", "iq2_xs"])
def test_sweeps_only_gain(kind: str, h: np.ndarray, factors: Factors) -> None:
    """Each sweep lowers the loss of every single row, the packed base holds what was chosen, and chunks of rows do not matter."""
    w = weights(96, len(h))
    base = base_with_feedback(BASES[kind], w, factors)

    def losses(data: np.ndarray) -> np.ndarray:
        error = (w - dequantize(BASES[kind], data, *w.shape)).astype(np.float64)
        return np.einsum("ij,ij->i", error @ factors.h, error)

    def sweep(rows: np.ndarray, data: np.ndarray, n: int) -> None:
        check(lib().twobit_base_sweep(BASES[kind], floats(rows), *rows.shape, floats(factors.h), n, ffi.from_buffer(data)))

    before = first = losses(base)
    swept = base.copy()
    for _ in range(3):
        sweep(w, swept, 1)
        after = losses(swept)
        assert (after <= before * (1 + 1e-5)).all()
        before = after
    assert before.sum() < 0.97 * first.sum()
    alone = base[: base.size * 32 // 96].copy()
    sweep(np.ascontiguousarray(w[:32]), alone, 3)
    assert np.array_equal(alone, swept[: alone.size])


def test_sweeps_that_are_refused(h: np.ndarray, factors: Factors) -> None:
    w = weights(32, len(h))
    base = base_with_feedback(BASES["q2_k"], w, factors)
    for kind, columns, matrix in ((BASES["q3_k"], len(h), factors.h), (BASES["q2_k"], 100, factors.h), (BASES["q2_k"], len(h), -factors.h)):
        assert lib().twobit_base_sweep(kind, floats(w), 32, columns, floats(matrix), 1, ffi.from_buffer(base)) < 0
    assert not lib().twobit_sweep_supports(BASES["q3_k"])


# ---- converting and evaluating --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "llama-320", "moe-192"])
def test_convert_with_calibration(name: str, tiny_gguf: Callable[[str], Path], text_file: Path, tmp_path: Path) -> None:
    source, calib = tiny_gguf(name), tmp_path / "c"
    calibration = run_calibrate(source, calib, text_file)
    plain = conftest.convert(source, tmp_path / "plain.gguf")
    fed = conftest.convert(source, tmp_path / "fed.gguf", "--calibration", str(calib))
    again = conftest.convert(source, tmp_path / "again.gguf", "--calibration", str(calib), "--threads", "1")
    assert fed.read_bytes() == again.read_bytes()

    errors = {}
    for path in (plain, fed):
        paired = format.open_paired(path)
        format.verify(paired)
        for which in (True, False):
            write_f16(path, tmp_path / "expanded.gguf", residual=which)
            errors[path, which] = _model_error(source, tmp_path / "expanded.gguf", paired, calibration)
        write_f16(path, tmp_path / "layers.gguf", residual=False, output_residual=True)
        layers_only = _model_error(source, tmp_path / "layers.gguf", paired, calibration)
        assert errors[path, True] < layers_only < errors[path, False], "the base in the layers, base + residual as the output"
    assert errors[fed, True] < errors[plain, True]
    assert errors[fed, False] < errors[plain, False]


def _model_error(source: Path, expanded: Path, paired: format.PairedFile, calibration: Calibration) -> float:
    """Σ tr E H Eᵀ over a model's pairs; both files hold f16."""
    total = 0.0
    files = {path: gguf_file.open_gguf(path) for path in (source, expanded)}
    for pair in paired.pairs:
        known = calibration.input_of(pair.name)
        assert known is not None
        values = []
        for path, main in files.items():
            tensor = main.by_name[pair.name]
            data = np.fromfile(path, np.float16, tensor.n_weights, offset=tensor.offset)
            values.append(data.reshape(-1, tensor.columns).astype(np.float32))
        total += output_error(values[0] - values[1], calibration.matrix(known))
    return total


@pytest.mark.parametrize(("name", "bpw"), [("llama", 3.1), ("llama-320", 3.0)])
def test_mixed_bases(name: str, bpw: float, tiny_gguf: Callable[[str], Path], text_file: Path, tmp_path: Path) -> None:
    source, calib = tiny_gguf(name), tmp_path / "c"
    calibration = run_calibrate(source, calib, text_file)
    low = conftest.convert(source, tmp_path / "low.gguf", "--calibration", str(calib))
    mixed = format.open_paired(conftest.convert(source, tmp_path / "mixed.gguf", "--calibration", str(calib), "--base-bpw", str(bpw)))
    format.verify(mixed)
    assert bpw - 0.6 < base_bits(mixed) <= bpw
    types = {gguf_types.name(pair.base_type) for pair in mixed.pairs}
    assert len(types) > 1
    for pair in mixed.pairs:
        assert pair.bits == {2: 6, 3: 5, 4: 4}[int(gguf_types.bpw(pair.base_type))]
    errors = []
    for path in (low, mixed.path):
        write_f16(path, tmp_path / "expanded.gguf", residual=False)
        errors.append(_model_error(source, tmp_path / "expanded.gguf", format.open_paired(path), calibration))
    assert errors[1] < errors[0]


def test_sensitivity_is_that_of_the_output(tiny_gguf: Callable[[str], Path]) -> None:
    """Noise on the logits themselves has a divergence that is known: half the power of the noise, weighted by p, mean taken off."""
    model = tiny_gguf("llama")
    runs: list[int] = []
    errors = {"blk.0.ffn_up.weight": 0.05, "blk.1.ffn_up.weight": 0.05, "output.weight": 1e-4}
    found = measure(model, errors, 2, lambda: runs.append(1))
    assert found.keys() == errors.keys() and all(weight > 0 for weight in found.values()) and len(runs) == 4
    assert measure(model, errors, 2, lambda: None) == pytest.approx(found, rel=1e-3)

    with Runner(model, 2, 256, 2, logits=True) as runner:
        tokens = cut(runner.tokenize(default_text()), runner.bos, 256, 2)
        runner.run(tokens, Nobody())
        rows = runner.logits(tokens.size).reshape(2, 256, -1)[:, 32:].reshape(-1, runner.logits(1).shape[1])
        p = np.exp(log_softmax(rows.copy()))
    variance = np.square(rows).mean(axis=1)
    expected = 0.5 * float((variance * (1 - np.square(p).sum(axis=1))).mean())
    assert found["output.weight"] == pytest.approx(expected, rel=0.1)


class Nobody:
    """A watcher that wants nothing."""

    def wants(self, weight: str) -> bool:
        return False

    def take(self, weight: str, x: Activations) -> bool:
        raise AssertionError(weight)



def test_mixed_bases_that_do_not_fit(
    tiny_gguf: Callable[[str], Path], text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from twobit_gguf.convert import main

    run_calibrate(tiny_gguf("llama"), tmp_path / "c", text_file)
    capsys.readouterr()
    for option in (["--vram", "100M"], ["--base-bpw", "1.9"]):
        assert main([str(tiny_gguf("llama")), str(tmp_path / "o"), "--calibration", str(tmp_path / "c"), "-q", *option]) == 2
        assert "give more --vram" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "0", "many"])
@pytest.mark.parametrize("option", ["--base-bpw", "--damping", "--vram"])
def test_numbers_that_are_none(option: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from twobit_gguf.convert import main

    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "in.gguf"), str(tmp_path / "o"), "--calibration", str(tmp_path / "c"), option, value])
    assert f"error: argument {option}: " in capsys.readouterr().err


def test_sizes() -> None:
    assert (size("1.5K"), size("2g"), size("7")) == (1536, 2 << 30, 7)
    for text in ("1e308T", "0.1", "4X", ""):
        with pytest.raises(argparse.ArgumentTypeError):
            size(text)


def test_bits_go_where_they_buy_most() -> None:
    levels = {
        "flat": [Level(0, 100, 0.10), Level(1, 150, 0.09), Level(2, 200, 0.08)],
        "steep": [Level(0, 100, 0.30), Level(1, 150, 0.29), Level(2, 200, 0.02)],  # the middle one is not on the hull
    }
    chosen = allocate(levels, 310)
    assert chosen is not None and {name: level.type for name, level in chosen.items()} == {"flat": 0, "steep": 2}
    chosen = allocate(levels, 360)
    assert chosen is not None and {name: level.type for name, level in chosen.items()} == {"flat": 1, "steep": 2}
    assert allocate(levels, 199) is None


def test_order_of_columns(tiny_gguf: Callable[[str], Path], text_file: Path, tmp_path: Path) -> None:
    """Blocks of 256 columns rounded by the strength of their inputs: every block is back at its place, and the error no other in kind."""
    source, calib = tiny_gguf("qwen2"), tmp_path / "c"  # its ffn_down has three blocks
    calibration = run_calibrate(source, calib, text_file)
    errors, bases = [], []
    fed = ["--calibration", str(calib)]
    for name, options in (("plain", []), ("natural", fed), ("ordered", [*fed, "--order", "activation"])):
        paired = format.open_paired(conftest.convert(source, tmp_path / f"{name}.gguf", *options))
        format.verify(paired)
        both = []
        for residual in (True, False):
            write_f16(paired.path, tmp_path / "expanded.gguf", residual=residual)
            both.append(_model_error(source, tmp_path / "expanded.gguf", paired, calibration))
        errors.append(both)
        bases.append({pair.name: pair.base_xxh64 for pair in paired.pairs})
    plain, natural, ordered = errors
    assert ordered[0] < plain[0] and ordered[1] < plain[1]
    assert ordered[1] < 1.1 * natural[1]
    differ = {name for name in bases[1] if bases[1][name] != bases[2][name]}
    assert differ == {name for name in bases[1] if ".ffn_down" in name}, "rows of one block have no order"


def test_block_order_moves_blocks_there_and_back() -> None:
    order = BlockOrder.by_activation(np.repeat([1.0, 9.0, 4.0, 100.0], [256, 256, 256, 64]).astype(np.float32))
    assert order.columns[[0, 256, 512, 768]].tolist() == [256, 512, 0, 768]  # the part of a block stays behind
    packed = np.arange(2 * 35, dtype=np.uint8)  # 2 rows: 3 blocks of 10 bytes and 5 bytes more
    assert order.pack(packed, 2, 10)[:35].tolist() == [*range(10, 30), *range(10), *range(30, 35)]
    assert np.array_equal(order.unpack(order.pack(packed, 2, 10), 2, 10), packed)


def test_a_calibration_serves_as_imatrix(tiny_gguf: Callable[[str], Path], text_file: Path, tmp_path: Path) -> None:
    calibration = run_calibrate(tiny_gguf("llama"), tmp_path / "c", text_file)
    imatrix = Imatrix(tmp_path / "c")
    diagonal = calibration.diagonal(calibration.info.weights["blk.1.ffn_up.weight"])
    weights = imatrix.weights(("blk.1.ffn_up.weight",), 1, diagonal.size)
    assert weights is not None and np.allclose(weights[0], diagonal / diagonal.mean(), rtol=1e-5)
    conftest.convert(tiny_gguf("llama"), tmp_path / "out.gguf", "--imatrix", str(tmp_path / "c"))



def test_a_calibration_of_another_model_is_refused(
    tiny_gguf: Callable[[str], Path], text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from twobit_gguf.convert import main

    run_calibrate(tiny_gguf("llama-320"), tmp_path / "c", text_file)
    assert main([str(tiny_gguf("llama")), str(tmp_path / "out.gguf"), "--calibration", str(tmp_path / "c"), "-q"]) == 2
    assert "calibrate the model you convert" in capsys.readouterr().err
    assert not (tmp_path / "out.gguf").exists()


def test_divergence() -> None:
    rng = np.random.default_rng(0)
    p = log_softmax(rng.standard_normal((50, 11)).astype(np.float32))
    following = rng.integers(0, 11, 50)
    same = Divergence()
    same.add(p, p.copy(), following)
    summary = same.summary()
    assert abs(summary["kld"]["mean"]) < 1e-6 and summary["same_top"]["mean"] == 1  # type: ignore[index]
    other = Divergence()
    uniform = np.zeros_like(p)
    other.add(p, uniform, following)
    entropy = -(np.exp(p) * p).sum(axis=1).mean()
    assert np.isclose(other.summary()["kld"]["mean"], np.log(11) - entropy, rtol=1e-4)  # type: ignore[index]
    assert np.isclose(other.summary()["perplexity"]["mean"], 11, rtol=1e-4)  # type: ignore[index]


def test_eval_on_answers(tiny_gguf: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The reference's own texts are likelier to it than any other."""
    source = tiny_gguf("qwen2")
    paired = conftest.convert(source, tmp_path / "paired.gguf")
    capsys.readouterr()
    perplexity = []
    for option in (["--answers"], []):
        assert evaluate.main([str(paired), "--reference", str(source), "--sequences", "2", "--rows", "verify", "--json", *option]) == 0
        perplexity.append(json.loads(capsys.readouterr().out)["rows"]["reference"]["perplexity"]["mean"])
    assert perplexity[0] < 0.9 * perplexity[1]


def test_eval(tiny_gguf: Callable[[str], Path], text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tiny_gguf("qwen2")
    paired = conftest.convert(source, tmp_path / "paired.gguf")
    capsys.readouterr()
    command = [str(paired), "--reference", str(source), "--text", str(text_file), "--sequences", "2", "--threads", "2", "--json"]
    assert evaluate.main([*command, "--beside", "q8_0", "--acceptance", "chain8", "--prompts", "2", "--acceptance-tokens", "12"]) == 0
    result = json.loads(capsys.readouterr().out)
    rows = result["rows"]
    if importlib.util.find_spec("matplotlib"):
        evaluate.plot(result, tmp_path / "plot.png")
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    kld = {name: row["kld"]["mean"] for name, row in rows.items()}
    assert rows["verify"]["tokens"] == 2 * 255
    assert kld["reference"] < 1e-6 < kld["verify weights"] < kld["draft"] and kld["verify"] < kld["draft"] and kld["q8_0"] < kld["draft"]
    assert 6 < rows["verify"]["ram_bits"] < 6.5 and rows["q8_0"]["ram_bits"] == 8.5
    assert 1 <= result["acceptance"]["chain8 t=0"]["mean"] <= 9
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".twobit-eval")] == []


def test_eval_refuses_before_it_measures(
    tiny_gguf: Callable[[str], Path], paired_tiny: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    other = tiny_models.write(tmp_path / "other.gguf", "llama", n_vocab=352)
    command = [str(paired_tiny("llama")), "--reference"]
    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "logits", None)  # nothing is measured
        assert evaluate.main([*command, str(other)]) == 2
        assert "320 tokens in its vocabulary, 352 in the reference's" in capsys.readouterr().err
        for option in (["--threads", "-1"], ["--sequences", "0"], ["--prompts", "99"], ["--temperature", "nan"]):
            with pytest.raises(SystemExit, match="2"):
                evaluate.main([*command, str(other), *option])

    def fails(*_: object) -> None:
        raise RuntimeError("llama_decode returned -1")

    monkeypatch.setattr(evaluate, "logits", fails)
    assert evaluate.main([*command, str(tiny_gguf("llama"))]) == 2
    assert capsys.readouterr().err.endswith("twobit eval: llama_decode returned -1\n")


def test_one_value_has_no_error(
    tiny_gguf: Callable[[str], Path], paired_tiny: Callable[[str], Path], text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert mean(np.array([3.0])).to_dict() == {"mean": 3.0, "stderr": None}
    assert mean(np.array([1.0, 3.0])).to_dict() == {"mean": 2.0, "stderr": 1.0}
    command = [str(paired_tiny("llama")), "--reference", str(tiny_gguf("llama")), "--text", str(text_file), "--sequences", "1", "--rows"]
    capsys.readouterr()
    assert evaluate.main([*command, "--acceptance", "chain8", "--prompts", "1", "--acceptance-tokens", "4", "--json"]) == 0
    out = capsys.readouterr().out
    assert "NaN" not in out and json.loads(out)["acceptance"]["chain8 t=0"]["stderr"] is None
    assert " ± - tokens per verification" in evaluate.render(json.loads(out))


def test_eval_prints_before_it_plots(
    tiny_gguf: Callable[[str], Path], paired_tiny: Callable[[str], Path], text_file: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    figures = pytest.importorskip("matplotlib.figure")
    command = [str(paired_tiny("llama")), "--reference", str(tiny_gguf("llama")), "--text", str(text_file), "--sequences", "1", "--json"]

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(figures.Figure, "savefig", full)
    capsys.readouterr()
    assert evaluate.main([*command, "--rows", "draft", "--plot", str(tmp_path / "plot.png")]) == 2
    printed = capsys.readouterr()
    assert "draft" in json.loads(printed.out)["rows"]
    assert printed.err.endswith(f"twobit eval: {tmp_path / 'plot.png'}: cannot be written: No space left on device\n")
    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "evaluate", None)  # nothing is measured
        for plot, said in (("x.foo", ".png, "), (str(tmp_path / "none" / "x.png"), "no such folder"), ("no-ending", ".svg")):
            assert evaluate.main([*command, "--plot", plot]) == 2
            assert said in capsys.readouterr().err
