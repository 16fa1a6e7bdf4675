"""Prints what pyproject.toml asks for to build, to run and for development, one requirement a line, for pip install -r."""

from __future__ import annotations

from pathlib import Path

try:
    import tomllib
except ImportError:  # Python 3.10: pip's own copy
    from pip._vendor import tomli as tomllib  # type: ignore[no-redef]

EXTRAS = ("hf", "server", "demo", "plot", "test", "lint")

pyproject = tomllib.loads((Path(__file__).resolve().parent.parent / "pyproject.toml").read_text())
project = pyproject["project"]
for requirement in [
    *pyproject["build-system"]["requires"],
    *project["dependencies"],
    *(line for extra in EXTRAS for line in project["optional-dependencies"][extra]),
]:
    print(requirement)
