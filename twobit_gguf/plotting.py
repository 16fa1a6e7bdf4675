"""matplotlib, which is optional: pip install 'twobit-gguf[plot]'."""

from __future__ import annotations

from pathlib import Path

from .errors import TwobitError


def require(path: Path) -> None:
    """Called before anything that takes long is measured for a plot in `path`; `from matplotlib import pyplot` works afterwards.

    Raises:
        TwobitError: matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError:
        raise TwobitError(f"{path}: plots need matplotlib; pip install 'twobit-gguf[plot]'") from None
    matplotlib.use("Agg")
