"""twobit COMMAND: the command line. Each command is a module with a main(argv) of its own, imported when it is called."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib import metadata

from .cli_output import flushed
from .errors import TwobitError, first_line

_COMMANDS = {
    "run": ("cli_run", "generate text, or chat in the terminal"),
    "serve": ("cli_serve", "OpenAI-compatible server"),
    "inspect": ("inspect", "show and check the pairs of a file"),
    "bench": ("cli_bench", "measure the kernels, or decoding beside llama.cpp's own"),
    "calibrate": ("calibration.calibrate", "collect what a model's matrices see, for twobit-convert --calibration"),
    "eval": ("calibration.evaluate", "perplexity and KL divergence of a converted model"),
    "exec": ("cli_exec", "run llama-server, llama-cli, … with the plugin"),
}

_USAGE = """usage: twobit COMMAND [...]

{commands}

A paired GGUF is made by twobit-convert. A session from nothing:
  twobit-convert model.safetensors out.gguf
  twobit run out.gguf -p "Once upon a time" -n 100
  twobit exec -- llama-server -m out.gguf

twobit COMMAND --help explains a command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0; 2 and one line on stderr for what is refused; 130 when interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return flushed(" ".join(["twobit", *(word for word in arguments[:1] if word in _COMMANDS)]), lambda: _run(arguments))


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        lines = [f"  {name:<10} {what}" for name, (_, what) in _COMMANDS.items()]
        print(_USAGE.format(commands="\n".join(lines)))
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(", ".join(f"{package} {_version(package)}" for package in ("twobit-gguf", "llama-cpp-python")))
        return 0
    command = arguments[0]
    if command not in _COMMANDS:
        print(f"twobit: no command {command!r}; there are {', '.join(_COMMANDS)}", file=sys.stderr)
        return 2
    try:
        return int(importlib.import_module(f".{_COMMANDS[command][0]}", __package__).main(arguments[1:]) or 0)
    except (TwobitError, ValueError, MemoryError, RuntimeError) as error:  # llama.cpp does not take the file or the memory, or fails
        print(f"twobit {command}: {first_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # run from a checkout
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
