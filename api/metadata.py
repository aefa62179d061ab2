# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false
"""The notes that callers hang on what they ask for, as OpenAI limits them."""

from typing import Annotated

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError


def _check_metadata(value: object) -> object:
    match value:
        case None:
            return value
        case dict() if len(value) <= 16 and all(
            isinstance(key, str) and len(key) <= 64 and isinstance(text, str) and len(text) <= 512
            for key, text in value.items()
        ):
            return value
        case _:
            raise PydanticCustomError("metadata", "must be up to 16 pairs of strings, of up to 64 and 512 characters")


Metadata = Annotated[
    dict[str, str] | None,
    BeforeValidator(_check_metadata),
    WithJsonSchema({"anyOf": [{"type": "object", "additionalProperties": {"type": "string"}}, {"type": "null"}]}),
]
