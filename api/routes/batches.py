"""/v1/batches: many requests in a file, run when nobody waits for an answer; `python -m api.jobs` carries them out."""

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from api.access import Caller
from api.answers import json_response
from api.batches import ENDED, Batch
from api.deps import CallerDep, Services, ServicesDep, json_body
from api.errors import ApiError, invalid
from api.metadata import Metadata
from api.openapi import ERROR_RESPONSES, request_body
from api.paging import page
from api.routes.files import find_file
from api.schemas import StrictBody, WebhookBody

router = APIRouter(tags=["openai"])

BatchEndpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]


class Expiry(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)

    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=2_592_000)


class BatchBody(StrictBody):
    input_file_id: str = Field(max_length=128, description="A file with purpose `batch`: one JSON request a line.")
    endpoint: BatchEndpoint
    completion_window: Literal["24h"]
    metadata: Metadata = None
    output_expires_after: Expiry | None = None
    webhook: WebhookBody | None = Field(default=None, description="Who is told, signed, once the batch has ended.")


@router.post("/v1/batches", openapi_extra=request_body(BatchBody), responses=ERROR_RESPONSES)
async def create(
    body: Annotated[BatchBody, Depends(json_body(BatchBody))], services: ServicesDep, caller: CallerDep
) -> Response:
    """Queue a batch. Its lines are checked first, then run behind all other requests."""
    if body.webhook is not None:
        services.webhooks.check(caller.id, body.webhook.url)
    file = await find_file(services, caller, body.input_file_id, "input_file_id")
    if file.purpose != "batch":
        raise invalid("input_file_id", f"that file has the purpose {file.purpose}; a batch needs one with batch")
    settings = services.settings
    expiry = body.output_expires_after
    batch = await services.stores.batches.create(
        caller.id,
        body.endpoint,
        file.id,
        body.completion_window,
        settings.batch_window_s,
        settings.file_ttl_s,
        settings.file_ttl_s if expiry is None else expiry.seconds,
        body.metadata,
        None if body.webhook is None else body.webhook.model_dump(exclude_none=True),
    )
    return json_response(batch.object)


@router.get("/v1/batches", responses=ERROR_RESPONSES)
async def list_batches(
    services: ServicesDep,
    caller: CallerDep,
    after: Annotated[str | None, Query()] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> Response:
    """List batches, newest first."""
    batches = await services.stores.batches.list_all(caller.id)
    return json_response(page([batch.object for batch in batches], after, limit))


@router.get("/v1/batches/{batch_id}", responses=ERROR_RESPONSES)
async def describe(batch_id: str, services: ServicesDep, caller: CallerDep) -> Response:
    """Describe a batch."""
    return json_response((await _find(services, caller, batch_id)).object)


@router.post("/v1/batches/{batch_id}/cancel", responses=ERROR_RESPONSES)
async def cancel(batch_id: str, services: ServicesDep, caller: CallerDep) -> Response:
    """Cancel a batch: what has been answered is kept. One that has ended is a 409."""
    batches = services.stores.batches
    status = await batches.advance(caller.id, batch_id, ["validating", "in_progress"], "cancelling")
    if status in ENDED:
        raise ApiError(409, "batch_ended", f"this batch is {status} already", "batch_id")
    return json_response((await _find(services, caller, batch_id)).object)


async def _find(services: Services, caller: Caller, batch_id: str) -> Batch:
    batch = await services.stores.batches.find(caller.id, batch_id)
    if batch is None:
        raise ApiError(404, "not_found", f"there is no batch {batch_id[:80]!r}", "batch_id")
    return batch
