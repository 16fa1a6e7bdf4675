"""What a draft pass and a verification of T tokens cost on this machine, and whether speculation has been worth its time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

KNOTS = (1, 2, 4, 8, 16, 32)  # widths of a verification that are measured; straight lines between them


class Costs:
    """Seconds of one draft pass and of one verification of 1…32 tokens; follows what the run sees."""

    def __init__(self, draft: float, verify: Iterable[float]) -> None:
        self.draft = draft
        self._verify = list(verify)
        self._table: list[float] = []  # verify(0), verify(1), …
        if len(self._verify) != len(KNOTS) or not all(value > 0 for value in (draft, *self._verify)):
            raise ValueError("costs are positive seconds, one for each width measured")

    def widths(self) -> list[float]:
        """Seconds of verifications: [n] is that of n tokens, up to twice the widest measured."""
        if not self._table:
            self._table = [self.verify(n) for n in range(2 * KNOTS[-1] + 1)]
        return self._table

    def verify(self, n_tokens: int) -> float:
        """Seconds that verifying n_tokens takes."""
        for i in range(1, len(KNOTS)):
            left, right = KNOTS[i - 1], KNOTS[i]
            if n_tokens <= right or i == len(KNOTS) - 1:
                share = (n_tokens - left) / (right - left)
                return self._verify[i - 1] + share * (self._verify[i] - self._verify[i - 1])
        raise AssertionError("unreachable: the last knot always returns")

    def saw_draft(self, seconds: float) -> None:
        """One draft pass took this long."""
        self.draft += 0.05 * (min(seconds, 4 * self.draft) - self.draft)

    def saw_verify(self, n_tokens: int, seconds: float) -> None:
        """One verification took this long; the knots beside its width follow it, the others at half the pace."""
        expected = self.verify(n_tokens)
        self._table = []
        ratio = min(max(seconds / expected, 0.25), 4.0)
        for i, knot in enumerate(KNOTS):
            left = KNOTS[i - 1] if i else 0
            right = KNOTS[i + 1] if i + 1 < len(KNOTS) else 1 << 30
            step = 0.1 if left < n_tokens < right or knot == n_tokens else 0.05
            self._verify[i] *= 1 + step * (ratio - 1)

    def to_dict(self) -> dict[str, object]:
        """Milliseconds, for people and --json."""
        return {
            "draft_ms": round(self.draft * 1e3, 4),
            "verify_ms": {str(knot): round(value * 1e3, 4) for knot, value in zip(KNOTS, self._verify, strict=True)},
        }


def _cache_file(key: str) -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "twobit" / f"costs-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def load(key: str) -> Costs | None:
    """The costs measured for `key` (model, device, threads, machine) in an earlier run."""
    try:
        data = json.loads(_cache_file(key).read_text(encoding="utf-8"))
        if data["key"] == key:
            return Costs(float(data["draft"]), [float(value) for value in data["verify"]])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # no cache, or one of another version: measure again
    return None


def save(key: str, costs: Costs) -> None:
    """Keeps the costs for the next run; a cache that cannot be written is no error."""
    path = _cache_file(key)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump({"key": key, "draft": costs.draft, "verify": costs._verify}, file)
        os.replace(file.name, path)


class Rate:
    """Tokens a second of speculation, of plain decoding, and whether to speculate at all.

    Speculation that turns out slower than plain decoding pauses; each pause is twice as long as the one before it,
    until speculation pays again.
    """

    _TRIAL = 6  # steps of speculation before it is judged
    _MARGIN = 0.97  # of plain decoding's rate: less than this is slower, not noise
    _PAUSE = 24  # tokens of the first pause
    _LONGEST = 1024

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._steps = 0
        self._pause = self._PAUSE
        self._paused = 0

    def speculative(self) -> float:
        """Tokens a second of the latest steps of speculation; 0 before the first."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def should_speculate(self) -> bool:
        """Counts one step of a pause if there is one."""
        if self._paused == 0:
            return True
        self._paused -= 1
        return False

    def saw_step(self, tokens: int, seconds: float, plain: float) -> None:
        """One step of speculation made this many tokens in this time."""
        self._tokens = 0.9 * self._tokens + tokens
        self._seconds = 0.9 * self._seconds + seconds
        self._steps += 1
        if self._steps < self._TRIAL:
            return
        if self.speculative() < self._MARGIN * plain:
            self._paused = self._pause
            self._pause = min(2 * self._pause, self._LONGEST)
            self._tokens = self._seconds = 0.0
            self._steps = 0
        elif self._steps > 4 * self._TRIAL:
            self._pause = self._PAUSE
