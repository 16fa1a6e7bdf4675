"""`twobit bench kernels`: our matrix kernels beside ggml's and beside a pure read of memory, all in ggml's own threads.

The measuring is done by libtwobit-bench-kernels (ggml-twobit/bench), which lies beside the plugin; here its single times become a
table, JSON or a plot.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import _native, cli_options
from .errors import TwobitError
from .machine import describe, usable_cpus
from .plotting import require, save

CONTESTANTS = ("read", "R4", "R5", "R6", "R8", "base Q2_K", "base Q2_0", "base Q2_K+R6", "base Q2_0+R6",
               "Q8_0", "Q6_K", "Q2_K", "Q2_K repacked", "Q2_0")  # fmt: skip
DEFAULT = ("read", "R4", "R5", "R6", "R8", "base Q2_K", "base Q2_K+R6", "Q8_0", "Q6_K", "Q2_K", "Q2_K repacked")
READ = "read"


# a process of its own: a bad allocation or a crash there is an error here
_WORKER = """
import ctypes, sys
import llama_cpp  # brings ggml in
arguments = [argument.encode() for argument in sys.argv[2:]]
main = ctypes.CDLL(sys.argv[1]).twobit_bench_kernels
sys.exit(main(len(arguments), (ctypes.c_char_p * len(arguments))(*arguments)))
"""


def library_path() -> Path:
    """Where libtwobit-bench-kernels is: beside the plugin, in a build folder in bench/ there.

    Raises:
        TwobitError: it is not there.
    """
    folder = _native.library_path().parent
    for path in (folder / "libtwobit-bench-kernels.so", folder / "bench" / "libtwobit-bench-kernels.so"):
        if path.is_file():
            return path
    raise TwobitError(f"libtwobit-bench-kernels.so is not in {folder}: reinstall twobit-gguf")


def measure(arguments: Sequence[str]) -> dict[str, Any]:
    """Runs the benchmark with `arguments` (ggml-twobit/bench/bench_kernels.cpp); progress goes to stderr.

    Returns:
        {"cpu", "kernel", "weights", "matrices", "series": [{"name", "bytes", "threads", "tokens", "seconds": [...]}, ...]};
        "tokens" is 0 for the pure read.

    Raises:
        TwobitError: it is not there, or failed.
    """
    command = [sys.executable, "-c", _WORKER, str(library_path()), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise TwobitError(f"the benchmark ended with status {done.returncode}, see above")
    result: dict[str, Any] = json.loads(done.stdout)
    result["cpu"] = describe()
    return result


def render(result: dict[str, Any]) -> str:
    """The tables, one for each number of threads. Each time: median / minimum."""
    series = result["series"]
    lines = [f"{result['cpu']}; kernels {result['kernel']}; {result['weights'] / 1e6:.0f} M weights in {result['matrices']} matrices"]
    for threads in sorted({s["threads"] for s in series}):
        here = [s for s in series if s["threads"] == threads]
        read = next((s for s in here if s["name"] == READ), None)
        lines += ["", f"{threads} thread{'s' * (threads > 1)}" + (f", pure read {_rates(read)}" if read else "")]
        tokens = sorted({s["tokens"] for s in here if s["tokens"]})
        of_read = " of read |" if read else ""
        lines.append(f"| | MB | ms, T={tokens[0]} | GB/s |{of_read}" + "".join(f" T={t} |" for t in tokens[1:]) + f" ms, T={tokens[-1]} |")
        lines.append("|" + "---|" * (5 + len(tokens) + bool(read) - 1))
        for name in dict.fromkeys(s["name"] for s in here if s["name"] != READ):
            rows = {s["tokens"]: s for s in here if s["name"] == name}
            one = rows[tokens[0]]
            cells = [name, f"{one['bytes'] / 1e6:.0f}", _milliseconds(one), _rates(one, unit="")]
            if read:
                cells.append(f"{100 * _rate(one, statistics.median) / _rate(read, statistics.median):.0f} %")
            cells += [f"{_ratio(rows[t], one):.2f}×" for t in tokens[1:]] + [_milliseconds(rows[tokens[-1]])]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(result: dict[str, Any], path: Path) -> None:
    """Writes an image: time against tokens, one panel for each number of threads, medians.

    Raises:
        TwobitError: matplotlib is not installed, or cannot write the file.
    """
    require(path)
    from matplotlib import pyplot

    threads = sorted({s["threads"] for s in result["series"]})
    figure, panels = pyplot.subplots(1, len(threads), figsize=(6 * len(threads), 5), squeeze=False, sharey=True)
    for panel, n in zip(panels[0], threads, strict=True):
        here = [s for s in result["series"] if s["threads"] == n]
        for name in dict.fromkeys(s["name"] for s in here):
            points = sorted((s["tokens"], 1e3 * statistics.median(s["seconds"])) for s in here if s["name"] == name)
            if name == READ:
                panel.axhline(points[0][1], color="black", linestyle=":", label="pure read of R6's bytes")
            else:
                ours = name.startswith(("R", "base"))
                panel.plot(*zip(*points, strict=True), marker="o", linestyle="-" if ours else "--", label=name)
        panel.set(title=f"{n} thread{'s' * (n > 1)}", xlabel="tokens", xscale="log", yscale="log")
        ticks = sorted({s["tokens"] for s in here if s["tokens"]})
        panel.set_xticks(ticks, [str(t) for t in ticks])
        panel.minorticks_off()
    panels[0][0].set_ylabel(f"ms for {result['weights'] / 1e6:.0f} M weights")
    panels[0][-1].legend(fontsize="small")
    figure.suptitle(result["cpu"])
    save(figure, path, dpi=120, bbox_inches="tight")


def _rate(s: dict[str, Any], which: Any) -> float:  # GB/s
    return s["bytes"] / which(s["seconds"]) / 1e9


def _rates(s: dict[str, Any], unit: str = " GB/s") -> str:
    return f"{_rate(s, statistics.median):.1f} / {_rate(s, min):.1f}{unit}"


def _milliseconds(s: dict[str, Any]) -> str:
    return f"{1e3 * statistics.median(s['seconds']):.1f} / {1e3 * min(s['seconds']):.1f}"


def _ratio(s: dict[str, Any], one: dict[str, Any]) -> float:
    """Median over the rounds of the time of s over that of `one` in the same round: they were measured side by side."""
    return statistics.median(a / b for a, b in zip(s["seconds"], one["seconds"], strict=True))


def _threads() -> str:
    count = len(usable_cpus())
    return ",".join(str(n) for n in sorted({1, 2, 4, 8, 16, 32, count}) if n <= count)


def main(argv: Sequence[str] | None = None) -> int:
    """`twobit bench kernels`. Returns the exit status: 2 where something is missing or wrong."""
    parser = argparse.ArgumentParser(
        prog="twobit bench kernels",
        description="Times of our kernels, ggml's, and a pure read of the same bytes, taking turns, in ggml's own threads. R4 … R8 are "
        "residuals, 'base' the repacked 2-bit bases, 'base …+R6' both in one pass; the others are ggml's. Contestants: "
        + ", ".join(CONTESTANTS),
    )
    parser.add_argument(
        "--only", default=",".join(DEFAULT), metavar="NAMES", help="contestants, separated by commas (default: %(default)s)"
    )
    parser.add_argument("--kernel", metavar="SET", help="avx512vnni, avxvnni, avx2, neon or scalar (default: the best here)")
    parser.add_argument("--tokens", default="1,2,4,8,16,32", metavar="T,…", help="tokens at once (default: %(default)s)")
    parser.add_argument("--threads", default=_threads(), metavar="N,…", help="(default: %(default)s)")
    parser.add_argument("--weights", type=int, default=1000, metavar="MILLIONS", help="how many weights (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=cli_options.number, default=60, metavar="S", help="how long to measure; at least 3 rounds (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="every single time, instead of the table")
    parser.add_argument("--plot", type=Path, metavar="IMAGE", help="also write a plot of time against tokens")
    options = parser.parse_args(argv)
    unknown = [name for name in options.only.split(",") if name not in CONTESTANTS]
    if unknown:
        parser.error(f"--only: {unknown[0]!r} is none of {', '.join(CONTESTANTS)}")
    if not any(name != READ for name in options.only.split(",")):
        parser.error("--only: nothing to compare with the pure read")
    if not 1 <= options.weights <= 100_000:
        parser.error("--weights: from 1 to 100000 millions")
    arguments = [f"--{name}={getattr(options, name)}" for name in ("only", "tokens", "threads", "weights", "seconds")]
    if options.kernel:
        arguments.append(f"--kernel={options.kernel}")
    try:
        if options.plot:
            require(options.plot)
        result = measure([part for argument in arguments for part in argument.split("=", 1)])
        print(json.dumps(result) if options.json else render(result))
        if options.plot:
            plot(result, options.plot)
    except TwobitError as error:
        print(f"twobit bench kernels: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
