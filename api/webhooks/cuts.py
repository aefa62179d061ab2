"""Whether an answer has ended within a call of a function, which its terminal event does not say."""

from collections.abc import Awaitable, Callable

from api.structure.calls import CallReader
from shared.client import Result, UnknownRequest
from shared.webhooks import Taken


async def was_cut(message: Taken, look: Callable[[str], Awaitable[Result]]) -> bool:
    """Look at the answer of a response that may hold calls; one that is no longer kept counts as whole.

    `look` reads what a request has said, and raises `UnknownRequest`; what else it raises is raised.
    """
    if message.to.kind != "response" or not message.to.calls:
        return False
    try:
        result = await look(message.id)
    except UnknownRequest:
        return False
    reader = CallReader()
    reader.push(result.text)
    reader.end()
    return reader.cut
