"""Forget a model that nobody serves any more: its card and its name, which outlive its workers on purpose."""

import asyncio
from dataclasses import dataclass

from shared.card import InvalidCard, unpack
from shared.client import CARD_FRESH_S, FleetClient, UnknownModel
from shared.commands import LANES
from shared.connection import Link
from shared.keys import MODELS, Keys, card, loras, partition
from shared.lua import script
from shared.roster import read_roster

_SPARE_S = 1.0


class StillServed(Exception):
    """The model is not forgotten: somebody serves it, or waits for it. The message says who."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What went with a model, besides its card. Requests that have ended can be read as long as they are kept."""

    adapters: tuple[str, ...]
    """Names that were registered; their files stay."""
    dead_letters: int


async def forget(fleet: FleetClient, link: Link, model: str) -> Forgotten:
    """Forget a model, which takes some seconds: until no api takes requests for it by what it has read before.

    Should one come meanwhile, the model stays. A worker that starts meanwhile announces it by itself. Raises
    `StillServed`, `UnknownModel`, `FleetUnavailable`; then nothing is forgotten.
    """
    known = await fleet.models()
    if model not in known:
        raise UnknownModel(model, known)
    fields: dict[bytes, bytes] = await link.read("HGETALL", card(model))
    try:
        count = unpack(fields).partitions if fields else 1
    except InvalidCard:
        raise StillServed(
            f"the card of {model} is none that this program can read: use the one that wrote it"
        ) from None
    parts = [Keys(partition(model, number)) for number in range(count)]
    await _check(link, model, parts)
    names: dict[bytes, bytes] = await link.read("HGETALL", loras(model))
    dead = sum([await link.read("XLEN", keys.dead_letters()) for keys in parts])

    await link.read("SREM", MODELS, model)
    await link.read("DEL", card(model))
    try:
        await asyncio.sleep(CARD_FRESH_S + _SPARE_S)
        await _check(link, model, parts)
    except BaseException:
        await _announce(link, model, fields)
        raise
    await link.read("DEL", loras(model))
    for keys in parts:
        streams = [*(keys.lane(lane) for lane in LANES), keys.dead_letters()]
        await link.run_again(script("drop_lanes"), streams, [])
    return Forgotten(tuple(sorted(name.decode() for name in names)), dead)


async def _check(link: Link, model: str, parts: list[Keys]) -> None:
    workers = [worker.id for worker in await read_roster(link, Keys(partition(model)))]
    if workers:
        raise StillServed(f"{model} is served by {', '.join(workers)}")
    waiting = sum([await link.read("XLEN", keys.lane(lane)) for keys in parts for lane in LANES])
    if waiting:
        raise StillServed(f"{model} has {_counted(waiting, 'open request')}: `diffleet requests -m {model}` lists them")
    due = sum([await link.read("ZCARD", keys.hooks()) for keys in parts])
    if due:
        raise StillServed(f"{model} has {_counted(due, 'webhook')} to send: `diffleet webhooks --due` lists them")


async def _announce(link: Link, model: str, fields: dict[bytes, bytes]) -> None:
    """Put back what was there, unless a worker has written its own meanwhile."""
    if fields:
        pairs = [part for pair in fields.items() for part in pair]
        await link.run_again(
            script("publish_card"), [card(model)], [fields.get(b"digest", b""), fields.get(b"by", b""), "*", *pairs]
        )
        await link.read("SADD", MODELS, model)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
