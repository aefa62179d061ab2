from typing import Any

import pytest

from api.metrics import Metrics
from api.relay import Relay
from api.settings import ApiSettings
from shared.commands import Generate, Lane
from shared.keys import new_request_id


class Refusing:
    """A fleet that only remembers the limit with which it was asked."""

    def run(self, command: Generate, **terms: Any) -> Any:
        self.limit = terms["queue_limit"]

        async def nothing() -> Any:
            return
            yield

        return nothing()


@pytest.mark.parametrize(("lane", "bulk", "limit"), [("bulk", 7, 7), ("bulk", None, 50), ("std", 7, 50), ("rt", 7, 50)])
async def test_lines_of_batches_have_a_queue_limit_of_their_own(lane: Lane, bulk: int | None, limit: int) -> None:
    fleet: Any = Refusing()
    relay = Relay(fleet, ApiSettings(queue_limit=50, bulk_queue_limit=bulk), Metrics())
    follow = relay.submit(Generate(id=new_request_id("m"), model="m", prompt=(1,), lane=lane), None)
    await follow.aclose()
    assert fleet.limit == limit
