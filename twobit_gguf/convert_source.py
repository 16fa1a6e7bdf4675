"""The model to convert, opened for reading: one GGUF or all shards of a split one, tensor data read in rows, never mapped."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import TracebackType

import numpy as np

from . import gguf_file, gguf_types
from ._native import check, ffi, lib
from .errors import TwobitError
from .format import is_paired
from .gguf_file import GGUFFile, Tensor, Value

_SHARD = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")


class Source:
    """A model's tensors and keys. Use as a context manager: it holds its files open."""

    def __init__(self, path: Path, shown_as: Path | None = None, may_be_paired: bool = False) -> None:
        """path: a GGUF, of a split model the first shard; shown_as: what errors call it (a temporary GGUF has a better name).
        may_be_paired: of a paired GGUF the main part will do.

        Raises:
            TwobitError: damaged, a shard missing, or not a model.
        """
        self.file, self.path = path, shown_as or path
        files = _open_shards(path)
        _check_model(self.path, files[0], may_be_paired)
        self.kv: dict[str, Value] = {k: v for k, v in files[0].kv.items() if k not in _SPLIT_KEYS}
        self.alignment = files[0].alignment
        self.tensors: list[Tensor] = []
        self._fd_of: dict[str, int] = {}
        self._fds: list[int] = []
        try:
            for file in files:
                self._fds.append(os.open(file.path, os.O_RDONLY))
                for tensor in file.tensors:
                    if tensor.name in self._fd_of:
                        raise TwobitError(f"{file.path}: tensor {tensor.name} is in another shard too; download the model again")
                    self._fd_of[tensor.name] = self._fds[-1]
                    self.tensors.append(tensor)
        except BaseException:
            self.close()
            raise
        self.by_name = {tensor.name: tensor for tensor in self.tensors}

    @property
    def architecture(self) -> str:
        return str(self.kv["general.architecture"].get())

    def read(self, tensor: Tensor, row0: int, n_rows: int) -> bytes:
        """The bytes of rows [row0, row0 + n_rows), counted through all matrices. Safe from several threads."""
        row_nbytes = gguf_types.nbytes(tensor.type, tensor.columns)
        data, offset = b"", tensor.offset + row0 * row_nbytes
        left = n_rows * row_nbytes
        while left:
            part = os.pread(self._fd_of[tensor.name], left, offset)
            if not part:
                raise TwobitError(f"{self.path}: the file became shorter while it was read (tensor {tensor.name})")
            data = data + part if data else part
            offset += len(part)
            left -= len(part)
        return data

    def read_f32(self, tensor: Tensor, row0: int, n_rows: int) -> np.ndarray:
        """The same rows as f32, (n_rows, columns).

        Raises:
            TwobitError: NaN or Inf among them.
        """
        data = self.read(tensor, row0, n_rows)
        weights = np.empty((n_rows, tensor.columns), np.float32)
        check(
            lib().twobit_base_dequantize(
                tensor.type, ffi.from_buffer(data), n_rows, tensor.columns, ffi.from_buffer("float[]", weights)
            )
        )
        if not np.isfinite(weights).all():
            raise TwobitError(f"{self.path}: tensor {tensor.name} holds NaN or Inf; the model is damaged, get it again")
        return weights

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def __enter__(self) -> Source:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _open_shards(path: Path) -> list[GGUFFile]:
    first = gguf_file.open_gguf(path)
    count = first.get("split.count", gguf_file.U16) or 0
    if count <= 1:
        return [first]
    match = _SHARD.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise TwobitError(f"{path}: one of {count} shards; give it its name back (NAME-00001-of-{count:05}.gguf)")
    paths = [path.with_name(f"{match['prefix']}-{i + 1:05}-of-{count:05}.gguf") for i in range(count)]
    if first.get("split.no", gguf_file.U16) != 0:
        raise TwobitError(f"{path}: not the first shard; convert {paths[0].name}, the others are found from it")
    missing = [p.name for p in paths if not p.is_file()]
    if missing:
        raise TwobitError(f"{path}: {len(missing)} of {count} shards are missing ({missing[0]}); put them beside it")
    files = [first] + [gguf_file.open_gguf(p) for p in paths[1:]]
    for i, file in enumerate(files):
        if file.get("split.no", gguf_file.U16) != i or file.get("split.count", gguf_file.U16) != count:
            raise TwobitError(f"{file.path}: not shard {i + 1} of this model; download the shards again")
    expected = first.get("split.tensors.count", gguf_file.I32)
    found = sum(len(file.tensors) for file in files)
    if expected is not None and expected != found:
        raise TwobitError(f"{path}: the shards hold {found} tensors, {expected} are expected; download them again")
    return files


def _check_model(path: Path, file: GGUFFile, may_be_paired: bool) -> None:
    if is_paired(file) and not may_be_paired:
        raise TwobitError(f"{path}: already a paired GGUF; convert the model it was made from")
    if not file.get("general.architecture", gguf_file.STRING):
        raise TwobitError(f"{path}: a GGUF without general.architecture; convert a language model")
    kind = file.get("general.type", gguf_file.STRING) or "model"
    if kind != "model" or file.get("general.architecture", gguf_file.STRING) == "clip":
        raise TwobitError(f"{path}: not a language model but of kind {kind!r}; convert the model it belongs to")
