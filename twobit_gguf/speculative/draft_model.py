"""The 2-bit base as the LlamaDraftModel of a plain llama_cpp.Llama, which verifies by itself.

    draft = TwobitDraftModel()
    llm = llama_cpp.Llama("out.gguf", draft_model=draft)    # after twobit_gguf.install()
    draft.bind(llm)

twobit_gguf.Llama does better by itself: it knows what a draft costs, follows trees, and stops when drafting does not pay.
"""

from __future__ import annotations

from typing import Any

import llama_cpp
import llama_cpp.llama_cpp as llama_c
import numpy as np
import numpy.typing as npt
from llama_cpp.llama_speculative import LlamaDraftModel

from ..errors import TwobitError
from .acceptance import Acceptance
from .cells import Cells
from .options import SpeculationOptions
from .shapes import BaseDraft
from .stats import SpeculationStats
from .tree import DraftTree
from .worth import FixedWorth


class TwobitDraftModel(LlamaDraftModel):
    """Drafts a chain of up to num_pred_tokens tokens in the context of the model it is bound to."""

    def __init__(self, num_pred_tokens: int = 8) -> None:
        self._options = SpeculationOptions(shape="chain", adaptive=False, max_depth=num_pred_tokens, max_nodes=num_pred_tokens)
        self._llama: llama_cpp.Llama | None = None
        self.stats = SpeculationStats()

    def bind(self, llama: llama_cpp.Llama) -> None:
        """Names the model whose base drafts: a paired file, loaded with this object as its draft_model.

        Raises:
            TwobitError: its memory is recurrent; llama_cpp.Llama drops rejected tokens, which such a memory cannot.
        """
        model = llama._model.model
        if llama_c.llama_model_is_recurrent(model) or llama_c.llama_model_is_hybrid(model):
            raise TwobitError("TwobitDraftModel: this architecture's memory cannot drop rejected tokens; twobit_gguf.Llama can use it")
        self._llama = llama
        vocab = llama._model.vocab
        self._draft = BaseDraft(
            Cells(llama.ctx, 1, llama.n_vocab()), Acceptance(), self._options,
            lambda token: bool(llama_c.llama_vocab_is_eog(vocab, token)),
        )  # fmt: skip

    def __call__(self, input_ids: npt.NDArray[np.intc], /, **kwargs: Any) -> npt.NDArray[np.intc]:
        """Drafts behind input_ids, of which the bound model has evaluated the first llama.n_tokens.

        Raises:
            TwobitError: bind() has not been called.
        """
        if self._llama is None:
            raise TwobitError("TwobitDraftModel: call bind(llama) with the model it is the draft of")
        n_past = self._llama.n_tokens
        roots = input_ids[n_past:].tolist()
        room = self._llama.n_ctx() - len(input_ids)
        tree = DraftTree()
        if roots and room > 0:
            self._draft.pass_seconds.clear()
            self._draft.grow(tree, roots, n_past, room, FixedWorth(self._options))
            self.stats.draft_passes += len(self._draft.pass_seconds)
            self.stats.drafted += len(tree)
            self.stats.seconds["draft"] += sum(self._draft.pass_seconds)
        return np.array(tree.tokens, np.intc)
