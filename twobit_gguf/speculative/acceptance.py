"""From the draft's probability to the chance that the verifier follows: learnt while running.

The draft's own p is a poor guide: at temperature 0 a token with p = 0.45 is followed two times in three. So the
outcomes are counted in bins of p, one row for the draft's favourite and one for its runner-ups, with p itself as the prior.
"""

from __future__ import annotations

from typing import Any

_BINS = 12
_PRIOR = 6.0  # the prior's weight in outcomes
_MEAN_TOP = 0.8  # before anything was seen
_MEMORY = 400.0  # outcomes after which a bin starts to forget: text and temperature change
_CARRIED = 20.0  # outcomes that a bin keeps from another run


class Acceptance:
    """Estimated chance that a drafted token is followed, given that its parent was reached."""

    def __init__(self) -> None:
        self._trials = [[0.0] * _BINS for _ in range(2)]
        self._hits = [[0.0] * _BINS for _ in range(2)]
        self._n_top = 0
        self.mean_top = _MEAN_TOP  # running mean over the draft's favourites

    @staticmethod
    def _bin(p: float) -> int:
        return min(int(p * _BINS), _BINS - 1)

    def chance(self, rank: int, p: float) -> float:
        """rank: 0 for the draft's favourite; p: the draft's probability, 0 to 1."""
        row, cell = min(rank, 1), self._bin(p)
        return (self._hits[row][cell] + _PRIOR * p) / (self._trials[row][cell] + _PRIOR)

    def observe(self, rank: int, p: float, followed: bool) -> None:
        """Counts one outcome of a token whose parent was reached."""
        row, cell = min(rank, 1), self._bin(p)
        self._trials[row][cell] += 1
        self._hits[row][cell] += followed
        if self._trials[row][cell] > _MEMORY:
            self._trials[row][cell] /= 2
            self._hits[row][cell] /= 2
        if rank == 0:
            self._n_top += 1
            self.mean_top += (followed - self.mean_top) * max(0.02, 1 / (self._n_top + 4))

    def to_json(self) -> dict[str, object]:
        """For another run."""
        return {"mean_top": self.mean_top, "trials": self._trials, "hits": self._hits}

    def restore(self, data: dict[str, Any]) -> None:
        """Begins with what another run learnt; a little of its weight is left, since its text was another.

        Raises:
            ValueError, KeyError, TypeError: data is not what to_json gives.
        """
        mean, trials, hits = float(data["mean_top"]), data["trials"], data["hits"]
        if [len(row) for row in (*trials, *hits)] != [_BINS] * 4 or not 0 <= mean <= 1:
            raise ValueError("not an acceptance")
        for row in range(2):
            for cell in range(_BINS):
                n = float(trials[row][cell])
                weight = min(n, _CARRIED) / n if n > 0 else 0.0
                self._trials[row][cell] = n * weight
                self._hits[row][cell] = min(float(hits[row][cell]), n) * weight
        self.mean_top = mean
        self._n_top = int(_CARRIED)
