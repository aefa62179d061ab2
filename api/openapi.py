# pyright: reportUnknownVariableType=false
"""What FastAPI cannot derive for `/docs`: bodies are read by `api.deps.json_body`, for errors of the one shape."""

from typing import Any

from pydantic import BaseModel

ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"description": description}
    for status, description in {
        400: "A field is wrong; `error.param` names it.",
        401: "The API key is missing or not known.",
        403: "The API key may not do this.",
        404: "Unknown model or object; the message says which.",
        409: "It contradicts what went before.",
        413: "The body is too long.",
        415: "The body is not JSON by its content type.",
        429: "The rate of this API key is used up; see Retry-After.",
        500: "The server failed.",
        503: "The queue is full or cannot be reached; see Retry-After.",
        504: "The request ran out of time.",
    }.items()
}

STREAM_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; with `stream`, server-sent events.",
        "content": {"application/json": {"schema": {}}, "text/event-stream": {"schema": {"type": "string"}}},
    },
    **ERROR_RESPONSES,
}
"""Of endpoints that stream."""

BYTES_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "The bytes.", "content": {"application/octet-stream": {"schema": {"type": "string"}}}},
    **ERROR_RESPONSES,
}


def without_422(document: dict[str, Any]) -> dict[str, Any]:
    """Drop the status that FastAPI documents by itself: here a wrong parameter is a 400."""
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    schemas = document.get("components", {}).get("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    return document


def request_body(kind: type[BaseModel]) -> dict[str, Any]:
    """Return `openapi_extra` for a route whose body is a `kind`."""
    schema = kind.model_json_schema()
    definitions = schema.pop("$defs", {})
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": _inlined(schema, definitions)}}}
    }


def _inlined(node: Any, definitions: dict[str, Any]) -> Any:
    """Return a schema with its references replaced by what they name; bodies are not recursive."""
    match node:
        case {"$ref": str(reference)}:
            return _inlined(definitions[reference.rpartition("/")[2]], definitions)
        case dict():
            return {key: _inlined(value, definitions) for key, value in node.items()}
        case list():
            return [_inlined(item, definitions) for item in node]
        case _:
            return node
