"""What was learnt about a model on a machine, kept for the next run: costs, and how well the draft is followed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path

from .acceptance import Acceptance
from .costs import Costs


def _file(key: str) -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "twobit" / f"costs-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def load(key: str, acceptance: Acceptance) -> Costs | None:
    """The costs seen for `key` (model, device, threads, machine) in an earlier run; acceptance takes over what that run learnt."""
    try:
        data = json.loads(_file(key).read_text(encoding="utf-8"))
        if data["key"] == key:
            costs = Costs(float(data["draft"]), [float(value) for value in data["verify"]])
            acceptance.restore(data["acceptance"])
            return costs
    except (OSError, ValueError, KeyError, TypeError):
        pass  # no file, or one of another version: measure again
    return None


def save(key: str, costs: Costs, acceptance: Acceptance) -> None:
    """Keeps both for the next run; a cache that cannot be written is no error."""
    path = _file(key)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump({"key": key, **costs.to_json(), "acceptance": acceptance.to_json()}, file)
        os.replace(file.name, path)
