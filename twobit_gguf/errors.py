"""The errors a user can do something about. Every message is one line that names the file and says what to do."""

from __future__ import annotations


class TwobitError(Exception):
    """A file or an option that twobit refuses."""


class MissingResidual(TwobitError):
    """A paired file whose residual is gone (tail cut or dropped by a rewriting tool): only its 2-bit base is left."""
