"""/v1/files: what batches read and write. Kept in Redis, so each has a lifetime and a size limit."""

from collections.abc import AsyncIterator
from typing import Annotated, cast

from fastapi import APIRouter, Query, Request
from python_multipart.exceptions import MultipartParseError
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.responses import Response, StreamingResponse

from api.access import Caller
from api.answers import json_response
from api.deps import CallerDep, Services, ServicesDep
from api.errors import ApiError, invalid
from api.files import StoredFile
from api.openapi import BYTES_RESPONSES, ERROR_RESPONSES
from api.paging import Order, page

router = APIRouter(tags=["openai"])

PATH = "/v1/files"
FORM_SPARE_BYTES = 65_536
"""What a form may have beside the file."""
_READ_BYTES = 262_144
_PURPOSES = ("assistants", "batch", "fine-tune", "vision", "user_data", "evals")
_TTL_S = (3600, 2_592_000)
_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": list(_PURPOSES)},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer", "minimum": _TTL_S[0], "maximum": _TTL_S[1]},
                    },
                }
            }
        },
    }
}


@router.post(PATH, openapi_extra=_FORM, responses=ERROR_RESPONSES)
async def upload(request: Request, services: ServicesDep, caller: CallerDep) -> Response:
    """Store a file."""
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise ApiError(415, "unsupported_media_type", "the content type must be multipart/form-data")
    try:
        form = await request.form(max_files=1, max_fields=16)
    except (HTTPException, MultiPartException, MultipartParseError) as error:
        raise ApiError(400, "invalid_form", "the body is not a form of one file and a few fields") from error
    try:
        file, purpose = form.get("file"), form.get("purpose")
        if not isinstance(file, UploadFile):
            raise invalid("file", "file is required, as a file", "missing_required_parameter")
        if purpose not in _PURPOSES:
            raise invalid("purpose", f"purpose must be one of {', '.join(_PURPOSES)}")
        if (file.size or 0) > services.settings.max_file_bytes:
            message = f"the file is longer than {services.settings.max_file_bytes} bytes"
            raise ApiError(413, "file_too_large", message, "file")
        ttl_s = _ttl_s(form, services.settings.file_ttl_s)
        name = (file.filename or "file")[:255]
        stored = await services.stores.files.write(caller.id, name, cast(str, purpose), _read(file), ttl_s)
    finally:
        await form.close()
    return json_response(stored.object)


@router.get(PATH, responses=ERROR_RESPONSES)
async def list_files(
    services: ServicesDep,
    caller: CallerDep,
    after: Annotated[str | None, Query()] = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Annotated[Order, Query()] = "desc",
    purpose: Annotated[str | None, Query()] = None,
) -> Response:
    """List files, newest first."""
    files = await services.stores.files.list_all(caller.id)
    shown = [file.object for file in files if purpose is None or file.purpose == purpose]
    return json_response(page(shown, after, limit, order))


@router.get(PATH + "/{file_id}", responses=ERROR_RESPONSES)
async def describe(file_id: str, services: ServicesDep, caller: CallerDep) -> Response:
    """Describe a file."""
    return json_response((await find_file(services, caller, file_id)).object)


@router.get(
    PATH + "/{file_id}/content",
    responses=BYTES_RESPONSES,
    response_class=Response,
)
async def content(file_id: str, services: ServicesDep, caller: CallerDep) -> Response:
    """Return the bytes of a file."""
    file = await find_file(services, caller, file_id)
    return StreamingResponse(
        services.stores.files.read(caller.id, file.id),
        media_type="application/octet-stream",
        headers={"Content-Length": str(file.bytes)},
    )


@router.delete(PATH + "/{file_id}", responses=ERROR_RESPONSES)
async def delete(file_id: str, services: ServicesDep, caller: CallerDep) -> Response:
    """Delete a file."""
    if not await services.stores.files.delete(caller.id, file_id):
        raise _unknown(file_id)
    return json_response({"id": file_id, "object": "file", "deleted": True})


async def find_file(services: Services, caller: Caller, file_id: str, param: str = "file_id") -> StoredFile:
    """Raises `ApiError` (404)."""
    file = await services.stores.files.find(caller.id, file_id)
    if file is None:
        raise _unknown(file_id, param)
    return file


def _unknown(file_id: str, param: str = "file_id") -> ApiError:
    return ApiError(404, "not_found", f"there is no file {file_id[:80]!r}", param)


def _ttl_s(form: FormData, fallback: int) -> int:
    anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return fallback
    if anchor != "created_at":
        raise invalid("expires_after.anchor", "expires_after.anchor must be created_at")
    least, most = _TTL_S
    if not isinstance(seconds, str) or not seconds.isdecimal() or not least <= int(seconds[:12]) <= most:
        raise invalid("expires_after.seconds", f"expires_after.seconds must be {least} to {most}")
    return int(seconds)


async def _read(file: UploadFile) -> AsyncIterator[bytes]:
    while part := await file.read(_READ_BYTES):
        yield part
