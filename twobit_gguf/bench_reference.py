"""What the benchmarks compare with: llama.cpp alone in a process of its own, and llama.cpp's own speculation.

Neither ever loads the plugin. They never compute while something else does: the benchmarks take turns.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import TwobitError, first_line

if TYPE_CHECKING:
    import llama_cpp

SAMPLING: dict[str, Any] = {"top_k": 40, "top_p": 0.95, "min_p": 0.05}  # of every contestant, beside the temperature
_TRIES = 5
SPECULATIVE = "llama-speculative-simple"


def generate(model: llama_cpp.Llama, prompt: str, n_tokens: int, temperature: float, seed: int) -> dict[str, Any]:
    """Tokens behind a prompt and the seconds they took, the prompt and the first token left out.

    EOS does not end the text, so that all texts are as long. What the cache still holds of the prompt is used again.
    """
    model.set_seed(seed)
    tokens: list[int] = []
    first = 0.0
    for token in model.generate(model.tokenize(prompt.encode(), special=True), temp=temperature, repeat_penalty=1.0, **SAMPLING):
        if not tokens:
            first = time.perf_counter()
        tokens.append(token)
        if len(tokens) == n_tokens:
            break
    seconds = time.perf_counter() - first
    return {"tokens_per_second": (len(tokens) - 1) / seconds, "seconds": seconds, "tokens": tokens}


class Reference:
    """llama.cpp alone, in another process: a callable object there, called through a pipe."""

    def __init__(self, path: Path, n_threads: int, n_ctx: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_reference_process, args=(theirs, str(path), n_threads, n_ctx), daemon=True)
        self._process.start()
        theirs.close()
        self._receive()

    def __call__(self, name: str, *arguments: Any) -> Any:
        """decoder(n_past), seconds(width) or generate(prompt, n_tokens, temperature, seed)."""
        return self._receive(name, arguments)

    def _receive(self, *call: Any) -> Any:
        try:
            if call:
                self._pipe.send(call)
            failed, value = self._pipe.recv()
        except (EOFError, OSError):
            raise TwobitError("the process that runs the reference has ended") from None
        if failed:
            raise TwobitError(value)
        return value

    def close(self) -> None:
        self._pipe.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()


def _reference_process(pipe: Any, path: str, n_threads: int, n_ctx: int) -> None:
    import llama_cpp

    from .bench_decode import Decoder

    try:
        model = llama_cpp.Llama(path, n_ctx=n_ctx, n_threads=n_threads, n_threads_batch=n_threads, flash_attn=True, verbose=False)
        decoder: Decoder | None = None
        pipe.send((False, None))
        while True:
            name, arguments = pipe.recv()
            if name == "decoder":
                decoder = Decoder(model, *arguments)
                value: Any = None
            elif name == "seconds":
                assert decoder is not None
                value = decoder.seconds(*arguments)
            else:
                value = generate(model, *arguments)
            pipe.send((False, value))
    except (EOFError, KeyboardInterrupt):
        pass
    except Exception as error:
        pipe.send((True, f"{path}: {first_line(error)}"))


class LlamaSpeculative:
    """llama.cpp's speculation with a draft model of its own: one run of llama-speculative-simple for each text.

    Args:
        program: its path.
        target, draft: GGUFs of one vocabulary.
    """

    def __init__(self, program: Path, target: Path, draft: Path, n_threads: int) -> None:
        self._program = program
        threads = str(n_threads)
        self._arguments = [
            str(program.absolute()), "-m", str(target), "-md", str(draft), "--spec-type", "draft-simple", "-t", threads, "-tb", threads,
            "-td", threads, "-tbd", threads, "-fa", "on", "--no-escape", "--ignore-eos", "--top-k", str(SAMPLING["top_k"]),
            "--top-p", str(SAMPLING["top_p"]), "--min-p", str(SAMPLING["min_p"]), "--repeat-penalty", "1",
        ]  # fmt: skip

    def generate(self, prompt: str, n_tokens: int, temperature: float, seed: int, n_ctx: int) -> dict[str, Any]:
        """tokens_per_second, tokens_per_verification and acceptance, as it prints them; the prompt is left out.

        Raises:
            TwobitError: it failed, or prints something else.
        """
        size = str(n_ctx)
        command = [*self._arguments, "-p", prompt, "-n", str(n_tokens), "--temp", f"{temperature:g}", "--seed", str(seed),
                   "-c", size, "-b", size]  # fmt: skip
        # at its end it does not wait for its log to be written, and with sleeping OpenMP threads it hardly ever is
        environment = {**without_plugin(), "OMP_WAIT_POLICY": "active"}
        for _ in range(_TRIES):
            done = subprocess.run(command, capture_output=True, env=environment)
            output = (done.stdout + done.stderr).decode("utf-8", "replace")
            decoded = re.search(r"decoded +(\d+) tokens in +([\d.]+) seconds", output)
            drafted, accepted = (re.search(rf"n_{what} += +(\d+)", output) for what in ("drafted", "accept"))
            if done.returncode != 0 or (decoded and drafted and accepted):
                break  # otherwise it ended before its log was written, as it does now and then
        if done.returncode != 0 or not decoded or not drafted or not accepted:
            last = next((line for line in reversed(output.splitlines()) if line.strip()), f"status {done.returncode}")
            raise TwobitError(f"{self._program}: {last.strip()}")
        n, seconds = int(decoded[1]), float(decoded[2])
        return {
            "tokens_per_second": n / seconds, "seconds": seconds, "tokens_per_verification": n / (n - int(accepted[1])),
            "acceptance": int(accepted[1]) / int(drafted[1]) if int(drafted[1]) else 0.0,
        }  # fmt: skip


def without_plugin() -> dict[str, str]:
    """This process's environment for stock programs."""
    return {name: value for name, value in os.environ.items() if name != "GGML_BACKEND_PATH"}
