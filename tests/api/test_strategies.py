"""The strategies that can be asked for over HTTP."""

from typing import get_args

import pytest

from api.requests import _DECODING_OPTIONS  # pyright: ignore[reportPrivateUsage]
from api.schemas import DiffusionOptions, Strategy
from shared.decoding import KINDS
from tests.api.scripted import Caller, ScriptedFleet


@pytest.mark.parametrize("name", get_args(Strategy))
async def test_a_strategy_is_taken_with_all_of_its_options(name: str, caller: Caller, fleet: ScriptedFleet) -> None:
    fields = KINDS[name].model_fields
    options = {option: fields[option].default for option in _DECODING_OPTIONS if option in fields}
    options |= {"steps": 3} if "steps" in options else {}

    response = await caller.post("/generate", {"prompt": "x", "diffusion": {"strategy": name} | options})

    assert response.status == 200, response.body
    assert fleet.commands[0].decoding == KINDS[name](**options)


def test_every_option_of_decoding_can_be_written() -> None:
    assert set(_DECODING_OPTIONS) <= set(DiffusionOptions.model_fields)
