# pyright: reportUnknownMemberType=false
"""Chat templates: Jinja as model folders ship it, rendered in a sandbox.

The environment offers what templates of the Hugging Face hub expect: block trimming, loop controls, `tojson`,
`raise_exception`, `strftime_now`, and `{% generation %}` blocks (a training mark that is transparent here).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, nodes
from jinja2 import TemplateError as JinjaError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]


class TemplateError(ValueError):
    """The chat template is missing, broken, or refuses these messages; the message is fit for the caller."""


class ChatTemplate:
    """A compiled template with the special tokens that it may name (`bos_token`, `eos_token`, ...)."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], now: Callable[[], datetime] = datetime.now
    ) -> None:
        """Compile `source`; raises `TemplateError` if it is not a template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception

        def strftime_now(pattern: str) -> str:
            return now().strftime(pattern)

        environment.globals["strftime_now"] = strftime_now
        self._special_tokens = dict(special_tokens)
        self.takes_tools = "tools" in source
        try:
            self._template: Template = environment.from_string(source)
        except JinjaError as error:
            raise TemplateError(f"the model's chat template is broken: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None,
        add_generation_prompt: bool,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt as text; raises `TemplateError`. No option stands in for what is given beside them."""
        given = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render({**(options or {}), **given, **self._special_tokens})
        except JinjaError as error:
            raise TemplateError(f"the model's chat template refuses these messages: {error}") from error
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            # A template is a program: any of Python's complaints about its operands means that the messages do not fit.
            raise TemplateError(
                f"the model's chat template cannot handle these messages ({type(error).__name__})"
            ) from error


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` renders its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise JinjaError(message)
