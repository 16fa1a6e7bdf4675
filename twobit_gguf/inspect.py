"""twobit inspect FILE: what a paired GGUF holds, and with --verify whether base and residual of every pair are as they were written.

Tensors that are not paired have no checksum.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from . import gguf_file, gguf_types
from .errors import TwobitError
from .format import PairedFile, open_paired, verify


def describe(paired: PairedFile) -> dict[str, Any]:
    """The file as --json prints it: sizes in bytes, bits a weight of base, residual and both, and one entry for each pair."""
    weights = sum(pair.n_weights for pair in paired.pairs)
    base = sum(pair.base_nbytes for pair in paired.pairs)
    residual = sum(pair.residual_nbytes for pair in paired.pairs)
    names = {pair.name for pair in paired.pairs}
    unpaired = [tensor for tensor in paired.main.tensors if tensor.name not in names]
    return {
        "file": str(paired.path),
        "residual_file": str(paired.residual_path) if paired.residual_path != paired.path else None,
        "architecture": paired.main.get("general.architecture", gguf_file.STRING),
        "name": paired.main.get("general.name", gguf_file.STRING),
        "version": paired.main.get("twobit.version", gguf_file.U32),
        "layout_version": paired.section.get("twobit.layout_version", gguf_file.U32),
        "pair_id": f"{paired.trailer.pair_id:016x}",
        "weights": weights + sum(tensor.n_weights for tensor in unpaired),
        "paired_weights": weights,
        "base_bytes": base,
        "residual_bytes": residual,
        "unpaired_bytes": sum(tensor.nbytes for tensor in unpaired),
        "base_bpw": 8 * base / weights,
        "residual_bpw": 8 * residual / weights,
        "pairs": [
            asdict(pair)
            | {
                "base_type": gguf_types.name(pair.base_type),
                "base_bpw": 8 * pair.base_nbytes / pair.n_weights,
                "residual_bpw": 8 * pair.residual_nbytes / pair.n_weights,
                "base_xxh64": f"{pair.base_xxh64:016x}",
                "residual_xxh64": f"{pair.residual_xxh64:016x}",
            }
            for pair in paired.pairs
        ],
        "unpaired": [
            {"name": t.name, "type": gguf_types.name(t.type), "shape": list(t.shape), "nbytes": t.nbytes} for t in unpaired
        ],
    }


def render(about: dict[str, Any]) -> str:
    lines = [
        f"{about['file']}: {about['name'] or 'a model without a name'} ({about['architecture']}), "
        f"{about['weights'] / 1e6:.1f} M weights, {about['paired_weights'] / 1e6:.1f} M of them in {len(about['pairs'])} pairs",
        f"{'tensor':<40} {'rows':>7} {'columns':>7} {'×':>4}  {'base':<8} {'bits':>5}  {'residual':<8} {'bits':>5} {'MB':>9}",
    ]
    for pair in about["pairs"]:
        lines.append(
            f"{pair['name']:<40} {pair['rows']:>7} {pair['columns']:>7} {pair['matrices']:>4}  {pair['base_type']:<8} "
            f"{pair['base_bpw']:>5.2f}  {'R' + str(pair['bits']):<8} {pair['residual_bpw']:>5.2f} "
            f"{(pair['base_nbytes'] + pair['residual_nbytes']) / 1e6:>9.2f}"
        )
    for tensor in about["unpaired"]:
        if tensor["nbytes"] >= 1 << 20:
            lines.append(f"{tensor['name']:<40} not paired, {tensor['type']}, {tensor['nbytes'] / 1e6:.2f} MB")
    lines.append(
        f"base {about['base_bytes'] / 1e6:.1f} MB ({about['base_bpw']:.2f} bits a weight), "
        f"residual {about['residual_bytes'] / 1e6:.1f} MB ({about['residual_bpw']:.2f}), "
        f"not paired {about['unpaired_bytes'] / 1e6:.1f} MB"
    )
    if about["residual_file"]:
        lines.append(f"the residual is in {about['residual_file']}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Exit status 0, or 2 with one line on stderr for a file that is refused."""
    parser = argparse.ArgumentParser(prog="twobit inspect", description="Shows the pairs of a paired GGUF and checks its structure.")
    parser.add_argument("file", metavar="FILE", type=Path)
    parser.add_argument("--residual", metavar="PATH", type=Path, help="the residual's own file, if it is not beside FILE")
    parser.add_argument("--verify", action="store_true", help="compare the checksums of every pair, too; what is not paired has none")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    try:
        paired = open_paired(args.file, args.residual)
        about = describe(paired)
        if args.verify:
            total = about["base_bytes"] + about["residual_bytes"]
            with tqdm(total=total, desc="verifying", unit="B", unit_scale=True, disable=None, leave=False) as bar:
                verify(paired, bar.update)
            about["verified"] = True
    except TwobitError as error:
        print(f"twobit inspect: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(about, indent=2))
    else:
        print(render(about))
        if args.verify:
            print("the checksums of all pairs agree")
    return 0


if __name__ == "__main__":
    sys.exit(main())
