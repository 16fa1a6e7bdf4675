"""Bases that exist already (--base-from): those of another GGUF of the same model, so that only the residual is made.

Any quantised GGUF will do: a paired file whose residual is to have another size, or somebody's carefully made 2-bit model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from . import gguf_types
from .convert_plan import Action, Step
from .convert_source import Source
from .errors import TwobitError

_MOST = 7.0  # bits a weight: above that nothing is left for a residual to hold


class Bases:
    """The tensors of the other file. Use as a context manager."""

    def __init__(self, path: Path, warn: Callable[[str], object]) -> None:
        """Raises TwobitError: cannot be read, or is no model."""
        self._file = Source(path, may_be_paired=True)
        self._warn = warn
        self._warned: set[str] = set()

    def refine(self, source: Source, steps: list[Step]) -> list[Step]:
        """The plan with the other file's base types; pairs it does not have, or has in nearly full size, keep theirs.

        Raises:
            TwobitError: a tensor of another shape, or none that can be taken: it is another model.
        """
        refined = [self._refine(step) if step.action is Action.PAIR else step for step in steps]
        if not any(step.action is Action.PAIR and self._has(step) for step in refined):
            raise TwobitError(
                f"{self._file.path}: none of its tensors is a base for {source.path}; give a quantised GGUF of the same model"
            )
        return refined

    def read(self, step: Step, row0: int, n_rows: int) -> np.ndarray | None:
        """The bytes of a base's rows, (bytes,) u8; None if the file does not have this one."""
        if not self._has(step):
            return None
        return np.frombuffer(self._file.read(self._file.by_name[step.spec.name], row0, n_rows), np.uint8)

    def _has(self, step: Step) -> bool:
        tensor = self._file.by_name.get(step.spec.name)
        return tensor is not None and tensor.type == step.spec.type and gguf_types.bpw(tensor.type) < _MOST

    def _refine(self, step: Step) -> Step:
        tensor = self._file.by_name.get(step.spec.name)
        if tensor is not None and tensor.shape != step.spec.shape:
            raise TwobitError(
                f"{self._file.path}: tensor {tensor.name} has the shape {tensor.shape}, {step.spec.shape} is expected; "
                "give a quantised GGUF of the same model"
            )
        if tensor is None or gguf_types.bpw(tensor.type) >= _MOST:
            if step.spec.name not in self._warned:
                self._warned.add(step.spec.name)
                missing = "not there" if tensor is None else f"{gguf_types.name(tensor.type)}, too large for a base"
                self._warn(f"{self._file.path}: {step.spec.name} is {missing}; its base is made anew")
            return step
        return replace(step, spec=replace(step.spec, type=tensor.type))

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Bases:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
