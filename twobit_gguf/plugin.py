"""The backend plugin inside this process: load it, say where a residual is, choose the mode, read the counters.

    plugin.load()
    with plugin.attach("model.gguf"):
        model = llama_model_load_from_file(...)
    with plugin.mode("draft"):
        llama_decode(...)
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from . import _native
from ._native import NativeError

DRAFT = 0  # enum twobit_mode
FULL = 1
_MODES = {"draft": DRAFT, "full": FULL}

# enum ggml_backend_dev_type
_DEVICE_TYPES = {0: "CPU", 1: "GPU", 2: "IGPU", 3: "ACCEL"}

_loading = threading.Lock()


@dataclass(frozen=True)
class Device:
    """A device of the running ggml. memory_free and memory_total are in bytes."""

    name: str
    description: str
    type: str
    memory_free: int
    memory_total: int


@dataclass(frozen=True)
class Counters:
    """struct twobit_counters: what the plugin did since it was loaded or since reset_counters()."""

    graphs_draft: int
    graphs_full: int
    matmuls_paired: int
    matmuls_unpaired: int
    tokens_residual: int
    slices: int
    pairs_alive: int
    residual_bytes: int


@functools.cache
def _ggml() -> Any:
    """ggml's functions out of the libggml that llama_cpp has already loaded.

    They are looked up through libllama's handle: opening libggml by its path again would load a second copy, with devices of its own.
    """
    from llama_cpp.llama_cpp import _lib

    functions = {
        "ggml_backend_load": (ctypes.c_void_p, [ctypes.c_char_p]),
        "ggml_backend_register": (None, [ctypes.c_void_p]),
        "ggml_backend_reg_by_name": (ctypes.c_void_p, [ctypes.c_char_p]),
        "ggml_backend_reg_get_proc_address": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p]),
        "ggml_backend_dev_count": (ctypes.c_size_t, []),
        "ggml_backend_dev_get": (ctypes.c_void_p, [ctypes.c_size_t]),
        "ggml_backend_dev_by_name": (ctypes.c_void_p, [ctypes.c_char_p]),
        "ggml_backend_dev_name": (ctypes.c_char_p, [ctypes.c_void_p]),
        "ggml_backend_dev_description": (ctypes.c_char_p, [ctypes.c_void_p]),
        "ggml_backend_dev_type": (ctypes.c_int, [ctypes.c_void_p]),
        "ggml_backend_dev_memory": (None, [ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)]),
    }
    for name, (result, arguments) in functions.items():
        function = getattr(_lib, name)
        function.restype = result
        function.argtypes = arguments
    return _lib


def load() -> None:
    """Loads the plugin into llama_cpp's ggml; a second call, or one after GGML_BACKEND_PATH did it, changes nothing.

    Raises:
        NativeError: the library is missing, or refuses this ggml.
    """
    with _loading:
        if _is_registered():
            return
        _native.lib()
        path = _native.library_path()
        if not _ggml().ggml_backend_load(os.fsencode(path)) or not _is_registered():
            raise NativeError(_native.last_error() or f"{path}: this ggml would not take the plugin")


def is_loaded() -> bool:
    """True once the plugin's devices are among those of ggml."""
    return _is_registered()


def _is_registered() -> bool:
    # a function of its own: ggml would register a second set of devices without a word
    return any(device.name.startswith("TWOBIT") for device in devices())


def devices() -> list[Device]:
    """All devices of the running ggml, the plugin's among them, in ggml's order."""
    ggml = _ggml()
    found = []
    for index in range(ggml.ggml_backend_dev_count()):
        handle = ggml.ggml_backend_dev_get(index)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        ggml.ggml_backend_dev_memory(handle, ctypes.byref(free), ctypes.byref(total))
        found.append(
            Device(
                name=ggml.ggml_backend_dev_name(handle).decode(),
                description=ggml.ggml_backend_dev_description(handle).decode("utf-8", "replace"),
                type=_DEVICE_TYPES.get(ggml.ggml_backend_dev_type(handle), "?"),
                memory_free=free.value,
                memory_total=total.value,
            )
        )
    return found


def device_handle(name: str) -> int:
    """The ggml_backend_dev_t of a device, as an address.

    Raises:
        NativeError: there is no such device; the line lists those there are.
    """
    handle = _ggml().ggml_backend_dev_by_name(name.encode())
    if not handle:
        names = ", ".join(device.name for device in devices())
        raise NativeError(f"no device {name}: this ggml has {names}")
    return int(handle)


def add_rpc_server(endpoint: str) -> None:
    """Adds the devices of a ggml RPC server ("host:port"), and a TWOBIT device over each of them.

    Raises:
        NativeError: this llama_cpp was built without RPC, or the server does not answer.
    """
    ggml = _ggml()
    registry = ggml.ggml_backend_reg_by_name(b"RPC")
    if not registry:
        raise NativeError("this llama-cpp-python was built without RPC (CMAKE_ARGS=-DGGML_RPC=ON)")
    address = ggml.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_rpc_add_server")
    if not address:
        raise NativeError("this ggml's RPC cannot add servers")
    host, _, port = endpoint.rpartition(":")
    try:  # ggml aborts the process where nobody answers
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, ValueError) as error:
        raise NativeError(f"no RPC server answers at {endpoint}: {error}") from None
    add = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(address)
    server = add(endpoint.encode())
    if not server:
        raise NativeError(f"no RPC server answers at {endpoint}")
    ggml.ggml_backend_register(server)
    if is_loaded():
        _native.check(_native.lib().twobit_rescan_devices(), "twobit_rescan_devices")


@contextlib.contextmanager
def attach(
    model_path: str | os.PathLike[str],
    residual_path: str | os.PathLike[str] | None = None,
    *,
    populate: bool = False,
    mlock: bool = False,
    verify: bool = True,
) -> Iterator[None]:
    """While a model loads: its residual is in `model_path` itself, or in `residual_path`.

    populate reads the residual into RAM now; mlock also keeps it there; verify compares the checksums.

    Raises:
        NativeError: the file is not a sound paired GGUF.
    """
    library = _native.lib()
    # TWOBIT_ATTACH_POPULATE, TWOBIT_ATTACH_MLOCK, TWOBIT_ATTACH_NO_VERIFY
    flags = (1 if populate else 0) | (2 if mlock else 0) | (0 if verify else 4)
    model = os.fsencode(model_path)
    residual = _native.ffi.NULL if residual_path is None else os.fsencode(residual_path)
    _native.check(library.twobit_attach(model, residual, flags), f"attaching {os.fspath(model_path)}")
    try:
        yield
    finally:
        library.twobit_detach(model)


class mode:
    """`with mode("draft"):` around one llama_decode, on this thread; the former mode comes back at its end.

    Never hold one across a yield: another thread may resume the generator.
    """

    __slots__ = ("_former", "_mode")

    def __init__(self, name: str) -> None:
        self._mode = _MODES[name]
        self._former = FULL

    def __enter__(self) -> None:
        self._former = _native.lib().twobit_set_mode(self._mode)

    def __exit__(self, *_: object) -> None:
        _native.lib().twobit_set_mode(self._former)


def counters() -> Counters:
    """What the plugin has done so far."""
    values = _native.ffi.new("struct twobit_counters *")
    _native.lib().twobit_get_counters(values)
    return Counters(**{name: int(getattr(values, name)) for name in Counters.__dataclass_fields__})


def reset_counters() -> None:
    """Sets all counters to 0 but pairs_alive and residual_bytes."""
    _native.lib().twobit_reset_counters()


def memory_available() -> int | None:
    """Bytes of RAM that can be had without swapping (MemAvailable); None where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None


def memory_advice(ram_bytes: int, *, mlock: bool = False) -> str | None:
    """One line if a model that wants `ram_bytes` of RAM (residual, and the base where it runs on the CPU) does not fit; None if it does.

    Raises:
        MemoryError: it does not fit and is to be locked in RAM.
    """
    available = memory_available()
    if available is None or ram_bytes <= available:
        return None
    line = f"the model wants {ram_bytes / 2**30:.1f} GiB of RAM and {available / 2**30:.1f} GiB are free"
    if mlock:
        raise MemoryError(f"{line}: it cannot be locked in memory; load it without mlock, or convert with a smaller --residual")
    return f"{line}: parts of it will be read from disk again for every token; a smaller --residual (r4, r5) would help"
