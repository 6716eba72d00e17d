"""`cs336-infer bench serve`: load for an OpenAI-compatible server, with options and figures of `vllm bench serve`."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from pathlib import Path
from typing import Any

from cs336_infer.types import InferError, InvalidRequest, check_integer, short

DATASETS = ("random", "custom", "timed_trace")
METRIC_NAMES = "ttft,tpot,itl,e2el"
VOCABULARY = 256  # ids below it are in every vocabulary the engine loads


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands below `bench`."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=type(parser))
    p = commands.add_parser("serve", help="send requests to a server and measure latency, throughput and goodput")
    p.add_argument("--base-url", default=None, help="of the server (default: http://HOST:PORT)")
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--port", type=int, default=8000)
    p.add_argument("--endpoint", default="/v1/completions", help="/v1/completions (default) or /v1/chat/completions")
    p.add_argument("--model", default=None, help="name of the model (default: the first that the server lists)")
    p.add_argument("--api-key", default=None, help="key that requests carry")
    p.add_argument("--dataset-name", choices=DATASETS, default="random")
    p.add_argument(
        "--dataset-path", default=None, help="custom: JSONL with prompt; timed_trace: a trace, see kv replay"
    )
    p.add_argument("--num-prompts", type=int, default=1000)
    p.add_argument("--request-rate", type=float, default=float("inf"), help="requests per second (default inf)")
    p.add_argument("--burstiness", type=float, default=1.0, help="shape of the gaps' gamma distribution; 1 is Poisson")
    p.add_argument("--max-concurrency", type=int, default=None, help="requests at once (default: no limit)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--random-input-len", type=int, default=1024)
    p.add_argument("--random-output-len", type=int, default=128)
    p.add_argument("--random-range-ratio", type=float, default=0.0, help="lengths are uniform over len * (1 -+ ratio)")
    p.add_argument("--custom-output-len", type=int, default=256)
    p.add_argument("--vocab-size", type=int, default=VOCABULARY, help="made-up prompts have ids below this")
    p.add_argument("--ignore-eos", action="store_true", help="answers go on to their full length")
    p.add_argument("--temperature", type=float, default=0.0)
    p.add_argument("--percentile-metrics", default=METRIC_NAMES, help=f"of {METRIC_NAMES} (default: all)")
    p.add_argument("--metric-percentiles", default="99", help="such as 50,90,99 (default 99)")
    p.add_argument("--goodput", nargs="+", default=[], metavar="NAME:MS", help="limits: ttft:200 tpot:50 e2el:3000")
    p.add_argument("--timeout", type=float, default=600.0, help="seconds without a byte until a request has failed")
    p.add_argument("--save-result", action="store_true", help="write the figures as JSON")
    p.add_argument("--result-filename", type=Path, default=None, help="where (default: bench-serve-TIME.json)")
    p.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    p.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Send the load and print the figures; 1 when no request succeeded."""
    try:
        import httpx
    except ModuleNotFoundError:
        raise InferError("bench serve needs the package httpx: pip install 'cs336-infer[serving]'") from None
    from tqdm import tqdm

    from cs336_infer.serve import bench
    from cs336_infer.serve.bench_report import figures, parse_goodput, table

    metrics, percentiles, limits = _metrics(args), _percentiles(args), parse_goodput(args.goodput)
    if args.max_concurrency is not None:
        check_integer("--max-concurrency", args.max_concurrency, 1, 1 << 20)
    if args.result_filename is not None and not args.save_result:
        raise InvalidRequest("--result-filename needs --save-result")
    shots = _shots(args)
    url = args.base_url or f"http://{args.host}:{args.port}"
    headers = {"authorization": f"Bearer {args.api_key}"} if args.api_key else {}

    async def go() -> tuple[list[bench.Outcome], float, str]:
        limit = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=args.timeout, limits=limit) as client:
            name = args.model or await _model(client, url)
            body: dict[str, Any] = {"model": name, "temperature": args.temperature}
            if args.ignore_eos:
                body["ignore_eos"] = True
            with tqdm(total=len(shots), disable=args.disable_tqdm, leave=False) as bar:
                outcomes, seconds = await bench.fire(
                    client,
                    args.endpoint,
                    body,
                    shots,
                    max_concurrency=args.max_concurrency,
                    on_end=lambda _: _tick(bar),
                )
            return outcomes, seconds, name

    outcomes, seconds, name = asyncio.run(go())
    asked = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "model_id": name,
        "num_prompts": len(shots),
        "request_rate": args.request_rate if args.request_rate != float("inf") else "inf",
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        "dataset_name": args.dataset_name,
        "seed": args.seed,
    }
    result = asked | figures(outcomes, seconds, metrics=metrics, percentiles=percentiles, goodput=limits)
    if args.save_result:
        file = args.result_filename or Path(f"bench-serve-{asked['date']}.json")
        file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result) if args.json else "\n".join(table(result, metrics, percentiles)))
    return 0 if result["completed"] else 1


def _tick(bar: Any) -> None:
    bar.update()


async def _model(client: Any, url: str) -> str:
    import httpx

    try:
        response = await client.get("/v1/models")
        return str(response.raise_for_status().json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
        raise InferError(f"{url} does not list a model ({type(error).__name__}: {error}); give --model") from None


def _shots(args: argparse.Namespace) -> list[Any]:
    from cs336_infer.measure.workload import random_work
    from cs336_infer.serve import bench

    if args.dataset_name == "random" and args.dataset_path is not None:
        raise InvalidRequest("--dataset-path is for custom and timed_trace; random makes its own prompts")
    if args.dataset_name != "random" and args.dataset_path is None:
        raise InvalidRequest(f"--dataset-name {args.dataset_name} needs --dataset-path")
    if args.endpoint.endswith(bench.CHAT) and args.dataset_name != "custom":
        raise InvalidRequest(f"{bench.CHAT} takes text: use --dataset-name custom, or --endpoint /v1/completions")
    if args.dataset_name == "timed_trace":
        if args.request_rate != float("inf"):
            raise InvalidRequest("--request-rate: a trace has its own times of arrival")
        return _from_trace(args)
    times = bench.arrivals(args.num_prompts, args.request_rate, args.burstiness, args.seed)
    if args.dataset_name == "custom":
        check_integer("--custom-output-len", args.custom_output_len, 1, 1 << 24)
        texts = _texts(Path(str(args.dataset_path)))
        return [bench.Shot(t, texts[i % len(texts)], args.custom_output_len) for i, t in enumerate(times)]
    work = random_work(
        args.num_prompts,
        args.vocab_size,
        input_len=args.random_input_len,
        output_len=args.random_output_len,
        ratio=args.random_range_ratio,
        seed=args.seed,
    )
    return [bench.Shot(t, w.prompt, w.output) for t, w in zip(times, work, strict=True)]


def _from_trace(args: argparse.Namespace) -> list[Any]:
    """Prompts with the lengths of a trace; equal blocks become equal ids, so that prefixes are shared as there."""
    from cs336_infer.serve import bench
    from cs336_infer.simulate.sources import open_source

    shots = []
    for number, request in enumerate(open_source(args.dataset_path, limit=args.num_prompts).requests()):
        keys = request.keys if request.keys is not None else [("request", number)]
        size = request.block_size or request.input_tokens
        ids: list[int] = []
        for key in [*keys, ("tail", number)]:
            draw = random.Random(repr((args.seed, request.session, key)))
            ids += [draw.randrange(3, args.vocab_size) for _ in range(min(size, request.input_tokens - len(ids)))]
        shots.append(bench.Shot(request.time_s, ids, max(1, request.output_tokens)))
    return shots


def _texts(path: Path) -> list[str]:
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        texts = [row["prompt"] for row in rows]
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        texts = []
    if not texts or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(f'{path} is not JSONL of objects like {{"prompt": "text"}}')
    return texts


def _metrics(args: argparse.Namespace) -> list[str]:
    names = [name for name in args.percentile_metrics.split(",") if name]
    if not names or set(names) - set(METRIC_NAMES.split(",")):
        raise InvalidRequest(f"--percentile-metrics takes some of {METRIC_NAMES}, not {short(args.percentile_metrics)}")
    return names


def _percentiles(args: argparse.Namespace) -> list[float]:
    try:
        values = [float(p) for p in args.metric_percentiles.split(",")]
    except ValueError:
        values = [-1.0]
    if not all(0 <= p <= 100 for p in values):
        raise InvalidRequest(f"--metric-percentiles takes numbers from 0 to 100, not {short(args.metric_percentiles)}")
    return values
