"""Bad input is normal input: one clear line on stderr that names the file, exit status 2, nothing left behind, no crash."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash
from test_format import GOLDEN, write_pair

from twobit_gguf import convert, format, gguf_types, inspect
from twobit_gguf._native import ffi, lib
from twobit_gguf.convert_source import Source
from twobit_gguf.errors import MissingResidual, TwobitError
from twobit_gguf.format import Trailer

CUTS = 200


def one_line(stderr: str, path: object) -> str:
    """The message: a single line, from our command, that names the file."""
    assert stderr.count("\n") == 1 and stderr.endswith("\n"), stderr
    assert stderr.startswith(("twobit-convert: ", "twobit inspect: ")), stderr
    assert str(path) in stderr, stderr
    return stderr


def refused(main: Callable[[list[str]], int], *args: object) -> str:
    """Runs a command in this process; its one line."""
    stderr = io.StringIO()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with contextlib.redirect_stderr(stderr):
            assert main([*map(str, args)]) == 2, args
    finally:
        signal.signal(signal.SIGTERM, handler)
    return stderr.getvalue()


def refused_outside(module: str, *args: object, **options: object) -> str:
    """The same through the command line."""
    command = [sys.executable, "-m", f"twobit_gguf.{module}", *map(str, args)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, **options)  # type: ignore[call-overload]
    assert result.returncode == 2, (result.returncode, result.stderr)
    assert result.stdout == ""
    return result.stderr


def plugin_refuses(path: Path, residual: Path | None = None) -> str:
    """The C++ reader's line."""
    given = os.fsencode(residual) if residual is not None else ffi.NULL
    assert lib().twobit_attach(os.fsencode(path), given, 0) < 0
    line = ffi.string(lib().twobit_last_error()).decode()
    assert line and "\n" not in line and str(residual or path) in line
    return line


def cuts(size: int, count: int = CUTS) -> list[int]:
    """Places all over a file, its first and last bytes among them."""
    inner = sorted(random.Random(1).sample(range(1, size), min(count, size - 1) - 8))
    return sorted({0, 1, 3, 4, size - 65, size - 64, size - 2, size - 1, *inner})


# ---- a paired file that is damaged


@pytest.fixture
def paired(tmp_path: Path) -> Path:
    return shutil.copy(GOLDEN, tmp_path / "model.gguf")


def test_golden_is_accepted_by_the_plugin(paired: Path) -> None:
    assert lib().twobit_attach(os.fsencode(paired), ffi.NULL, 0) >= 0, ffi.string(lib().twobit_last_error())
    assert lib().twobit_detach(os.fsencode(paired)) >= 0


def test_cut_anywhere(paired: Path) -> None:
    whole = paired.read_bytes()
    for cut in cuts(len(whole)):
        paired.write_bytes(whole[:cut])
        one_line(refused(inspect.main, paired), paired)
        plugin_refuses(paired)
    one_line(refused_outside("inspect", paired), paired)


def gguf_tool(name: str, *args: object) -> None:
    subprocess.run([sys.executable, "-m", f"gguf.scripts.{name}", "--force", *map(str, args)], check=True, capture_output=True)


def test_tail_dropped_by_another_tool(paired_tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """gguf-py's gguf-new-metadata writes header and tensors anew, and nothing else."""
    rewritten = tmp_path / "renamed.gguf"
    gguf_tool("gguf_new_metadata", "--general-name", "renamed", paired_tiny("llama"), rewritten)
    with pytest.raises(MissingResidual, match="the residual is missing.*twobit-convert"):
        format.open_paired(rewritten)
    one_line(refused(inspect.main, rewritten), rewritten)
    assert "lost its residual" in plugin_refuses(rewritten)


def test_edit_in_place_does_no_harm(paired_tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """gguf-set-metadata overwrites a number in the header of the main part: bases and residuals are as they were."""
    edited = shutil.copy(paired_tiny("llama"), tmp_path / "edited.gguf")
    gguf_tool("gguf_set_metadata", edited, "llama.context_length", 1024)
    format.verify(format.open_paired(edited))


def test_header_grown(paired: Path) -> None:
    """One more byte, and one more alignment unit, somewhere in front of the residual."""
    whole = paired.read_bytes()
    for extra in (1, 32, 4096):
        grown = whole[: 24 + 40] + bytes(extra) + whole[24 + 40 :]
        paired.write_bytes(grown)
        one_line(refused(inspect.main, paired), paired)
        plugin_refuses(paired)
    # a tool that writes the header correctly and keeps what follows
    at = format.open_paired(GOLDEN).main.data_offset
    paired.write_bytes(rename_model(whole, at))
    assert "header was rewritten" in one_line(refused(inspect.main, paired), paired)
    plugin_refuses(paired)


def rename_model(whole: bytes, data_offset: int) -> bytes:
    """general.name made 64 bytes longer in a header that is right."""
    old = struct.pack("<Q", 6) + b"golden"
    head = whole[:data_offset].rstrip(b"\0")
    assert head.count(old) == 1
    head = head.replace(old, struct.pack("<Q", 70) + b"golden" + b"x" * 64)
    return head.ljust(-(-len(head) // 32) * 32, b"\0") + whole[data_offset:]


@pytest.mark.parametrize("what", ["base", "residual"])
def test_flipped_bit(paired: Path, what: str) -> None:
    pair = format.open_paired(paired).pairs[2]
    offset = pair.base_offset if what == "base" else pair.residual_offset
    blob = bytearray(paired.read_bytes())
    blob[offset + 777] ^= 4
    paired.write_bytes(blob)
    format.open_paired(paired)  # the structure is sound
    line = one_line(refused(inspect.main, paired, "--verify"), paired)
    assert f"the {what} of {pair.name} is damaged" in line


def test_flipped_bits_in_header_and_trailer(paired: Path) -> None:
    """Any damage is refused by both readers or does not matter to them; no other exception, no crash."""
    whole = paired.read_bytes()
    golden = format.open_paired(GOLDEN)
    section = len(whole) - 64 - golden.trailer.section_size
    places = [*range(golden.main.data_offset), *range(section, section + golden.trailer.header_size), *range(len(whole) - 64, len(whole))]
    chosen = random.Random(2)
    for _ in range(600):
        blob = bytearray(whole)
        at = chosen.choice(places)
        blob[at] ^= 1 << chosen.randrange(8)
        paired.write_bytes(blob)
        try:
            format.verify(format.open_paired(paired))
        except TwobitError as error:
            assert "\n" not in str(error) and str(paired) in str(error)
        else:
            assert at < section, f"byte {at} of the section or the trailer is not checked"
        if lib().twobit_attach(os.fsencode(paired), ffi.NULL, 0) >= 0:
            assert at < section, f"byte {at} of the section or the trailer is not checked by the plugin"
            lib().twobit_detach(os.fsencode(paired))


def reseal(paired: Path, change: Callable[[bytearray], None], **trailer: int) -> None:
    """Changes the section's header, or fields of the trailer, and makes every checksum of them right again."""
    blob = bytearray(paired.read_bytes())
    old = format.open_paired(GOLDEN).trailer
    start = len(blob) - 64 - old.section_size
    header = blob[start : start + old.header_size]
    change(header)
    blob[start : start + old.header_size] = header
    fields = {**vars(old), "header_xxh64": xxhash.xxh64_intdigest(bytes(header)), **trailer}
    blob[-64:] = Trailer(**fields).pack()
    paired.write_bytes(blob)


def set_key(header: bytearray, key: str, value: bytes, item: int = 0) -> None:
    """Overwrites a number of the section's header in place."""
    at = header.index(struct.pack("<Q", len(key)) + key.encode()) + 8 + len(key) + 4
    if header[at - 4] == 9:  # an array: type and count come first
        at += 12 + item * len(value)
    header[at : at + len(value)] = value


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("twobit.version", struct.pack("<I", 2)),
        ("twobit.layout_version", struct.pack("<I", 2)),
        ("twobit.pair_id", struct.pack("<Q", 1)),
        ("twobit.bits", struct.pack("<I", 7)),
        ("twobit.rows", struct.pack("<Q", 65)),
        ("twobit.rows", struct.pack("<Q", (1 << 64) - 1)),
        ("twobit.columns", struct.pack("<Q", 384)),
        ("twobit.columns", struct.pack("<Q", 1 << 62)),
        ("twobit.matrices", struct.pack("<Q", 1 << 40)),
        ("twobit.matrices", struct.pack("<Q", 0)),
        ("twobit.factor", struct.pack("<f", float("nan"))),
        ("twobit.factor", struct.pack("<f", -1.0)),
        ("twobit.base_type", struct.pack("<I", 1 << 31)),
        ("general.alignment", struct.pack("<I", 32)),
    ],
)
def test_wrong_values_with_right_checksums(paired: Path, key: str, value: bytes) -> None:
    reseal(paired, lambda header: set_key(header, key, value))
    one_line(refused(inspect.main, paired), paired)
    plugin_refuses(paired)


@pytest.mark.parametrize(
    "fields",
    [
        {"header_size": 0}, {"header_size": 1 << 31}, {"header_size": 64},
        {"section_size": 1 << 63}, {"section_size": 64}, {"section_size": 0},
        {"main_size": 0}, {"main_size": (1 << 64) - 1}, {"main_size": (1 << 64) - 5000}, {"pair_id": 7},
    ],
)  # fmt: skip
def test_wrong_trailer_with_right_checksum(paired: Path, fields: dict[str, int]) -> None:
    reseal(paired, lambda header: None, **fields)
    one_line(refused(inspect.main, paired), paired)
    plugin_refuses(paired)


def test_trailer_of_another_version(paired: Path) -> None:
    blob = bytearray(paired.read_bytes())
    struct.pack_into("<I", blob, len(blob) - 56, 9)
    struct.pack_into("<Q", blob, len(blob) - 8, xxhash.xxh64_intdigest(bytes(blob[-64:-8])))
    paired.write_bytes(blob)
    assert "update twobit" in one_line(refused(inspect.main, paired), paired)
    assert "update twobit" in plugin_refuses(paired)


def test_residual_of_another_model(tmp_path: Path) -> None:
    """Same names, same shapes, other weights."""
    a, b = tmp_path / "a.gguf", tmp_path / "b.gguf"
    write_pair(a, gguf_types.Q2_K, tmp_path / "a.residual.gguf")
    write_pair(b, gguf_types.IQ2_S, tmp_path / "b.residual.gguf")
    line = one_line(refused(inspect.main, a, "--residual", tmp_path / "b.residual.gguf"), "b.residual.gguf")
    assert "belongs to another model than a.gguf" in line
    shutil.copy(tmp_path / "b.residual.gguf", tmp_path / "a.residual.gguf")
    assert "another model" in one_line(refused(inspect.main, a), "a.residual.gguf")
    lib().twobit_attach(os.fsencode(a), ffi.NULL, 0)
    assert "another model" in ffi.string(lib().twobit_last_error()).decode()


def test_residual_file_that_points_elsewhere(tmp_path: Path) -> None:
    """A file must not make us open others: the residual's name is a base name."""
    out = tmp_path / "m.gguf"
    write_pair(out, gguf_types.Q2_K, tmp_path / "residual.gguf")
    out.write_bytes(out.read_bytes().replace(b"residual.gguf", b"../sid/x.gguf"))
    assert "not the name of a file" in one_line(refused(inspect.main, out), out)


@pytest.mark.parametrize("content", [b"", b"GG", b"GGUF", b"not a model" * 100, bytes(5000), b"GGUF\x00\x00\x00\x03" + bytes(100)])
def test_not_a_gguf(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    one_line(refused(inspect.main, path), path)
    one_line(refused(convert.main, path, tmp_path / "out.gguf"), path)
    assert [p.name for p in tmp_path.iterdir()] == ["x.gguf"]


def test_fifo(tmp_path: Path) -> None:
    """Does not wait for somebody to write into it."""
    os.mkfifo(tmp_path / "x.gguf")
    one_line(refused_outside("inspect", tmp_path / "x.gguf"), tmp_path / "x.gguf")
    one_line(refused(inspect.main, tmp_path), tmp_path)


def test_inspect_of_what_is_no_pair(tiny_gguf: Callable[[str], Path], tmp_path: Path) -> None:
    assert "make one with twobit-convert" in one_line(refused(inspect.main, tiny_gguf("llama")), "llama.gguf")
    assert "No such file" in one_line(refused_outside("inspect", tmp_path / "none.gguf"), "none.gguf")


# ---- a source that is damaged


def test_source_cut_anywhere(tiny_gguf: Callable[[str], Path], tmp_path: Path) -> None:
    whole = tiny_gguf("llama").read_bytes()
    source = tmp_path / "in.gguf"
    last_tensor = 1024  # the last norm, f32
    for cut in cuts(len(whole) - last_tensor):
        source.write_bytes(whole[:cut])
        one_line(refused(convert.main, source, tmp_path / "out.gguf"), source)
    assert [p.name for p in tmp_path.iterdir()] == ["in.gguf"]


def test_source_with_flipped_bits(tiny_gguf: Callable[[str], Path], tmp_path: Path) -> None:
    """A damaged header is refused or read as something else; never another exception, never a great allocation."""
    whole = tiny_gguf("moe").read_bytes()
    with Source(tiny_gguf("moe")) as sound:
        header = sound.tensors[0].offset
    source = tmp_path / "in.gguf"
    chosen = random.Random(3)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(400):
        blob = bytearray(whole)
        for _ in range(chosen.choice((1, 1, 8))):
            blob[chosen.randrange(header)] ^= 1 << chosen.randrange(8)
        source.write_bytes(blob)
        try:
            Source(source).close()
        except TwobitError as error:
            assert "\n" not in str(error) and str(source) in str(error)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KB


def test_nan_names_the_tensor(tiny_gguf: Callable[[str], Path], tmp_path: Path) -> None:
    source = tmp_path / "in.gguf"
    blob = bytearray(tiny_gguf("llama").read_bytes())
    with Source(tiny_gguf("llama")) as sound:
        at = sound.by_name["blk.1.ffn_up.weight"].offset
    blob[at + 100 : at + 102] = b"\x00\x7e"  # NaN in f16
    source.write_bytes(blob)
    line = one_line(refused(convert.main, source, tmp_path / "out.gguf", "-q"), source)
    assert "blk.1.ffn_up.weight" in line
    assert [p.name for p in tmp_path.iterdir()] == ["in.gguf"]


def test_unknown_architecture(tiny_gguf: Callable[[str], Path], tmp_path: Path) -> None:
    source = tmp_path / "in.gguf"
    source.write_bytes(tiny_gguf("llama").read_bytes().replace(b"llama", b"lxama"))
    line = one_line(refused_outside("convert", source, tmp_path / "out.gguf"), source)
    assert "unknown model architecture: 'lxama'" in line
    assert [p.name for p in tmp_path.iterdir()] == ["in.gguf"]


def test_model_that_llama_cpp_refuses(tiny_gguf: Callable[[str], Path], tmp_path: Path) -> None:
    """A tensor is missing: llama.cpp's own words."""
    source = tmp_path / "in.gguf"
    source.write_bytes(tiny_gguf("llama").read_bytes().replace(b"blk.0.attn_norm.weight", b"blk.0.attn_nork.weight"))
    assert "'blk.0.attn_norm.weight' not found" in one_line(refused(convert.main, source, tmp_path / "out.gguf"), source)


def test_paired_or_other_kind_as_source(tiny_gguf: Callable[[str], Path], tmp_path: Path) -> None:
    assert "already a paired GGUF" in one_line(refused(convert.main, GOLDEN, tmp_path / "out.gguf"), GOLDEN)
    big_endian = tmp_path / "be.gguf"
    big_endian.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    assert "big-endian" in one_line(refused(convert.main, big_endian, tmp_path / "out.gguf"), big_endian)


# ---- Hugging Face folders


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sharded checkpoint whose files are all there (its weights are no model's)."""
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    (folder / "tokenizer.json").write_text("{}")
    names = [f"model-{i:05}-of-00002.safetensors" for i in (1, 2)]
    for i, name in enumerate(names):
        (folder / name).write_bytes(safetensors({f"w{i}": ("F16", [8, 8])}))
    index = {"metadata": {}, "weight_map": {"w0": names[0], "w1": names[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def safetensors(tensors: dict[str, tuple[str, list[int]]]) -> bytes:
    header, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = shape[0] * shape[1] * {"F32": 4, "F16": 2, "BF16": 2}[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(at)


def convert_folder(source: Path, tmp_path: Path) -> str:
    line = refused(convert.main, source, tmp_path / "out.gguf")
    assert not [p for p in tmp_path.iterdir() if p.name.startswith((".", "out"))]
    return line


def test_missing_shard(folder: Path, tmp_path: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()
    line = one_line(convert_folder(folder, tmp_path), folder / "model-00002-of-00002.safetensors")
    assert "shard is missing" in line
    (folder / "model.safetensors.index.json").unlink()
    assert "1 of 2 shards" in one_line(convert_folder(folder, tmp_path), folder)


@pytest.mark.parametrize("length", [0, 1, 1 << 20, 1 << 40, (1 << 64) - 1, "shorter", "longer"])
def test_safetensors_header_length(folder: Path, tmp_path: Path, length: int | str) -> None:
    path = folder / "model.safetensors"
    blob = safetensors({"w": ("BF16", [8, 8])})
    right = struct.unpack_from("<Q", blob)[0]
    wrong = {"shorter": right - 1, "longer": right + 1}.get(length, length) if isinstance(length, str) else length
    path.write_bytes(struct.pack("<Q", wrong) + blob[8:])
    assert "download it again" in one_line(convert_folder(path, tmp_path), path)


def test_safetensors_cut_anywhere(folder: Path, tmp_path: Path) -> None:
    path = folder / "model.safetensors"
    blob = safetensors({"a": ("F32", [8, 8]), "b": ("F16", [4, 8])})
    for cut in cuts(len(blob)):
        path.write_bytes(blob[:cut])
        one_line(convert_folder(path, tmp_path), path)
    path.write_bytes(blob + b"x")
    one_line(convert_folder(path, tmp_path), path)


def test_safetensors_with_flipped_bits(folder: Path, tmp_path: Path) -> None:
    from twobit_gguf.hf import open_checkpoint

    path = folder / "model.safetensors"
    blob = safetensors({"a": ("F32", [8, 8]), "b": ("F16", [4, 8])})
    chosen = random.Random(4)
    for _ in range(400):
        damaged = bytearray(blob)
        damaged[chosen.randrange(len(blob) - 64 * 4 - 64)] ^= 1 << chosen.randrange(8)
        path.write_bytes(damaged)
        with contextlib.suppress(TwobitError):
            open_checkpoint(path)


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        (["tokenizer.json"], "no tokenizer files"),
        (["config.json"], "no config.json"),
        (["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"], "no model*.safetensors"),
    ],
)
def test_missing_files(folder: Path, tmp_path: Path, missing: list[str], says: str) -> None:
    for name in missing:
        (folder / name).unlink()
    assert says in one_line(convert_folder(folder, tmp_path), folder)


def test_damaged_json(folder: Path, tmp_path: Path) -> None:
    for content in ("", "{", "[]", "null", '{"weight_map": 3}', '{"weight_map": {"w": "../../etc/passwd"}}', '{"weight_map": {"w": 5}}'):
        (folder / "model.safetensors.index.json").write_text(content)
        one_line(convert_folder(folder, tmp_path), folder / "model.safetensors.index.json")
    for content in ("", "{", "[]", "{}"):
        (folder / "config.json").write_text(content)
        one_line(convert_folder(folder, tmp_path), folder / "config.json")
    (folder / "config.json").write_bytes(b"\xff\xfe\x00")
    one_line(convert_folder(folder, tmp_path), folder / "config.json")


def test_architecture_that_the_converter_does_not_know(folder: Path, tmp_path: Path) -> None:
    """With torch: llama.cpp's converter's reason. Without: what to install."""
    (folder / "config.json").write_text(json.dumps({"architectures": ["NobodysForCausalLM"]}))
    line = one_line(convert_folder(folder, tmp_path), folder)
    assert "Model NobodysForCausalLM is not supported" in line or "pip install 'twobit-gguf[hf]'" in line


def test_no_such_input(tmp_path: Path) -> None:
    for name in ("none.gguf", "none.safetensors", "none"):
        one_line(refused(convert.main, tmp_path / name, tmp_path / "out.gguf"), tmp_path)


# ---- the output


def test_output_exists(tiny_gguf: Callable[[str], Path], tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    out.write_text("precious")
    assert "--force" in one_line(refused_outside("convert", tiny_gguf("llama"), out), out)
    assert out.read_text() == "precious"
    assert "exists already" in one_line(
        refused(convert.main, tiny_gguf("llama"), tmp_path / "new.gguf", "--residual-file", out), out
    )
    assert refused(convert.main, tiny_gguf("llama"), tiny_gguf("llama"), "--force").endswith("name another output\n")
    link = tmp_path / "link.gguf"
    link.symlink_to(tiny_gguf("llama"))
    assert "the same file" in one_line(refused(convert.main, tiny_gguf("llama"), link, "--force"), link)
    assert "no such folder" in one_line(refused(convert.main, tiny_gguf("llama"), tmp_path / "no/out.gguf"), tmp_path / "no")
    assert "is a folder" in one_line(refused(convert.main, tiny_gguf("llama"), tmp_path), tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.gguf", "out.gguf"]


def test_old_output_survives_a_failure(tiny_gguf: Callable[[str], Path], tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    out.write_text("precious")
    source = tmp_path / "in.gguf"
    source.write_bytes(tiny_gguf("llama").read_bytes()[:-5000])
    one_line(refused(convert.main, source, out, "--force"), source)
    assert out.read_text() == "precious"


def test_file_size_limit(tiny_gguf: Callable[[str], Path], tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))

    line = refused_outside("convert", tiny_gguf("llama"), tmp_path / "out.gguf", preexec_fn=limit)
    assert "make room" in one_line(line, tmp_path / "out.gguf")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True)
    if mount.returncode != 0:
        pytest.skip("mounting a tmpfs is not allowed here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_disk_too_small(tiny_gguf: Callable[[str], Path], small_disk: Path) -> None:
    line = one_line(refused(convert.main, tiny_gguf("moe"), small_disk / "out.gguf"), small_disk)
    assert "not enough space" in line
    assert list(small_disk.iterdir()) == []


def test_disk_that_fills_up_meanwhile(tiny_gguf: Callable[[str], Path], small_disk: Path) -> None:
    """The check in advance passes (somebody else takes the space afterwards)."""
    code = (
        "import shutil, sys; from types import SimpleNamespace; from twobit_gguf import convert; "
        "shutil.disk_usage = lambda path: SimpleNamespace(free=1 << 40); sys.exit(convert.main(sys.argv[1:]))"
    )
    args = [sys.executable, "-c", code, str(tiny_gguf("moe")), str(small_disk / "out.gguf")]
    result = subprocess.run(args, capture_output=True, text=True)
    assert result.returncode == 2, result.stderr
    assert "No space left" in one_line(result.stderr, small_disk / "out.gguf")
    assert list(small_disk.iterdir()) == []


@pytest.fixture
def everyones_folder() -> Iterator[Path]:
    """A folder that any user can reach, unlike pytest's."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_unreadable_and_unwritable(everyones_folder: Path, folder: Path) -> None:
    """As a user without rights; root could read everything."""
    closed = shutil.copytree(folder, everyones_folder / "closed")
    model = everyones_folder / "model.gguf"
    model.write_bytes(b"GGUF")
    locked = everyones_folder / "locked"
    locked.mkdir()
    for path in (closed, model):
        path.chmod(0)
    locked.chmod(0o555)
    open_folder = everyones_folder / "open"
    open_folder.mkdir()
    open_folder.chmod(0o777)
    for source, out, named in (
        (closed, open_folder / "out.gguf", closed),
        (closed / "model.safetensors", open_folder / "out.gguf", closed),
        (model, open_folder / "out.gguf", model),
        (model, locked / "out.gguf", locked),
    ):
        code = (
            "import os, sys; from twobit_gguf import convert; os.getuid() or os.setuid(65534); sys.exit(convert.main(sys.argv[1:]))"
        )
        args = [sys.executable, "-c", code, str(source), str(out)]
        result = subprocess.run(args, capture_output=True, text=True, cwd=Path(convert.__file__).parent.parent)
        assert result.returncode == 2, result.stderr
        assert "permission" in one_line(result.stderr, named).lower()
    assert list(open_folder.iterdir()) == []
    closed.chmod(0o755)
