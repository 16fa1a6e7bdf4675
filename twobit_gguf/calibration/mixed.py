"""Mixed bases: spends a budget of base bits where they lower the divergence most; a finer base gets a coarser residual.

What bits buy is measured: a sample of each tensor's rows is rounded to each type with error feedback, and the relative output
error over the calibration text, tr(E H Eᵀ) / tr(W H Wᵀ), is taken; sensitivity.py measures what such an error does to the model's
output. The sum of error · sensitivity over all tensors is then minimised under the budget: of each tensor only the types on the
lower convex hull of (bytes, error) come into question, and steps along the hulls are taken by falling gain for each byte.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from tqdm import tqdm

from .. import gguf_types
from ..convert_plan import Action, Step
from ..convert_source import Source
from ..errors import TwobitError
from . import sensitivity
from .expand import dequantize
from .quantizer import FeedbackFactory, FeedbackQuantizer
from .sensitivity import groups

Item = TypeVar("Item")

IQ2_XS, Q2_K, Q3_K, Q4_K, Q4_0, Q2_0 = gguf_types.IQ2_XS, gguf_types.Q2_K, 11, 12, 2, gguf_types.Q2_0
_SUPER_BLOCKS, _SHORT_ROWS = (IQ2_XS, Q2_K, Q3_K, Q4_K), (Q2_0, Q4_0)
_COARSER = {8: 6, 6: 5, 5: 4, 4: 4}  # bits of a residual for each bit more of base
_SAMPLE = 64  # rows
_CONTEXT = 8192  # tokens of KV cache that --vram leaves room for
_BUFFERS = 512 << 20  # and bytes of compute buffers


@dataclass(frozen=True)
class Budget:
    """What all bases together may take: bits a weight on average, or bytes of VRAM with KV cache and buffers."""

    bpw: float | None = None
    vram: int | None = None

    def nbytes(self, source: Source, steps: list[Step]) -> int:
        """Bytes for the bases."""
        pairs = [step for step in steps if step.action is Action.PAIR]
        if self.bpw is not None:
            return int(self.bpw * sum(step.source.n_weights for step in pairs) / 8)
        assert self.vram is not None
        # token_embd stays in RAM; everything else that is not paired is copied to the GPU
        others = sum(
            gguf_types.nbytes(step.spec.type, step.source.n_weights)
            for step in steps
            if step.action is not Action.PAIR and not step.spec.name.endswith("token_embd.weight")
        )
        return self.vram - others - kv_cache_nbytes(source, _CONTEXT) - _BUFFERS


@dataclass(frozen=True)
class Level:
    """A tensor in one base type."""

    type: int
    nbytes: int
    error: float  # relative output error, times what it weighs


class Mixer:
    """Chooses the types of a plan's pairs; give it to convert.Job as `refine`."""

    def __init__(self, factory: FeedbackFactory, budget: Budget, threads: int, quiet: bool = False) -> None:
        self.factory, self.budget, self.threads, self.quiet = factory, budget, threads, quiet
        self._levels: dict[str, list[Level]] = {}  # measured once, though the plan may be refined twice

    def __call__(self, source: Source, steps: list[Step]) -> list[Step]:
        """Raises TwobitError: the budget is too small."""
        pairs = [step for step in steps if step.action is Action.PAIR]
        unknown = [step for step in pairs if step.spec.name not in self._levels]
        if unknown:
            errors = {step.spec.name: self._measure(source, step) for step in self._bar(unknown, "errors", "tensor")}
            self._levels |= self._weigh(source, errors)
        available = self.budget.nbytes(source, steps)
        chosen = allocate({step.spec.name: self._levels[step.spec.name] for step in pairs}, available)
        if chosen is None:
            least = sum(min(level.nbytes for level in self._levels[step.spec.name]) for step in pairs)
            raise TwobitError(
                f"{source.path}: its bases take {least / 2**30:.3f} GiB at least and the budget leaves "
                f"{max(0, available) / 2**30:.3f}; give more --vram (or --base-bpw), or keep layers in RAM when running it"
            )
        return [_with_type(step, chosen[step.spec.name].type) if step.action is Action.PAIR else step for step in steps]

    def _bar(self, items: Iterable[Item], what: str, unit: str, total: int | None = None) -> tqdm[Item]:
        return tqdm(items, desc=f"measuring {what}", unit=unit, total=total, disable=True if self.quiet else None)

    def _weigh(self, source: Source, levels: dict[str, list[Level]]) -> dict[str, list[Level]]:
        """The same levels with errors in nats of divergence."""
        worst = {name: max(level.error for level in options) for name, options in levels.items()}
        with self._bar((), "sensitivity", "run", 1 + len(groups(list(worst)))) as bar:
            weights = sensitivity.measure(source.file, worst, self.threads, bar.update)
        return {name: [replace(level, error=level.error * weights[name]) for level in options] for name, options in levels.items()}

    def _measure(self, source: Source, step: Step) -> list[Level]:
        kinds = _SUPER_BLOCKS if step.source.columns % gguf_types.block(Q2_K) == 0 else _SHORT_ROWS
        w = _sample(source, step)
        levels = []
        for kind in kinds:
            quantizer = self.factory(_with_type(step, kind), None)
            base = quantizer.base(w, 0)
            error = w - dequantize(kind, base, *w.shape)
            if isinstance(quantizer, FeedbackQuantizer):
                relative = quantizer.output_error(error) / max(quantizer.output_error(w), 1e-30)
            else:  # not calibrated: all columns count the same
                relative = float(np.square(error).sum() / max(float(np.square(w).sum()), 1e-30))
            levels.append(Level(kind, gguf_types.nbytes(kind, step.source.n_weights), relative))
        return levels


def allocate(levels: dict[str, list[Level]], nbytes: int) -> dict[str, Level] | None:
    """One level for each tensor with the least sum of errors (but for the last, partial step) in `nbytes`; None if they do not fit."""
    hulls = {name: _hull(options) for name, options in levels.items()}
    chosen = {name: hull[0] for name, hull in hulls.items()}
    left = nbytes - sum(level.nbytes for level in chosen.values())
    if left < 0:
        return None
    steps = [
        ((before.error - after.error) / (after.nbytes - before.nbytes), name, after)
        for name, hull in hulls.items()
        for before, after in zip(hull, hull[1:], strict=False)
    ]
    blocked: set[str] = set()
    for _, name, after in sorted(steps, key=lambda step: (-step[0], step[1])):
        more = after.nbytes - chosen[name].nbytes
        if name in blocked or more > left:
            blocked.add(name)
            continue
        chosen[name] = after
        left -= more
    return chosen


def _hull(options: list[Level]) -> list[Level]:
    """The lower convex hull of (bytes, error): each step along it gains less for a byte than the one before."""
    hull: list[Level] = []
    for level in sorted(options, key=lambda option: (option.nbytes, option.error)):
        if hull and level.error >= hull[-1].error:
            continue
        while len(hull) >= 2 and _gain(hull[-2], hull[-1]) <= _gain(hull[-1], level):
            hull.pop()
        hull.append(level)
    return hull


def _gain(before: Level, after: Level) -> float:
    return (before.error - after.error) / (after.nbytes - before.nbytes)


def kv_cache_nbytes(source: Source, context: int) -> int:
    """An f16 KV cache by the header's keys; 0 where this architecture does not have them."""

    def number(key: str) -> int:
        value = source.kv.get(f"{source.architecture}.{key}")
        found = value.get() if value is not None else 0
        return max(int(n) for n in found) if isinstance(found, list) else int(found)

    heads, heads_kv, width = number("attention.head_count"), number("attention.head_count_kv"), number("embedding_length")
    if not heads:
        return 0
    key = number("attention.key_length") or width // heads
    value = number("attention.value_length") or key
    return number("block_count") * (heads_kv or heads) * (key + value) * 2 * context


def _with_type(step: Step, kind: int) -> Step:
    """The step with this base; for each bit more than two the residual has one less."""
    bits = step.spec.bits
    assert bits is not None
    for _ in range(round(gguf_types.bpw(kind)) - 2 if gguf_types.bpw(kind) >= 3 else 0):
        bits = _COARSER[bits]
    return replace(step, spec=replace(step.spec, type=kind, bits=bits))


def _sample(source: Source, step: Step) -> np.ndarray:
    """Up to _SAMPLE rows from all over the tensor, (rows, columns) f32."""
    total = step.rows * step.matrices
    rows = np.unique(np.linspace(0, total - 1, min(_SAMPLE, total)).astype(int))
    return np.concatenate([source.read_f32(step.source, int(row), 1) for row in rows])
