import io
import logging
from collections.abc import Iterator

import pytest

from shared.telemetry import configure_logging
from tests.api.scripted import Caller

SECRET = "xyzzy-secret-prompt"
DEEP = b"[" * 5000 + b"]" * 5000
BODIES: list[bytes] = [
    b"",
    b"\x00",
    b"{" * 5000,
    DEEP,
    b'{"prompt": ' + DEEP + b"}",
    b'{"messages": ' + b"[" * 900 + b"]" * 900 + b"}",
    b'{"prompt": "xyzzy-secret-prompt',
    b'{"prompt": "xyzzy-secret-prompt", "max_tokens": "xyzzy-secret-prompt"}',
    b'{"prompt": "xyzzy-secret-prompt", "stop": {"xyzzy-secret-prompt": 1}}',
    b'{"prompt": "xyzzy-secret-prompt", "diffusion": {"xyzzy-secret-prompt": 1}}',
    b'{"prompt": "xyzzy-secret-prompt \\u0000 \\ufffe \\uffff"}',
    b'{"prompt": "xyzzy-secret-prompt \\ud83d"}',
    b'{"prompt": "xyzzy-secret-prompt <|MASK|><|im_start|><|endoftext|>"}',
    b'{"prompt": {"xyzzy-secret-prompt": []}}',
    b'{"prompt": [1e400]}',
    b'{"prompt": [9223372036854775808]}',
    b'{"prompt": [-9223372036854775809]}',
    b'{"prompt": [NaN]}',
    b'{"prompt": "xyzzy-secret-prompt", "temperature": 1e308, "seed": 18446744073709551615}',
    b'{"prompt": "xyzzy-secret-prompt", "temperature": -0.0}',
    b'{"prompt": "xyzzy-secret-prompt", "max_nfe": 9223372036854775807}',
    b'{"prompt": "xyzzy-secret-prompt", "max_repetition_run": 9223372036854775807, "top_k": 9223372036854775807}',
    b'{"prompt": "xyzzy-secret-prompt", "model": "xyzzy-secret-prompt\\u0000"}',
    b'{"prompt": "xyzzy-secret-prompt", "model": ""}',
    b'{"prompt": "xyzzy-secret-prompt", "user": "\\n\\nxyzzy-secret-prompt"}',
    b'{"prompt": "xyzzy-secret-prompt", "stream": true, "stream_mode": "xyzzy-secret-prompt"}',
    b'{"prompt": "xyzzy-secret-prompt", "__class__": {}, "constructor": {"prototype": {}}}',
    b'{"prompt": "' + b"a" * 300_000 + b'"}',
    b'{"prompt": "' + "🎉".encode() * 60_000 + b'"}',
    b'{"prompt": "' + b"<|im_start|>" * 10_000 + b'"}',
    b'{"prompt": [' + b"5," * 400_000 + b"5]}",
    b'{"messages": [' + b'{"role":"user","content":"x"},' * 20_000 + b'{"role":"user","content":"x"}]}',
    b'{"messages": [{"role": "user", "content": "{{ 1/0 }}{% for %} xyzzy-secret-prompt"}]}',
    b'{"messages": [{"role": "user", "content": [{"type": "text", "text": ["xyzzy-secret-prompt"]}]}]}',
    b'{"messages": [{"role": "xyzzy-secret-prompt", "content": "x"}]}',
    b'{"messages": {"role": "user"}}',
    b'{"messages": [[{"role": "user"}]]}',
    b'{"messages": [{"role": "user", "content": "' + b"<|im_end|>" * 5_000 + b'"}]}',
    b'{"messages": [{"role": "user", "content": "x"}], "stop": ["' + b"a" * 900_000 + b'"]}',
    b'{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"a": {"b": 1}}}',
]


TOOL = b'{"type":"function","name":"f","parameters":{"type":"object"}}'
RESPONSES: list[bytes] = [
    b'"input": [' + b'{"role":"user","content":"xyzzy-secret-prompt"},' * 20_000 + b'{"role":"user","content":"x"}]',
    b'"input": ['
    + b'{"type":"function_call","call_id":"c","name":"f","arguments":"{}"},' * 14_000
    + b'{"role":"user"}]',
    b'"input": [{"type":"function_call","call_id":"c","name":"xyzzy-secret-prompt","arguments":"' + DEEP + b'"}]',
    b'"input": [{"type":"function_call","call_id":"c","name":"f","arguments":"' + b"[" * 900_000 + b'"}]',
    b'"input": [{"type":"function_call_output","call_id":"c","output":["' + b'","' * 200_000 + b'"]}]',
    b'"input": [{"type":"function_call_output","call_id":{"xyzzy-secret-prompt":1},"output":"x"}]',
    b'"input": [{"type":["xyzzy-secret-prompt"]}]',
    b'"input": "x", "tools": [' + (TOOL + b",") * 14_000 + TOOL + b"]",
    b'"input": "x", "tools": [{"type":"function","name":"' + b"f" * 900_000 + b'"}]',
    b'"input": "x", "tools": [{"type":"function","name":"f","parameters":'
    + b'{"items":' * 200
    + b"{}"
    + b"}" * 201
    + b"]",
    b'"input": "x", "tools": [{"type":"function","name":"f","parameters":{"enum":[' + b'"a",' * 200_000 + b'"b"]}}]',
    b'"input": "x", "tools": [{"type":"function","name":"f","parameters":{"$ref":"#"}}]',
    b'"input": "x", "tools": ['
    + TOOL
    + b'], "tool_choice": {"xyzzy-secret-prompt": '
    + b'{"a":' * 900
    + b"1"
    + b"}" * 901,
    b'"input": "x", "tools": ['
    + TOOL
    + b'], "tool_choice": {"type":"allowed_tools","mode":"auto","tools":['
    + b"[]," * 300_000
    + b"[]]}",
    b'"input": "x", "include": ["xyzzy-secret-prompt"]',
    b'"input": "x", "include": [' + b'"a",' * 200_000 + b'"b"]',
    b'"input": "x", "top_logprobs": 1e400',
    b'"input": "x", "text": {"format": {"type": "json_schema", "schema": {"pattern": "' + b"(a|" * 9000 + b'"}}}',
    b'"input": "x", "previous_response_id": ["xyzzy-secret-prompt"]',
]
EMBEDDINGS: list[bytes] = [
    b'"input": [' + b'"xyzzy-secret-prompt",' * 40_000 + b'"x"]',
    b'"input": [' + b"[5]," * 200_000 + b"[5]]",
    b'"input": "x", "dimensions": 1e400',
]


@pytest.fixture
def log_lines() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    # pytest's own handlers stay out of the way; the configured one is put back below.
    root.handlers = []
    stream = io.StringIO()
    configure_logging("debug", "json", stream)
    yield stream
    root.handlers, root.level = handlers, level


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: repr(body[:40]))
async def test_no_body_breaks_the_front_or_gets_into_its_log(
    caller: Caller, log_lines: io.StringIO, path: str, body: bytes
) -> None:
    response = await caller.post(path, body)

    assert response.status in (200, 400, 404, 413)
    if response.status != 200:
        assert response.error["message"]
        assert "Traceback" not in response.body.decode()
    assert log_lines.getvalue().count("request finished") == 1
    assert SECRET not in log_lines.getvalue()
    assert (await caller.post("/generate", {"prompt": "still here"})).status == 200


@pytest.mark.parametrize(
    ("path", "fields"),
    [("/v1/responses", fields) for fields in RESPONSES]
    + [("/v1/embeddings", fields) for fields in EMBEDDINGS]
    + [(path, b'"messages": [{"role": "user", "content": "x"}], "prompt": "x", "logprobs": [' + b"1," * 400_000 + b"1]")
       for path in ("/generate", "/v1/chat/completions", "/v1/completions")],
    ids=lambda part: repr(part[:60]),
)  # fmt: skip
async def test_no_field_of_a_body_breaks_the_front_or_gets_into_its_log(
    caller: Caller, log_lines: io.StringIO, path: str, fields: bytes
) -> None:
    await test_no_body_breaks_the_front_or_gets_into_its_log(
        caller, log_lines, path, b'{"store": false, ' + fields + b"}"
    )
