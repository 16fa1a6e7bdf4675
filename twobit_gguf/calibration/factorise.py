"""H = XᵀX, damped, as U·diag(d)·Uᵀ with U unit upper triangular: the form that error feedback needs (ggml-twobit/src/gptq.h)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .order import BlockOrder

_LEAST = 0.05  # damping where there is text in plenty (see docs/quality.md: with less, the base leaves a larger residual)
_PER_COLUMN = 0.35  # damping for each column a row of text
_ATTEMPTS = 4  # of ten times more damping each
# These wide inputs overfit first: on 20,000 tokens of Qwen2.5-Coder-1.5B 1 % gave a held-out error a sixth higher than 15 %.
_FFN_DOWN_LEAST = 0.15


@dataclass
class Factors:
    """h: (k, k) f32, H damped; u: (k, k) f32, unit upper triangular; d: (k,) f32, positive; notes: what was odd about H, one line each.

    order: that of the columns in all three, where it is not the file's.
    """

    h: np.ndarray
    u: np.ndarray
    d: np.ndarray
    notes: list[str] = field(default_factory=list)
    order: BlockOrder | None = None

    @property
    def nbytes(self) -> int:
        return self.h.nbytes + self.u.nbytes + self.d.nbytes


def damping_for(name: str, columns: int, rows: int) -> float:
    """λ for an input of `columns` seen through `rows` rows of text: the fewer rows for each column, the more."""
    least = _FFN_DOWN_LEAST if ".ffn_down" in name else _LEAST
    return min(1.0, max(least, _PER_COLUMN * columns / max(1, rows)))


def factorise(h: np.ndarray, damping: float) -> Factors | None:
    """Factors of h + λ·(diag h + median diag h). None if h says nothing: no text, or only zeros and NaN.

    The median keeps near-dead columns from ruin: they are damped by what is usual, not by their own next to nothing.

    h: (k, k) f32, damped in place and kept.
    """
    notes = []
    diagonal = np.diagonal(h).copy()
    broken = ~np.isfinite(h).all(axis=1) | ~np.isfinite(diagonal)
    if broken.any():
        # one NaN in X spreads over its row and column of XᵀX; a broken column is one with a bad diagonal
        broken = ~np.isfinite(diagonal) if not np.isfinite(diagonal).all() else broken
        notes.append(f"{int(broken.sum())} columns hold NaN or Inf and are taken as dead")
        h[broken], h[:, broken] = 0, 0
        np.nan_to_num(h, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
        diagonal = np.diagonal(h).copy()
    np.maximum(diagonal, 0, out=diagonal)
    alive = diagonal > 0
    if not alive.any():
        return None
    if not alive.all():
        notes.append(f"{int((~alive).sum())} of {len(alive)} columns are dead (no text reached them)")
    usual = float(np.median(diagonal[alive]))

    for _ in range(_ATTEMPTS):
        h[np.diag_indices(len(h))] = diagonal + damping * (diagonal + usual)
        try:
            lower = np.linalg.cholesky(h[::-1, ::-1])  # of the reversed matrix: reversed, it is the upper triangle wanted
        except np.linalg.LinAlgError:
            lower = None
        if lower is not None and np.isfinite(lower).all():
            return _unit(h, lower, notes)
        damping = max(10 * damping, 1e-3)
        notes.append(f"not positive definite, damping raised to {damping:g}")
    return None


def _unit(h: np.ndarray, lower: np.ndarray, notes: list[str]) -> Factors:
    u = np.ascontiguousarray(lower[::-1, ::-1], np.float32)
    root = np.diagonal(u).copy()
    u /= root
    return Factors(h, u, np.square(root), notes)
