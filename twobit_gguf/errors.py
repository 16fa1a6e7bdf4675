"""The errors a user can do something about. Every message is one line that names the file and says what to do."""

from __future__ import annotations


class TwobitError(Exception):
    """A file or an option that twobit refuses."""


class MissingResidual(TwobitError):
    """A paired file whose residual is gone (tail cut or dropped by a rewriting tool): only its 2-bit base is left."""


def first_line(error: BaseException) -> str:
    """What it says, with the file that an OSError names; its type where it says nothing."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    return str(error).splitlines()[0] if str(error) else type(error).__name__
