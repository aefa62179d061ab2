"""Short ways to say what protocol tests need."""

from collections.abc import Sequence
from typing import Any

from shared.card import ModelCard
from shared.commands import LANES, Generate, Lane, Limits
from shared.events import Delta, Event, Finished, Usage, decode_event
from shared.keys import Keys, new_request_id
from shared.queue import Claim, WorkerQueue

MODEL = "m"


def card_of(model: str = MODEL, digest: str = "") -> ModelCard:
    return ModelCard(model, "sdar", 64, 4, False, {"strategy": "threshold"}, 0.0, (), (1,), 2, 100, {}, digest)


def command_for(
    model: str = MODEL, lane: Lane = "std", queue_ms: int | None = None, total_ms: int | None = None
) -> Generate:
    limits = Limits(max_tokens=16, queue_ms=queue_ms, total_ms=total_ms)
    return Generate(id=new_request_id(model), model=model, prompt=(1, 2, 3), lane=lane, limits=limits)


def block_of(claim: Claim, number: int) -> Delta:
    """Return the block with this number, as the claim's owner would write it: two tokens and two letters."""
    seq = claim.seq - claim.blocks + number + 1
    return Delta(claim.id, seq, claim.epoch, number, 2 * number, [number, number], f"<{number}>", number + 1)


def end_of(claim: Claim, blocks: int) -> Finished:
    seq = claim.seq - claim.blocks + blocks + 1
    return Finished(claim.id, seq, claim.epoch, "stop", "stop_token", Usage(3, 2 * blocks, blocks, blocks))


async def finish(queue: WorkerQueue, claim: Claim, blocks: int = 1) -> None:
    """Write the blocks that are missing, and the end."""
    await queue.emit([block_of(claim, number) for number in range(claim.blocks, blocks)])
    await queue.finish(None, end_of(claim, blocks))


def log_of(redis: Any, request_id: str) -> list[tuple[str, Event]]:
    """Return the event log: ids and events, without `Queued`, which is not stored."""
    return logs_of(redis, [request_id])[0]


def logs_of(redis: Any, request_ids: Sequence[str]) -> list[list[tuple[str, Event]]]:
    """Return the event logs of several requests, in one round trip."""
    pipe = redis.pipeline(transaction=False)
    for request_id in request_ids:
        pipe.xrange(Keys.of(request_id).log(request_id))
    return [[(entry_id.decode(), decode_event(fields[b"d"])) for entry_id, fields in log] for log in pipe.execute()]


def state_of(redis: Any, request_id: str) -> dict[str, str]:
    fields = redis.hgetall(Keys.of(request_id).request(request_id))
    return {name.decode(): value.decode(errors="replace") for name, value in fields.items()}


def lengths_of(redis: Any, model: str = MODEL, lanes: Sequence[Lane] = LANES) -> int:
    keys = Keys(f"{model}.0")
    return sum(redis.xlen(keys.lane(lane)) for lane in lanes)


def pending_of(redis: Any, model: str = MODEL) -> int:
    keys = Keys(f"{model}.0")
    lanes = [keys.lane(lane) for lane in LANES]
    return sum(redis.xpending(lane, "g")["pending"] for lane in lanes if redis.exists(lane))


def run_out_of_lease(redis: Any, request_id: str) -> None:
    """Let the lease of a claimed request end now: its entry has been idle for a day."""
    state = state_of(redis, request_id)
    lane = f"df:{{{Keys.of(request_id).part}}}:q:{state['lane']}"
    redis.xclaim(lane, "g", state["own"] or "nobody", 0, [state["eid"]], idle=86_400_000, justid=True)
