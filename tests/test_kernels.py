"""Builds and runs ggml-twobit/tests/test_kernels.cpp, for this machine and, where a cross compiler and qemu are there, for aarch64."""

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "ggml-twobit" / "tests"
ARM_COMPILER = "aarch64-linux-gnu-g++"  # Debian: g++-aarch64-linux-gnu
ARM_EMULATOR = "qemu-aarch64"  # Debian: qemu-user


def build(folder: Path, *options: str) -> Path:
    """Builds test_kernels in `folder` and returns its path."""
    for command in (["cmake", "-S", str(SOURCE), "-B", str(folder), *options], ["cmake", "--build", str(folder), "-j2"]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "test_kernels"


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_set_agrees_with_the_scalar_one(tmp_path: Path) -> None:
    report = run(str(build(tmp_path)))
    print(report)
    assert "sets:" in report


def test_neon_agrees_with_the_scalar_one(tmp_path: Path) -> None:
    for program, package in ((ARM_COMPILER, "g++-aarch64-linux-gnu"), (ARM_EMULATOR, "qemu-user")):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed (apt install {package})")
    options = ("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={ARM_COMPILER}")
    report = run(ARM_EMULATOR, str(build(tmp_path, *options)), "--quick")
    print(report)
    assert " neon" in report
