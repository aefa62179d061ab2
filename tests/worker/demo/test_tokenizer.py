"""The tokenizer loses nothing and the template says what training said."""

import json
from collections.abc import Mapping, Sequence
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from shared.template import ChatTemplate
from worker.demo.chatml import ANSWER_START, CHAT_TEMPLATE, FILLER_ID, MASK_ID, SPECIALS, STOP_ID, render_turns
from worker.demo.items import Turn
from worker.demo.tasks import TASKS
from worker.demo.tasks.structure import TOOL_INTRO, TOOL_OUTRO
from worker.demo.tokenizer import VOCABULARY, train_tokenizer
from worker.demo.train import MODELS

TOKENIZER = Tokenizer.from_file(str(MODELS / "demo" / "tokenizer.json"))


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(codec="utf-8")))
def test_any_text_comes_back(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    if not any(special in text for special in SPECIALS):
        assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_every_digit_is_a_token_and_ids_fit_the_vocabulary() -> None:
    assert TOKENIZER.get_vocab_size() == VOCABULARY
    assert TOKENIZER.encode("12345").tokens == list("12345")
    assert [TOKENIZER.token_to_id(token) for token in SPECIALS] == [FILLER_ID, 1, STOP_ID, MASK_ID]


def test_training_again_gives_a_tokenizer_of_the_asked_size() -> None:
    small = train_tokenizer(conversations=400, vocabulary=700)
    assert small.get_vocab_size() == 700
    assert small.decode(small.encode("Zoë ate 12 plums\n🦊").ids) == "Zoë ate 12 plums\n🦊"


def _render(messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]] | None = None) -> str:
    return ChatTemplate(CHAT_TEMPLATE, {}).render(messages, tools, add_generation_prompt=True)


def test_the_template_renders_what_training_rendered() -> None:
    turns: tuple[Turn, ...] = (("system", "Be brief."), ("user", "Hi {x}"), ("assistant", "Hello!"), ("user", "2+2"))
    assert _render([{"role": role, "content": text} for role, text in turns]) == render_turns(turns) + ANSWER_START
    only = [{"role": "user", "content": "Hi"}]
    assert _render(only) == "<|im_start|>user\nHi<|im_end|>\n" + ANSWER_START


def test_tools_calls_and_results_render_as_trained() -> None:
    item = TASKS["tool_result"].draw(Random(6))
    system, user, call, result = (text for _, text in item.turns)
    tools = [json.loads(line) for line in system.removeprefix(TOOL_INTRO).removesuffix(TOOL_OUTRO).splitlines()]
    function = json.loads(call.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
    messages: list[dict[str, object]] = [
        {"role": "user", "content": user},
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": result},
    ]
    assert _render(messages, tools) == render_turns(item.turns) + ANSWER_START
    function["arguments"] = json.dumps(function["arguments"])  # the wire format of OpenAI clients
    assert _render(messages, tools) == render_turns(item.turns) + ANSWER_START
    with_system = _render([{"role": "system", "content": "Be kind."}, *messages], tools)
    assert with_system.startswith("<|im_start|>system\nBe kind.\n\n" + TOOL_INTRO)


def test_the_shipped_configuration_carries_the_template() -> None:
    for folder in ("demo", "demo-nano"):
        config = json.loads((MODELS / folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        assert config["chat_template"] == CHAT_TEMPLATE
        assert (config["eos_token"], config["pad_token"], config["mask_token"]) == (
            SPECIALS[2],
            SPECIALS[0],
            SPECIALS[3],
        )
