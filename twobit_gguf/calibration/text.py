"""Calibration text: the user's files, or what every Python ships with (prose of its language reference, code of its library)."""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path

from ..errors import TwobitError

_PASSAGE = 6000  # characters taken in one piece from a default source
_MODULES = 60  # files of the standard library
_PROSE, _CODE = 180, 90  # passages of each in the calibration's text; those behind them are for evaluation


def read_texts(paths: list[Path]) -> str:
    """The files one after the other.

    Raises:
        TwobitError: a file cannot be read, or all are empty.
    """
    parts = []
    for path in paths:
        try:
            parts.append(path.read_text(encoding="utf-8", errors="replace"))
        except OSError as error:
            raise TwobitError(f"{path}: cannot be read: {error.strerror}") from None
    text = "\n\n".join(parts)
    if not text.strip():
        raise TwobitError(f"{paths[0]}: no text in it; give --text files with prose and code")
    return text


def default_text(held_out: bool = False) -> str:
    """About 1.5 MB of English prose and Python code, mixed, the same for one Python version; held_out: other passages of the same kind."""
    passages = []
    for texts, n in ((_prose(), _PROSE), (_code(), _CODE)):
        found = [text[i : i + _PASSAGE] for text in texts for i in range(0, len(text), _PASSAGE)]
        random.Random(0).shuffle(found)
        n = min(n, 3 * len(found) // 4)
        passages += found[n : n + n // 3] if held_out else found[:n]
    if not passages:
        raise TwobitError("this Python has no sources of its standard library; give --text files with prose and code")
    random.Random(0).shuffle(passages)
    return "\n\n".join(passages)


def _prose() -> list[str]:
    texts: list[str] = []
    try:
        from pydoc_data import topics

        texts.extend(topics.topics[key] for key in sorted(topics.topics))
    except ImportError:  # some distributions leave it out
        pass
    licence = Path(sysconfig.get_paths()["stdlib"]) / "LICENSE.txt"
    if licence.is_file():
        texts.append(licence.read_text(encoding="utf-8", errors="replace"))
    return texts


def _code() -> list[str]:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    random.Random(0).shuffle(files)
    return [file.read_text(encoding="utf-8", errors="replace") for file in files[:_MODULES]]

