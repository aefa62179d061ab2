"""C40 to C46: what only diffusion has, what is hostile, and the wire."""

import gzip
import http.client
import json
from itertools import pairwise
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.api.test_hostile import BODIES
from tests.conformance.fleet import MODEL, LiveFleet

ASK: Any = [{"role": "user", "content": "What is 12 + 30?"}]
STORY: Any = [{"role": "user", "content": "Tell me a story."}]
CHAT = "/v1/chat/completions"


def test_c40_frames_disturb_no_client_and_replay_to_the_final_canvas(client: OpenAI, http: httpx.Client) -> None:
    # One position a step, so that there is something to see; the loaded reader may still miss most of it.
    sequential = {"strategy": "sequential"}
    options: Any = {"model": MODEL, "messages": STORY, "seed": 1, "max_tokens": 300}
    framed = {"diffusion": sequential | {"stream": "frames", "frame_interval_ms": 0, "frame_detail": "full"}}
    plain = client.chat.completions.create(extra_body={"diffusion": sequential}, **options).choices[0].message.content
    with client.chat.completions.stream(extra_body=framed, **options) as helper:
        assert helper.get_final_completion().choices[0].message.content == plain
    chunks, frames = [], []
    for _ in range(20):
        chunks = list(client.chat.completions.create(stream=True, extra_body=framed, **options))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == plain
        frames: list[Any] = [chunk.diffusion for chunk in chunks if hasattr(chunk, "diffusion")]  # pyright: ignore
        if any(frame["step"] is not None for frame in frames):
            break
    assert [frame["seq"] for frame in frames] == list(range(len(frames)))
    assert any(frame["step"] is not None for frame in frames)
    for chunk in chunks:
        frame: Any = getattr(chunk, "diffusion", None)
        if frame and frame["step"] is not None:
            assert chunk.choices[0].delta.content is None, "a frame of the canvas carries no text"
    canvas: dict[int, Any] = {}
    committed: dict[int, int] = {}
    for frame in frames:
        for position, token, _, state, confidence in frame["edits"]:
            assert 0.0 <= confidence <= 1.0
            assert position not in committed, "what is committed stays"
            canvas[position] = token
            if state == "committed":
                committed[position] = token
        if frame["full"] and frame["step"] is not None:
            assert {edit[0] for edit in frame["edits"]} == set(
                range(frame["offset"], frame["offset"] + len(frame["edits"]))
            )
    body = {"model": MODEL, "prompt": None, "seed": 1}
    ids = http.post("/tokenize", json={"model": MODEL, "messages": STORY}).json()["tokens"]
    final = http.post("/generate", json=body | {"prompt": ids, "max_tokens": 300, "diffusion": sequential}).json()
    assert [committed[position] for position in sorted(committed)] == final["token_ids"]
    assert all(canvas[position] == token for position, token in committed.items())


def test_c40_less_detail_and_mercurys_way(client: OpenAI, http: httpx.Client) -> None:
    options: Any = {"model": MODEL, "messages": STORY, "seed": 1, "max_tokens": 300}
    plain = client.chat.completions.create(**options).choices[0].message.content or ""
    texts = {"diffusion": {"stream": "frames", "frame_interval_ms": 0, "frame_detail": "text"}}
    for chunk in client.chat.completions.create(stream=True, extra_body=texts, **options):
        frame: Any = getattr(chunk, "diffusion", {})
        assert "edits" not in frame
    for asked in ({"diffusing": True}, {"diffusion": {"stream": "replace", "frame_interval_ms": 0}}):
        chunks = list(client.chat.completions.create(stream=True, extra_body=asked, **options))
        said = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]
        assert said[-1] == plain
        assert all(len(after) > 0 for _, after in pairwise(said))
    ids = {"model": MODEL, "input": "Tell me a story.", "stream": True, "diffusion": {"stream": "frames"}}
    events = list(client.responses.create(model=MODEL, input="Tell me a story.", stream=True, extra_body=ids))
    kept = [event for event in events if event.type != "response.diffusion.frame"]
    assert [event.sequence_number for event in kept] == list(range(len(kept)))
    with client.responses.stream(model=MODEL, input="Tell me a story.", extra_body=texts) as helper:
        assert helper.get_final_response().output_text


def test_c41_a_template_is_filled(client: OpenAI, http: httpx.Client) -> None:
    template = [
        "Name:\r\n ",
        {"hole": "name", "max_tokens": 4},
        "!  é🎉\u200d ",
        {"hole": "rest", "max_tokens": 7},
        "\tend",
    ]
    options = {"diffusion": {"template": template, "report": True}}
    for path, body in (("/v1/completions", {"prompt": "x"}), (CHAT, {"messages": ASK})):
        answer = http.post(path, json={"model": MODEL, "seed": 1} | body | options).json()
        (choice,) = answer["choices"]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        holes = choice["diffusion"]["holes"]
        assert text == "Name:\r\n " + holes["name"] + "!  é🎉\u200d " + holes["rest"] + "\tend"
        assert choice["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] <= 11 and answer["usage"]["nfe"] <= 11
        assert all(
            len(http.post("/tokenize", json={"model": MODEL, "prompt": hole}).json()["tokens"]) <= 7
            for hole in holes.values()
        )
    with client.chat.completions.stream(model=MODEL, messages=ASK, seed=1, extra_body=options) as helper:
        assert helper.get_final_completion().choices[0].message.content == text
    fim = {"model": MODEL, "prompt": "Once upon a time", "suffix": " the end.", "max_tokens": 8, "seed": 1}
    answers = [http.post(path, json=fim).json()["choices"] for path in ("/v1/completions", "/v1/fim/completions")]
    assert answers[0] == answers[1] and answers[0][0]["text"]


def test_c42_a_prediction_seeds_the_canvas(client: OpenAI, http: httpx.Client) -> None:
    options: Any = {"model": MODEL, "messages": STORY, "seed": 1, "temperature": 0.0, "max_tokens": 90}
    plain = client.chat.completions.create(**options)
    text = plain.choices[0].message.content or ""
    tokens = len(http.post("/tokenize", json={"model": MODEL, "prompt": text}).json()["tokens"])
    draft: Any = {"type": "content", "content": text}
    own = client.chat.completions.create(prediction=draft, **options)
    assert own.usage and (details := own.usage.completion_tokens_details)
    accepted, rejected = details.accepted_prediction_tokens, details.rejected_prediction_tokens
    assert accepted is not None and rejected is not None and accepted + rejected == tokens
    assert accepted > tokens // 2
    assert (own.usage.nfe or 0) < (plain.usage.nfe or 0), "a right draft saves forwards"  # type: ignore[union-attr]
    # Unchanged spans are identical: what a draft of another beginning shares with the answer is counted, no more.
    parts: Any = {
        "type": "content",
        "content": [{"type": "text", "text": "12 + 30 "}, {"type": "text", "text": "= 43"}],
    }
    sum_ = client.chat.completions.create(model=MODEL, messages=ASK, temperature=0.0, prediction=parts)
    assert (sum_.choices[0].message.content or "").startswith("12 + 30 = ")
    assert sum_.usage and (details := sum_.usage.completion_tokens_details)
    assert details.accepted_prediction_tokens and details.rejected_prediction_tokens is not None
    streamed = list(
        client.chat.completions.create(stream=True, stream_options={"include_usage": True}, prediction=draft, **options)
    )
    assert streamed[-1].usage and streamed[-1].usage.completion_tokens_details == own.usage.completion_tokens_details


def test_c43_more_steps_never_take_fewer_forwards_and_a_cap_holds(http: httpx.Client) -> None:
    def ask(**options: Any) -> Any:
        body = {"model": MODEL, "messages": STORY, "seed": 1, "max_tokens": 64, "ignore_eos": True, **options}
        response = http.post(CHAT, json=body)
        assert response.status_code == 200
        return response.json()

    forwards = [
        ask(diffusion={"remasking": "low_confidence", "steps": steps})["usage"]["nfe"] for steps in (1, 2, 4, 8, 16)
    ]
    assert forwards == sorted(forwards) and forwards[0] < forwards[-1]
    capped = ask(diffusion={"max_nfe": 5, "report": True})
    assert capped["usage"]["nfe"] <= 5
    assert capped["diffusion"][0]["forwards"] == capped["usage"]["nfe"]
    presets = [ask(diffusion={"preset": preset})["usage"]["nfe"] for preset in ("fast", "balanced", "quality")]
    assert presets == sorted(presets)


def test_c43_a_deadline_is_kept_with_what_there_is(http: httpx.Client) -> None:
    body = {"model": MODEL, "messages": STORY, "max_tokens": 900, "ignore_eos": True, "seed": 1}
    ended = http.post(CHAT, json=body | {"diffusion": {"deadline_ms": 1}}).json()
    (choice,) = ended["choices"]
    assert (choice["finish_reason"], choice["finish_detail"]) == ("length", "deadline")
    # Its time is up before a worker has it: the forwards until the worker's next look at the clock, two on a quiet
    # machine, where all 900 tokens take hundreds.
    assert choice["diffusion"] == {"truncated_by": "deadline", "forwards": ended["usage"]["nfe"]}
    assert ended["usage"]["nfe"] <= 20 and 0 < ended["usage"]["completion_tokens"] <= 200
    early = {"diffusion": {"deadline_ms": 60_000}, "max_tokens": 8}
    assert "diffusion" not in http.post(CHAT, json=body | early).json()["choices"][0]
    body |= {"stream": True, "diffusion": {"max_nfe": 3}}
    last = [
        json.loads(line[6:]) for line in http.post(CHAT, json=body).text.split("\n\n") if line.startswith("data: {")
    ]
    assert last[-1]["choices"][0]["diffusion"] == {"truncated_by": "max_nfe", "forwards": 3}


def test_guidance_costs_nothing_but_forwards_and_is_reproducible(http: httpx.Client) -> None:
    def ask(scale: float) -> Any:
        body = {"model": MODEL, "messages": ASK, "temperature": 0, "diffusion": {"cfg_scale": scale}}
        response = http.post(CHAT, json=body)
        assert response.status_code == 200
        return response.json()["choices"][0]["message"]["content"]

    assert (
        ask(0.0)
        == http.post(CHAT, json={"model": MODEL, "messages": ASK, "temperature": 0}).json()["choices"][0]["message"][
            "content"
        ]
    )
    assert ask(1.5) == ask(1.5)


def test_a_prompt_that_was_written_before_is_counted_as_cached(http: httpx.Client) -> None:
    prompt = "Once upon a time there was a rabbit who counted every prompt that came along the road. " * 4
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "seed": 1}

    def cached(**options: Any) -> int:
        return http.post("/v1/completions", json=body | options).json()["usage"]["prompt_tokens_details"][
            "cached_tokens"
        ]

    assert cached() == 0
    assert cached() >= 32
    assert cached(cache_prompt=False) == 0
    assert "diffleet_cached_prompt_tokens_total" in http.get("/metrics").text


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tresholt": 0.5}, "diffusion.tresholt"),
        ({"threshold": 1.5}, "diffusion.threshold"),
        ({"threshold": -0.1}, "diffusion.threshold"),
        ({"cfg_scale": -1.5}, "diffusion.cfg_scale"),
        ({"deadline_ms": 0}, "diffusion.deadline_ms"),
        ({"canvas_length": 128}, "diffusion.canvas_length"),
        ({"preset": "warp"}, "diffusion.preset"),
        ({"stream": "all"}, "diffusion.stream"),
        ({"strategy": "threshold", "steps": 4}, "diffusion.steps"),
        ({"block_length": 0}, "diffusion.block_length"),
        ({"frame_interval_ms": -1}, "diffusion.frame_interval_ms"),
    ],
)
def test_c44_what_cannot_be_done_is_a_400_that_names_it(http: httpx.Client, options: Any, param: str) -> None:
    for path, body in ((CHAT, {"messages": ASK}), ("/v1/completions", {"prompt": "x"}), ("/generate", {"prompt": "x"})):
        response = http.post(path, json={"model": MODEL, "diffusion": options} | body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_c45_no_body_ends_a_worker(http: httpx.Client, fleet: LiveFleet) -> None:
    paths = (CHAT, "/v1/completions", "/v1/responses", "/v1/batches", "/tokenize", "/detokenize", "/generate")
    headers = {"content-type": "application/json"}
    named = [body.replace(b"{", b'{"model": "%s", "max_tokens": 2, ' % MODEL.encode(), 1) for body in BODIES]
    for path in paths:
        for body in [*BODIES, *named]:
            response = http.post(path, content=body, headers=headers)
            assert response.status_code in (200, 400, 404, 413), (path, body[:60], response.text[:200])
    huge = {"model": MODEL, "messages": ASK, "n": 10**12}
    assert http.post(CHAT, json=huge).status_code == 400
    for token in (-1, 4096, 2**31, 2**63, 10**30):
        assert http.post("/v1/completions", json={"model": MODEL, "prompt": [token]}).status_code == 400
    assert fleet.worker.alive
    assert http.post(CHAT, json={"model": MODEL, "messages": ASK}).status_code == 200
    assert "xyzzy-secret-prompt" not in fleet.logs + fleet.worker.log.read_text()


def test_c46_connections_are_kept_and_paths_are_forgiving(base: str) -> None:
    host = base.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=30)
    connection.connect()
    port = connection.sock.getsockname()[1]
    body = json.dumps({"model": MODEL, "messages": ASK, "stream": True, "max_tokens": 4})
    for path in (CHAT, CHAT + "/"):
        connection.request("POST", path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200
        assert response.read().endswith(b"data: [DONE]\n\n")
        assert connection.sock.getsockname()[1] == port, "the connection is used again"
    for method, path, status in (
        ("HEAD", "/health", 200),
        ("HEAD", "/ping", 200),
        ("GET", "/v1/models/", 200),
        ("GET", "/load", 200),
    ):
        connection.request(method, path)
        response = connection.getresponse()
        response.read()
        assert response.status == status
    packed = {"content-type": "application/json", "content-encoding": "gzip"}
    connection.request("POST", CHAT, gzip.compress(body.encode()), packed)
    response = connection.getresponse()
    assert response.status == 415 and b'"error"' in response.read()
    connection.close()
