"""Collects XᵀX of every matmul's input: windows of inputs that fit the RAM budget, one pass over the text for each window.

Interrupted, it leaves OUT.part (finished inputs), OUT.part.json (which those are) and OUT.part.npz (sums under way); run again
with the same model and text, it goes on from there.
"""

from __future__ import annotations

import json
import os
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import TwobitError
from .graph import OUTPUT, Activations
from .model import Runner
from .store import Info, Writer

_CHECKPOINT = 120.0  # seconds between saved sums
_PROBE = 32  # tokens that show what the graph looks like
_GROUP = 64  # a weight with another number of columns has no residual


@dataclass
class Inputs:
    """The distinct inputs of a model's matmuls, in the order they are computed."""

    columns: dict[str, int] = field(default_factory=dict)  # input: columns
    weights: dict[str, str] = field(default_factory=dict)  # weight: input


class _Probe:
    """Watches one small graph to learn which weights share an input."""

    def __init__(self) -> None:
        self.inputs = Inputs()
        self._names: dict[tuple[int, int, int], str] = {}

    def wants(self, weight: str) -> bool:
        return weight.endswith(".weight") and weight not in self.inputs.weights

    def take(self, weight: str, x: Activations) -> bool:
        if x.is_f32 and x.columns % _GROUP == 0:
            name = self._names.setdefault(x.identity, weight)
            self.inputs.columns.setdefault(name, x.columns)
            self.inputs.weights[weight] = name
        return weight != OUTPUT


class _Sums:
    """Adds up x xᵀ of a window of inputs; ends each graph after the last of them."""

    def __init__(self, columns: dict[str, int]) -> None:
        self.sums = {name: np.zeros((k, k), np.float32) for name, k in columns.items()}
        self.rows = dict.fromkeys(columns, 0)
        self.dropped = dict.fromkeys(columns, 0)
        self._missing: set[str] = set()
        self._product = np.empty(max(k for k in columns.values()) ** 2, np.float32)

    def start(self) -> None:
        self._missing = set(self.sums)

    def check_complete(self) -> None:
        """Raises TwobitError: the graph has ended before all inputs were seen."""
        if self._missing:
            raise TwobitError(f"{min(self._missing)}: was not computed, and {len(self._missing) - 1} others; nothing is kept of this batch")

    def wants(self, weight: str) -> bool:
        return weight in self._missing

    def take(self, weight: str, x: Activations) -> bool:
        self._missing.discard(weight)
        rows = x.read()
        finite = np.isfinite(rows).all(axis=1)
        if not finite.all():
            self.dropped[weight] += int(len(rows) - finite.sum())
            rows = rows[finite]
        product = self._product[: rows.shape[1] ** 2].reshape(rows.shape[1], rows.shape[1])
        np.matmul(rows.T, rows, out=product)
        self.sums[weight] += product
        self.rows[weight] += len(rows)
        return bool(self._missing)


def probe(runner: Runner) -> Inputs:
    """The model's inputs, found by running a few tokens.

    Raises:
        TwobitError: there are none.
    """
    watcher = _Probe()
    runner.run(np.full((1, min(_PROBE, runner.context)), runner.bos or 0, np.int32), watcher)
    if not watcher.inputs.columns:
        raise TwobitError(f"{runner.path}: no matmul that could be calibrated was seen")
    return watcher.inputs


def windows(columns: dict[str, int], ram: int) -> list[dict[str, int]]:
    """Consecutive inputs whose matrices fit into `ram` bytes together (one that is larger than that goes alone)."""
    result: list[dict[str, int]] = []
    used = 0
    for name, k in columns.items():
        nbytes = 4 * k * k
        if not result or used + nbytes > ram:
            result.append({})
            used = 0
        result[-1][name] = k
        used += nbytes
    return result


class Collection:
    """The work on one .calib, a new one or what an interrupted run has left."""

    def __init__(self, out: Path, info: Info, batches: list[np.ndarray], ram: int) -> None:
        self.out, self.batches = out, batches
        self._part = out.with_name(out.name + ".part")
        self._state_path = out.with_name(out.name + ".part.json")
        self._sums_path = out.with_name(out.name + ".part.npz")
        self.writer = Writer(self._part, info)
        self.rows: dict[str, int] = {}
        self.dropped: dict[str, int] = {}
        self.resumed = self._load_state()
        if not self.resumed:
            self.writer.create()
            self._sums_path.unlink(missing_ok=True)
            self._save_state()
        self.windows = windows({name: k for name, k in info.columns.items() if name not in self.rows}, ram)
        self._sums, self.first_batch = self._load_sums()

    @property
    def steps_left(self) -> int:
        """Batches still to be run."""
        return max(0, len(self.windows) * len(self.batches) - self.first_batch)

    def run(self, runner: Runner, progress: Callable[[], object]) -> None:
        """Runs what is left and finishes the file."""
        for i, window in enumerate(self.windows):
            sums = self._sums if i == 0 and self._sums is not None else _Sums(window)
            first = self.first_batch if i == 0 else 0
            saved, pause = time.monotonic(), _CHECKPOINT
            for b in range(first, len(self.batches)):
                sums.start()
                runner.run(self.batches[b], sums)
                sums.check_complete()
                progress()
                if time.monotonic() - saved > pause:
                    started = time.monotonic()
                    self._save_sums(sums, b + 1)
                    saved = time.monotonic()
                    pause = max(_CHECKPOINT, 20 * (saved - started))
            for name, total in sums.sums.items():
                total /= max(1, sums.rows[name])
                self.writer.put(name, total)
            self.rows.update(sums.rows)
            self.dropped.update(sums.dropped)
            self._save_state()
            self._sums_path.unlink(missing_ok=True)
        self.writer.set_counts(self.rows, {name: n for name, n in self.dropped.items() if n})
        os.replace(self._part, self.out)
        self._state_path.unlink(missing_ok=True)

    def _load_state(self) -> bool:
        """Whether an earlier run's inputs can be kept: same model, same text, same everything."""
        try:
            state = json.loads(self._state_path.read_text())
            if not self.writer.matches() or not set(state["rows"]) <= set(self.writer.info.columns):
                return False
            self.rows, self.dropped = state["rows"], state["dropped"]
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return True

    def _save_state(self) -> None:
        _write_aside(self._state_path, json.dumps({"rows": self.rows, "dropped": self.dropped}).encode())

    def _load_sums(self) -> tuple[_Sums | None, int]:
        """The sums of the first window and the batch to go on with, if they were saved."""
        if not self.windows:
            return None, 0
        try:
            with np.load(self._sums_path) as saved:
                counts = json.loads(str(saved["counts"]))
                if list(counts["rows"]) != list(self.windows[0]):
                    return None, 0
                sums = _Sums(self.windows[0])
                for name in sums.sums:
                    sums.sums[name] += saved[name]
                sums.rows, sums.dropped = counts["rows"], counts["dropped"]
                return sums, int(counts["next"])
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None, 0

    def _save_sums(self, sums: _Sums, next_batch: int) -> None:
        counts = json.dumps({"rows": sums.rows, "dropped": sums.dropped, "next": next_batch})
        aside = self._sums_path.with_suffix(".tmp.npz")
        arrays: dict[str, Any] = {"counts": np.array(counts), **sums.sums}
        np.savez(aside, **arrays)
        os.replace(aside, self._sums_path)


def _write_aside(path: Path, data: bytes) -> None:
    aside = path.with_name(path.name + ".tmp")
    aside.write_bytes(data)
    os.replace(aside, path)
