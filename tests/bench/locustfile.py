# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUntypedBaseClass=false, reportUnknownArgumentType=false, reportUntypedFunctionDecorator=false
"""Chat streams for locust: the time to the first block, and to the end.

locust -f tests/bench/locustfile.py --headless -u 4 -r 4 -t 20s -H http://127.0.0.1:8000

Locust's own time of a streamed request is that of its headers, hence two entries of our own. `MODEL` and `MAX_TOKENS`
are taken from the environment.
"""

import itertools
import json
import os
import time

from locust import HttpUser, constant, task

QUESTIONS = itertools.cycle(
    ("What is 123 + 456?", "Tell me a story about a fox named Rusty.", "What is the capital of Japan?")
)


class Chat(HttpUser):
    wait_time = constant(0)

    @task
    def ask(self) -> None:
        body = {
            "model": os.environ.get("MODEL", "demo"),
            "messages": [{"role": "user", "content": next(QUESTIONS)}],
            "max_tokens": int(os.environ.get("MAX_TOKENS", "64")),
            "stream": True,
        }
        began, first, ended = time.perf_counter(), None, False
        with self.client.post("/v1/chat/completions", json=body, stream=True, catch_response=True) as response:
            for line in response.iter_lines():
                data = line.removeprefix(b"data: ")
                if data == line:
                    continue
                if data == b"[DONE]":
                    ended = True
                    break
                chunk = json.loads(data)
                if first is None and any(choice["delta"].get("content") for choice in chunk.get("choices", ())):
                    first = time.perf_counter()
            if not ended or first is None:
                response.failure("the stream did not end well")
                return
        for name, at in (("first block", first), ("whole answer", time.perf_counter())):
            self.environment.events.request.fire(
                request_type="STREAM", name=name, response_time=1000 * (at - began), response_length=0, exception=None
            )
