"""twobit serve FILE: llama-cpp-python's OpenAI-compatible server with our Llama behind it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from . import cli_options
from .errors import TwobitError


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns when the server is stopped (Ctrl-C, SIGTERM)."""
    parser = argparse.ArgumentParser(
        prog="twobit serve",
        description="Serves /v1/completions, /v1/chat/completions (streaming too), /v1/models. Requests are answered one after the other, "
        "the others wait; a client that hangs up ends its text. Needs pip install 'twobit-gguf[server]'.",
        epilog="The key may also come from the environment: TWOBIT_API_KEY. example: twobit serve out.gguf --port 8000, then "
        "curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{\"prompt\": \"Once upon a time\"}'",
    )
    cli_options.add_model(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="default %(default)s")
    parser.add_argument("--api-key", metavar="KEY", default=os.environ.get("TWOBIT_API_KEY"), help="clients must send it")
    parser.add_argument("--name", help="the model's name for clients (default: that of the file)")
    parser.add_argument("--chat-format", metavar="NAME", help="one of llama-cpp-python's (default: the file's own template)")
    parser.add_argument("--logprobs", action="store_true", help="allow logprobs: keeps all logits, n_ctx × vocabulary × 4 bytes")
    cli_options.add_speculation(parser)
    args = parser.parse_args(argv)
    if not 0 < args.port < 65536:
        parser.error("--port must be 1 to 65535")
    try:
        import uvicorn

        from .server import Served, make_app
    except ImportError as error:
        raise TwobitError(f"the server is not installed ({error.name} is missing): pip install 'twobit-gguf[server]'") from None

    model = cli_options.load(
        args, Served, speculation=cli_options.speculation(args), chat_format=args.chat_format, logits_all=args.logprobs
    )
    app = make_app(model, args.name or args.file.stem, host=args.host, port=args.port, api_key=args.api_key)
    print(f"twobit serve: {args.file.name} at http://{args.host}:{args.port}/v1", file=sys.stderr, flush=True)
    uvicorn.run(app, host=args.host, port=args.port, log_level="info" if args.verbose else "warning")
    return 0
