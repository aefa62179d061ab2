"""W3C trace context (www.w3.org/TR/trace-context): taken from a request, carried in its commands."""

import re
import secrets
from collections.abc import Mapping

_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
_STATE = re.compile(r"[\x20-\x7e]{1,512}")


def trace_context(headers: Mapping[str, str]) -> dict[str, str]:
    """Return `traceparent` and `tracestate` of a request, or a fresh context if it has none that is valid.

    The parent of a fresh one is the head of its trace id: so `shared.opentelemetry` knows that no span stands there.
    """
    parent, state = headers.get("traceparent", ""), headers.get("tracestate", "")
    if not _PARENT.fullmatch(parent):
        trace = secrets.token_hex(16)
        return {"traceparent": f"00-{trace}-{trace[:16]}-00"}
    return {"traceparent": parent[:128]} | ({"tracestate": state} if _STATE.fullmatch(state) else {})


def trace_id(context: Mapping[str, str]) -> str:
    return context["traceparent"].split("-")[1]
