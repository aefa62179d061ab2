"""What the front does with texts before it queues them."""

import asyncio
import re
import threading
from dataclasses import replace
from typing import cast

import pytest

from api.catalog import ServedModel
from shared.card import ModelCard
from shared.decoding import Threshold
from shared.lora import AdapterRecord
from shared.text import Message, Tokenizer
from tests.api.scripted import Caller, ScriptedFleet

CARD = ModelCard("tiny", "sdar", 64, 4, False, {}, 0.0, (), (1,), 0, 8, {})
WORDS = "word " * 1_000


class SlowTokenizer:
    """Encodes only once the event loop has had a turn meanwhile."""

    def __init__(self) -> None:
        self.turn = threading.Event()
        self.template_takes_tools = True

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        return [1] if self.turn.wait(5) else [0]

    def encode_chat(self, messages: list[Message], *_: object) -> list[int]:
        return self.encode("")


@pytest.mark.parametrize("chat", [False, True])
async def test_others_are_served_while_a_prompt_of_a_thousand_words_is_encoded(chat: bool) -> None:
    slow = SlowTokenizer()
    model = ServedModel(CARD, cast(Tokenizer, slow), Threshold())
    work = model.encode_chat([{"role": "user", "content": WORDS}]) if chat else model.encode(WORDS)
    task = asyncio.create_task(work)
    await asyncio.sleep(0)
    slow.turn.set()
    assert await task == [1]


def adapter(name: str) -> AdapterRecord:
    return AdapterRecord(name, f"team/{name}", "0" * 64, 4, 100, 1)


async def test_adapters_that_a_request_names_reach_the_command_in_its_order(
    caller: Caller, fleet: ScriptedFleet
) -> None:
    fleet.registered = [adapter(name) for name in ("elk", "fox", "owl")]
    body = {"prompt": "x", "model": "org/demo:owl", "lora": [{"name": "fox", "scale": 0.5}, {"name": "owl"}]}
    assert (await caller.post("/generate", body)).status == 200
    assert fleet.commands[0].lora == (
        adapter("owl").use(param="model"),
        adapter("fox").use(0.5),
        adapter("owl").use(),
    )
    assert (await caller.get("/v1/models/org/demo:fox")).json()["root"] == "team/fox"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("path", "asks"),
    [
        ("/generate", {"prompt": "x"}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x", "store": False}),
        ("/api/chat", {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
async def test_an_answer_tells_the_model_by_the_name_that_was_asked_for(
    caller: Caller, fleet: ScriptedFleet, path: str, asks: dict[str, object], streamed: bool
) -> None:
    fleet.registered = [adapter("fox")]
    for name, lora in (("org/demo:fox", None), ("org/demo", [{"name": "fox"}]), (None, None)):
        if path == "/api/chat" and (name is None or lora):
            continue  # there it must be named, and has no such field
        body = asks | {"stream": streamed, "model": name} | ({"lora": lora} if lora else {})
        answer = await caller.post(path, body)
        assert answer.status == 200, answer.body
        wanted = name or "org/demo"
        told = re.findall(rb'"model":"([^"]*)"', answer.body)
        assert told and set(told) == {wanted.encode()}, answer.body
        # Counted and queued as the base, and what is told later goes by the same name.
        command = fleet.commands[-1]
        assert (command.model, command.asked or command.model) == ("org/demo", wanted)


async def test_an_unknown_adapter_is_named_and_of_the_known_ones_a_few(caller: Caller, fleet: ScriptedFleet) -> None:
    fleet.registered = [adapter(f"a{number:03}") for number in range(500)]
    for body, param in (({"model": "org/demo:fox"}, "model"), ({"lora": [{"name": "fox"}]}, "lora[0].name")):
        answer = await caller.post("/generate", {"prompt": "x"} | body)
        assert (answer.status, answer.error["param"]) == (404, param)
        assert "no adapter 'fox': its adapters are a000, a001" in answer.error["message"]
        assert answer.error["message"].endswith("a019 and 480 more")
    assert (await caller.get("/v1/models/org/demo:fox")).status == 404


async def test_a_request_without_a_model_means_the_only_one_that_has_workers(
    caller: Caller, fleet: ScriptedFleet
) -> None:
    fleet.cards |= {"former": replace(CARD, name="former", digest="")}
    fleet.departed = {"former"}
    assert (await caller.post("/generate", {"prompt": "x"})).status == 200
    assert fleet.commands[-1].model == "org/demo"
    fleet.departed = set()
    refused = await caller.post("/generate", {"prompt": "x"})
    assert (refused.status, refused.error["code"]) == (400, "missing_required_parameter")
    assert refused.error["message"] == "model is required: the models are former, org/demo"
    fleet.cards = {}
    refused = await caller.post("/generate", {"prompt": "x"})
    assert (refused.status, refused.error["code"]) == (404, "model_not_found")
