"""What the front does with texts before it queues them."""

import asyncio
import threading
from typing import cast

import pytest

from api.catalog import ServedModel
from shared.card import ModelCard
from shared.decoding import Threshold
from shared.text import Message, Tokenizer

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
