"""Builds stock llama.cpp tools (llama-server, llama-bench, …) from the pinned source, once, into the cache; prints the folder.

Nothing is patched. Shared libraries, so that the plugin finds ggml by soname; RPC on, the cheapest "GPU" for tests. The folder holds

    bin/              the tools and their libraries
    site/llama_cpp    llama-cpp-python of the same version over those libraries: for PYTHONPATH, where RPC devices are wanted
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from twobit_gguf import llama_source

TOOLS = (
    "llama-server",
    "llama-bench",
    "llama-completion",
    "llama-perplexity",
    "llama-quantize",
    "llama-imatrix",
    "llama-gguf-split",
    "llama-speculative-simple",
)
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",
    "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",
    "-DCMAKE_INSTALL_RPATH=$ORIGIN",
    "-DGGML_RPC=ON",
    "-DLLAMA_BUILD_NUMBER=0",
    "-DLLAMA_BUILD_COMMIT=pinned",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
)


def folder() -> Path:
    """Where the build for this version, these options, compiler and CPU is kept."""
    compiler = subprocess.run([os.environ.get("CXX", "c++"), "--version"], capture_output=True, text=True).stdout
    try:  # the build is for the CPU it runs on (GGML_NATIVE)
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        cpu = platform.processor()
    key = hashlib.sha256(repr((TOOLS, OPTIONS, compiler, platform.machine(), cpu)).encode()).hexdigest()[:12]
    return llama_source.cache_dir() / f"llama-tools-{llama_source.VERSION}-{key}"


def build(target: Path, jobs: int) -> None:
    """Builds aside and renames, so that the folder is complete wherever it exists."""
    source = llama_source.path()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tools-", dir=target.parent) as temporary:
        work = Path(temporary) / "build"
        done = Path(temporary) / "done"
        generator = ["-G", "Ninja"] if find_tool("ninja") else []
        if generator:
            generator.append(f"-DCMAKE_MAKE_PROGRAM={find_tool('ninja')}")
        cmake = find_tool("cmake")
        if cmake is None:
            raise SystemExit("cmake is missing: pip install cmake ninja")
        run([cmake, "-S", str(source / "vendor/llama.cpp"), "-B", str(work), *generator, *OPTIONS])
        run([cmake, "--build", str(work), "--parallel", str(jobs), "--target", *TOOLS])
        done.mkdir()
        shutil.copytree(work / "bin", done / "bin", symlinks=True)
        shutil.copytree(source / "llama_cpp", done / "site/llama_cpp", ignore=shutil.ignore_patterns("lib", "__pycache__"))
        (done / "site/llama_cpp/lib").symlink_to("../../bin")
        try:
            os.rename(done, target)
        except OSError:  # somebody else was faster
            if not target.is_dir():
                raise


def find_tool(name: str) -> str | None:
    """A program in PATH, or one that pip put beside this interpreter."""
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))


def run(command: list[str]) -> None:
    """Runs quietly; shows the output only where it fails."""
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode != 0:
        sys.stderr.write(result.stdout[-8000:])
        raise SystemExit(f"failed: {' '.join(command)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at once (default: the number of cores)")
    jobs = parser.parse_args().jobs
    target = folder()
    if not target.is_dir():
        print(f"building llama.cpp's tools into {target}, some minutes", file=sys.stderr, flush=True)
        os.nice(10)
        build(target, jobs)
    print(target)


if __name__ == "__main__":
    main()
