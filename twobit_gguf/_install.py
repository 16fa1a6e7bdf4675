"""install(): llama_cpp.Llama itself does the right thing with paired GGUFs."""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp
import llama_cpp._internals as internals

from . import plugin
from .llama import Llama, attached, device_list, device_names, open_if_paired

_plain_model_init = internals.LlamaModel.__init__


def install() -> None:
    """After this, whatever loads a paired GGUF through llama_cpp gets base and residual. Calling it again changes nothing.

    `llama_cpp.Llama` becomes twobit_gguf.Llama, for code that imports it from now on. Code that holds the plain class already decodes
    one token a step, in full quality: the plugin is loaded and attached wherever a llama_cpp model loads.
    """
    plugin.load()
    internals.LlamaModel.__init__ = _model_init  # type: ignore[method-assign]
    llama_cpp.Llama = Llama  # type: ignore[misc]


def _model_init(self: Any, *, path_model: str, params: Any, verbose: bool = True) -> None:
    attached_already = bool(params.devices)  # by twobit_gguf.Llama
    paired = None if attached_already or params.vocab_only else open_if_paired(path_model)
    if paired is None:
        _plain_model_init(self, path_model=path_model, params=params, verbose=verbose)
        return
    devices = device_list(device_names(None))  # llama.cpp's own choice might be the GPU without us
    params.devices = ctypes.addressof(devices)
    self._twobit_devices = devices
    with attached(paired):
        _plain_model_init(self, path_model=path_model, params=params, verbose=verbose)
