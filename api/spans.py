"""A span around the events of a request that this process submits."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from shared.events import Delta, Event, Failed, Finished
from shared.tracing import Span, close_with


async def spanned(events: AsyncGenerator[Event], span: Span) -> AsyncGenerator[Event]:
    """Yield the events as they are; the span ends with them, or when nobody follows any longer."""
    began, first = time.perf_counter(), True
    try:
        async with aclosing(events):
            async for event in events:
                match event:
                    case Delta() if first:
                        first = False
                        span.set({"diffleet.time_to_first_block_s": time.perf_counter() - began})
                    case Finished() | Failed():
                        close_with(span, event)
                    case _:
                        pass
                yield event
    except Exception as error:
        span.fail(type(error).__name__)
        raise
    finally:
        span.end()
