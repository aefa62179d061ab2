"""What goes to the api, and what its events make of a canvas."""

from functools import reduce

import pytest

from shared.cli.canvas import Canvas, Cell
from shared.cli.exits import Exit, Stop
from shared.cli.http_fleet import after_chat, after_native, connected, refusal, request_of, server_of
from shared.cli.question import Question

VIEW = {"tokens": ["there", None], "confidence": [0.9, 0.0], "step": 1, "nfe": 3}
CELLS = (Cell("there", 0.9), Cell(None))


def delta(content: str | None = None, finish: str | None = None, **extra: object) -> dict[str, object]:
    choice: dict[str, object] = {"delta": {} if content is None else {"content": content}, "finish_reason": finish}
    return {"choices": [choice], **extra}


def test_a_chat_stream_becomes_committed_blocks_with_their_counts() -> None:
    stream = [
        delta("", usage={"completion_tokens": 0, "nfe": 0}),
        delta("Once upon ", usage={"completion_tokens": 4, "nfe": 2}),
        delta(diffusion=VIEW, usage={"completion_tokens": 4, "nfe": 2}),
    ]
    canvas = reduce(after_chat, stream, Canvas())
    assert canvas == Canvas(("Once upon ",), CELLS, step=1, nfe=3, tokens=4)
    end = [
        delta("there", usage={"completion_tokens": 6, "nfe": 4}),
        delta(finish="stop", usage={"completion_tokens": 6, "nfe": 4}) | {},
        {"choices": [], "usage": {"completion_tokens": 7, "nfe": 5}},
    ]
    canvas = reduce(after_chat, end, canvas)
    assert (canvas.text, canvas.tokens, canvas.nfe, canvas.finish) == ("Once upon there", 7, 5, "stop")


def test_a_native_stream_becomes_the_same() -> None:
    stream = [
        {"event": "append", "text": "Once upon ", "token_ids": [1, 2, 3, 4], "nfe": 2},
        {"event": "buffer_snapshot", **VIEW},
        {"event": "news of a later version"},
    ]
    assert reduce(after_native, stream, Canvas()) == Canvas(("Once upon ",), CELLS, step=1, nfe=3, tokens=4)
    end = {"event": "final", "finish_detail": "max_tokens", "usage": {"completion_tokens": 5}, "nfe": 4}
    assert after_native(Canvas(), end) == Canvas(nfe=4, tokens=5, finish="max_tokens")


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
async def test_the_base_url_of_an_openai_client_is_the_same_fleet(url: str) -> None:
    async with connected(url) as client:
        assert client.build_request("GET", "/v1/models").url == "http://h:1/v1/models"
    assert server_of("http://h:1/fleets/v1") == "http://h:1/fleets"


@pytest.mark.parametrize(
    ("kind", "code"), [("invalid_request_error", Exit.REFUSED), ("server_error", Exit.FAILED), (None, Exit.FAILED)]
)
def test_an_error_in_mid_stream_ends_the_command(kind: str | None, code: Exit) -> None:
    error = {"message": "it broke", "type": kind, "param": "seed"}
    for raised in (
        lambda: after_chat(Canvas(), {"error": error}),
        lambda: after_native(Canvas(), {"event": "error", "error": error}),
    ):
        with pytest.raises(Stop, match=r"it broke \(seed\)") as stop:
            raised()
        assert stop.value.exit_code is code


@pytest.mark.parametrize(("status", "code"), [(400, 4), (404, 4), (413, 4), (429, 1), (500, 1), (503, 1)])
def test_a_status_tells_a_refusal_from_a_failure(status: int, code: int) -> None:
    body = b'{"error": {"message": "no", "type": "x", "param": null}}'
    assert refusal(status, body).exit_code == code
    assert str(refusal(status, body)) == "no"


@pytest.mark.parametrize("body", [b"", b"<html>bad gateway</html>", b"[]", b'{"error": "text"}', b'{"detail": 1}'])
def test_an_error_that_is_not_ours_shows_its_status(body: bytes) -> None:
    assert "HTTP 502" in str(refusal(502, body))


def test_only_what_was_chosen_is_sent() -> None:
    path, body = request_of(Question("hi"), frames=False)
    assert path == "/v1/chat/completions"
    assert set(body) == {"messages", "stream", "stream_mode", "stream_options"}
    path, body = request_of(Question("hi", raw=True, threshold=0.0, seed=0), frames=True)
    assert path == "/generate"
    assert body == {
        "prompt": "hi",
        "seed": 0,
        "diffusion": {"threshold": 0.0},
        "stream": True,
        "stream_mode": "denoise",
    }


@pytest.mark.parametrize("key", ["df-secret", ""])
async def test_the_key_of_the_environment_is_shown_to_the_api(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("DIFFLEET_API_KEY", key)
    async with connected("http://127.0.0.1:1") as client:
        assert client.headers.get("Authorization") == (f"Bearer {key}" if key else None)
