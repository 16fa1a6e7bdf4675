"""Runs of a long benchmark, kept in a file as they come, so that an interrupted one goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import TwobitError


class Saved:
    """A list of runs and the settings they were made with.

    Args:
        path: the JSON file, written anew (aside, then renamed) after each run; None: nothing is kept.
        settings: what the runs depend on, as JSON has it.

    Raises:
        TwobitError: the file holds runs of other settings, or is something else.
    """

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        self._path = path
        self.settings: dict[str, Any] = json.loads(json.dumps(settings))
        self.runs: list[dict[str, Any]] = []
        if path is None or not path.exists():
            return
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            found, self.runs = data["settings"], list(data["runs"])
        except (OSError, ValueError, KeyError, TypeError):
            raise TwobitError(f"{path}: not the results of a benchmark; remove it or name another file") from None
        if found != self.settings:
            differs = sorted(key for key in {*found, *self.settings} if found.get(key) != self.settings.get(key))
            raise TwobitError(f"{path}: has runs with other settings ({', '.join(differs)}); remove it or name another file")

    def has(self, **key: Any) -> bool:
        """Whether there is a run with these values."""
        return any(all(run.get(name) == value for name, value in key.items()) for run in self.runs)

    def left(self, temperatures: list[float], indices: list[int], progress: Callable[[], object], **key: Any) -> list[tuple[float, int]]:
        """Each temperature and prompt of which there is no run yet; progress: called for every other. key: what else is asked of a run."""
        todo = []
        for temperature in temperatures:
            for index in indices:
                if self.has(temperature=temperature, prompt=index, **key):
                    progress()
                else:
                    todo.append((temperature, index))
        return todo

    def add(self, run: dict[str, Any]) -> None:
        """Keeps one more run.

        Raises:
            TwobitError: the file cannot be written.
        """
        self.runs.append(run)
        self.write({})

    def write(self, more: dict[str, Any]) -> dict[str, Any]:
        """The whole result, with what was made of the runs; in the file, too."""
        result = {"settings": self.settings, "runs": self.runs, **more}
        if self._path is not None:
            aside = self._path.with_name(self._path.name + ".part")
            try:
                aside.write_text(json.dumps(result, indent=1), encoding="utf-8")
                os.replace(aside, self._path)
            except OSError as error:
                raise TwobitError(f"{self._path}: cannot be written: {error.strerror}") from None
        return result
