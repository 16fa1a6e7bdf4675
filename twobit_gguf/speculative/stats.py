"""What speculation did and where the time went."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field


@dataclass
class SpeculationStats:
    """Sums since the model was loaded or since reset(). Seconds are wall time.

    `verifications` counts decodes of the verifier that speculation made, plain one-token steps among them; the prompt is not part of it.
    """

    drafted: int = 0  # nodes sent to the verifier
    accepted: int = 0  # of those, the ones that the verifier's samples followed
    verifications: int = 0
    plain_steps: int = 0  # verifications without a draft, because drafting did not pay
    draft_passes: int = 0
    tokens: int = 0  # tokens generated
    widths: dict[int, int] = field(default_factory=dict)  # verifications by the number of their tokens
    seconds: dict[str, float] = field(default_factory=lambda: {"draft": 0.0, "verify": 0.0, "sample": 0.0, "measure": 0.0})

    @property
    def tokens_per_verification(self) -> float:
        """Tokens generated for each decode of the verifier; 1 is plain decoding."""
        return self.tokens / self.verifications if self.verifications else 0.0

    @property
    def acceptance(self) -> float:
        """Share of the drafted tokens that were accepted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def reset(self) -> None:
        """Back to zero."""
        self.__dict__.update(SpeculationStats().__dict__)

    def to_dict(self) -> dict[str, object]:
        """For --json."""
        return {**asdict(self), "tokens_per_verification": self.tokens_per_verification, "acceptance": self.acceptance}
