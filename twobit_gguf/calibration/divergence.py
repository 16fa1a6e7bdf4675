"""How far a model's next-token distribution is from a reference's, token by token, with standard errors."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Mean:
    """A mean over tokens and its standard error (tokens taken as independent, as llama-perplexity does), which one value does not have."""

    value: float
    error: float | None

    def to_dict(self) -> dict[str, float | None]:
        return {"mean": self.value, "stderr": self.error}


def mean(values: np.ndarray) -> Mean:
    """values: (n,)."""
    n = len(values)
    return Mean(float(values.mean()), float(values.std(ddof=1) / np.sqrt(n)) if n > 1 else None)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """(n, vocabulary) f32, in place."""
    logits -= logits.max(axis=1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return logits


@dataclass
class Divergence:
    """Per-token figures, gathered sequence by sequence."""

    kld: list[np.ndarray] = field(default_factory=list)
    same_top: list[np.ndarray] = field(default_factory=list)
    log_likelihood: list[np.ndarray] = field(default_factory=list)

    def add(self, reference: np.ndarray, logits: np.ndarray, following: np.ndarray) -> None:
        """reference: (n, vocabulary) log probabilities; logits: the same shape, overwritten; following: (n,) the tokens that came next."""
        q = log_softmax(logits)
        self.same_top.append(reference.argmax(axis=1) == q.argmax(axis=1))
        self.log_likelihood.append(q[np.arange(len(following)), following].astype(np.float64))
        self.kld.append((np.exp(reference) * (reference - q)).sum(axis=1, dtype=np.float64))

    def summary(self) -> dict[str, object]:
        """kld, kld_99_9, same_top (0…1), perplexity, each mean with its stderr."""
        kld = np.concatenate(self.kld)
        nll = mean(-np.concatenate(self.log_likelihood))
        perplexity = float(np.exp(nll.value))
        return {
            "tokens": len(kld),
            "kld": mean(kld).to_dict(),
            "kld_99_9": float(np.quantile(kld, 0.999)),
            "same_top": mean(np.concatenate(self.same_top).astype(np.float64)).to_dict(),
            "perplexity": Mean(perplexity, None if nll.error is None else perplexity * nll.error).to_dict(),
        }
