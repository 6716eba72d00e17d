"""The real server process under load and abuse: many streaming clients, who leave, read slowly or send rubbish.

    python tests/e2e/load_serve.py --clients 200 --seconds 120 [--seed 0]

Every answer of a valid request is compared with the same request sent alone. Afterwards no KV block may be in use, the
server's memory must be flat, and SIGTERM must let running streams end and give exit code 0. Prints one line; exit
status 1 when anything was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "public"))
import tiny

GROWTH = 48 << 20  # bytes by which the last third of the run may need more memory than the first, on average
BODY_LIMIT = 1 << 20
STARTED = re.compile(r"serving tiny in float32 on cpu: KV memory for [\d,]+ tokens, (http://127\.0\.0\.1:\d+)")
BAD = [
    (b"{", 400),
    (b"[]", 400),
    (b"\xff\xfe", 400),
    (b'{"model": "tiny"}', 400),
    (json.dumps({"model": "tiny", "prompt": [5] * 300}).encode(), 400),
    (json.dumps({"model": "tiny", "prompt": "a" * 100_000}).encode(), 400),
    (json.dumps({"model": "tiny", "prompt": [5], "temperature": -1}).encode(), 400),
    (json.dumps({"model": "other", "prompt": [5]}).encode(), 404),
    (b" " * (BODY_LIMIT + 1), 413),
]


def requests(count: int, draw: random.Random) -> list[dict[str, Any]]:
    made = []
    for i in range(count):
        prompt = [draw.randrange(3, 300) for _ in range(draw.randint(1, 60))]
        body: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": draw.randint(1, 60), "seed": i}
        made.append(body | {"temperature": draw.choice([0.0, 0.9]), "ignore_eos": True})
    return made


class Load:
    """Clients of one server, and what they saw."""

    def __init__(self, url: str, process: psutil.Process, seed: int) -> None:
        self.url, self.process, self.draw = url, process, random.Random(seed)
        self.bodies = requests(32, self.draw)
        self.alone: list[str] = []
        self.seen: Counter[str] = Counter()
        self.memory: list[int] = []

    def wrong(self, what: str) -> None:
        self.seen["wrong"] += 1
        if self.seen["wrong"] <= 20:
            print(f"load_serve: {what}", file=sys.stderr)

    async def whole(self, client: httpx.AsyncClient, body: dict[str, Any]) -> str:
        response = await client.post("/v1/completions", json=body)
        response.raise_for_status()
        return response.json()["choices"][0]["text"]

    async def stream(self, client: httpx.AsyncClient, number: int, *, leave: bool = False, slow: bool = False) -> None:
        text, ended = "", False
        body = self.bodies[number] | {"stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            self.seen[f"status {response.status_code}"] += 1
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                    if leave:
                        self.seen["left"] += 1
                        return
                    if slow:
                        await asyncio.sleep(0.05)
                ended = ended or line == "data: [DONE]"
        if ended and text == self.alone[number]:
            self.seen["right"] += 1
        else:
            self.wrong(
                f"request {number}: status {response.status_code}, ended {ended}, {text!r}, not {self.alone[number]!r}"
            )

    async def rubbish(self, client: httpx.AsyncClient) -> None:
        body, status = self.draw.choice(BAD)
        response = await client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        self.seen[f"status {response.status_code}"] += 1
        if response.status_code == status:
            self.seen["refused"] += 1
        else:
            self.wrong(f"body {body[:40]!r} got status {response.status_code}, not {status}: {response.text[:200]}")

    async def client(self, until: float) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=300) as client:
            while time.monotonic() < until:
                what = self.draw.random()
                if what < 0.15:
                    await self.rubbish(client)
                else:
                    number = self.draw.randrange(len(self.bodies))
                    await self.stream(client, number, leave=what < 0.3, slow=0.3 <= what < 0.4)

    async def watch(self) -> None:
        while True:
            self.memory.append(self.process.memory_info().rss)
            await asyncio.sleep(0.2)

    async def run(self, clients: int, seconds: float) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=300) as client:
            self.alone = [await self.whole(client, body) for body in self.bodies]
            await asyncio.gather(*(self.client(0.0) for _ in range(clients)))
            watcher = asyncio.ensure_future(self.watch())
            ends = time.monotonic() + seconds
            results = await asyncio.gather(*(self.client(ends) for _ in range(clients)), return_exceptions=True)
            watcher.cancel()
            for error in results:
                if error is not None:
                    self.wrong(f"a client failed: {error!r}")
            for _ in range(200):  # those who left are cancelled between two steps
                self.seen["live"] = int(await self.gauge(client, "num_requests_running") > 0)
                self.seen["live"] += int(await self.gauge(client, "kv_cache_usage_perc") > 0)
                if not self.seen["live"]:
                    break
                await asyncio.sleep(0.05)
            self.seen["failures"] = int(await self.gauge(client, "engine_failures_total"))
            streams = [asyncio.ensure_future(self.stream(client, i)) for i in range(4)]
            await asyncio.sleep(0.05)
            self.process.send_signal(signal.SIGTERM)
            for error in await asyncio.gather(*streams, return_exceptions=True):
                if isinstance(error, httpx.ConnectError):
                    self.seen["too late"] += 1  # not yet connected when the server stopped to listen
                elif error is not None:
                    self.wrong(f"a stream did not survive the stop: {error!r}")

    async def gauge(self, client: httpx.AsyncClient, name: str) -> float:
        text = (await client.get("/metrics")).text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"cs336:{name}{{"))


def run(clients: int, seconds: float, seed: int) -> tuple[bool, str]:
    """Whether all was well, and the line that says what was seen."""
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top) / "tiny"
        tiny.write_model(folder)
        command = [sys.executable, "-m", "cs336_infer.cli", "serve", "--model", str(folder), "--name", "tiny"]
        command += ["--port", "0", "--dtype", "float32", "--kernels", "reference", "--block-size", "4"]
        command += ["--kv-tokens", "2048", "--max-body-bytes", str(BODY_LIMIT)]
        log = Path(top) / "log"
        with log.open("wb") as err:
            server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True, env=os.environ)
        try:
            assert server.stdout is not None
            found = STARTED.search(server.stdout.readline())
            if found is None:
                return False, f"load_serve: the server did not start: {log.read_text()[-500:]}"
            # the log of requests goes on: a full pipe would stop the server
            threading.Thread(target=server.stdout.read, daemon=True).start()
            load = Load(found[1], psutil.Process(server.pid), seed)
            asyncio.run(load.run(clients, seconds))
            code = server.wait(60)
        finally:
            server.kill()
            server.wait()
    third = max(1, len(load.memory) // 3)
    growth = statistics.mean(load.memory[-third:]) - statistics.mean(load.memory[:third])
    seen = load.seen
    errors = sum(n for name, n in seen.items() if name.startswith("status 5"))
    good = not (seen["wrong"] or errors or seen["live"] or seen["failures"]) and seen["right"] > 0
    good = good and code == 0 and growth < GROWTH
    line = (
        f"load_serve: {clients} clients, {seconds:g} s: {seen['right']} streams as when alone, {seen['left']} left, "
        f"{seen['refused']} bad bodies refused, {seen['wrong']} wrong, {errors} answers 5xx, {seen['failures']} failed "
        f"steps, {seen['live']} live afterwards, memory {growth / 2**20:+.1f} MiB, exit code {code}"
    )
    return good, f"{line}: {'ok' if good else 'FAILED'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    good, line = run(args.clients, args.seconds, args.seed)
    print(line)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
