"""twobit serve, as OpenAI's own client and raw sockets see it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
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

    def refusal(self, path: str, body: Any) -> dict[str, Any]:
        """The error of a request that is the client's fault: status 400 in OpenAI's format, neither paths nor a traceback in the log."""
        size = len(self.log.read_text())
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Authorization": "Bearer secret", "Content-Type": "application/json"}
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers), timeout=120)
        text = caught.value.read().decode()
        assert caught.value.code == 400, text
        error = json.loads(text)["error"]
        assert error.keys() == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
        assert "/" not in error["message"] and "\n" not in error["message"]
        assert "Traceback" not in self.log.read_text()[size:]
        return error

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
    parts = [{"role": "user", "content": [{"type": "text", "text": "Say hello."}]}]
    newer = client.chat.completions.create(model="tiny", messages=parts, max_completion_tokens=10, **PLAIN)
    assert newer.choices[0].message.content == whole and newer.usage.completion_tokens <= 10
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


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Say hello."}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("question", [{"prompt": "a"}, {"messages": HELLO}])
@pytest.mark.parametrize("grammar", ["root ::= (((", "root ::= root", 'other ::= "a"', "root ::= " + 200_000 * "("])
def test_a_bad_grammar_is_refused(grammar: str, question: dict[str, Any], stream: bool, server: Server) -> None:
    path = CHAT if "messages" in question else COMPLETIONS
    assert "grammar" in server.refusal(path, {**question, "max_tokens": 4, "grammar": grammar, "stream": stream})["message"]


@pytest.mark.parametrize(
    ("path", "body", "message", "param"),
    [
        (COMPLETIONS, b"{bad", "no JSON", None),
        (COMPLETIONS, b"[1]", "body: Input should be", None),
        (COMPLETIONS, {"prompt": 5}, "prompt: Input should be a valid string", "prompt"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, "prompt: one a request", None),
        (COMPLETIONS, {"prompt": "a", "n": 2}, "n: one text a request", None),
        (COMPLETIONS, {"prompt": "a", "top_p": 7}, "top_p: Input should be less than or equal to 1", "top_p"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 2}, "logprobs", None),
        (COMPLETIONS, {"prompt": "a", "logprobs": 2, "stream": True}, "logprobs", None),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"999999": 1}}, "no token 999999", None),
        (CHAT, {"messages": 5}, "messages: Input should be a valid list", "messages"),
        (CHAT, {"messages": HELLO, "response_format": {"type": "xml"}}, "'json_object'", "response_format"),
        (CHAT, {"messages": HELLO, "response_format": {"type": "json_schema"}}, "json_schema", None),
        (CHAT, {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}}, "schema", None),
        (CHAT, {"messages": HELLO, "tools": [], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "'f' not found", None),
        ("/extras/detokenize", {"tokens": [10_000_000]}, "tokens: this model has those from 0 to", None),
    ],
)
def test_what_is_the_clients_fault(path: str, body: Any, message: str, param: str | None, server: Server) -> None:
    error = server.refusal(path, body)
    assert message in error["message"] and error["param"] == param


def test_a_json_schema_is_followed(server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}
    create = server.client().chat.completions.create
    answer = create(model="tiny", messages=HELLO, max_tokens=60, response_format=form, **PLAIN).choices[0].message.content
    assert isinstance(json.loads(answer)["a"], bool)
    chunks = create(model="tiny", messages=HELLO, max_tokens=60, response_format=form, stream=True, **PLAIN)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer


@pytest.mark.parametrize(("error", "status"), [(ValueError("bad"), 400), (RuntimeError("/secret"), 500)])
@pytest.mark.parametrize("begun", [False, True])
def test_a_stream_that_fails(begun: bool, error: Exception, status: int) -> None:
    """Before its first bytes it gets a status; later, an error event."""
    from twobit_gguf import server as module

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if begun:
            await send({"type": "http.response.body", "body": b": ping\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})  # as a cancelled stream ends
        raise error

    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(60)
        raise AssertionError

    with pytest.raises(RuntimeError) if status == 500 else contextlib.nullcontext():
        asyncio.run(module.Watch(app)({"type": "http"}, receive, send))
    body = sent[-1]["body"].decode()
    assert sent[0]["status"] == (200 if begun else status) and not sent[-1].get("more_body") and "/secret" not in body
    assert body.startswith("data: ") == begun and json.loads(body.removeprefix("data: "))["error"]["message"]


def test_an_unknown_chat_format_is_refused_at_start(paired_smollm2: Path) -> None:
    command = [sys.executable, "-m", "twobit_gguf.cli", "serve", str(paired_smollm2), "--port", str(free_port()), "--chat-format", "bogus"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    last = result.stderr.splitlines()[-1]
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert last.startswith("twobit serve: no chat format 'bogus': chat_template.default, ") and "llama-2" in last


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
