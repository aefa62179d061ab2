"""GET /v1/models."""

from fastapi import APIRouter
from starlette.responses import Response

from api.answers import json_response
from api.deps import ServicesDep
from api.errors import ApiError
from api.openapi import ERROR_RESPONSES
from shared.card import ModelCard
from shared.commands import LONGEST_BLOCK
from shared.lora import AdapterRecord

router = APIRouter(tags=["openai"])


@router.get("/v1/models", responses=ERROR_RESPONSES)
async def list_models(services: ServicesDep) -> Response:
    """List the models that have been announced, whether or not a worker runs right now."""
    entries: list[dict[str, object]] = []
    names = await services.catalog.names()
    alive = await services.fleet.alive(names)
    for name in names:
        try:
            entry = _entry(await services.catalog.card(name), name in alive)
            entries.append(entry)
            entries += [_adapter(entry, record) for record in await services.catalog.adapters(name)]
        except ApiError:
            # One unusable or just removed card must not hide the others; asking for it by name tells.
            continue
    return json_response({"object": "list", "data": entries})


@router.get("/v1/models/{name:path}", responses=ERROR_RESPONSES)
async def get_model(name: str, services: ServicesDep) -> Response:
    """Describe one model; names may contain slashes."""
    base, colon, adapter = name.partition(":")
    card = await services.catalog.card(base)
    entry = _entry(card, base in await services.fleet.alive([base]))
    if not colon:
        return json_response(entry)
    record = await services.catalog.adapter(base, adapter)
    if record is not None:
        return json_response(_adapter(entry, record))
    raise ApiError(404, "model_not_found", f"model {base} has no adapter {adapter[:96]!r}", "model")


def _adapter(entry: dict[str, object], record: AdapterRecord) -> dict[str, object]:
    """Return the entry of a model under an adapter."""
    own: dict[str, object] = {"id": f"{entry['id']}:{record.name}", "created": record.created, "digest": record.digest}
    return entry | own | {"parent": entry["id"], "root": record.path}


def _entry(card: ModelCard, served: bool) -> dict[str, object]:
    largest = None if card.largest_block is None else min(card.largest_block, LONGEST_BLOCK)
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "diffleet",
        "served": served,
        "family": card.family,
        "max_model_len": card.max_model_len,
        "block_length": card.block_length,
        "largest_block_length": largest,
        "fixed_block_length": card.fixed_block_length,
        "block_lengths": card.block_lengths or (card.block_length,),
        "embedding_size": card.embedding_size,
        "decoding": card.decoding,
        "temperature": card.temperature,
        "capabilities": card.capabilities,
        "digest": card.digest,
    }
