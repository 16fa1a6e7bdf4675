"""Plots of the benchmarks of whole texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .bench_texts import PHASES
from .plotting import require, save


def texts(result: dict[str, Any], path: Path) -> None:
    """Left: each text's tokens a second against the reference's. Right: where the milliseconds of a token go."""
    require(path)
    from matplotlib import pyplot

    rows, runs = result["medians"], result["runs"]
    labels = [f"{row['name']}, {row['temperature']:g}" for row in rows]
    figure, (ratios, phases) = pyplot.subplots(1, 2, figsize=(12, 0.5 * len(rows) + 1.8), sharey=True)
    kinds = sorted({run["kind"] for run in runs})
    for y, row in enumerate(rows):
        for color, kind in enumerate(kinds):
            values = [
                run["results"][row["name"]]["tokens_per_second"] / run["results"][row["against"]]["tokens_per_second"]
                for run in runs
                if run["temperature"] == row["temperature"] and run["kind"] == kind
            ]
            ratios.plot(values, [y] * len(values), "o", color=f"C{color}", alpha=0.5, label=kind if y == 0 and kind else None)
        ratios.plot(row["ratio"], y, "k|", markersize=16, label="median" if y == 0 else None)
        left = 0.0
        for color, phase in enumerate(PHASES):
            width = row.get("milliseconds", {}).get(phase, 0.0)
            phases.barh(y, width, left=left, color=f"C{color}", label=phase if y == len(rows) - 1 else None)
            left += width
    ratios.set_yticks(range(len(rows)), labels)
    ratios.invert_yaxis()
    ratios.axvline(1, color="gray", linewidth=0.8)
    ratios.set_xlim(left=0)
    ratios.set_xlabel(f"tokens a second, against {rows[0]['against']}")
    ratios.legend(fontsize=8)
    phases.set_xlabel("milliseconds a token")
    phases.legend(fontsize=8)
    figure.suptitle(f"{Path(result['settings']['file']).name}, {result['settings']['cpu']}", fontsize=9)
    figure.tight_layout()
    save(figure, path)
