"""Whole JSON answers."""

from collections.abc import Mapping

import orjson
from starlette.responses import Response


def json_response(content: Mapping[str, object], status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")
