"""The drafted tokens of one step, and how likely the verifier is to follow them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

ROOT = -1  # the pending token, parent of the first drafted ones


class Candidate(NamedTuple):
    """A token the draft offers behind a node: rank 0 is its favourite, p its probability in the draft's distribution."""

    token: int
    rank: int
    p: float


@dataclass
class DraftTree:
    """Nodes in the order in which they were added, parents first; one list for each field.

    A node's chance is the estimated probability that the verifier's samples lead to it.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)  # 1 behind the root
    chances: list[float] = field(default_factory=list)
    candidates: list[Candidate] = field(default_factory=list)
    children: dict[int, list[int]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, candidate: Candidate, chance: float) -> int:
        """Adds a node behind `parent` (a node or ROOT) and returns it."""
        node = len(self.tokens)
        self.tokens.append(candidate.token)
        self.parents.append(parent)
        self.depths.append(1 if parent == ROOT else self.depths[parent] + 1)
        self.chances.append(chance)
        self.candidates.append(candidate)
        self.children.setdefault(parent, []).append(node)
        return node

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` (or of ROOT) that is `token`."""
        for child in self.children.get(node, ()):
            if self.tokens[child] == token:
                return child
        return None

    def trunk(self) -> list[int]:
        """The path that takes the first child everywhere: the one whose cells stay in the verified sequence."""
        path: list[int] = []
        node = ROOT
        while children := self.children.get(node):
            node = children[0]
            path.append(node)
        return path
