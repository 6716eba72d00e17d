"""Chat templates: a list of messages to the text that the model was trained on.

A template is a Jinja program that came with the weights, so it is run in Jinja's immutable sandbox: it sees the
messages and a few helpers, nothing of Python. The sandbox limits what a template can touch, not how long it runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cs336_infer.types import InvalidRequest


class ChatTemplate:
    """A compiled template.

    Args:
        source: Jinja text.
        tokens: variables of the template that name special tokens, such as `bos_token` -> "<s>".

    Raises:
        InvalidRequest: the template is not valid Jinja.
    """

    def __init__(self, source: str, tokens: Mapping[str, str] | None = None) -> None:
        self._tokens = dict(tokens or {})
        environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        try:
            self._template = environment.from_string(source)
        except Exception as e:  # besides its own errors, Jinja lets RecursionError and others through
            raise InvalidRequest(f"the model's chat template is not valid Jinja: {_one_line(e)}") from e

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        date: datetime | None = None,
    ) -> str:
        """The prompt text of a chat.

        Args:
            messages: each with a string "role" and a string "content"; other keys, also strings, are passed on.
            add_generation_prompt: end with the opening of the assistant's turn.
            date: what `strftime_now` shows; None is the present local time.

        Raises:
            InvalidRequest: a message is malformed, or the template refuses it, fails, or reaches out of the sandbox.
        """

        def strftime_now(fmt: str) -> str:
            return (date or datetime.now()).strftime(fmt)

        try:
            return self._template.render(
                messages=_check_messages(messages),
                add_generation_prompt=add_generation_prompt,
                strftime_now=strftime_now,
                tools=None,
                documents=None,
                **self._tokens,
            )
        except InvalidRequest:
            raise
        except Exception as e:  # the template is somebody's program: it can fail in any way
            raise InvalidRequest(f"the model's chat template failed: {_one_line(e)}") from e


class _Sandbox(ImmutableSandboxedEnvironment):
    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Stop at once. Jinja's own answer is an undefined value, which prints as an empty string."""
        raise SecurityError(f"access to attribute {attribute!r} of a {type(obj).__name__} is not allowed")


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _check_messages(messages: object) -> list[dict[str, str]]:
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequest(f"messages must be a non-empty list of messages, not {_short(messages)}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidRequest(f"messages[{i}] must be a dict with 'role' and 'content', not {_short(message)}")
        for key in ("role", "content"):
            if key not in message:
                raise InvalidRequest(f"messages[{i}] has no {key!r}")
        for key, value in message.items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise InvalidRequest(f"messages[{i}][{key!r}] must be a string, not {_short(value)}")
    return [dict(m) for m in messages]


def _short(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML characters, which a prompt must not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
