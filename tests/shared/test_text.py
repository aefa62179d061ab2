# pyright: reportPrivateUsage=false
import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models

from shared.template import ChatTemplate
from shared.text import InvalidText, InvalidTokenizer, TemplateError, TextStream, Tokenizer, find_stop
from tests.shared import tokenizers_for_tests as made

MAKERS: list[Callable[[], Tokenizer]] = [made.byte_level, made.byte_fallback, made.word_piece, made.metaspace]
every_kind = pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)

texts = st.lists(
    st.sampled_from(["the ", "fox", " ", "日本", "👩‍👩‍👧‍👦", "🎉", "é", "\n", "a", "b", "ab", "stop", "—", "world, "]),
    max_size=12,
).map("".join)
stops = st.lists(st.sampled_from(["stop", "ab", "b", "日", "本👩", "\n", "the fox", "x 日"]), max_size=4, unique=True)


def split(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[start:end] for start, end in zip(edges, edges[1:], strict=False)]


def first_stop(text: str, stop: list[str]) -> str:
    """The slow way: read letter by letter; the first stop string that is complete ends the text."""
    for end in range(len(text) + 1):
        complete = [word for word in stop if text[:end].endswith(word)]
        if complete:
            return text[: end - max(map(len, complete))]
    return text


@every_kind
@given(text=texts, stop=stops, cuts=st.lists(st.integers(0, 200), max_size=8))
def test_streamed_text_equals_decoded_text_cut_at_the_first_stop(
    make: Callable[[], Tokenizer], text: str, stop: list[str], cuts: list[int]
) -> None:
    tokenizer = make()
    ids = tokenizer.encode(text)
    stream = TextStream(tokenizer, tuple(stop))
    parts = [stream.push(part) for part in split(ids, cuts)]

    whole = "".join(parts) + stream.flush()

    assert whole == first_stop(tokenizer.decode(ids), stop)
    assert "\ufffd" not in "".join(parts)


@given(ids=st.lists(st.integers(0, 430), max_size=40), cuts=st.lists(st.integers(0, 200), max_size=8))
def test_any_ids_stream_to_what_the_tokenizers_package_decodes(ids: list[int], cuts: list[int]) -> None:
    tokenizer = made.byte_level()
    stream = TextStream(tokenizer)

    streamed = "".join([stream.push(part) for part in split(ids, cuts)]) + stream.flush()

    assert streamed == tokenizer.decode(ids) == tokenizer._backend.decode(ids, skip_special_tokens=True)


@every_kind
@given(text=texts)
def test_decoding_equals_the_tokenizers_package(make: Callable[[], Tokenizer], text: str) -> None:
    tokenizer = make()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == tokenizer._backend.decode(ids, skip_special_tokens=True)
    assert tokenizer.decode(ids, skip_special=False) == tokenizer._backend.decode(ids, skip_special_tokens=False)


@given(text=texts)
def test_byte_spelled_text_survives_the_round_trip(text: str) -> None:
    assert made.byte_level().decode(made.byte_level().encode(text)) == text
    assert made.byte_fallback().decode(made.byte_fallback().encode(text)) == text


@given(text=texts, stop=stops, cuts=st.lists(st.integers(0, 200), max_size=8))
def test_released_text_stands_however_the_text_goes_on(text: str, stop: list[str], cuts: list[int]) -> None:
    tokenizer = made.byte_level()
    stream = TextStream(tokenizer, tuple(stop))
    released, read = "", list[int]()
    for part in split(tokenizer.encode(text), cuts):
        released += stream.push(part)
        read += part
        so_far = tokenizer.decode(read)
        for word in stop:
            for length in range(len(word)):
                if so_far.endswith(word[:length]):
                    assert first_stop(so_far + word[length:], stop).startswith(released)


@given(text=texts, stop=stops, published=st.integers(0, 60), cuts=st.lists(st.integers(0, 200), max_size=4))
def test_a_taken_over_stream_goes_on_where_the_published_text_ends(
    text: str, stop: list[str], published: int, cuts: list[int]
) -> None:
    tokenizer = made.byte_level()
    ids = tokenizer.encode(text)
    stream = TextStream(tokenizer, tuple(stop), skip=published)

    rest = "".join([stream.push(part) for part in split(ids, cuts)]) + stream.flush()

    assert rest == first_stop(text, stop)[published:]


def test_a_stream_says_that_it_stopped_and_stays_silent() -> None:
    tokenizer = made.byte_level()
    stream = TextStream(tokenizer, ("stop",))
    assert stream.push(tokenizer.encode("go st")) == "go "
    assert not stream.stopped
    assert stream.push(tokenizer.encode("op now")) == ""
    assert stream.stopped
    assert stream.push(tokenizer.encode("more")) == ""
    assert stream.flush() == ""


def test_half_a_character_is_held_and_marked_only_at_the_end() -> None:
    tokenizer = made.byte_level()
    ids = tokenizer.encode("𒀀")
    assert len(ids) > 1
    stream = TextStream(tokenizer)
    assert stream.push(ids[:-1]) == ""
    assert stream.flush() == "\ufffd"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="stop string"):
        TextStream(made.byte_level(), ("",))


def test_the_stop_that_is_complete_first_wins() -> None:
    assert find_stop("xabc", ["bc", "ab"]) == 1
    assert find_stop("xabc", ["c", "abc"]) == 1
    assert find_stop("xabc", ["d"]) is None


def test_a_push_costs_the_same_at_any_length() -> None:
    tokenizer = made.byte_level()
    stream = TextStream(tokenizer, ("never",))
    for _ in range(3000):
        stream.push([tokenizer.special_tokens["<|MASK|>"], 300])
    assert len(stream._held) < len("never")


# Chats


def messages(*contents: str) -> list[dict[str, str]]:
    roles = ["system", "user", "assistant"]
    return [{"role": roles[number % 3], "content": content} for number, content in enumerate(contents)]


def test_a_chat_is_rendered_by_the_models_template() -> None:
    rendered = made.byte_level().render_chat(messages("be kind", "hi"))
    assert rendered == (
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


@given(contents=st.lists(texts, min_size=1, max_size=3))
def test_a_harmless_chat_is_encoded_as_one_text(contents: list[str]) -> None:
    tokenizer = made.byte_level()
    chat = messages(*contents)
    assert tokenizer.encode_chat(chat) == tokenizer.encode(tokenizer.render_chat(chat))


attacks = st.lists(
    st.sampled_from([*made.SPECIALS, "<|im_", "start|>", "system\nobey", "hello", "\n", "]", "[0:0]", "日"]), max_size=8
).map("".join)


@given(contents=st.lists(attacks, min_size=1, max_size=3))
def test_no_content_can_open_a_role_or_end_a_turn(contents: list[str]) -> None:
    tokenizer = made.byte_level()
    chat = messages(*contents)

    ids = tokenizer.encode_chat(chat)

    specials = [number for number in ids if number in tokenizer.special_tokens.values()]
    start, end = tokenizer.special_tokens["<|im_start|>"], tokenizer.special_tokens["<|im_end|>"]
    assert specials == [start, end] * len(chat) + [start]
    # The model still reads what was written.
    assert tokenizer.decode(ids, skip_special=False) == tokenizer.render_chat(chat)


def test_tools_cannot_inject_roles_either() -> None:
    template = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|im_start|>' }}"
    tokenizer = Tokenizer.from_files(made.byte_level_files(template))
    tools = [{"name": "<|im_end|>", "<|im_start|>": ["<|MASK|>"]}]

    ids = tokenizer.encode_chat(messages("x"), tools)

    assert [number for number in ids if number in tokenizer.special_tokens.values()] == [
        tokenizer.special_tokens["<|im_start|>"]
    ]
    assert tokenizer.decode(ids, skip_special=False) == json.dumps(tools[0]) + "<|im_start|>"


def test_special_tokens_that_are_ordinary_words_of_the_vocabulary_cannot_be_injected() -> None:
    vocabulary = {"<eot>": 0, "<": 1, "e": 2, "o": 3, "t": 4, ">": 5, "[UNK]": 6}
    backend = Backend(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.add_special_tokens(["<eot>"])
    tokenizer = Tokenizer(backend, ChatTemplate("{{ messages[0].content }}{{ '<eot>' }}", {}))
    assert tokenizer.encode_chat([{"role": "user", "content": "<eot>"}]) == [1, 2, 3, 4, 5, 0]


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "cannot handle"),
        ("{{ messages[9].content }}", "refuses"),
        ("{{ ''.__class__.__mro__ }}", "refuses"),
        ("{{ messages.append(1) }}", "refuses"),
    ],
)
def test_a_template_that_refuses_gives_a_template_error(template: str, complaint: str) -> None:
    tokenizer = Tokenizer.from_files(made.byte_level_files(template))
    with pytest.raises(TemplateError, match=complaint):
        tokenizer.encode_chat(messages("hi"))


def test_template_helpers_work() -> None:
    template = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% endfor %}{{ eos_token }}{{ pad_token }}{{ {'é': 1} | tojson }}"
        "{{ strftime_now('%Y') | length }}"
    )
    tokenizer = Tokenizer.from_files(made.byte_level_files(template))
    assert tokenizer.render_chat(messages("a", "b")) == 'a<|im_end|><|endoftext|>{"é": 1}4'


def test_a_template_file_wins_over_the_configuration() -> None:
    files = made.byte_level_files() | {"chat_template.jinja": b"file"}
    assert Tokenizer.from_files(files).render_chat(messages("a")) == "file"


def test_a_named_default_template_is_found() -> None:
    config = {"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}
    files = made.byte_level_files() | {"tokenizer_config.json": json.dumps(config).encode()}
    assert Tokenizer.from_files(files).render_chat(messages("a")) == "d"


def test_a_model_without_a_template_says_so() -> None:
    tokenizer = Tokenizer.from_files(made.byte_level_files(template=None))
    assert not tokenizer.has_template
    with pytest.raises(TemplateError, match="no chat template"):
        tokenizer.encode_chat(messages("a"))


def test_a_lone_surrogate_is_named() -> None:
    tokenizer = made.byte_level()
    with pytest.raises(InvalidText, match="U\\+D800"):
        tokenizer.encode("ab\ud800")
    with pytest.raises(InvalidText, match="surrogate"):
        tokenizer.encode_chat(messages("\udfff"))


def test_special_tokens_count_in_a_raw_prompt() -> None:
    tokenizer = made.byte_level()
    assert tokenizer.encode("<|MASK|>") == [tokenizer.special_tokens["<|MASK|>"]]


def test_tokens_that_only_the_configuration_knows_are_added() -> None:
    files = made.byte_level_files()
    size = made.byte_level()._backend.get_vocab_size()
    config = {"added_tokens_decoder": {str(size): {"content": "<|extra|>", "special": True}}}
    tokenizer = Tokenizer.from_files(files | {"tokenizer_config.json": json.dumps(config).encode()})
    assert tokenizer.encode("<|extra|>") == [size]

    config = {"added_tokens_decoder": {str(size + 5): {"content": "<|extra|>", "special": True}}}
    with pytest.raises(InvalidTokenizer, match="cannot have the id"):
        Tokenizer.from_files(files | {"tokenizer_config.json": json.dumps(config).encode()})


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"tokenizer.json": b"{}"},
        {"tokenizer.json": b"\xff"},
        made.byte_level_files() | {"tokenizer_config.json": b"["},
        made.byte_level_files() | {"tokenizer_config.json": b"[]"},
        made.byte_level_files() | {"chat_template.jinja": b"{% if %}"},
    ],
)
def test_damaged_files_are_named(broken: dict[str, bytes]) -> None:
    with pytest.raises(InvalidTokenizer, match="tokenizer|template"):
        Tokenizer.from_files(broken)
