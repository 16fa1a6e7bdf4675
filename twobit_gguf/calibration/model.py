"""A model in llama.cpp, on the CPU alone and straight from its file: tokens in, whatever an eval callback sees or logits out."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import TracebackType
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp._logger import set_verbose

from ..errors import TwobitError
from .graph import EvalCallback, Watcher

CONTEXT = 512  # tokens of a sequence
SEQUENCES = 4  # sequences of a batch


class Runner:
    """Runs batches of SEQUENCES sequences under an eval callback. Use as a context manager."""

    def __init__(self, path: Path, threads: int, context: int = CONTEXT, sequences: int = SEQUENCES, logits: bool = False) -> None:
        """logits: keep them, context × sequences × vocabulary f32.

        Raises:
            TwobitError: llama.cpp cannot load the model.
        """
        self.path, self.context, self.sequences = path, context, sequences
        llama_cpp.llama_backend_init()
        set_verbose(False)
        model_params = llama_cpp.llama_model_default_params()
        # straight from the page cache: a model larger than RAM is read once a batch, and none of it is copied or repacked
        self._devices = (ctypes.c_void_p * 1)(None)  # the list's end: no device but the CPU
        model_params.devices = ctypes.addressof(self._devices)
        model_params.n_gpu_layers = 0
        model_params.load_mode = llama_cpp.LLAMA_LOAD_MODE_MMAP
        model_params.use_extra_bufts = False
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
        if not self.model:
            raise TwobitError(f"{path}: llama.cpp cannot load it; calibrate a GGUF that llama.cpp runs")
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)

        self._callback = EvalCallback()
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = context * sequences
        params.n_batch = params.n_ubatch = context * sequences
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = threads
        # "embeddings" makes every token an output without room for its logits
        params.embeddings = not logits
        params.op_offload = params.offload_kqv = False
        self._function = self._callback.function(type(params.cb_eval))
        params.cb_eval = self._function
        self._context = llama_cpp.llama_init_from_model(self.model, params)
        if not self._context:
            self.close()
            raise TwobitError(f"{path}: llama.cpp cannot make a context of {context * sequences} tokens; is there enough RAM?")

    def tokenize(self, text: str, special: bool = False) -> np.ndarray:
        """(n,) i32, without BOS; special: what reads like a special token is one."""
        return tokenize(self.vocab, text, special)

    @property
    def bos(self) -> int | None:
        """The token that sequences start with, None if this model has none."""
        return _bos(self.vocab)

    def run(self, tokens: np.ndarray, watcher: Watcher) -> None:
        """tokens: (sequences, length) i32, at most what the runner was made for.

        Raises:
            TwobitError: llama_decode failed; and whatever the watcher raises.
        """
        sequences, length = tokens.shape
        memory = llama_cpp.llama_get_memory(self._context)
        if memory:
            llama_cpp.llama_memory_clear(memory, True)
        batch = llama_cpp.llama_batch_init(sequences * length, 0, 1)
        try:
            batch.n_tokens = sequences * length
            for s in range(sequences):
                for i in range(length):
                    at = s * length + i
                    batch.token[at], batch.pos[at], batch.logits[at] = int(tokens[s, i]), i, 1
                    batch.n_seq_id[at], batch.seq_id[at][0] = 1, s
            with self._callback.watched_by(watcher):
                result = llama_cpp.llama_decode(self._context, batch)
        finally:
            llama_cpp.llama_batch_free(batch)
        if result != 0:
            raise TwobitError(f"{self.path}: llama_decode failed ({result})")

    def logits(self, n_tokens: int) -> np.ndarray:
        """(n_tokens, vocabulary) f32 of the last run, of a runner that keeps them: a view, valid until the next run."""
        n_vocab = int(llama_cpp.llama_vocab_n_tokens(self.vocab))
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits(self._context), (n_tokens, n_vocab))

    def close(self) -> None:
        if getattr(self, "_context", None):
            llama_cpp.llama_free(self._context)
        if self.model:
            llama_cpp.llama_model_free(self.model)
        self._context = self.model = None

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Vocabulary:
    """A model's tokens, without its weights. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        """Raises TwobitError: llama.cpp cannot load it."""
        set_verbose(False)
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise TwobitError(f"{path}: llama.cpp cannot load it")
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)

    def __len__(self) -> int:
        return int(llama_cpp.llama_vocab_n_tokens(self._vocab))

    @property
    def bos(self) -> int | None:
        """The token that sequences start with, None if this model has none."""
        return _bos(self._vocab)

    def tokenize(self, text: str) -> np.ndarray:
        """(n,) i32, without special tokens."""
        return tokenize(self._vocab, text)

    def __enter__(self) -> Vocabulary:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        llama_cpp.llama_model_free(self._model)


def _bos(vocab: Any) -> int | None:
    return int(llama_cpp.llama_vocab_bos(vocab)) if llama_cpp.llama_vocab_get_add_bos(vocab) else None


def tokenize(vocab: Any, text: str, special: bool = False) -> np.ndarray:
    """(n,) i32."""
    data = text.encode("utf-8")
    buffer = (ctypes.c_int32 * (len(data) + 8))()
    n = llama_cpp.llama_tokenize(vocab, data, len(data), buffer, len(buffer), False, special)
    if n < 0:
        raise TwobitError("llama.cpp could not tokenise the text")
    return np.array(buffer[:n], np.int32)


def cut(tokens: np.ndarray, bos: int | None, context: int, most: int) -> np.ndarray:
    """Whole sequences, (n ≤ most, context) i32, each starting with bos where there is one.

    Raises:
        TwobitError: not enough for one.
    """
    step = context - (bos is not None)
    n = min(most, len(tokens) // step)
    if n == 0:
        raise TwobitError(f"the text has {len(tokens)} tokens, at least {step} are needed; give more --text")
    sequences = tokens[: n * step].reshape(n, step)
    if bos is not None:
        sequences = np.concatenate([np.full((n, 1), bos, np.int32), sequences], axis=1)
    return np.ascontiguousarray(sequences, np.int32)

