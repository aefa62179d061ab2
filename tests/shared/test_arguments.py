"""Arguments of the client: what is wrong is told by the argument's name, in our words, before anything is sent."""

import asyncio
import inspect
import math
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from api.schemas import ChatBody, ChatMessage
from shared.arguments import prompt_parts
from shared.client import Fleet, FleetClient, InvalidArgument, OutputTooLong, PromptTooLong, UnknownModel
from shared.commands import Generate
from shared.decoding import Threshold
from shared.keys import Keys, new_request_id
from shared.queue import WorkerQueue
from shared.text import Tokenizer
from tests.shared.protocol_for_tests import MODEL, card_of, command_for
from tests.shared.tokenizers_for_tests import byte_level

CARD = replace(card_of(), digest="")
ARGUMENTS = set(inspect.signature(FleetClient.generate).parameters) - {"self"}


class Captured(Exception):
    """The command was made, and would have been sent."""

    def __init__(self, command: Generate) -> None:
        self.command = command


class Unconnected(FleetClient):
    """A client that knows one model, and sends nothing."""

    async def default_model(self) -> str:
        return MODEL

    async def card(self, name: str) -> Any:
        if name != MODEL:
            raise UnknownModel(name, [MODEL])
        return CARD

    async def tokenizer(self, card: Any) -> Tokenizer:
        return byte_level()

    def run(self, command: Generate, **_: Any) -> Any:
        raise Captured(command)


async def made(**arguments: Any) -> Generate:
    client = Unconnected.connect("redis://127.0.0.1:1/0")
    with pytest.raises(Captured) as captured:
        async for _ in client.generate(**{"model": MODEL, "prompt": [1, 2], **arguments}):
            pass
    return captured.value.command


@pytest.mark.parametrize(
    ("arguments", "field", "told"),
    [
        ({"temperature": 7}, "temperature", "must be less than or equal to 5"),
        ({"temperature": math.nan}, "temperature", "must be "),
        ({"temperature": "hot"}, "temperature", "must be "),
        ({"top_p": 0}, "top_p", "must be greater than 0"),
        ({"top_k": 1.5}, "top_k", "must be an integer"),
        ({"seed": -1}, "seed", "must be greater than or equal to 0"),
        ({"seed": 2**63}, "seed", "must be less than"),
        ({"max_tokens": 0}, "max_tokens", "must be greater than or equal to 1"),
        ({"max_tokens": [1]}, "max_tokens", "must be an integer"),
        ({"max_tokens": "5"}, "max_tokens", "must be an integer"),
        ({"max_tokens": 5.0}, "max_tokens", "must be an integer"),
        ({"max_tokens": True}, "max_tokens", "must be an integer"),
        ({"temperature": "1"}, "temperature", "must be a number"),
        ({"temperature": True}, "temperature", "must be a number"),
        ({"decoding": {"strategy": "threshold", "threshold": "0.5"}}, "decoding.threshold", "must be a number"),
        ({"stop": 5}, "stop", "must be a list"),
        ({"stop": ["a", ""]}, "stop[1]", "must have at least 1 characters"),
        ({"stop": ["a", 5]}, "stop[1]", "must be a string"),
        ({"total_ms": 0}, "total_ms", "must be greater than or equal to 1"),
        ({"lane": "fast"}, "lane", "must be 'rt', 'std' or 'bulk'"),
        ({"decoding": "threshold"}, "decoding", "must be an object"),
        ({"decoding": {}}, "decoding", "must have a 'strategy'"),
        ({"decoding": {"strategy": "luck"}}, "decoding", "must have one of 'threshold', "),
        ({"decoding": {"strategy": "threshold", "threshold": 7}}, "decoding.threshold", "must be "),
        ({"model": 5}, "model", "must be a string"),
        ({"prompt": None}, "prompt", "must be a string, a list of token ids"),
        ({"prompt": b"hi"}, "prompt", "must be a string, a list of token ids"),
        ({"prompt": {"role": "user"}}, "prompt", "must be a string, a list of token ids"),
        ({"prompt": []}, "prompt", "is empty"),
        ({"prompt": ""}, "prompt", "is empty"),
        ({"prompt": "a\ud800"}, "prompt: character 1 is a lone surrogate", ""),
        ({"prompt": [1, -1]}, "prompt[1]", "is -1; token ids of this model are 0 to 99"),
        ({"prompt": [1, 100]}, "prompt[1]", "is 100; token ids of this model are 0 to 99"),
        ({"prompt": [1, "b"]}, "prompt[1]", "is no token id"),
        ({"prompt": [True]}, "prompt[0]", "is no token id"),
        ({"prompt": [{"role": "user", "content": "a"}, 5]}, "prompt[1]", "must be a message"),
        ({"prompt": [{"role": "user"}]}, "prompt[0].content", "is required"),
        ({"prompt": [{"content": "a"}]}, "prompt[0].role", "is required"),
        ({"prompt": [{"role": "user", "content": 5}]}, "prompt[0].content", "must be a string"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "prompt[0].content[0]", "must be {"),
        ({"prompt": [{"role": "boss", "content": "a"}]}, "prompt[0].role", "must be one of system, "),
    ],
)
async def test_a_wrong_argument_is_told_by_its_name(arguments: dict[str, Any], field: str, told: str) -> None:
    client = Unconnected.connect("redis://127.0.0.1:1/0")
    with pytest.raises(InvalidArgument) as caught:
        async for _ in client.generate(**{"model": MODEL, "prompt": [1, 2], **arguments}):
            pass
    assert caught.value.field == field.partition(":")[0]
    assert str(caught.value).startswith(f"{field} {told}")
    assert "\n" not in str(caught.value) and "pydantic" not in str(caught.value)
    # No traceback of what it was made from.
    assert caught.value.__context__ is None or caught.value.__suppress_context__


async def test_right_arguments_are_in_the_command() -> None:
    command = await made(stop="END", max_tokens=5, temperature=0.5, seed=3, top_k=2, decoding=Threshold(threshold=0.5))
    assert command.limits.stop == ("END",)
    assert (command.limits.max_tokens, command.sampling.seed, command.sampling.top_k) == (5, 3, 2)
    assert (command.sampling.temperature, command.decoding) == (0.5, Threshold(threshold=0.5))
    assert (await made(stop=["a", "b"])).limits.stop == ("a", "b")
    assert (await made(prompt=(part for part in (1, 2)))).prompt == (1, 2)
    assert (await made()).limits.max_tokens == CARD.max_model_len - 2


async def test_chat_messages_are_what_the_http_api_makes_of_them() -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "short"}]},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "content": "7", "tool_call_id": "c"},
    ]
    shown = [ChatMessage.model_validate(message).for_template() for message in messages]
    parts: list[Any] = [*prompt_parts(messages, CARD.vocab_size)]
    assert [{name: message[name] for name in ("role", "content")} for message in parts] == [
        {name: message[name] for name in ("role", "content")} for message in shown
    ]


NUMBERS = ["5", 5, 5.0, 5.5, True, False, -1, 0, 1, 2**31, math.nan, [1], {}]
MESSAGES = [
    {"role": role, "content": content}
    for role in ("user", "assistant", "developer", "boss", "", None, 5)
    for content in ("hi", "", None, 5, [], ["hi"], [{"type": "text", "text": "hi"}], [{"type": "text"}], {}, True)
]


@pytest.mark.parametrize(
    ("name", "arguments", "fields"),
    [
        *[(f"max_tokens {value!r}", {"max_tokens": value}, {"max_tokens": value}) for value in NUMBERS],
        *[(f"temperature {value!r}", {"temperature": value}, {"temperature": value}) for value in NUMBERS],
        *[(f"{message}", {"prompt": [message]}, {"messages": [message]}) for message in MESSAGES],
    ],
)
async def test_what_the_http_api_refuses_the_client_refuses_and_the_reverse(
    name: str, arguments: dict[str, Any], fields: dict[str, Any]
) -> None:
    try:
        ChatBody.model_validate({"messages": [{"role": "user", "content": "a"}], **fields})
        over_http = True
    except ValidationError:
        over_http = False
    try:
        await made(**arguments)
        here = True
    except (InvalidArgument, OutputTooLong) as error:
        # Too many for the model is no question of the arguments.
        here = isinstance(error, OutputTooLong)
    assert (name, here) == (name, over_http)


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.lists(st.none() | st.integers(-5, 200) | st.text(max_size=2), max_size=3),
    st.dictionaries(st.sampled_from(["strategy", "role", "content"]), st.text(max_size=2) | st.integers(), max_size=3),
    st.lists(st.dictionaries(st.sampled_from(["role", "content"]), st.text(max_size=2) | st.none()), max_size=2),
)


# The first text that is drawn takes a second where nothing is cached: characters by their categories.
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(sorted(ARGUMENTS - {"previews"})), values, max_size=3))
async def test_whatever_the_arguments_are_the_error_is_ours_and_names_one_of_them(arguments: dict[str, Any]) -> None:
    client = Unconnected.connect("redis://127.0.0.1:1/0")
    try:
        async for _ in client.generate(**{"model": MODEL, "prompt": [1, 2], **arguments}):
            pass
    except InvalidArgument as error:
        assert re.split(r"[.\[]", error.field)[0] in arguments
    except (Captured, UnknownModel, PromptTooLong, OutputTooLong):
        pass


async def test_a_submit_that_no_server_can_take_is_refused_here(redis_url: str, fleet_redis: Any) -> None:
    queue = WorkerQueue.connect(redis_url, MODEL, "w1")
    await queue.publish_card(card_of())
    await queue.close()
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("queue_limit", {"queue_limit": -1}),
        ("retention_ms", {"retention_ms": 0}),
        ("retention_ms", {"retention_ms": "long"}),
    ]
    async with FleetClient.connect(redis_url) as fleet:
        for field, options in wrong:
            with pytest.raises(InvalidArgument) as caught:
                await fleet.submit(command_for(), **options)
            assert caught.value.field == field
        for request_id in ("nonsense", new_request_id("other")):
            with pytest.raises(InvalidArgument, match="^id must be a request id"):
                await fleet.submit(command_for().model_copy(update={"id": request_id}))
        with pytest.raises(InvalidArgument, match="^after must be"):
            await anext(fleet.stream(command_for().id, after=-1))
        with pytest.raises(InvalidArgument, match="^request_id must be a string"):
            await fleet.result(5)  # pyright: ignore[reportArgumentType]
    assert fleet_redis.xlen(Keys(f"{MODEL}.0").lane("std")) == 0


async def test_the_client_without_asyncio_tells_the_same(redis_url: str) -> None:
    queue = WorkerQueue.connect(redis_url, MODEL, "w1")
    await queue.publish_card(card_of())
    await queue.close()

    def ask() -> None:
        with Fleet(redis_url) as fleet:
            list(fleet.generate(MODEL, [1, 2], temperature=7))

    with pytest.raises(InvalidArgument, match="^temperature must be less than or equal to 5$"):
        await asyncio.to_thread(ask)
