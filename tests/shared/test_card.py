import dataclasses

import pytest

from shared.card import InvalidCard, ModelCard, pack, unpack

CARD = ModelCard(
    name="org/demo",
    family="sdar",
    max_model_len=2048,
    block_length=16,
    fixed_block_length=False,
    decoding={"strategy": "threshold", "threshold": 0.9},
    temperature=0.0,
    capabilities=("chat",),
    stop_token_ids=(1, 2),
    mask_token_id=3,
    vocab_size=100,
    files={"tokenizer.json": b"{}" * 1000, "tokenizer_config.json": b""},
)


def test_a_card_survives_the_wire_with_text_or_bytes_as_names() -> None:
    fields = pack(CARD)
    assert unpack(fields) == CARD
    assert unpack({name.encode(): value for name, value in fields.items()}) == CARD


def test_files_travel_compressed() -> None:
    assert len(pack(CARD)["file:tokenizer.json"]) < 100


@pytest.mark.parametrize(
    "change",
    [{"name": "other"}, {"temperature": 0.5}, {"files": {"tokenizer.json": b"{ }"}}, {"files": {}}],
)
def test_the_digest_tells_contents_apart(change: dict[str, object]) -> None:
    assert dataclasses.replace(CARD, digest="", **change).digest != CARD.digest  # type: ignore[arg-type]
    assert dataclasses.replace(CARD, digest="").digest == CARD.digest


def test_fields_of_newer_writers_are_ignored() -> None:
    fields = pack(CARD)
    fields["meta"] = fields["meta"].replace(b"{", b'{"later": 1, ', 1)
    assert unpack(fields | {"later": b"?"}) == CARD


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"v": b"9"}, "version '9'"),
        ({"meta": b"{"}, "JSON"),
        ({"meta": b"{}"}, "name"),
        ({"file:tokenizer.json": b"plain"}, "damaged"),
        ({"digest": b"\xff"}, "damaged"),
    ],
)
def test_a_damaged_card_is_refused_with_its_fault(change: dict[str, bytes], complaint: str) -> None:
    with pytest.raises(InvalidCard, match=complaint):
        unpack(pack(CARD) | change)


def test_an_incomplete_card_names_what_it_lacks() -> None:
    with pytest.raises(InvalidCard, match="digest"):
        unpack({"v": b"1"})
