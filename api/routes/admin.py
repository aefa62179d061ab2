"""Administration of adapters, workers, requests and caches: for keys with the scope admin."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends
from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError
from starlette.responses import Response

from api.answers import json_response
from api.deps import Services, ServicesDep, json_body
from api.errors import ApiError, invalid
from api.openapi import ERROR_RESPONSES, request_body
from api.roster import live_workers
from api.schemas import StrictBody
from shared.adapters import (
    TARGETS_FILE,
    InvalidAdapter,
    check_adapter,
    check_values,
    digest_of,
    find_folder,
    unpack_targets,
)
from shared.administration import RequestFacts
from shared.card import ModelCard
from shared.dead_letters import DeadLetter
from shared.hook_places import hook_partitions
from shared.keys import model_of
from shared.lora import ADAPTER_NAME, AdapterRecord
from shared.roster import WorkerInfo
from shared.webhooks import Undelivered

router = APIRouter(tags=["admin"], prefix="/admin")


_NAMES: dict[str, Any] = {"pattern": ADAPTER_NAME.pattern}


def _check_name(name: str) -> str:
    if not ADAPTER_NAME.fullmatch(name):
        told = "must have 1 to 96 letters without accents, digits, '.', '_' or '-', a letter or digit first"
        raise PydanticCustomError("adapter_name", told)
    return name


class AdapterBody(StrictBody):
    name: Annotated[
        str, AfterValidator(_check_name), Field(description="What requests call it.", json_schema_extra=_NAMES)
    ]
    path: str = Field(min_length=1, max_length=4096, description="Its folder in the model store, as PEFT writes it.")
    model: str | None = Field(default=None, description="May be left out where only one model has workers.")


class FlushBody(StrictBody):
    model: str | None = Field(default=None, description="May be left out where only one model has workers.")


# --- adapters


@router.post("/loras", openapi_extra=request_body(AdapterBody), responses=ERROR_RESPONSES)
async def add_adapter(body: Annotated[AdapterBody, Depends(json_body(AdapterBody))], services: ServicesDep) -> Response:
    """Register an adapter for every worker of a model; each loads it when a request first asks for it.

    Its configuration, the shapes of its tensors, and that all their values are finite, are checked first. An adapter of
    the same name is replaced; requests that were accepted before keep the former.
    """
    card = (await services.catalog.resolve(body.model)).card
    record = await asyncio.to_thread(_read, services, card, body)
    await services.admin.adapters.add(card.name, record)
    return json_response(_adapter(card.name, record, await live_workers(services.fleet, card.name)))


@router.get("/loras", responses=ERROR_RESPONSES)
async def list_adapters(services: ServicesDep, model: str | None = None) -> Response:
    """List the adapters of a model, or of all models, and the workers that have each one loaded."""
    entries: list[dict[str, object]] = []
    for name in await _models(services, model):
        workers = await live_workers(services.fleet, name)
        entries += [_adapter(name, record, workers) for record in await services.catalog.adapters(name)]
    return json_response({"object": "list", "data": entries})


@router.delete("/loras/{name}", responses=ERROR_RESPONSES)
async def delete_adapter(name: str, services: ServicesDep, model: str | None = None) -> Response:
    """Forget an adapter. Requests that were accepted with it are finished; its files stay where they are."""
    card = (await services.catalog.resolve(model)).card
    if not await services.admin.adapters.remove(card.name, name):
        raise ApiError(404, "not_found", f"model {card.name} has no adapter {name[:96]!r}", "name")
    return json_response({"object": "adapter", "name": name, "model": card.name, "deleted": True})


def _read(services: Services, card: ModelCard, body: AdapterBody) -> AdapterRecord:
    store = services.settings.model_store
    if store is None:
        raise ApiError(400, "no_model_store", "this server has no model store (DIFFLEET_MODEL_STORE)", "path")
    try:
        targets = unpack_targets(card.files[TARGETS_FILE])
    except KeyError:
        message = f"the workers of model {card.name} take no adapters: they have no model store, or its layers do not"
        raise invalid("model", message, "unsupported_model") from None
    try:
        folder = find_folder(store, body.path)
        facts = check_adapter(folder, targets)
        check_values(folder)
        digest = digest_of(folder)
    except InvalidAdapter as error:
        raise invalid(error.field, str(error), "invalid_adapter") from error
    path = str(folder.relative_to(store.resolve()))
    return AdapterRecord(body.name, path, digest, facts.rank, facts.parameters, int(time.time()))


def _adapter(model: str, record: AdapterRecord, workers: Sequence[WorkerInfo]) -> dict[str, object]:
    holding = [worker.id for worker in workers if record.is_loaded(worker)]
    return _entry("adapter", record, model=model, workers=holding)


# --- workers


@router.get("/workers", responses=ERROR_RESPONSES)
async def list_workers(services: ServicesDep, model: str | None = None) -> Response:
    """List the live workers of a model, or of all models."""
    entries: list[dict[str, object]] = []
    for name in await _models(services, model):
        records = await services.catalog.adapters(name)
        entries += [_worker(worker, records) for worker in await live_workers(services.fleet, name)]
    return json_response({"object": "list", "data": entries})


@router.post("/workers/{worker_id}/drain", status_code=202, responses=ERROR_RESPONSES)
async def drain_worker(worker_id: str, services: ServicesDep) -> Response:
    """Ask a worker to take nothing more, finish or hand back what it runs, and end, within a few seconds."""
    for name in await services.catalog.names():
        for worker in await live_workers(services.fleet, name):
            if worker.id == worker_id:
                await services.admin.orders.drain(name, worker_id)
                records = await services.catalog.adapters(name)
                return json_response(_worker(worker, records) | {"drain_requested": True}, 202)
    raise ApiError(404, "not_found", f"no live worker is called {worker_id[:120]!r}", "worker_id")


def _worker(info: WorkerInfo, records: Sequence[AdapterRecord]) -> dict[str, object]:
    """Describe a worker, with every name of the adapters that it has loaded."""
    known = {record.name for record in records}
    # A name that now stands for other files would say that those are loaded.
    names = {record.name for record in records if record.is_loaded(info)} | (set(info.adapters) - known)
    return _entry("worker", info, adapters=sorted(names))


@router.post("/prefix-cache/flush", status_code=202, openapi_extra=request_body(FlushBody), responses=ERROR_RESPONSES)
async def flush_prefix_cache(
    body: Annotated[FlushBody, Depends(json_body(FlushBody))], services: ServicesDep
) -> Response:
    """Ask all workers of a model to forget, within a few seconds, what earlier texts have left in their caches."""
    card = (await services.catalog.resolve(body.model)).card
    await services.admin.orders.flush(card.name)
    return json_response({"model": card.name, "flush_requested": True}, 202)


# --- requests


@router.get("/requests/{request_id:path}", responses=ERROR_RESPONSES)
async def get_request(request_id: str, services: ServicesDep) -> Response:
    """Tell where a request stands, without its prompt and its text."""
    try:
        facts = await services.admin.inspect(request_id)
    except ValueError:
        facts = None
    if facts is None:
        raise _no_request(request_id)
    return json_response(_entry("request", facts))


@router.get("/dead-letters", responses=ERROR_RESPONSES)
async def list_dead_letters(
    services: ServicesDep, model: str | None = None, limit: Annotated[int, Field(ge=1, le=1000)] = 100
) -> Response:
    """List requests that were given up because they kill their workers, the newest first."""
    entries: list[dict[str, object]] = []
    for name in await _models(services, model):
        card = await services.catalog.card(name)
        letters = await services.admin.dead_letters.list(name, card.partitions, limit)
        entries += [_entry("dead_letter", letter, model=name) for letter in letters]
    return json_response({"object": "list", "data": entries})


@router.post("/dead-letters/{request_id:path}/replay", status_code=202, responses=ERROR_RESPONSES)
async def replay_dead_letter(request_id: str, services: ServicesDep) -> Response:
    """Submit what a dead request asked for again, under a new id, and discard the dead letter.

    Asked once more, the answer has the same new id, and nothing is submitted twice.
    """
    _check_id(request_id)
    letters = services.admin.dead_letters
    command = await letters.command(request_id)
    fresh = None if command is None else await letters.name_replay(request_id)
    if command is None or fresh is None:
        raise await _no_dead_letter(services, request_id)
    again, tenant = command.model_copy(update={"id": fresh}), await letters.tenant(request_id)
    await services.fleet.submit(again, queue_limit=services.settings.queue_limit, tenant=tenant)
    await letters.discard(request_id)
    return json_response({"object": "request", "id": fresh, "replays": request_id}, 202)


@router.delete("/dead-letters/{request_id:path}", responses=ERROR_RESPONSES)
async def discard_dead_letter(request_id: str, services: ServicesDep) -> Response:
    """Remove a dead letter from the list."""
    _check_id(request_id)
    if not await services.admin.dead_letters.discard(request_id):
        raise await _no_dead_letter(services, request_id)
    return json_response({"object": "dead_letter", "id": request_id, "deleted": True})


# --- webhooks


@router.get("/webhooks", responses=ERROR_RESPONSES)
async def list_webhooks(
    services: ServicesDep,
    state: Literal["dead", "due"] = "dead",
    limit: Annotated[int, Field(ge=1, le=1000)] = 100,
) -> Response:
    """List messages that were given up, the newest first; or those that wait for their next try, the next first."""
    store = services.admin.webhooks
    look = store.list_dead if state == "dead" else store.list_due
    found = await look(await hook_partitions(services.fleet), limit)
    return json_response({"object": "list", "data": [_entry("webhook", one, state=state) for one in found]})


@router.post("/webhooks/{subject_id:path}/replay", status_code=202, responses=ERROR_RESPONSES)
async def replay_webhook(subject_id: str, services: ServicesDep) -> Response:
    """Send a message that was given up once more, with all its tries; a receiver that was gone counts as back."""
    if not await _of_webhook(services.admin.webhooks.replay, subject_id):
        raise _no_webhook(subject_id)
    return json_response({"object": "webhook", "id": subject_id, "state": "due"}, 202)


@router.delete("/webhooks/{subject_id:path}", responses=ERROR_RESPONSES)
async def discard_webhook(subject_id: str, services: ServicesDep) -> Response:
    """Forget a message that was given up."""
    if not await _of_webhook(services.admin.webhooks.discard, subject_id):
        raise _no_webhook(subject_id)
    return json_response({"object": "webhook", "id": subject_id, "deleted": True})


async def _of_webhook(act: Callable[[str], Awaitable[bool]], subject_id: str) -> bool:
    try:
        return await act(subject_id)
    except ValueError:
        return False


def _no_webhook(subject_id: str) -> ApiError:
    return ApiError(404, "not_found", f"no webhook about {subject_id[:120]!r} was given up", "subject_id")


def _entry(
    kind: str, facts: AdapterRecord | WorkerInfo | RequestFacts | DeadLetter | Undelivered, **more: object
) -> dict[str, object]:
    return {"object": kind, **asdict(facts), **more}


def _check_id(request_id: str) -> None:
    try:
        model_of(request_id)
    except ValueError:
        raise _no_request(request_id) from None


async def _no_dead_letter(services: Services, request_id: str) -> ApiError:
    fate = await services.admin.dead_letters.fate(request_id)
    if fate is None:
        return _no_request(request_id)
    shown = f"request {request_id[:120]!r}"
    if fate.state != "dead":
        return ApiError(404, "not_found", f"{shown} is no dead letter: it is {fate.state}", "request_id")
    replayed = "" if fate.replayed_as is None else f": it was replayed as {fate.replayed_as}"
    return ApiError(404, "not_found", f"{shown} is off the list already{replayed}", "request_id")


def _no_request(request_id: str) -> ApiError:
    return ApiError(404, "not_found", f"no request {request_id[:120]!r} is known here, or no longer", "request_id")


async def _models(services: Services, model: str | None) -> list[str]:
    """Return the model's name, or those of all models; raises `ApiError`."""
    if model is None:
        return await services.catalog.names()
    return [(await services.catalog.card(model)).name]
