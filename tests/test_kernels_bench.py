"""`twobit bench kernels` on a matrix small enough for seconds: the figures mean nothing here, their forms do."""

import json
from pathlib import Path

import pytest

from twobit_gguf import bench_kernels

SMALL = ["--weights", "4", "--seconds", "0", "--tokens", "1,9", "--threads", "1"]


def test_json_has_every_single_time(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["read", "R5", "base Q2_0", "base Q2_K+R6", "Q8_0"]
    assert bench_kernels.main([*SMALL, "--only", ",".join(names), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [(s["name"], s["tokens"]) for s in result["series"]] == [("read", 0)] + [(n, t) for n in names[1:] for t in (1, 9)]
    assert all(len(s["seconds"]) == 2 and min(s["seconds"]) > 0 for s in result["series"])
    sizes = {s["name"]: 8 * s["bytes"] / result["weights"] for s in result["series"]}  # bits a weight
    assert sizes == pytest.approx({"read": 6.1875, "R5": 5.1875, "base Q2_0": 2.25, "base Q2_K+R6": 8.8125, "Q8_0": 8.5})


def test_table_and_plot(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    png = tmp_path / "times.png"
    assert bench_kernels.main([*SMALL, "--only", "read,R6,Q2_K", "--kernel", "avx2", "--plot", str(png)]) in (0, 2)
    if png.exists():  # status 2: this CPU has no AVX2
        assert png.read_bytes().startswith(b"\x89PNG")
        table = capsys.readouterr().out
        assert "kernels avx2" in table and "| R6 |" in table and "| Q2_K |" in table


@pytest.mark.parametrize("name", ["nowhere/times.png", "times.foo", "times", ""])
def test_a_plot_that_cannot_be_written(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert bench_kernels.main([*SMALL, "--plot", str(tmp_path / name)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and str(tmp_path) in printed.err and printed.err.count("\n") == 1


@pytest.mark.parametrize("options", [["--only", "R7"], ["--only", "read"], ["--weights", "0"], ["--seconds", "nan"]])
def test_bad_options(options: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        bench_kernels.main(options)
    assert stop.value.code == 2


def test_no_such_kernels(capfd: pytest.CaptureFixture[str]) -> None:
    assert bench_kernels.main([*SMALL, "--only", "R6", "--kernel", "abacus"]) == 2
    assert 'no kernels "abacus"' in capfd.readouterr().err
