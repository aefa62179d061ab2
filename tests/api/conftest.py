from collections.abc import AsyncIterator

import pytest

from tests.api.scripted import Caller, ScriptedFleet, running


@pytest.fixture
def fleet() -> ScriptedFleet:
    return ScriptedFleet()


@pytest.fixture
async def caller(fleet: ScriptedFleet) -> AsyncIterator[Caller]:
    async with running(fleet) as caller:
        yield caller
