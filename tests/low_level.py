"""llama.cpp's C API, as far as tests need it: load a model on named devices, get the logits of every token at a given batch width."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as api

LOAD_NONE, LOAD_MMAP = 1, 2


class Model:
    """A loaded model with one context. device: name of a ggml device for all layers, or None for the CPU (n_gpu_layers 0, no devices)."""

    def __init__(
        self,
        path: Path,
        device: str | None = None,
        n_ctx: int = 1024,
        mmap: bool = True,
        repack: bool = False,
        n_threads: int = 1,
        flash_attn: bool = False,
        cache_type: int | None = None,
        eval_callback: Any = None,
    ) -> None:
        api.llama_backend_init()
        params = api.llama_model_default_params()
        params.use_extra_bufts = repack
        params.load_mode = api.llama_load_mode_from_str(b"mmap" if mmap else b"none")
        handles = [device_handle(device)] if device else []
        self._devices = (ctypes.c_void_p * 2)(*handles)  # a NULL-terminated list, which must live as long as the load
        params.devices = ctypes.addressof(self._devices)
        params.n_gpu_layers = 999 if device else 0
        self.model = api.llama_model_load_from_file(str(path).encode(), params)
        assert self.model, f"{path} does not load"

        options = api.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = n_ctx, 512, 512
        options.n_threads = options.n_threads_batch = n_threads
        options.flash_attn_type = int(flash_attn)
        if cache_type is not None:
            options.type_k = options.type_v = cache_type
        if eval_callback is not None:
            options.cb_eval = ctypes.cast(eval_callback, type(options.cb_eval))
        self.context = api.llama_init_from_model(self.model, options)
        assert self.context, f"{path}: no context"
        self.n_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))

    def __enter__(self) -> Model:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        if self.context:
            api.llama_free(self.context)
            api.llama_model_free(self.model)
            self.context = self.model = None

    def logits(self, tokens: list[int], width: int | None = None) -> np.ndarray:
        """(tokens, vocabulary): the tokens from an empty cache on, `width` of them at once (None: all)."""
        api.llama_memory_clear(api.llama_get_memory(self.context), True)
        width = width or len(tokens)
        out = np.empty((len(tokens), self.n_vocab), np.float32)
        for first in range(0, len(tokens), width):
            part = tokens[first : first + width]
            batch = api.llama_batch_init(len(part), 0, 1)
            batch.n_tokens = len(part)
            for i, token in enumerate(part):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, first + i, 1, 1
                batch.seq_id[i][0] = 0
            code = api.llama_decode(self.context, batch)
            assert code == 0, f"llama_decode: {code}"
            for i in range(len(part)):
                out[first + i] = np.ctypeslib.as_array(api.llama_get_logits_ith(self.context, i), (self.n_vocab,))
            api.llama_batch_free(batch)
        return out


def device_handle(name: str) -> int:
    find = api._lib.ggml_backend_dev_by_name
    find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    handle = find(name.encode())
    assert handle, f"no device {name}"
    return int(handle)


def kld(reference: np.ndarray, other: np.ndarray) -> float:
    """Mean Kullback-Leibler divergence over the positions, nats."""

    def log_softmax(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float64) - x.max(axis=-1, keepdims=True)
        return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))

    p, q = log_softmax(reference), log_softmax(other)
    return float((np.exp(p) * (p - q)).sum(axis=-1).mean())
