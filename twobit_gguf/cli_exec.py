"""twobit exec -- PROGRAM …: llama.cpp's own tools with the plugin, nothing of theirs changed."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from . import _native, llama_source
from .errors import TwobitError

# how the tools say where layers go; with none of these the plugin's device is named for them
_DEVICE_OPTIONS = ("-dev", "--device", "--list-devices", "-h", "--help", "--version")


def main(argv: Sequence[str] | None = None) -> int:
    """Replaces this process by the program; returns only if that fails."""
    parser = argparse.ArgumentParser(
        prog="twobit exec",
        usage="twobit exec [--model FILE] [--mode full|draft] [--print] -- PROGRAM [ARGUMENT …]",
        description="Runs llama-server, llama-cli, llama-bench, … of a llama.cpp built from the same version, with the plugin in "
        "GGML_BACKEND_PATH. PROGRAM is a path, a name in PATH, or a tool that scripts/build_llama_tools.py built. "
        "If the arguments name no device, -dev TWOBIT0 is added for programs called llama-*.",
        epilog="example: twobit exec -- llama-server -m out.gguf --port 8080",
    )
    parser.add_argument("--model", metavar="FILE", type=Path,
                        help="the paired file, where the plugin cannot look at open files (not Linux); sets TWOBIT_MODEL")  # fmt: skip
    parser.add_argument("--mode", choices=("full", "draft"), help="draft: run the 2-bit base alone; sets TWOBIT_MODE")
    parser.add_argument("--print", action="store_true", help="print the environment and the command instead")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        parser.error("no program; write it behind --")

    settings = {"GGML_BACKEND_PATH": str(_native.library_path())}
    if args.model is not None:
        if not args.model.is_file():
            raise TwobitError(f"{args.model}: no such file")
        settings["TWOBIT_MODEL"] = str(args.model.resolve())
    if args.mode is not None:
        settings["TWOBIT_MODE"] = args.mode
    program = llama_source.tool(command[0])
    if program is None:
        raise TwobitError(f"{command[0]}: no such program, neither in PATH nor among those that scripts/build_llama_tools.py builds")
    if program.name.startswith("llama-") and not any(argument.split("=")[0] in _DEVICE_OPTIONS for argument in command[1:]):
        command = [*command, "-dev", "TWOBIT0"]
    if args.print:
        print(" ".join(f"{name}={value}" for name, value in settings.items()), " ".join([str(program), *command[1:]]))
        return 0
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(program, command, {**os.environ, **settings})
    except OSError as error:
        raise TwobitError(f"{program}: {error.strerror}") from None
