"""What an output may look like, as data: a schema, a pattern, a list, a grammar, or calls of tools.

`shared.grammar` turns it into a grammar; a worker follows that (`worker.constraints`).
"""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

MOST_CALLS = 8
"""Tool calls that one answer may make."""
TEXT_LIMIT = 65_536
"""Characters of a pattern, a grammar or a schema."""
MOST_OPTIONS = 4096
MOST_TOOLS = 128

_TOOL_NAME = re.compile(r"^[a-zA-Z0-9_.-]{1,64}$")


def _check_tool_name(name: str) -> str:
    if not _TOOL_NAME.fullmatch(name):
        raise PydanticCustomError("tool_name", "must have 1 to 64 letters without accents, digits, '.', '_' or '-'")
    return name


ToolName = Annotated[str, AfterValidator(_check_tool_name), Field(json_schema_extra={"pattern": _TOOL_NAME.pattern})]


class _Constraint(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class JsonSchema(_Constraint):
    """One JSON value that a schema accepts, written without line breaks."""

    kind: Literal["json_schema"] = "json_schema"
    json_schema: dict[str, Any]


class JsonObject(_Constraint):
    """Any JSON object."""

    kind: Literal["json_object"] = "json_object"


class Regex(_Constraint):
    """A text that the whole pattern matches (Rust's syntax, without look-around)."""

    kind: Literal["regex"] = "regex"
    pattern: str = Field(min_length=1, max_length=TEXT_LIMIT)


class Choice(_Constraint):
    """One of some texts."""

    kind: Literal["choice"] = "choice"
    options: tuple[Annotated[str, Field(min_length=1)], ...] = Field(min_length=1, max_length=MOST_OPTIONS)


class Lark(_Constraint):
    """A context-free grammar in llguidance's dialect of Lark, whose first rule is `start`."""

    kind: Literal["grammar"] = "grammar"
    lark: str = Field(min_length=1, max_length=TEXT_LIMIT)


class Tool(_Constraint):
    name: ToolName
    parameters: dict[str, Any] = Field(default_factory=dict[str, Any], description="JSON schema of the arguments.")


class ToolCalls(_Constraint):
    """Calls of tools, each between <tool_call> and </tool_call>, as `{"name": ..., "arguments": {...}}`."""

    kind: Literal["tools"] = "tools"
    tools: tuple[Tool, ...] = Field(min_length=1, max_length=MOST_TOOLS)
    required: bool = Field(default=False, description="Nothing but calls; else text, which calls may follow.")
    parallel: bool = Field(default=True, description="More than one call.")


Constraint = Annotated[
    JsonSchema | JsonObject | Regex | Choice | Lark | ToolCalls,
    Field(discriminator="kind"),
]
