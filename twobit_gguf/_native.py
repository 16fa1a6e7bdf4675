"""The C interface of libggml-twobit, read by cffi from the very header the library was built with.

`lib()` opens the library at its first call; `check()` turns a negative result into a NativeError with the library's own line.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cffi

from .errors import TwobitError

ffi = cffi.FFI()

_PACKAGE = Path(__file__).resolve().parent
_SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")


class NativeError(TwobitError, RuntimeError):
    """A call into libggml-twobit failed, or the library is not there; one line."""


def _header() -> Path:
    places = (_PACKAGE / "include" / "twobit.h", _PACKAGE.parent / "ggml-twobit" / "include" / "twobit.h")
    for path in places:
        if path.is_file():
            return path
    raise NativeError(f"twobit.h is not at {places[0]}: reinstall twobit-gguf")


def _declarations(header: str) -> str:
    """What cffi can read: the header without preprocessor lines, export marks and C++ linkage."""
    lines = []
    for line in header.splitlines():
        # 'extern "C" {' and its closing brace are the only ones that stand alone at the left margin
        if line.lstrip().startswith("#") or line in ('extern "C" {', "}"):
            continue
        lines.append(line.replace("TWOBIT_API ", ""))
    return "\n".join(lines)


ffi.cdef(_declarations(_header().read_text(encoding="utf-8")))


def _candidates() -> Iterator[Path]:
    chosen = os.environ.get("TWOBIT_LIBRARY")
    if chosen:
        yield Path(chosen)
        return
    yield _PACKAGE / "lib" / f"libggml-twobit{_SUFFIX}"
    # an editable install keeps compiled files in site-packages, beside none of our sources
    for entry in sys.path:
        yield Path(entry) / "twobit_gguf" / "lib" / f"libggml-twobit{_SUFFIX}"


@functools.cache
def library_path() -> Path:
    """Where libggml-twobit is: TWOBIT_LIBRARY, or the package's lib folder.

    Raises:
        NativeError: there is none.
    """
    for path in _candidates():
        if path.is_file():
            return path.resolve()
    chosen = os.environ.get("TWOBIT_LIBRARY")
    if chosen:
        raise NativeError(f"TWOBIT_LIBRARY={chosen}: no such file")
    raise NativeError(f"libggml-twobit{_SUFFIX} is not installed: reinstall twobit-gguf or set TWOBIT_LIBRARY")


@functools.cache
def lib() -> Any:
    """The open library.

    Raises:
        NativeError: it is missing, or it cannot be loaded beside this llama_cpp.
    """
    # The plugin asks for libggml by soname: llama_cpp's must be in memory first, or another one (or none) is found.
    import llama_cpp  # noqa: F401

    path = library_path()
    try:
        return ffi.dlopen(str(path), ffi.RTLD_NOW | ffi.RTLD_LOCAL)
    except OSError as error:
        reason = str(error).split(".  Additionally")[0].split("': ", 1)[-1]  # without cffi's advice on ctypes
        raise NativeError(f"cannot load the plugin: {reason}") from None


def last_error() -> str:
    """The last failure on this thread, "" if there was none."""
    return ffi.string(lib().twobit_last_error()).decode("utf-8", "replace")


def check(result: int, what: str = "libggml-twobit") -> int:
    """Returns a result that is not negative.

    Raises:
        NativeError: the result is negative; the text is the library's last error, or `what` failed.
    """
    if result < 0:
        raise NativeError(last_error() or f"{what} failed ({result})")
    return result


def kernel_names() -> list[str]:
    """The kernel sets this CPU can run, best first."""
    names: list[str] = []
    while (name := lib().twobit_kernel_name(len(names))) != ffi.NULL:
        names.append(ffi.string(name).decode())
    return names
