"""One step of speculation: draft, verify, and the cells that stay.

The verifier decodes the pending tokens (the roots) and the drafted tree in one batch. The caller then walks: it samples at a node
with its own sampler chain and follows the child that equals the sample (SpecExec's rule), so the text is distributed as in plain
decoding, whatever the chain.

Cells stay in the order of their positions. The trunk's are the ones plain decoding would have made; a token accepted off the trunk
is decoded again as one of the next step's roots. So is all of a step that a recurrent memory cannot keep a part of (states.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import llama_cpp.llama_cpp as llama_cpp
import numpy as np
import numpy.typing as npt

from .. import plugin
from . import memory
from .acceptance import Acceptance
from .cells import Batch, Cells, DecodeError
from .costs import KNOTS, Costs, Probes, Rate
from .lookup import PromptLookup
from .options import MAX_WIDTH, SpeculationOptions
from .shapes import BaseDraft
from .states import StateCells
from .stats import SpeculationStats
from .tree import ROOT, DraftTree
from .worth import FixedWorth, MeasuredWorth, ProbeWorth, Worth


class Source(Protocol):
    """Where drafts come from: the 2-bit base, prompt lookup, one day an MTP head."""

    acceptance: Acceptance

    def grow(self, tree: DraftTree, roots: Sequence[int], n_past: int, room: int, worth: Worth) -> None:
        """Adds nodes to the tree; leaves sequence 0 with its positions below n_past and no others."""


@dataclass
class Step:
    """A verified tree whose samples are still to be drawn."""

    n_past: int
    roots: list[int]
    tree: DraftTree
    acceptance: Acceptance
    trunk: list[int]
    n_sequences: int
    rows: list[int]  # of each node in the verifier's batch
    seconds: float = 0.0  # drafting and verifying
    speculative: bool = False  # False: a plain step, nothing was drafted
    path: list[int] = field(default_factory=list)  # nodes accepted so far
    n_sampled: int = 0
    over: bool = False  # the last sample was not among the drafted tokens
    open: bool = True  # its cells have not been settled yet

    @property
    def node(self) -> int:
        """The node whose row is sampled next."""
        return self.path[-1] if self.path else ROOT

    @property
    def row(self) -> int:
        """Its row in the verifier's batch."""
        return self.rows[self.node] if self.node != ROOT else len(self.roots) - 1


_MEASURED = 8  # tokens of the verification that is timed before the first step, beside one of a single token
_WORTH_KEEPING = 16  # steps
_MOST_ROOTS = 6  # tokens that a recurrent memory has to decode again: with more a step drafts nothing, and so keeps them


class Speculator:
    """Speculation on one llama_context that has `options.n_seq` sequences in a unified cache; two if its memory is recurrent.

    Args:
        ctx: the context; its sequence 0 holds the text.
        recurrent: the memory is a state, all or in part; every shape is then a chain.
        n_vocab, n_ctx: of the context.
        options: shape and limits.
        is_end: whether a token ends generation, so that nothing is drafted behind it.
        history: gives the verified tokens, for prompt lookup.
        costs_key: names the model and the machine in the cache of measured costs.
    """

    def __init__(
        self,
        ctx: llama_cpp.llama_context_p,
        *,
        n_vocab: int,
        n_ctx: int,
        n_batch: int,
        options: SpeculationOptions,
        is_end: Callable[[int], bool],
        history: Callable[[], npt.NDArray[np.intc]],
        costs_key: str,
        recurrent: bool = False,
    ) -> None:
        if recurrent:
            options = replace(options, shape="chain")
        self.options = options
        self.stats = SpeculationStats()
        self.costs: Costs | None = None
        self._cells = StateCells(ctx, n_vocab) if recurrent else Cells(ctx, options.n_seq, n_vocab)
        self._n_ctx = n_ctx
        self._widest = min(MAX_WIDTH, n_batch)
        self._batch = Batch(self._widest, options.n_seq)
        self._costs_key = costs_key
        self._rate = Rate()
        self._probes = Probes()
        self._base = BaseDraft(self._cells, Acceptance(), options, is_end)
        self._lookup = PromptLookup(options.lookup, history) if options.lookup else None
        self._step: Step | None = None
        self._n_new = 0  # steps since remember() kept what was learnt
        self.n_settled = 0  # positions of sequence 0 after the last settle()

    def new_text(self) -> None:
        """The next step is the first of another text."""
        self._probes.new_text()

    # ---- a step ----

    def step(self, roots: Sequence[int], n_past: int) -> Step:
        """Drafts behind the last of the roots and verifies. The first root has position n_past, the number of verified tokens.

        Raises:
            DecodeError: the context is full, or llama.cpp fails.
        """
        self.settle()
        room = min(self._widest, self._n_ctx - n_past) - len(roots)
        if not self._cells.goes_back and len(roots) > _MOST_ROOTS:
            room = 0
        if self.options.adaptive and self.costs is None and not self._measure(roots, n_past):
            room = 0
        begin = time.perf_counter()
        self._base.pass_seconds.clear()
        tree, acceptance = DraftTree(), self._base.acceptance
        if room > 0 and (not self.options.adaptive or self._rate.should_speculate()):
            tree, acceptance = self._draft(roots, n_past, room)
        drafted = time.perf_counter()
        step = self._verify(tree, acceptance, roots, n_past)
        verified = time.perf_counter()

        self._n_new += 1
        step.seconds = verified - begin
        step.speculative = len(tree) > 0 or len(self._base.pass_seconds) > 0
        if self.costs is not None:
            for seconds in self._base.pass_seconds:
                self.costs.saw_draft(seconds)
            self.costs.saw_verify(len(roots) + len(tree), verified - drafted)
        self.stats.seconds["draft"] += drafted - begin
        self.stats.seconds["verify"] += verified - drafted
        self.stats.draft_passes += len(self._base.pass_seconds)
        self.stats.verifications += 1
        width = len(roots) + len(tree)
        self.stats.widths[width] = self.stats.widths.get(width, 0) + 1
        self.stats.drafted += len(tree)
        self.stats.plain_steps += not step.speculative
        return step

    def sampled(self, step: Step, token: int) -> bool:
        """Tells which token was sampled at step.node. True: it was drafted, and step.node is now its node; False: the step is over."""
        step.n_sampled += 1
        for child in step.tree.children.get(step.node, ()):
            candidate = step.tree.candidates[child]
            step.acceptance.observe(candidate.rank, candidate.p, candidate.token == token)
        following = step.tree.child(step.node, token)
        step.over = following is None
        if following is None or not step.open:
            return False
        step.path.append(following)
        self.stats.accepted += 1
        return True

    def settle(self) -> list[int]:
        """Ends the open step: sequence 0 keeps the accepted part of the trunk, or nothing of the step if it could not keep just that.

        Returns:
            The tokens from n_settled on that belong to the text and are not in sequence 0.
        """
        step, self._step = self._step, None
        if step is None:
            return []
        step.open = False
        on_trunk = 0
        while on_trunk < len(step.path) and on_trunk < len(step.trunk) and step.path[on_trunk] == step.trunk[on_trunk]:
            on_trunk += 1
        accepted = [step.tree.tokens[node] for node in step.path]
        if self._cells.goes_back or on_trunk == len(step.tree):
            self.n_settled, again = step.n_past + len(step.roots) + on_trunk, accepted[on_trunk:]
        else:
            self.n_settled, again = step.n_past, [*step.roots, *accepted]
        self._cells.remove(0, self.n_settled)
        for seq in range(1, step.n_sequences):
            self._cells.remove(seq, step.n_past)
        self._cells.check(self.n_settled)
        if self.costs is not None and step.over:
            self._learn(step, 1 / self.costs.verify(1))
        return again

    def _learn(self, step: Step, plain: float) -> None:
        if step.speculative:
            self._rate.saw_step(step.n_sampled, step.seconds, plain)
            self._probes.saw_draft(step.n_sampled, step.seconds, plain)
        else:
            self._probes.saw_plain()

    @property
    def is_open(self) -> bool:
        """Whether a step is waiting for samples; settle() ends it."""
        return self._step is not None

    def trim(self, n_past: int) -> bool:
        """Removes all positions of sequence 0 from n_past on; False if it cannot."""
        try:
            self._cells.remove(0, n_past)
        except DecodeError:
            return False
        return True

    def unmirror(self) -> None:
        """Leaves sequence 0 alone, as everyone else who uses the context expects it."""
        self._cells.unmirror()

    @property
    def n_past(self) -> int:
        """Positions that sequence 0 has by llama.cpp's count: for checks."""
        return self._cells.end()

    def logits(self, step: Step) -> npt.NDArray[np.float32]:
        """Logits (n_vocab) at step.node: a view, valid until the next step."""
        return self._cells.logits(step.row)

    # ---- parts ----

    def _draft(self, roots: Sequence[int], n_past: int, room: int) -> tuple[DraftTree, Acceptance]:
        worth: Worth = ProbeWorth(len(roots) + Probes.NODES)
        if self.costs is None or not self._probes.due:
            worth = self._worth(self._base.acceptance)
        if self._lookup is None and not worth.draft_pass(1.0, len(roots)):
            return DraftTree(), self._base.acceptance
        self._cells.mark(n_past)
        if self._lookup is not None:
            tree = DraftTree()
            self._lookup.grow(tree, roots, n_past, min(room, self.options.max_nodes), self._worth(self._lookup.acceptance))
            if sum(tree.chances) >= 1.0:  # free, but it takes the place of what the base would find
                return tree, self._lookup.acceptance
        tree = DraftTree()
        self._base.grow(tree, roots, n_past, room, worth)
        return tree, self._base.acceptance

    def _worth(self, acceptance: Acceptance) -> Worth:
        if self.costs is None:
            return FixedWorth(self.options)
        return MeasuredWorth(self.costs, acceptance)

    def _verify(self, tree: DraftTree, acceptance: Acceptance, roots: Sequence[int], n_past: int) -> Step:
        trunk = tree.trunk()
        sequences = _sequences(tree, trunk)
        n_sequences = 1 + max((seq for seqs in sequences for seq in seqs), default=0)
        for seq in range(1, n_sequences):
            self._cells.mirror(seq, n_past)
        self._batch.clear()
        everyone = range(n_sequences)
        for i, token in enumerate(roots):
            self._batch.add(token, n_past + i, everyone, i == len(roots) - 1)
        first = n_past + len(roots) - 1
        rows = [0] * len(tree)
        on_trunk = set(trunk)  # its cells come first, so that they leave no gap when the others are gone
        for node in (*trunk, *(node for node in range(len(tree)) if node not in on_trunk)):
            rows[node] = self._batch.add(tree.tokens[node], first + tree.depths[node], sequences[node])
        step = Step(n_past, list(roots), tree, acceptance, trunk, n_sequences, rows)
        self._step = step
        try:
            with plugin.mode("full"):
                self._cells.decode(self._batch)
        except Exception:
            self._abandon(step)
            raise
        return step

    def _abandon(self, step: Step) -> None:
        """After a failed decode: nothing of the step is left in any sequence."""
        self._step = None
        for seq in range(step.n_sequences):
            self._cells.remove(seq, step.n_past)

    def _measure(self, roots: Sequence[int], n_past: int) -> bool:
        """Costs from an earlier run, or measured on cells that are thrown away: a draft pass and one token twice, eight tokens once.

        That takes as long as some five tokens; what lies between is put on a straight line, and the steps to come correct it. False: there
        is no room for it.
        """
        self.costs = memory.load(self._costs_key, self._base.acceptance)
        if self.costs is not None:
            return True
        width = min(_MEASURED, self._widest, self._n_ctx - n_past)
        if width < 2:
            return False
        begin = time.perf_counter()
        self._cells.mark(n_past)
        tasks = (("draft", 1), ("full", 1), ("full", width), ("draft", 1), ("full", 1))
        times = [self._time(mode, roots[-1], n_tokens, n_past) for mode, n_tokens in tasks]
        one = min(times[1], times[4])
        slope = max(times[2] - one, 0.0) / (width - 1)  # more tokens never take less time: noise
        self.costs = Costs(min(times[0], times[3]), (one + slope * (knot - 1) for knot in KNOTS if knot <= _MEASURED))
        self.stats.seconds["measure"] += time.perf_counter() - begin
        return True

    def remember(self) -> None:
        """Keeps what was learnt for the next run, if that has become more."""
        if self.costs is not None and self._n_new >= _WORTH_KEEPING:
            self._n_new = 0
            memory.save(self._costs_key, self.costs, self._base.acceptance)

    def _time(self, mode: str, token: int, width: int, n_past: int) -> float:
        begin = time.perf_counter()
        self._batch.clear()
        for i in range(width):
            self._batch.add(token, n_past + i, (0,))
        try:
            with plugin.mode(mode):
                self._cells.decode(self._batch)
            self._cells.logits(0)
            return time.perf_counter() - begin
        finally:
            self._cells.remove(0, n_past)


def _sequences(tree: DraftTree, trunk: Sequence[int]) -> list[list[int]]:
    """For each node the sequences of the leaves below it: 0 for the trunk's leaf, 1, 2, … for the others."""
    sequences: list[list[int]] = [[] for _ in range(len(tree))]
    for node in trunk:
        sequences[node].append(0)
    leaf_of_trunk = trunk[-1] if trunk else ROOT
    seq = 0
    for leaf in range(len(tree)):
        if tree.children.get(leaf) or leaf == leaf_of_trunk:
            continue
        seq += 1
        node = leaf
        while node != ROOT:
            sequences[node].append(seq)
            node = tree.parents[node]
    return sequences
