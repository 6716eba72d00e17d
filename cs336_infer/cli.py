"""The command line: `cs336-infer generate | serve | bench | measure | models | doctor | grade | kv | sanitize`."""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NoReturn

import torch

from cs336_infer import bench_cli, interrupt, kv_cli, measure, sanitize_cli, serve_cli
from cs336_infer.course import grade_options
from cs336_infer.generate import KV_KINDS, Run
from cs336_infer.measure.phases import memory_traffic
from cs336_infer.measure.report import lines, report
from cs336_infer.models.llama import KERNELS
from cs336_infer.models.load import DTYPES, LoadedModel, load_model
from cs336_infer.models.zoo import EMBEDDED, list_models
from cs336_infer.types import Completion, InferError, InvalidRequest, SamplingParams, check_integer, check_unicode

BAD_INPUT = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 for findings, 2 for bad input, 130 when interrupted."""
    interrupt.imported()
    args = _parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal of another encoding shows \\u escapes, not a traceback
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = args.run(args)
        print(end="", flush=True)
        return code
    except InferError as e:
        return _fail(_in_options(str(e)), BAD_INPUT)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as in `| head`: nobody is left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as e:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _fail(f"cannot write the output: {e.strerror}", 1)
    except (MemoryError, torch.OutOfMemoryError):
        return _fail("not enough memory for this request", 1)


def _fail(message: str, code: int) -> int:
    print(f"cs336-infer: {_printable(message)}", file=sys.stderr)
    return code


def _generate(args: argparse.Namespace) -> int:
    params = SamplingParams(**{name: getattr(args, name) for name in (*_OPTIONS, "stop", "ignore_eos")})
    prompt = _read_prompt(args)
    model = _load(args)
    ids = model.tokenizer.encode_chat([{"role": "user", "content": prompt}]) if args.chat else prompt
    run = Run(model, [ids], params, args.kv)
    for event in run:
        if not args.json:
            print(event.text, end="", flush=True)
    done = run.completions[0]
    facts = _speed(model, done)
    if args.json:
        _print_json({**_completion(done), **facts})
    else:
        print()
        print(_speed_line(done, facts), file=sys.stderr)
    return 0


def _read_prompt(args: argparse.Namespace) -> str:
    if args.prompt != "-":
        check_unicode("the prompt", args.prompt)
        return args.prompt
    if sys.stdin is None:
        raise InvalidRequest("the prompt is to come from standard input, which is closed")
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as e:
        raise InvalidRequest(f"the prompt on standard input is not UTF-8 (byte {e.start})") from None


def _completion(done: Completion) -> dict[str, Any]:
    return {**asdict(done), "finish_reason": done.finish_reason.value if done.finish_reason else None}


def _speed(model: LoadedModel, done: Completion) -> dict[str, Any]:
    """Bytes of an average decode step and the share of this machine's read bandwidth it reached."""
    size = model.dtype.itemsize
    context = len(done.prompt_token_ids) + max(len(done.token_ids) - 1, 0) // 2
    bytes_per_token = memory_traffic(measure.decode(model.config, 1, context, dtype_bytes=size, kv_bytes=size))
    bandwidth = measure.read_bandwidth(model.device).bytes_per_s
    fraction = bytes_per_token / done.tpot_s / bandwidth if done.tpot_s > 0 else math.nan
    return {"bytes_per_token": bytes_per_token, "bandwidth_fraction": fraction, "bandwidth_bytes_per_s": bandwidth}


def _speed_line(done: Completion, facts: dict[str, Any]) -> str:
    if math.isnan(done.tpot_s):
        decode = "no decode step"
    else:
        decode = (
            f"{1 / done.tpot_s:.1f} tok/s, {facts['bytes_per_token'] / 1e6:.0f} MB per token = "
            f"{facts['bandwidth_fraction']:.0%} of {facts['bandwidth_bytes_per_s'] / 1e9:.1f} GB/s measured"
        )
    reason = done.finish_reason.value if done.finish_reason else ""
    return (
        f"[{len(done.prompt_token_ids)} + {len(done.token_ids)} tokens, ended by {reason}; "
        f"first token {done.ttft_s * 1e3:.0f} ms; {decode}; {done.path}]"
    )


def _measure(args: argparse.Namespace) -> int:
    for name in ("prompt_tokens", "batch"):
        check_integer(name, getattr(args, name), 1, None)
    model = _load(args)
    check_integer("prompt_tokens", args.prompt_tokens, 1, model.config.context_length - 1)
    facts = report(model, args.prompt_tokens, args.batch)
    if args.json:
        _print_json(facts)
    else:
        print("\n".join(lines(facts)))
    return 0


def _models(args: argparse.Namespace) -> int:
    found = list_models(args.names)
    if args.json:
        _print_json(found)
        return 0
    for m in found:
        print(
            f"{m['name']:28} {m['params'] / 1e6:8.0f} M  {m['family']:6} context {m['context_length']:6}  {m['source']}"
        )
    return 0


def _doctor(args: argparse.Namespace) -> int:
    checks = measure.doctor()
    if args.json:
        _print_json({"machine": measure.describe().to_dict(), "checks": [asdict(c) for c in checks]})
        return 0
    for c in checks:
        print(f"{c.status.value:5} {c.name:18} {c.detail}")
    return 0


def _load(args: argparse.Namespace) -> LoadedModel:
    if args.threads is not None:
        check_integer("threads", args.threads, 1, 1024)
        torch.set_num_threads(args.threads)
    return load_model(args.model, dtype=args.dtype, device=args.device, kernels=args.kernels)


def _print_json(value: object) -> None:
    """One JSON document on standard output; numbers that are not finite become null."""

    def clean(v: object) -> object:
        if isinstance(v, dict):
            return {k: clean(x) for k, x in v.items()}
        if isinstance(v, list | tuple):
            return [clean(x) for x in v]
        return None if isinstance(v, float) and not math.isfinite(v) else v

    print(json.dumps(clean(value), ensure_ascii=False, allow_nan=False))


def _in_options(message: str) -> str:
    """A message about a parameter, with the name that was typed: `max_tokens must be` is `--max-tokens must be`."""
    names = "|".join((*_OPTIONS, "stop", "threads", "prompt_tokens", "batch"))
    return re.sub(rf"^({names})(?= must be |=| has )", lambda m: f"--{m[1].replace('_', '-')}", message)


def _printable(text: str) -> str:
    """One line that any terminal encoding can show."""
    return " ".join(text.split()).encode("utf-8", "backslashreplace").decode("utf-8")


class _Parser(argparse.ArgumentParser):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {_printable(message)} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(BAD_INPUT)


_OPTIONS: dict[str, tuple[type, str]] = {
    "max_tokens": (int, "tokens to produce at most"),
    "temperature": (float, "0 is greedy"),
    "top_k": (int, "keep the k most probable tokens"),
    "top_p": (float, "keep the smallest set with this probability"),
    "min_p": (float, "drop tokens below this share of the most probable"),
    "repetition_penalty": (float, "divide the logits of tokens seen"),
    "presence_penalty": (float, "subtract from the logits of tokens produced"),
    "frequency_penalty": (float, "subtract per time produced"),
    "seed": (int, "makes sampling repeatable"),
}


def _parser() -> _Parser:
    parser = _Parser(prog="cs336-infer", description="A course on LLM inference that is also a real engine.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)

    generate = commands.add_parser("generate", help="complete a prompt and say how fast")
    generate.add_argument("prompt", help="text to continue; - reads standard input")
    generate.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    defaults = SamplingParams()
    for name, (kind, text) in _OPTIONS.items():
        default = getattr(defaults, name)
        shown = "" if default is None else f" (default {default})"
        generate.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, help=text + shown)
    generate.add_argument("--stop", action="append", default=[], help="end the text before this string; repeatable")
    generate.add_argument("--ignore-eos", action="store_true", help="go on past the end-of-sequence token")
    generate.add_argument("--kv", choices=KV_KINDS, default=KV_KINDS[0], help="KV cache, or none")
    _model_options(generate)
    generate.set_defaults(run=_generate)

    serving = commands.add_parser("serve", help="an OpenAI-compatible server for one model")
    serve_cli.add_arguments(serving)
    _model_options(serving)
    serving.set_defaults(run=lambda args: serve_cli.serve(args, _load))

    bench_cli.add_arguments(commands.add_parser("bench", help="measure a server under load"))

    measuring = commands.add_parser("measure", help="this machine's ceilings, and how near both phases come")
    measuring.add_argument("--prompt-tokens", type=int, default=512)
    measuring.add_argument("--batch", type=int, default=1)
    _model_options(measuring)
    measuring.set_defaults(run=_measure)

    models = commands.add_parser("models", help="the models on this machine, or the ones named")
    models.add_argument("names", nargs="*", metavar="NAME_OR_PATH")
    models.set_defaults(run=_models)

    doctor = commands.add_parser("doctor", help="what this machine can run, and why not the rest")
    doctor.set_defaults(run=_doctor)

    grading = commands.add_parser("grade", help="grade submissions of an assignment, each in a sandbox")
    grade_options.add_arguments(grading)
    grading.set_defaults(run=grade_options.run)

    caching = commands.add_parser("kv", help="replay a trace through the KV cache's block manager")
    kv_cli.add_arguments(caching)

    sanitizing = commands.add_parser("sanitize", help="look for races, deadlocks and unwritten reads in Triton scripts")
    sanitize_cli.add_arguments(sanitizing)
    sanitizing.set_defaults(run=sanitize_cli.run)

    for command in (generate, measuring, models, doctor):
        command.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    return parser


def _model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=EMBEDDED, help=f"name, GGUF file, folder or hub id (default {EMBEDDED})")
    parser.add_argument("--dtype", choices=[*DTYPES, "auto"], default="auto")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:N or auto")
    parser.add_argument("--kernels", choices=[*KERNELS, "auto"], default="auto")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads (default: as torch chooses)")


if __name__ == "__main__":
    sys.exit(main())
