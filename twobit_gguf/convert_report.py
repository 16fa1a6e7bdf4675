"""What went where: the table that ends a conversion."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from . import format, gguf_types
from .convert_plan import OUTPUT, TOKEN_EMBD, Action, Step


@dataclass
class Row:
    """Tensors of one kind. place: "VRAM" (all layers on the GPU) or "RAM"."""

    what: str
    type: str
    place: str
    tensors: int = 0
    weights: int = 0
    nbytes: int = 0

    @property
    def bpw(self) -> float:
        """Bits a weight."""
        return 8 * self.nbytes / self.weights if self.weights else 0.0


def rows(steps: Iterable[Step]) -> list[Row]:
    steps = list(steps)
    table: dict[tuple[str, str, str], Row] = {}

    def add(what: str, kind: str, place: str, step: Step, nbytes: int) -> None:
        row = table.setdefault((what, kind, place), Row(what, kind, place))
        row.tensors += 1
        row.weights += step.source.n_weights
        row.nbytes += nbytes

    has_output = any(step.spec.name == OUTPUT for step in steps)
    for step in steps:
        nbytes, kind = gguf_types.nbytes(step.spec.type, step.source.n_weights), gguf_types.name(step.spec.type)
        if step.action is Action.PAIR:
            bits = step.spec.bits or 0
            packed = format.residual_nbytes(bits, step.rows, step.source.columns, step.matrices)
            add("base", kind, "VRAM", step, nbytes)
            add("residual", f"R{bits}", "RAM", step, packed)
        elif step.spec.name.endswith("token_embd.weight"):
            add("token embedding", kind, "RAM", step, nbytes)
            if step.spec.name == TOKEN_EMBD and not has_output:
                add("output (shared)", kind, "VRAM", step, nbytes)
        else:
            add("other", kind, "VRAM", step, nbytes)
    return sorted(table.values(), key=lambda row: (row.what != "base", row.what != "residual", -row.nbytes))


def summary(table: list[Row]) -> dict[str, Any]:
    """Totals in bytes; bits a weight of the paired matrices."""
    paired = {what: [row for row in table if row.what == what] for what in ("base", "residual")}
    bits = {
        f"{what}_bpw": 8 * sum(r.nbytes for r in found) / max(1, sum(r.weights for r in found)) for what, found in paired.items()
    }
    return {
        "rows": [asdict(row) | {"bpw": row.bpw} for row in table],
        "pairs": sum(row.tensors for row in paired["base"]),
        "vram_bytes": sum(row.nbytes for row in table if row.place == "VRAM"),
        "ram_bytes": sum(row.nbytes for row in table if row.place == "RAM"),
    } | bits


def render(table: list[Row], disk_bytes: int) -> str:
    lines = [f"{'what':<16} {'type':<8} {'where':<5} {'tensors':>7} {'bits/weight':>11} {'MB':>10}"]
    for row in table:
        lines.append(
            f"{row.what:<16} {row.type:<8} {row.place:<5} {row.tensors:>7} {row.bpw:>11.2f} {row.nbytes / 1e6:>10.1f}"
        )
    totals = summary(table)
    lines.append(
        f"VRAM {totals['vram_bytes'] / 1e6:.1f} MB (KV cache and buffers come on top), "
        f"RAM {totals['ram_bytes'] / 1e6:.1f} MB, disk {disk_bytes / 1e6:.1f} MB"
    )
    return "\n".join(lines)
