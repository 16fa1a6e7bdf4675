"""twobit serve, as OpenAI's own client and raw sockets see it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import free_port, wait_for_port

for module in ("uvicorn", "fastapi", "sse_starlette", "starlette_context", "pydantic_settings"):
    pytest.importorskip(module)
openai = pytest.importorskip("openai")

PROMPT = "The capital of France is"
PLAIN = {"temperature": 0, "extra_body": {"repeat_penalty": 1.0}}
LONG = 1900  # tokens that nobody waits for


class Server(NamedTuple):
    port: int
    log: Path

    def client(self, api_key: str = "secret") -> Any:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=api_key, timeout=120, max_retries=0)

    def hang_up(self, path: str, **body: Any) -> int:
        """Asks, closes the socket while the model is at work, and returns how many tokens were made in vain."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\nContent-Type: application/json\r\n"
        for delay in (1.5, 6, 24):
            size = len(self.log.read_text())
            with socket.create_connection(("127.0.0.1", self.port)) as connection:
                connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
                time.sleep(delay)
            said = self.wait_for(("hung up", "before llm invoked"), size)
            if "hung up" in said:
                return int(said.split()[-2])
        raise AssertionError("the model never began")

    def wait_for(self, words: tuple[str, ...], begin: int) -> str:
        """The first line of the log behind `begin` that has one of the words."""
        end = time.monotonic() + 120
        while time.monotonic() < end:
            for line in self.log.read_text()[begin:].splitlines():
                if any(word in line for word in words):
                    return line
            time.sleep(0.1)
        raise AssertionError(self.log.read_text()[-2000:])


@pytest.fixture(scope="module")
def server(paired_smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port, log = free_port(), tmp_path_factory.mktemp("serve") / "log"
    command = [sys.executable, "-m", "twobit_gguf.cli", "serve", str(paired_smollm2), "--port", str(port), "-c", "2048"]
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, "--api-key", "secret", "--name", "tiny"], stdout=file, stderr=file, env={**os.environ, "PYTHONUNBUFFERED": "1"}
        )
    try:
        wait_for_port(port, process)
        yield Server(port, log)
    finally:
        process.terminate()
        assert process.wait(30) in (0, -signal.SIGTERM)


def ask(server: Server, prompt: str = PROMPT, n: int = 8) -> str:
    return server.client().completions.create(model="tiny", prompt=prompt, max_tokens=n, **PLAIN).choices[0].text


def test_openai_client(server: Server, paired_smollm2: Path) -> None:
    client = server.client()
    assert [entry.id for entry in client.models.list()] == ["tiny"]
    command = [sys.executable, "-m", "twobit_gguf.cli", "run", str(paired_smollm2), "-p", PROMPT, "-n", "12", "--mode", "full", "--json"]
    expected = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=300).stdout)["text"]
    answer = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, **PLAIN)
    assert answer.choices[0].text == expected and answer.usage.completion_tokens == 12
    streamed = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, stream=True, **PLAIN)
    assert "".join(chunk.choices[0].text for chunk in streamed) == expected

    messages = [{"role": "user", "content": "Say hello."}]
    whole = client.chat.completions.create(model="tiny", messages=messages, max_tokens=10, **PLAIN).choices[0].message.content
    chunks = client.chat.completions.create(model="tiny", messages=messages, max_tokens=10, stream=True, **PLAIN)
    assert whole and "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    with pytest.raises(openai.AuthenticationError):
        server.client("wrong").completions.create(model="tiny", prompt=PROMPT)


def test_requests_wait_for_their_turn(server: Server) -> None:
    prompts = [PROMPT, "Once upon a time", "def main():"]
    alone = [ask(server, prompt) for prompt in prompts]
    with ThreadPoolExecutor(2 * len(prompts)) as pool:
        assert list(pool.map(lambda prompt: ask(server, prompt), 2 * prompts)) == 2 * alone


def test_a_stream_that_nobody_reads_is_given_up(server: Server) -> None:
    alone = ask(server)
    size = len(server.log.read_text())
    stream = server.client().completions.create(model="tiny", prompt="Once upon a time", max_tokens=LONG, stream=True, temperature=1.5)
    next(iter(stream))
    stream.close()
    server.wait_for(("hung up", "Disconnected from client"), size)
    assert ask(server) == alone


@pytest.mark.parametrize(
    ("path", "question"),
    [
        ("/v1/completions", {"prompt": "Once upon a time"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Tell me a very long story about the sea."}]}),
    ],
)
def test_an_answer_that_nobody_waits_for_is_given_up(path: str, question: dict[str, Any], server: Server) -> None:
    alone = ask(server)
    options = {"max_tokens": LONG, "temperature": 1.5, "logit_bias": {"2": -100, "0": -100}}  # no end of text
    assert server.hang_up(path, **question, **options) < LONG - 1
    assert ask(server) == alone  # the model is where it should be


def test_embeddings_are_refused(server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.client().embeddings.create(model="tiny", input="hello")
    assert caught.value.body["type"] == "invalid_request_error" and "no embeddings" in caught.value.body["message"]
    assert "Traceback" not in server.log.read_text()
    assert ask(server)


def test_a_prompt_too_long_is_refused(server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, "word " * 3000)
    assert caught.value.code == "context_length_exceeded"
    assert ask(server)


def test_a_long_prompt_is_given_up_between_batches(paired_tiny: Callable[[str], Path]) -> None:
    from twobit_gguf import server as module

    model = module.Served(str(paired_tiny("llama")), n_ctx=256, n_batch=32, n_threads=2, verbose=False)
    gone = threading.Event()
    token = module._gone.set(gone)
    try:
        model.eval([5] * 64)
        gone.set()
        with pytest.raises(module.Refused):
            model.eval([5] * 64)
        assert model.n_tokens == 96
    finally:
        module._gone.reset(token)
        model.close()
