"""What a draft pass and a verification of T tokens cost on this machine, and whether speculation has been worth its time."""

from __future__ import annotations

from collections.abc import Iterable

KNOTS = (1, 2, 4, 8, 16, 32)  # widths of a verification that are measured; straight lines between them


class Costs:
    """Seconds of one draft pass and of one verification of 1…32 tokens; follows what the run sees.

    Args:
        draft: seconds of a draft pass.
        verify: of verifications of the first widths of KNOTS. A wider one is taken to cost twice as much as half its width does, which is
            the worst there is, until it has been seen.
    """

    def __init__(self, draft: float, verify: Iterable[float]) -> None:
        self.draft = draft
        self._verify = list(verify)
        if not 1 <= len(self._verify) <= len(KNOTS) or not all(value > 0 for value in (draft, *self._verify)):
            raise ValueError("costs are positive seconds, one for each width")
        self._n_single = 0
        self._n_seen = [float(i < len(self._verify)) for i in range(len(KNOTS))]
        self._verify += [0.0] * (len(KNOTS) - len(self._verify))
        self._table: list[float] = []
        self._extrapolate()

    def _extrapolate(self) -> None:
        for i in range(1, len(KNOTS)):
            if not self._n_seen[i]:
                self._verify[i] = 2 * self._verify[i - 1]
        self._table = []

    def widths(self) -> list[float]:
        """Seconds of verifications: [n] is that of n tokens, up to twice the widest knot."""
        if not self._table:
            table = [0.0]
            for i in range(1, len(KNOTS)):
                left, right = KNOTS[i - 1], KNOTS[i]
                slope = (self._verify[i] - self._verify[i - 1]) / (right - left)
                end = right if i + 1 < len(KNOTS) else 2 * right + 1
                table += [self._verify[i - 1] + slope * n for n in range(end - left)]
            self._table = table
        return self._table

    def verify(self, n_tokens: int) -> float:
        """Seconds that verifying n_tokens takes."""
        return self.widths()[n_tokens]

    def saw_draft(self, seconds: float) -> None:
        """One draft pass took this long."""
        self.draft += 0.1 * (min(seconds, 4 * self.draft) - self.draft)

    def saw_verify(self, n_tokens: int, seconds: float) -> None:
        """One verification took this long.

        A single token tells how busy the machine is now: everything follows it, the draft too, quickly at first, since all was measured at
        one moment. More tokens tell what their width costs: the knots beside it follow, faster while they have been seen seldom.
        """
        ratio = min(max(seconds / self.verify(n_tokens), 0.25), 4.0)
        common = 0.05
        if n_tokens == 1:
            common = max(0.1, 1 / (2 + self._n_single))
            self._n_single += 1
        for i, knot in enumerate(KNOTS):
            left = KNOTS[i - 1] if i else 0
            right = KNOTS[i + 1] if i + 1 < len(KNOTS) else 1 << 30
            pace = common
            if n_tokens > 1 and (left < n_tokens < right or knot == n_tokens):
                pace = max(0.2, 1 / (1 + self._n_seen[i]))
                self._n_seen[i] += 1
            self._verify[i] *= ratio**pace
        self.draft *= ratio**common
        self._extrapolate()

    def to_json(self) -> dict[str, object]:
        """Seconds, for another run."""
        return {"draft": self.draft, "verify": self._verify}

    def to_dict(self) -> dict[str, object]:
        """Milliseconds, for people and --json."""
        return {
            "draft_ms": round(self.draft * 1e3, 4),
            "verify_ms": {str(knot): round(value * 1e3, 4) for knot, value in zip(KNOTS, self._verify, strict=True)},
        }


class Rate:
    """Tokens a second of speculation, of plain decoding, and whether to speculate at all.

    Speculation that turns out slower than plain decoding pauses; each pause is twice as long as the one before it,
    until speculation pays again.
    """

    _TRIAL = 6  # steps of speculation before it is judged
    _MARGIN = 0.97  # of plain decoding's rate: less than this is slower, not noise
    _PAUSE = 24  # tokens of the first pause
    _LONGEST = 1024
    _CLOSE = 1.25  # of plain decoding's rate: up to here it is worth to know that well,
    _ANCHOR = 24  # and one step in so many is plain

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._steps = 0
        self._close = False
        self._pause = self._PAUSE
        self._paused = 0

    def speculative(self) -> float:
        """Tokens a second of the latest steps of speculation; 0 before the first."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def should_speculate(self) -> bool:
        """Counts one step of a pause if there is one."""
        if self._paused == 0 and self._close and self._steps % self._ANCHOR == self._ANCHOR - 1:
            self._steps += 1
            return False
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
        self._close = self.speculative() < self._CLOSE * plain
        if self.speculative() < self._MARGIN * plain:
            self._paused = self._pause
            self._pause = min(2 * self._pause, self._LONGEST)
            self._tokens = self._seconds = 0.0
            self._steps = 0
        elif self._steps > 4 * self._TRIAL:
            self._pause = self._PAUSE


class Probes:
    """Drafts that are made although they seem not to pay, or one bad measurement or one bad stretch of text would end drafting forever.

    Two in a row behind the beginning of a text and after 64 plain steps, and more while they pay; then after twice as many plain steps
    each time, until drafting pays.
    """

    NODES = 3
    _STEPS = 2
    _SOON = 2
    _FIRST = 64
    _LONGEST = 1024

    def __init__(self) -> None:
        self._wait = self._FIRST
        self._plain = 0
        self._steps: list[tuple[int, float]] = []  # tokens and seconds of the probe's

    @property
    def due(self) -> bool:
        """Whether to draft NODES tokens now, whatever they are worth."""
        return self._plain >= self._wait

    def new_text(self) -> None:
        """Another text, of which nothing is known."""
        self._wait, self._plain = self._SOON, 0
        self._steps.clear()

    def saw_plain(self) -> None:
        """One step without a draft."""
        self._plain += 1

    def saw_draft(self, tokens: int, seconds: float, plain: float) -> None:
        """One step with a draft made this many tokens in this time; plain: tokens a second of plain decoding."""
        if not self.due:
            self._plain, self._wait = 0, self._FIRST
            return
        self._steps.append((tokens, seconds))
        if len(self._steps) == self._STEPS:
            if sum(t for t, _ in self._steps) < plain * sum(s for _, s in self._steps):
                self._plain = 0
                self._wait = max(self._FIRST, min(2 * self._wait, self._LONGEST))
            self._steps.clear()
