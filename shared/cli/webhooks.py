"""`diffleet webhooks`: messages that were given up or are due, and what an operator does with the former."""

import time
from collections.abc import Awaitable, Callable, Sequence

from shared.cli.exits import Exit, Stop
from shared.cli.operations import operating
from shared.cli.requests import print_table, table_of
from shared.hook_places import hook_partitions
from shared.webhooks import WebhookStore


async def print_webhooks(redis_url: str, due: bool, limit: int) -> None:
    """Print the messages that were given up, or those that are due; raises `Stop`."""
    async with operating(redis_url) as (fleet, link):
        store, places = WebhookStore(link), await hook_partitions(fleet)
        found = await (store.list_due if due else store.list_dead)(places, limit)
    if not found:
        print("no webhook is due" if due else "no webhook was given up")
        return
    table = table_of("about", "due (UTC)" if due else "given up (UTC)", "last try", "receiver", right=("tries",))
    for one in found:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(one.at_ms / 1000))
        table.add_row(one.id, at, one.why or "-", one.url, str(one.attempts))
    print_table(table)


async def replay_webhooks(redis_url: str, subject_ids: Sequence[str]) -> None:
    """Make messages that were given up due again; raises `Stop` for one that was not."""
    async with operating(redis_url) as (_, link):
        await _each(subject_ids, WebhookStore(link).replay, "due again")


async def discard_webhooks(redis_url: str, subject_ids: Sequence[str]) -> None:
    """Forget messages that were given up; raises `Stop` for one that was not."""
    async with operating(redis_url) as (_, link):
        await _each(subject_ids, WebhookStore(link).discard, "discarded")


async def _each(subject_ids: Sequence[str], act: Callable[[str], Awaitable[bool]], done: str) -> None:
    """Do something with each message and print that, also behind one that is refused."""
    refused: list[str] = []
    for subject_id in subject_ids:
        try:
            found = await act(subject_id)
        except ValueError:
            found = False
        if found:
            print(f"{subject_id}  {done}")
        else:
            refused.append(f"no webhook about {subject_id[:120]!r} was given up")
    if refused:
        raise Stop(Exit.REFUSED, "; ".join(refused))
