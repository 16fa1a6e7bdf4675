"""matplotlib, which is optional: pip install 'twobit-gguf[plot]'."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import TwobitError, first_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def require(path: Path) -> None:
    """Called before anything that takes long is measured for a plot in `path`; `from matplotlib import pyplot` works afterwards.

    Raises:
        TwobitError: matplotlib is missing, or cannot write `path`.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        raise TwobitError(f"{path}: plots need matplotlib; pip install 'twobit-gguf[plot]'") from None
    matplotlib.use("Agg")
    endings = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix[1:].lower() not in endings:
        raise TwobitError(f"{path}: no kind of image that matplotlib writes; end its name in .{', .'.join(sorted(endings))}")
    if not path.parent.is_dir():
        raise TwobitError(f"{path.parent}: no such folder; make it first")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise TwobitError(f"{path}: cannot be written to")


def save(figure: Figure, path: Path, **options: Any) -> None:
    """Writes the image and closes the figure.

    Raises:
        TwobitError: it cannot be written.
    """
    from matplotlib import pyplot

    try:
        figure.savefig(path, **options)
    except OSError as error:
        raise TwobitError(f"{path}: cannot be written: {error.strerror or first_line(error)}") from None
    finally:
        pyplot.close(figure)
