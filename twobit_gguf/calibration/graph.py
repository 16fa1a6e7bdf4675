"""llama.cpp's compute graph as its eval callback shows it: which weight is multiplied by which activations."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

FINAL_NORM = "result_norm"  # llama.cpp's name of what the output matrix is multiplied by
OUTPUT, EMBEDDING = "output.weight", "token_embd.weight"
_F32 = 0  # GGML_TYPE_F32


class _Tensor(ctypes.Structure):
    """struct ggml_tensor of the pinned llama.cpp (ggml.h)."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
        ("extra", ctypes.c_void_p),
        ("padding", ctypes.c_char * 8),
    ]


class Activations:
    """The right-hand side of a matmul, in host memory, and what came out."""

    def __init__(self, address: int, result: int | None = None) -> None:
        self._tensor = _Tensor.from_address(address)
        self._result = _Tensor.from_address(result) if result is not None else None
        # one tensor seen through several reshapes is one input
        self.identity = (self._tensor.view_src or address, self._tensor.view_offs, self.columns)

    @property
    def columns(self) -> int:
        return self._tensor.ne[0]

    @property
    def is_f32(self) -> bool:
        return self._tensor.type == _F32

    def read(self) -> np.ndarray:
        """(rows, columns) f32, a copy; one row for each token, or for each token and expert."""
        values = _view(self._tensor)
        return values.reshape(-1, values.shape[-1]).copy()

    @property
    def result(self) -> np.ndarray | None:
        """(rows, columns) f32, the matmul's result itself: the graph goes on with what is written there. None if it is not known."""
        if self._result is None or self._result.type != _F32:
            return None
        values = _view(self._result)
        return values.reshape(-1, values.shape[-1]) if values.flags.c_contiguous else None


def _view(tensor: _Tensor) -> np.ndarray:
    shape, strides = tuple(tensor.ne)[::-1], tuple(tensor.nb)[::-1]
    span = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 4
    memory = (ctypes.c_uint8 * span).from_address(tensor.data)
    return np.ndarray(shape, np.float32, memory, strides=strides)


class Watcher(Protocol):
    """What is told about the matmuls of a graph, in the order they are computed."""

    def wants(self, weight: str) -> bool:
        """Whether to call take() for a matmul by this weight."""

    def take(self, weight: str, x: Activations) -> bool:
        """The matmul's activations; False ends the graph here, the rest of it is not needed."""


class EvalCallback:
    """A cb_eval that shows a watcher the matmuls by the model's weights: `with callback.watched_by(watcher): llama_decode(…)`."""

    def __init__(self) -> None:
        self._watcher: Watcher | None = None
        self._error: BaseException | None = None

    def function(self, kind: Callable[[Any], Any]) -> Any:
        """The ctypes function, of the type of llama_context_params.cb_eval. Keep it as long as the context."""
        return kind(self._call)

    @contextlib.contextmanager
    def watched_by(self, watcher: Watcher) -> Iterator[None]:
        """Raises behind the block what the watcher raised, and KeyboardInterrupt: nothing can be thrown through llama.cpp."""
        self._watcher, self._error = watcher, None
        try:
            with self._interrupt_kept():
                yield
        finally:
            self._watcher = None
        if self._error is not None:
            raise self._error

    @contextlib.contextmanager
    def _interrupt_kept(self) -> Iterator[None]:
        """Ctrl-C ends the graph at the next matmul. Python would raise it on the way into _call, where ctypes drops it."""
        is_pythons = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if not is_pythons or threading.current_thread() is not threading.main_thread():
            yield
            return

        def keep(_signal: int, _frame: object) -> None:
            self._error = KeyboardInterrupt()

        signal.signal(signal.SIGINT, keep)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _call(self, address: int, ask: bool, _user_data: object) -> bool:
        try:
            return self._visit(address, ask)
        except BaseException as error:
            self._error = error
            return False

    def _visit(self, address: int, ask: bool) -> bool:
        if self._error is not None:
            return ask  # asks to see this node, and ends the graph there
        if self._watcher is None:
            return not ask
        tensor = _Tensor.from_address(address)
        if tensor.name.decode("utf-8", "replace") == FINAL_NORM:
            # taken here, so that the logits, which nobody wants, need not be computed
            weight, x, result = OUTPUT, address, None
        elif tensor.op in _matmul_ops() and tensor.src[0] and tensor.src[1]:
            weight, x = _Tensor.from_address(tensor.src[0]).name.decode("utf-8", "replace"), tensor.src[1]
            weight = OUTPUT if weight == EMBEDDING else weight
            result = address
        else:
            return not ask
        if not self._watcher.wants(weight):
            return not ask
        return True if ask else self._watcher.take(weight, Activations(x, result))


@functools.cache
def _matmul_ops() -> frozenset[int]:
    from llama_cpp.llama_cpp import _lib

    name = _lib.ggml_op_name
    name.argtypes, name.restype = [ctypes.c_int], ctypes.c_char_p
    ops: set[int] = set()
    for op in range(64):  # both come long before the last one
        if name(op) in (b"MUL_MAT", b"MUL_MAT_ID"):
            ops.add(op)
        if len(ops) == 2:
            break
    return frozenset(ops)
