"""A limit on the body of a request, counted while it arrives, so that nobody fills the memory with one."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

LINGER_SECONDS = 5.0
LINGER_BODIES = 16  # bodies of the limit's size that are taken in and forgotten before the connection is closed


class TooLarge(Exception):
    """More bytes than allowed have arrived."""


class BodyLimit:
    """ASGI middleware: a body above `most` bytes gets a 413, whether or not its length was announced."""

    def __init__(self, app: Any, most: int) -> None:
        self.app, self.most = app, most

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.most:
            expects = b"expect" in dict(scope["headers"])  # such a client sends nothing before it is told to
            await self._refuse(send, None if expects else receive)
            return
        arrived, started, refused = 0, False, False

        async def counted() -> Any:
            nonlocal arrived
            message = await receive()
            arrived += len(message.get("body", b""))
            if arrived > self.most:
                raise TooLarge
            return message

        async def watched(message: Any) -> None:
            nonlocal started, refused
            if arrived > self.most and not started:  # the framework made an answer of its own of `TooLarge`
                if not refused:
                    refused = True
                    await self._refuse(send, receive)
                return
            started = True
            await send(message)

        try:
            await self.app(scope, counted, watched)
        except TooLarge:
            if not started and not refused:
                await self._refuse(send, receive)

    async def _refuse(self, send: Any, receive: Any) -> None:
        """Answer, then let the rest of the body arrive and forget it: a connection closed on a client that still sends
        is reset, and the answer may be lost with it."""
        text = f"the body is over the limit of {self.most} bytes"
        body = {"error": {"message": text, "type": "invalid_request_error", "param": None, "code": "body_too_large"}}
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(body).encode(), "more_body": True})
        if receive is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(LINGER_SECONDS):
                    await self._forget(receive)
        await send({"type": "http.response.body", "body": b""})

    async def _forget(self, receive: Any) -> None:
        left = LINGER_BODIES * self.most
        while left > 0:
            message = await receive()
            left -= len(message.get("body", b""))
            if message["type"] == "http.disconnect" or not message.get("more_body", False):
                return
