"""`cs336-infer serve`: the OpenAI-compatible server."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cs336_infer.types import InferError, InvalidRequest, check_integer, check_number

KEY_VARIABLE = "CS336_API_KEY"
MOST_HEADER_BYTES = 64 << 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port; 0 takes a free one and prints it (default 8000)")
    parser.add_argument("--name", default=None, help="what the model is called in requests (default: as it was given)")
    parser.add_argument(
        "--api-key", default=None, help=f"key that requests must carry (default: ${KEY_VARIABLE}, or none)"
    )
    parser.add_argument("--max-body-bytes", type=int, default=4 << 20, help="largest request body (default 4 MiB)")
    parser.add_argument("--drain-seconds", type=int, default=30, help="time for running answers when stopped")
    parser.add_argument(
        "--request-timeout",
        type=float,
        default=None,
        help="seconds after which an answer ends as it is (default: none)",
    )
    parser.add_argument(
        "--blocklist", type=Path, default=None, help="file of strings that prompts and answers may not have, one a line"
    )
    parser.add_argument(
        "--blocklist-words", action="store_true", help="find them as whole words only, not inside longer ones"
    )
    parser.add_argument("--kv-tokens", type=int, default=None, help="tokens of KV memory (default: by free memory)")
    parser.add_argument("--block-size", type=int, default=16, help="tokens of a KV block (default 16)")
    parser.add_argument("--max-batch", type=int, default=64, help="answers at once (default 64)")
    parser.add_argument("--step-tokens", type=int, default=512, help="tokens computed in a step (default 512)")
    parser.add_argument(
        "--preemption",
        choices=["recompute", "swap"],
        default="recompute",
        help="what becomes of an answer that must give up its KV blocks; swap needs --host-bytes",
    )
    parser.add_argument("--no-prefix-cache", action="store_true", help="forget the blocks of finished answers")
    parser.add_argument("--host-bytes", type=int, default=0, help="host tier for KV blocks, in bytes (default: none)")
    parser.add_argument("--disk-bytes", type=int, default=0, help="disk tier for KV blocks, in bytes (default: none)")
    parser.add_argument("--disk-folder", type=Path, default=None, help="where the disk tier is")
    parser.add_argument("--write", choices=["through", "back"], default="through", help="when blocks go down a tier")


def serve(args: argparse.Namespace, load: Callable[[argparse.Namespace], object]) -> int:
    """Serve until SIGINT or SIGTERM; running answers are finished first. Returns 0.

    Raises:
        InferError: an option cannot be obeyed, or the port is taken.
    """
    try:
        import uvicorn

        from cs336_infer.serve.api import create_app
    except ModuleNotFoundError as error:
        raise InferError(f"serving needs the package {error.name}: pip install 'cs336-infer[serving]'") from None
    from cs336_infer.engine.llm import LLM
    from cs336_infer.engine.roster import by_priority
    from cs336_infer.kv.tier_options import TierOptions
    from cs336_infer.models.load import LoadedModel
    from cs336_infer.text.blocklist import Blocklist

    check_integer("--port", args.port, 0, 65535)
    check_integer("--max-body-bytes", args.max_body_bytes, 1, 1 << 30)
    check_integer("--drain-seconds", args.drain_seconds, 0, 3600)
    if args.request_timeout is not None:
        check_number("--request-timeout", args.request_timeout, 0, math.inf, "seconds above 0", open_low=True)
    blocklist = None
    if args.blocklist is not None:
        blocklist = Blocklist.from_file(args.blocklist, whole_words=args.blocklist_words)
    elif args.blocklist_words:
        raise InvalidRequest("--blocklist-words says how --blocklist is read: give both")
    model = load(args)
    assert isinstance(model, LoadedModel)
    tiers = None
    if args.host_bytes or args.disk_bytes:
        tiers = TierOptions(args.host_bytes, args.disk_bytes, args.disk_folder, args.write)
    llm = LLM(
        model,
        block_size=args.block_size,
        kv_tokens=args.kv_tokens,
        prefix_cache=not args.no_prefix_cache,
        tiers=tiers,
        max_batch=args.max_batch,
        step_tokens=args.step_tokens,
        rank=by_priority,
        preemption=args.preemption,
        safety=blocklist,
    )
    slots = llm.kv.pool.total * args.block_size
    if slots < model.config.context_length:
        raise InvalidRequest(
            f"--kv-tokens {slots} is less than the model's context of {model.config.context_length}: "
            "one long request could never be finished"
        )
    key = args.api_key or os.environ.get(KEY_VARIABLE) or None
    app = create_app(
        llm,
        args.name or model.name,
        api_key=key,
        max_body_bytes=args.max_body_bytes,
        drain_s=args.drain_seconds,
        timeout_s=args.request_timeout,
    )
    config = uvicorn.Config(
        app,
        host=args.host,
        port=args.port,
        log_level="info",
        h11_max_incomplete_event_size=MOST_HEADER_BYTES,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=args.drain_seconds,
    )

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            if self.started:
                host, port = self.servers[0].sockets[0].getsockname()[:2]
                where = f"[{host}]" if ":" in host else host
                dtype = str(model.dtype).removeprefix("torch.")
                print(
                    f"serving {args.name or model.name} in {dtype} on {model.device}: KV memory for {slots:,} tokens, "
                    f"http://{where}:{port}",
                    flush=True,
                )

    # When it has drained, uvicorn raises the signal again, for the handlers that were there before: a stop is no error.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    server = Server(config)
    with contextlib.suppress(SystemExit):  # uvicorn's answer to a port that is taken
        server.run()
    if not server.started:
        raise InferError(f"cannot listen on {args.host}:{args.port}: is the port taken?")
    return 0
