"""Three shapes of one draft: chain, comb, tree. Each grows a DraftTree with passes of the 2-bit base over cells of its own."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence

from .. import plugin
from .acceptance import Acceptance
from .cells import Batch, Cells
from .options import MAX_WIDTH, SpeculationOptions
from .tree import ROOT, Candidate, DraftTree
from .worth import Worth

_BEAM = 4  # nodes of a tree that one pass drafts behind
_P_MIN = 0.02  # of a runner-up in the draft's distribution


class BaseDraft:
    """Drafts with the base alone, in the context of the verifier, whose cells it reads; its own cells are gone when grow() returns.

    Anything with this grow() can take its place: prompt lookup does, and an MTP head would.
    """

    def __init__(self, cells: Cells, acceptance: Acceptance, options: SpeculationOptions, is_end: Callable[[int], bool]) -> None:
        self._cells = cells
        self._options = options
        self._is_end = is_end
        self._branches = 1 if options.shape == "chain" else options.branches
        self._batch = Batch(MAX_WIDTH, 1)
        self._n_used = 1  # sequences that hold cells of the draft
        self.acceptance = acceptance
        self.pass_seconds: list[float] = []  # one for each pass; the caller clears it

    def grow(self, tree: DraftTree, roots: Sequence[int], n_past: int, room: int, worth: Worth) -> None:
        """Adds up to `room` nodes behind the last of `roots`, whose first stands at position n_past."""
        self._n_used = 1
        try:
            if self._options.shape == "tree":
                self._grow_tree(tree, roots, n_past, room, worth)
            else:
                self._grow_line(tree, roots, n_past, room, worth)
        finally:
            for seq in range(self._n_used):
                self._cells.remove(seq, n_past)

    # ---- chain and comb ----

    def _grow_line(self, tree: DraftTree, roots: Sequence[int], n_past: int, room: int, worth: Worth) -> None:
        runners_up: list[tuple[float, int, Candidate]] = []
        node, chance = ROOT, 1.0
        tokens: Sequence[int] = roots
        pos = n_past
        depth = min(self._options.max_depth, self._options.max_nodes, room)
        while len(tree) < depth and worth.draft_pass(chance, len(roots) + len(tree)):
            candidates = self._decode_roots(tokens, pos)
            if not candidates:
                break
            best, *others = candidates
            pos += len(tokens)
            runners_up += [(chance * self.acceptance.chance(c.rank, c.p), node, c) for c in others]
            chance *= self.acceptance.chance(0, best.p)
            if not worth.node(chance, len(roots) + len(tree)):
                break
            node = tree.add(node, best, chance)
            tokens = (best.token,)
            if self._is_end(best.token):
                break
        self._add_leaves(tree, runners_up, len(roots), room, worth)

    # ---- tree ----

    def _grow_tree(self, tree: DraftTree, roots: Sequence[int], n_past: int, room: int, worth: Worth) -> None:
        cells, first = self._cells, n_past + len(roots)
        frontier: list[tuple[float, int, int, Candidate]] = []  # (-chance, order, parent, candidate)
        order = 0
        sequences = {ROOT: 0}
        ends = {0: first}  # how far each draft sequence reaches; 0 has the roots
        passes = 0
        limit = min(self._options.max_nodes, room)

        def offer(parent: int, chance: float, candidates: Sequence[Candidate]) -> None:
            nonlocal order
            for candidate in candidates:
                order += 1
                heapq.heappush(frontier, (-chance * self.acceptance.chance(candidate.rank, candidate.p), order, parent, candidate))

        if not worth.draft_pass(1.0, len(roots)):
            return
        offer(ROOT, 1.0, self._decode_roots(roots, n_past))
        while frontier and passes < self._options.max_depth:
            nodes: list[int] = []
            while frontier and len(nodes) < _BEAM and len(tree) < limit and worth.draft_pass(-frontier[0][0], len(roots) + len(tree)):
                if len(nodes) > 0 and frontier[0][0] > tree.chances[nodes[0]] * -0.5:
                    break  # much less likely than the best one: wait for the best one's children
                chance, _, parent, candidate = frontier[0]
                if not self._has_leaf_for(tree, parent):
                    break
                heapq.heappop(frontier)
                node = tree.add(parent, candidate, -chance)
                if self._is_end(candidate.token):
                    continue
                pos = first + tree.depths[node] - 1
                seq = sequences[parent]
                if ends[seq] != pos:  # an elder sibling went on in the parent's sequence
                    seq = len(ends)
                    self._n_used = seq + 1
                    cells.mirror(seq, n_past)
                    cells.copy(sequences[parent], seq, n_past, pos)
                sequences[node] = seq
                ends[seq] = pos + 1
                nodes.append(node)
            if not nodes:
                break
            rows = self._decode([(tree.tokens[n], first + tree.depths[n] - 1, sequences[n], True) for n in nodes])
            passes += 1
            for node, candidates in zip(nodes, rows, strict=True):
                offer(node, tree.chances[node], candidates)
        leaves = [(-chance, parent, candidate) for chance, _, parent, candidate in frontier]
        self._add_leaves(tree, leaves, len(roots), room, worth)

    def _has_leaf_for(self, tree: DraftTree, parent: int) -> bool:
        """Whether there is a sequence for one more child of `parent`: the first child goes on in its parent's."""
        leaves = sum(1 for node in range(len(tree)) if not tree.children.get(node))
        return not tree.children.get(parent) or leaves < self._cells.n_seq

    # ---- both ----

    def _add_leaves(self, tree: DraftTree, leaves: list[tuple[float, int, Candidate]], n_roots: int, room: int, worth: Worth) -> None:
        """Adds tokens that are known already, the likely ones first."""
        for chance, parent, candidate in sorted(leaves, key=lambda leaf: -leaf[0]):
            if len(tree) >= min(room, self._options.max_nodes) or not worth.node(chance, n_roots + len(tree)):
                break
            if self._has_leaf_for(tree, parent):
                tree.add(parent, candidate, chance)

    def _decode_roots(self, tokens: Sequence[int], pos: int) -> list[Candidate]:
        """One draft pass over tokens of sequence 0 from `pos` on; the candidates behind the last of them."""
        last = len(tokens) - 1
        return self._decode([(token, pos + i, 0, i == last) for i, token in enumerate(tokens)])[-1]

    def _decode(self, tokens: Sequence[tuple[int, int, int, bool]]) -> list[list[Candidate]]:
        """One draft pass over (token, position, sequence, whether candidates are wanted); the candidates behind those."""
        begin = time.perf_counter()
        self._batch.clear()
        rows = []
        for token, pos, seq, want in tokens:
            row = self._batch.add(token, pos, (seq,), want)
            if want:
                rows.append(row)
        with plugin.mode("draft"):
            self._cells.decode(self._batch)
        found = [self._cells.candidates(row, self._branches, _P_MIN) for row in rows]
        self.pass_seconds.append(time.perf_counter() - begin)
        return found
