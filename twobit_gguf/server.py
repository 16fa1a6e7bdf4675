"""llama-cpp-python's OpenAI-compatible server around one loaded model, and what it leaves out.

A client that hangs up stops the model: each request has an event that is set when its client is gone. It reaches the thread that decodes
through a context variable. And what is the client's fault is answered with status 400 and a body as OpenAI's errors have it, streams too.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import sys
import threading
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import HTTPException, RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from jinja2 import TemplateError
from llama_cpp.llama_chat_format import LlamaChatCompletionHandlerRegistry
from llama_cpp.llama_grammar import json_schema_to_gbnf
from llama_cpp.server import app as llama_server
from llama_cpp.server.settings import ModelSettings, ServerSettings
from starlette.exceptions import HTTPException as AnyHTTPException

from .errors import TwobitError
from .llama import Llama

_gone: contextvars.ContextVar[threading.Event | None] = contextvars.ContextVar("gone", default=None)


class Refused(HTTPException):
    """A request that this server does not take: status 400."""


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

    def create_completion(self, *args: Any, **kwargs: Any) -> Any:
        """As Llama.create_completion.

        Raises:
            Refused: logit_bias names a token that there is not.
        """
        for token in kwargs.get("logit_bias") or ():
            if not 0 <= int(token) < self.n_vocab():
                raise Refused(400, f"logit_bias: this model has no token {token}")
        return super().create_completion(*args, **kwargs)

    def detokenize(self, tokens: list[int], *args: Any, **kwargs: Any) -> bytes:
        """As Llama.detokenize.

        Raises:
            Refused: there is no such token; llama.cpp would end the process.
        """
        if tokens and not (min(tokens) >= 0 and max(tokens) < self.n_vocab()):
            raise Refused(400, f"tokens: this model has those from 0 to {self.n_vocab() - 1}")
        return super().detokenize(tokens, *args, **kwargs)

    def create_embedding(self, *args: Any, **kwargs: Any) -> Any:
        """Raises Refused: embeddings need a context without logits, in which nothing can be generated."""
        raise Refused(400, "this server generates text and makes no embeddings; in Python, Llama(FILE, embedding=True).embed() does")


def _client_is_gone() -> bool:
    gone = _gone.get()
    return gone is not None and gone.is_set()


class Watch:
    """ASGI middleware: reads ahead of the application, so that a client's leaving is seen while it waits for the model.

    An answer begins and ends with its bytes: a stream that fails before it has any can still be given a status, and later an error event.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        gone = threading.Event()
        messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        held: list[dict[str, Any]] = []
        begun = ended = False

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

        async def send_held() -> None:
            nonlocal begun, ended
            while held:
                message = held.pop(0)
                begun, ended = True, message["type"] == "http.response.body" and not message.get("more_body", False)
                await send(message)

        async def hold(message: dict[str, Any]) -> None:
            held.append(message)
            if message.get("body"):
                await send_held()

        token = _gone.set(gone)
        task = asyncio.create_task(pump())
        try:
            await self._app(scope, next_message, hold)
            await send_held()
        except Exception as error:
            answer = await _refuse(None, _cause(error))
            if not begun:
                await answer(scope, receive, send)
            elif not ended:
                await send({"type": "http.response.body", "body": b"data: " + bytes(answer.body) + b"\n\n"})
            if answer.status_code >= 500:
                raise
        finally:
            task.cancel()
            _gone.reset(token)


class Question(Request):
    """A request whose body is made one that llama_cpp's server understands."""

    async def json(self) -> Any:
        """The body; a JSON schema has become a grammar.

        Raises:
            Refused: it asks for several texts at once, or no grammar comes of the schema.
        """
        body = await super().json()
        if not isinstance(body, dict):
            return body
        body = dict(body)
        prompt, form, messages = body.get("prompt"), body.get("response_format"), body.get("messages")
        if isinstance(prompt, list) and len(prompt) > 1 and all(isinstance(text, str) for text in prompt):
            raise Refused(400, "prompt: one a request")
        if body.get("n", 1) not in (1, None):
            raise Refused(400, "n: one text a request")
        if body.get("max_completion_tokens") is not None:  # OpenAI's newer name, which llama_cpp does not know
            body["max_tokens"] = body["max_completion_tokens"]
        if isinstance(messages, list):
            body["messages"] = [_with_plain_text(message) for message in messages]
        if isinstance(form, dict) and form.get("type") == "json_schema":
            body |= {"response_format": None, "grammar": _grammar(form)}
        return body


def _with_plain_text(message: Any) -> Any:
    """A chat message whose content is one text, if it came as a list of texts: most templates take nothing else."""
    parts = message.get("content") if isinstance(message, dict) else None
    if not isinstance(parts, list) or not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        return message
    return message | {"content": "\n".join(part["text"] for part in parts)}


def _grammar(form: dict[str, Any]) -> str:
    try:
        return str(json_schema_to_gbnf(json.dumps(form["json_schema"]["schema"])))
    except Exception as error:  # llama_cpp asserts and indexes
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise Refused(400, f"response_format: no grammar comes of json_schema.schema ({reason})") from None


class Route(APIRoute):
    """In the place of llama_cpp's RouteErrorHandler, which answers 500 to whatever is wrong with a body."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """As APIRoute's, for a Question."""
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            return await handle(Question(request.scope, request.receive))

        return answer


def make_app(model: Llama, name: str, *, host: str, port: int, api_key: str | None) -> Any:
    """The ASGI application; requests for a model of any name are answered by `model`.

    Raises:
        TwobitError: neither llama_cpp nor the file has the model's chat format.
    """
    formats = [*model._chat_handlers, *LlamaChatCompletionHandlerRegistry()._chat_handlers]
    if model.chat_format not in formats:
        raise TwobitError(f"no chat format {model.chat_format!r}: {', '.join(formats[:8])}, …")

    class Proxy(llama_server.LlamaProxy):
        """Hands out the one model that is loaded already."""

        @staticmethod
        def load_llama_from_model_settings(settings: Any) -> Any:
            return model

    router = APIRouter(route_class=Route)
    for route in llama_server.router.routes:
        assert isinstance(route, APIRoute)
        router.add_api_route(
            route.path, route.endpoint, methods=sorted(route.methods or ()), dependencies=route.dependencies, summary=route.summary,
            tags=route.tags, response_model=route.response_model, responses=route.responses, include_in_schema=route.include_in_schema,
        )  # fmt: skip
    llama_server.router = router
    llama_server.LlamaProxy = Proxy  # type: ignore[misc]
    app: FastAPI = llama_server.create_app(
        server_settings=ServerSettings(host=host, port=port, api_key=api_key, interrupt_requests=False),
        model_settings=[ModelSettings(model=model.model_path, model_alias=name)],
    )
    for kind in (AnyHTTPException, RequestValidationError, ValueError, TemplateError, Exception):
        app.add_exception_handler(kind, _refuse)
    return Watch(app)


async def _refuse(request: Any, error: Exception) -> JSONResponse:
    """The answer to an error: what the libraries refuse is a ValueError and the client's fault, all else is ours and in the log."""
    status, kind, message, param, code = 400, "invalid_request_error", str(error), None, None
    if isinstance(error, AnyHTTPException):
        status, message = error.status_code, error.detail
    elif isinstance(error, RequestValidationError):
        faults = error.errors()
        if faults[0]["type"] == "json_invalid":
            message = f"the body is no JSON: {faults[0]['ctx']['error']}"
        else:
            param = next(map(str, faults[0]["loc"][1:]), None)
            message = "; ".join(dict.fromkeys(f"{''.join(map(str, fault['loc'][1:2])) or 'body'}: {fault['msg']}" for fault in faults))
    elif "exceed context window" in message:
        code = "context_length_exceeded"
    elif not isinstance(error, (ValueError, TemplateError)):
        status, kind, message = 500, "internal_server_error", "the server failed; the reason is in its log"
    body = {"message": message, "type": kind, "param": param, "code": code}
    return JSONResponse({"error": body}, status, headers=getattr(error, "headers", None))


def _cause(error: Exception) -> Exception:
    """What was raised in a stream, without the group of anyio's and the RuntimeError of starlette's around it."""
    while True:
        inner = error.__cause__ if isinstance(error, RuntimeError) else next(iter(getattr(error, "exceptions", ())), None)
        if not isinstance(inner, Exception):
            return error
        error = inner
