"""llama-cpp-python's OpenAI-compatible server around one loaded model, and what it leaves out: a client that hangs up stops the model.

Each request has an event that is set when its client is gone. It reaches the thread that decodes through a context variable.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
from collections.abc import Generator, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import HTTPException
from fastapi.responses import JSONResponse
from llama_cpp.server import app as llama_server
from llama_cpp.server.settings import ModelSettings, ServerSettings

from .llama import Llama

_gone: contextvars.ContextVar[threading.Event | None] = contextvars.ContextVar("gone", default=None)


class Refused(HTTPException):
    """A request that this server does not take: status 400 and a body as OpenAI's errors have it."""


class Served(Llama):
    """A Llama that stops when the client it works for has hung up."""

    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Generator[int, Sequence[int] | None, None]:
        """As Llama.generate, and at an end as soon as nobody listens."""
        n_tokens = 0
        for token in super().generate(tokens, *args, **kwargs):
            if _client_is_gone():
                print(f"twobit serve: a client hung up after {n_tokens} tokens", file=sys.stderr, flush=True)
                return
            yield token
            n_tokens += 1

    def eval(self, tokens: Sequence[int]) -> None:
        """As Llama.eval; a long prompt is left between two batches.

        Raises:
            Refused: nobody listens any more.
        """
        for begin in range(0, len(tokens), self.n_batch):
            if begin > 0 and _client_is_gone():
                raise Refused(400, "the client has hung up")
            super().eval(tokens[begin : begin + self.n_batch])

    def create_embedding(self, *args: Any, **kwargs: Any) -> Any:
        """Raises Refused: embeddings need a context without logits, in which nothing can be generated."""
        raise Refused(400, "this server generates text and makes no embeddings; in Python, Llama(FILE, embedding=True).embed() does")


def _client_is_gone() -> bool:
    gone = _gone.get()
    return gone is not None and gone.is_set()


class Watch:
    """ASGI middleware: reads ahead of the application, so that a client's leaving is seen while it waits for the model."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        gone = threading.Event()
        messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

        async def pump() -> None:
            while not gone.is_set():
                message = await receive()
                messages.put_nowait(message)
                if message["type"] == "http.disconnect":
                    gone.set()

        async def next_message() -> dict[str, Any]:
            if gone.is_set() and messages.empty():
                return {"type": "http.disconnect"}
            return await messages.get()

        token = _gone.set(gone)
        task = asyncio.create_task(pump())
        try:
            await self._app(scope, next_message, send)
        finally:
            task.cancel()
            _gone.reset(token)


def make_app(model: Llama, name: str, *, host: str, port: int, api_key: str | None) -> Any:
    """The ASGI application; requests for a model of any name are answered by `model`."""

    class Proxy(llama_server.LlamaProxy):
        """Hands out the one model that is loaded already."""

        @staticmethod
        def load_llama_from_model_settings(settings: Any) -> Any:
            return model

    llama_server.LlamaProxy = Proxy  # type: ignore[misc]
    app: FastAPI = llama_server.create_app(
        server_settings=ServerSettings(host=host, port=port, api_key=api_key, interrupt_requests=False),
        model_settings=[ModelSettings(model=model.model_path, model_alias=name)],
    )
    app.add_exception_handler(Refused, _refuse)
    return Watch(app)


async def _refuse(request: Any, error: Exception) -> JSONResponse:
    assert isinstance(error, Refused)
    body = {"message": error.detail, "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": body}, status_code=error.status_code)
