"""Sizes on the command line."""

from __future__ import annotations

import argparse

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def size(text: str) -> int:
    """Bytes: 4G, 512M, 1.5G or a plain number. For argparse's type=."""
    number, unit = (text[:-1], _UNITS.get(text[-1:].upper())) if text[-1:].isalpha() else (text, 1)
    try:
        nbytes = float(number) * unit if unit is not None else 0
        if not 1 <= nbytes < float("inf"):
            raise ValueError
        return int(nbytes)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 4G or 512M") from None
