"""A limit on the body of a request, counted while it arrives, so that nobody fills the memory with one."""

from __future__ import annotations

import json
from typing import Any


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
            await self._refuse(send)
            return
        arrived, started = 0, False

        async def counted() -> Any:
            nonlocal arrived
            message = await receive()
            arrived += len(message.get("body", b""))
            if arrived > self.most:
                raise TooLarge
            return message

        async def watched(message: Any) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, counted, watched)
        except TooLarge:
            if not started:
                await self._refuse(send)

    async def _refuse(self, send: Any) -> None:
        text = f"the body is over the limit of {self.most} bytes"
        body = {"error": {"message": text, "type": "invalid_request_error", "param": None, "code": "body_too_large"}}
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})
