"""The command line, as a user runs it."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twobit_gguf import llama_source

TIMEOUT = 300


def twobit(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "twobit_gguf.cli", *map(str, arguments)]
    return subprocess.run(command, **{"capture_output": True, "text": True, "timeout": TIMEOUT, **options})


@pytest.fixture(scope="module")
def model(paired_tiny: Callable[[str], Path]) -> Path:
    return paired_tiny("llama")


def test_help_teaches() -> None:
    assert twobit().returncode == 2
    text = twobit("--help").stdout
    for command in ("run", "serve", "inspect", "bench", "exec"):
        assert command in text
        result = twobit(command, "--help")
        assert result.returncode == 0 and "usage: twobit " + command in result.stdout
    assert "llama-cpp-python 0" in twobit("--version").stdout
    for what in ("decode", "policies"):
        result = twobit("bench", what, "--help")
        assert result.returncode == 0 and "example: twobit bench " + what in result.stdout


def test_run_in_three_modes(model: Path) -> None:
    results = {}
    for mode in ("full", "draft", "speculative"):
        result = twobit("run", model, "-p", "in the", "-n", 20, "--mode", mode, "--json")
        assert result.returncode == 0, result.stderr
        results[mode] = json.loads(result.stdout)
        assert results[mode]["mode"] == mode and results[mode]["tokens"] == 20 and results[mode]["tokens_per_second"] > 0
    assert results["full"]["text"] == results["speculative"]["text"] != results["draft"]["text"]
    assert results["full"]["counters"]["matmuls_unpaired"] == 0 < results["draft"]["counters"]["matmuls_unpaired"]
    assert results["speculative"]["speculation"]["tokens"] == 20
    assert results["full"]["bytes"]["residual"] > results["full"]["bytes"]["base"] > 0


def test_run_prints_text_and_speed(model: Path) -> None:
    result = twobit("run", model, "-p", "in the", "-n", 10, "--temp", 0.8, "--seed", 3)
    assert result.stdout and "10 tokens, speculative" in result.stderr and "tokens/s" in result.stderr
    again = twobit("run", model, "-n", 10, "--temp", 0.8, "--seed", 3, input="in the")  # the prompt from a pipe
    assert again.stdout == result.stdout


def test_run_takes_any_gguf(tiny_gguf: Callable[[str], Path]) -> None:
    result = twobit("run", tiny_gguf("llama"), "-p", "in the", "-n", 5, "--json")
    assert json.loads(result.stdout)["mode"] == "plain"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "nowhere.gguf", "-p", "x"], "nowhere.gguf: no such file"),
        (["run", "FILE", "-p", "x" * 600, "--ctx", "256"], "give a larger --ctx"),
        (["run", "FILE", "-p", "x", "--device", "CUDA9"], "no device CUDA9"),
        (["run", "FILE", "-p", "x", "--max-nodes", "40"], "max_nodes from 1 to 31"),
        (["run", "FILE", "-p", "x", "--mode", "fast"], "invalid choice"),
        (["run", "FILE", "-p", "x", "--rpc", "127.0.0.1:1"], "RPC"),
        (["bench", "decode", "FILE", "--reference", "nowhere.gguf"], "nowhere.gguf: no such file"),
        (["bench", "decode", "FILE", "--prompts", "/dev/null"], "no prompts in it"),
        (["bench", "decode", "FILE", "--plot", "x.png"], "go with --prompts"),
        (["bench", "decode", "FILE", "--prompts", "--draft-model", "FILE"], "name one"),
        (["bench", "policies", "FILE", "--context-text", "/dev/null", "--context", "100"], "100 are wanted"),
        (["bench", "decode", "FILE", "--prompts", "-n", "1"], "1 is not from 2 to"),  # no time between tokens
        (["run", "FILE", "-p", "x", "-c", "99999999999"], "99999999999 is not from 1 to 2147483647"),
        (["run", "FILE", "-p", "x", "-ngl", "-2"], "-2 is not from -1 to"),
        (["run", "FILE", "-p", "x", "-n", "many"], "'many' is not a whole number"),
        (["run", "FILE", "-p", "x", "--temp", "nan"], "'nan' is not a finite number"),
        (["run", "FILE", "-p", "x", "--min-p", "-1"], "-1 is below 0"),
        (["run", "FILE", "-p", "x", "--repeat-penalty", "0"], "0 is not above 0"),
        (["bench", "policies", "FILE", "--temp", "inf"], "'inf' is not a finite number"),
        (["bench"], "usage"),
        (["exec"], "no program"),
        (["exec", "--", "llama-nothing"], "llama-nothing: no such program"),
        (["dance"], "no command 'dance'"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments: list[str], said: str, model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "empty.txt"
    prompts.write_text("\n\n")
    arguments = [{"FILE": str(model), "/dev/null": str(prompts)}.get(argument, argument) for argument in arguments]
    result = twobit(*arguments)
    assert result.returncode == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("twobit ") and ": " in line and "usage" not in line]
    assert len(lines) <= 1


def test_a_broken_file_is_one_line(model: Path, tmp_path: Path) -> None:
    for name, data in (("zeros", bytes(5000)), ("short", model.read_bytes()[:3000]), ("empty", b"")):
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(data)
        result = twobit("run", path, "-p", "x")
        assert result.returncode == 2 and path.name in result.stderr and "Traceback" not in result.stderr
        assert sum(line.startswith("twobit run: ") for line in result.stderr.splitlines()) == 1


def test_no_standard_input(model: Path) -> None:
    result = twobit("run", model, "-n", 5, preexec_fn=lambda: os.close(0))
    assert result.returncode == 2 and result.stderr.endswith("twobit run: no prompt: give one with -p, or on standard input\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("arguments", [["--help"], ["run", "FILE", "-p", "in", "-n", "5"], ["inspect", "FILE", "--json"]])
def test_output_that_cannot_be_written_is_one_line(arguments: list[str], model: Path) -> None:
    with open("/dev/full", "w") as full:
        result = twobit(*(str(model) if argument == "FILE" else argument for argument in arguments),
                        capture_output=False, stdout=full, stderr=subprocess.PIPE)  # fmt: skip
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].endswith(": No space left on device") and "Traceback" not in result.stderr


def test_a_reader_that_hangs_up_is_no_error(model: Path) -> None:
    command = [sys.executable, "-m", "twobit_gguf.cli", "inspect", str(model)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert (process.stderr.read(), process.wait(TIMEOUT)) == (b"", 0)
    process.stderr.close()


def test_other_devices_are_warned_of_and_the_advice_helps(model: Path) -> None:
    warning = "0 of 15 weights have their residual, the others run at 2 bits; put layers on TWOBIT devices only"
    assert warning in twobit("run", model, "-p", "in", "-n", 1, "--device", "CPU").stderr
    assert "WARNING" not in twobit("run", model, "-p", "in", "-n", 1, "--device", "CPU", "-ngl", 0).stderr  # left in RAM


def test_inspect_says_what_it_verified(model: Path) -> None:
    assert twobit("inspect", model, "--verify").stdout.endswith("\nthe checksums of all pairs agree\n")


def test_exec_sets_the_environment_up(model: Path) -> None:
    code = "import os, json; print(json.dumps({k: v for k, v in os.environ.items() if k[:4] in ('GGML', 'TWOB')}))"
    result = twobit("exec", "--model", model, "--mode", "draft", "--", sys.executable, "-c", code)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["GGML_BACKEND_PATH"].endswith("libggml-twobit.so")
    assert (found["TWOBIT_MODEL"], found["TWOBIT_MODE"]) == (str(model.resolve()), "draft")



def test_exec_names_the_device_for_llama_tools(tmp_path: Path) -> None:
    tool = tmp_path / "llama-server"
    tool.write_text('#!/bin/sh\necho "$@"\n')
    tool.chmod(0o755)
    assert twobit("exec", "--", tool, "-m", "x.gguf").stdout == "-m x.gguf -dev TWOBIT0\n"
    assert twobit("exec", "--", tool, "-m", "x.gguf", "--device", "CPU").stdout == "-m x.gguf --device CPU\n"


def test_exec_finds_the_tools_that_were_built(tmp_path: Path) -> None:
    tool = tmp_path / "twobit" / f"llama-tools-{llama_source.VERSION}-0" / "bin" / "llama-of-this-test"
    tool.parent.mkdir(parents=True)
    tool.write_text('#!/bin/sh\necho built "$@"\n')
    tool.chmod(0o755)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    assert twobit("exec", "--", tool.name, "-m", "x.gguf", env=environment).stdout == "built -m x.gguf -dev TWOBIT0\n"
    assert twobit("exec", "--print", "--", tool.name, env=environment).stdout.endswith(f"libggml-twobit.so {tool} -dev TWOBIT0\n")
    in_path = tmp_path / tool.name
    in_path.write_text("#!/bin/sh\necho in PATH\n")
    in_path.chmod(0o755)
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    assert twobit("exec", "--", tool.name, env=environment).stdout == "in PATH\n"


def test_interrupt_ends_quietly(model: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "twobit_gguf.cli", "run", str(model), "-p", "in the", "-n", "100000", "-c", "65536"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and b"Traceback" not in errors


# ---- chat ----


class Terminal:
    """A program in a pseudo-terminal."""

    def __init__(self, *arguments: object) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.execv(sys.executable, [sys.executable, "-m", "twobit_gguf.cli", *map(str, arguments)])
        self.seen = ""

    def send(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait_for(self, text: str, seconds: float = 60) -> str:
        """What came up to and with `text`."""
        deadline = time.monotonic() + seconds
        while text not in self.seen:
            ready, _, _ = select.select([self._fd], [], [], deadline - time.monotonic())
            assert ready, f"no {text!r} in {self.seen!r}"
            try:
                self.seen += os.read(self._fd, 65536).decode("utf-8", "replace")
            except OSError:  # the program has ended
                break
        assert text in self.seen
        found, _, self.seen = self.seen.partition(text)
        return found + text

    def end(self) -> int:
        while True:
            try:
                if not os.read(self._fd, 65536):
                    break
            except OSError:
                break
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_chat_in_a_terminal(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("TERM", "dumb")
    terminal = Terminal("run", model, "-n", 12, "--temp", 0)
    terminal.wait_for("> ")
    terminal.send("in the\r")
    terminal.wait_for("tokens/s")
    terminal.wait_for("> ")
    terminal.send("/reset\r")
    terminal.wait_for("> ")
    terminal.send("\x04")
    assert terminal.end() == 0
    assert "in the" in (tmp_path / "twobit" / "history").read_text()


def test_interrupt_stops_the_answer_and_not_the_program(paired_smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("TERM", "dumb")
    terminal = Terminal("run", paired_smollm2, "-c", 2048, "--temp", 0)
    terminal.wait_for("> ")
    terminal.send("Tell me a very long story about the sea.\r")
    terminal.wait_for("tokens/s")  # in the title, while the answer goes on
    terminal.send("\x03")
    terminal.wait_for("[stopped]")
    terminal.wait_for("> ")
    terminal.send("/exit\r")
    assert terminal.end() == 0
