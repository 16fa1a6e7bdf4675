"""The source tree of the pinned llama-cpp-python, llama.cpp included: headers for the plugin, llama.cpp's HF converter and tools.

pip fetches the sdist once; it is checked by hash and unpacked into the cache ($XDG_CACHE_HOME/twobit, by default
~/.cache/twobit). The build runs this file as a script before the package exists, so it imports the standard library only:

    python twobit_gguf/llama_source.py        prints the folder
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = "0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
NAME = f"llama_cpp_python-{VERSION}"
ENVIRONMENT = "TWOBIT_LLAMA_SOURCE"


class LlamaSourceError(RuntimeError):
    """The tree could not be had; the message is one line that says why and what to do."""


def cache_dir() -> Path:
    """The folder for what twobit fetches or builds once: $XDG_CACHE_HOME/twobit."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "twobit"


def tool(name: str) -> Path | None:
    """A program of llama.cpp (or any other): a path, in PATH, or where scripts/build_llama_tools.py puts them."""
    built = sorted(cache_dir().glob(f"llama-tools-{VERSION}-*/bin"), key=os.path.getmtime, reverse=True)
    found = shutil.which(name) or shutil.which(name, path=os.pathsep.join(map(str, built)))
    return Path(found).absolute() if found else None


def path() -> Path:
    """The unpacked sdist (llama.cpp is its vendor/llama.cpp): $TWOBIT_LLAMA_SOURCE, or the cached one, fetched if need be.

    Raises LlamaSourceError.
    """
    override = os.environ.get(ENVIRONMENT)
    if override:
        if not _is_tree(Path(override)):
            raise LlamaSourceError(f"{override}: {ENVIRONMENT} does not name an unpacked llama-cpp-python {VERSION}")
        return Path(override)
    tree = cache_dir() / NAME
    if not _is_tree(tree):
        _fetch(tree)
    return tree


def _is_tree(tree: Path) -> bool:
    """Whether this is the tree of our version (anything else has other struct layouts)."""
    try:
        init = (tree / "llama_cpp" / "__init__.py").read_text()
    except OSError:
        return False
    return f'"{VERSION}"' in init and (tree / "vendor/llama.cpp/ggml/src/ggml-backend-impl.h").is_file()


def _fetch(tree: Path) -> None:
    """Downloads and unpacks aside, then renames: another process may do the same at the same time, one of them wins."""
    try:
        tree.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=tree.parent) as aside:
            _unpack(_download(Path(aside)), Path(aside))
            try:
                os.rename(Path(aside) / NAME, tree)
            except OSError:
                if not _is_tree(tree):
                    raise
    except OSError as error:
        raise LlamaSourceError(f"{tree}: cannot store the llama-cpp-python source: {error}") from error


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-python",
               "--dest", str(folder), f"llama-cpp-python=={VERSION}"]
    print(f"twobit: fetching the source of llama-cpp-python {VERSION}", file=sys.stderr, flush=True)
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    sdist = folder / f"{NAME}.tar.gz"
    if result.returncode != 0 or not sdist.is_file():
        lines = result.stdout.strip().splitlines() or ["no reason given"]
        raise LlamaSourceError(f"pip could not fetch llama-cpp-python {VERSION} ({lines[-1]}); "
                               f"or unpack its sdist by hand and set {ENVIRONMENT}")
    digest = hashlib.sha256(sdist.read_bytes()).hexdigest()
    if digest != SHA256:
        raise LlamaSourceError(f"{sdist.name}: sha256 is {digest}, expected {SHA256}")
    return sdist


def _unpack(sdist: Path, folder: Path) -> None:
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(folder, filter="data")
            return
        for member in archive:  # Python before 3.10.12: plain files and folders below ours, nothing else
            inside = (folder / member.name).resolve().is_relative_to(folder.resolve())
            if inside and (member.isfile() or member.isdir()):
                archive.extract(member, folder)


def main() -> int:
    try:
        print(path())
    except LlamaSourceError as error:
        print(f"twobit: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
