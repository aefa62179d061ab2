"""W3C trace context (www.w3.org/TR/trace-context): taken from a request, carried in its commands."""

import re
import secrets
from collections.abc import Mapping

_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
_STATE = re.compile(r"[\x20-\x7e]{1,512}")


def trace_context(headers: Mapping[str, str]) -> dict[str, str]:
    """Return `traceparent` and `tracestate` of a request, or a fresh context if it has none that is valid."""
    parent, state = headers.get("traceparent", ""), headers.get("tracestate", "")
    if not _PARENT.fullmatch(parent):
        return {"traceparent": f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-00"}
    return {"traceparent": parent[:128]} | ({"tracestate": state} if _STATE.fullmatch(state) else {})


def trace_id(context: Mapping[str, str]) -> str:
    return context["traceparent"].split("-")[1]
