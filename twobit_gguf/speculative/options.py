"""How to speculate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import TwobitError

Shape = Literal["comb", "chain", "tree"]

MAX_WIDTH = 32  # tokens of one verification: what one pass of the residual's kernels over the weights serves


@dataclass(frozen=True)
class SpeculationOptions:
    """The shape of a draft and its limits.

    chain: the draft's favourites, one behind the other. comb: a chain and, beside its tokens, the runner-ups that its passes found anyway.
    tree: best-first, several branches drafted at once.

    With adaptive, depth and width follow the measured costs and the acceptance seen, and drafting pauses while it does not pay; without it
    every step drafts until its chance falls under `expand`, or to the limits.
    """

    shape: Shape = "comb"
    max_depth: int = 16  # draft passes a step
    max_nodes: int = 24  # drafted tokens a verification
    branches: int = 4  # tokens considered behind one node
    adaptive: bool = True
    expand: float = 0.2  # without adaptive: a node is drafted further while its chance is at least this
    leaf: float = 0.05  # without adaptive: a runner-up joins the verification if its chance is at least this
    lookup: int = 0  # n-grams of this length that occurred before are continued without a draft pass (prompt lookup); 0: off

    def __post_init__(self) -> None:
        if self.shape not in get_args(Shape):
            raise TwobitError(f"no shape {self.shape!r} of speculation: comb, chain or tree")
        if self.max_depth < 1 or self.branches < 1 or self.lookup < 0 or not 1 <= self.max_nodes < MAX_WIDTH:
            raise TwobitError(f"speculation takes max_depth and branches >= 1, lookup >= 0 and max_nodes from 1 to {MAX_WIDTH - 1}")

    @property
    def n_seq(self) -> int:
        """Sequences that the context needs: one for each leaf of the tree."""
        return {"chain": 1, "comb": 9, "tree": 17}[self.shape]
