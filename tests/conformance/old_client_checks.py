"""C3, C5, C7, C16 and C36 by whatever openai client this interpreter has: `python old_client_checks.py BASE_URL MODEL`.

Stands alone, because it runs in environments that have nothing but that client. Prints one line for each check.
"""

import json
import sys
import time
import traceback

import openai
from openai import OpenAI

STORY = [{"role": "user", "content": "Tell me a story."}]


def c3(client, model):
    chunks = list(client.chat.completions.create(model=model, messages=STORY, stream=True, seed=1))
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert choices[0].delta.role == "assistant"
    assert all(choice.delta.role is None for choice in choices[1:])
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]


def c5(client, model):
    options = {"model": model, "messages": STORY, "seed": 1, "max_tokens": 40}
    chunks = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **options))
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage == client.chat.completions.create(**options).usage


def c7(client, model):
    options = {"model": model, "messages": STORY, "seed": 1, "n": 3, "temperature": 1.0, "max_tokens": 300}
    texts = [choice.message.content for choice in client.chat.completions.create(**options).choices]
    assert len(texts) == 3
    streams = getattr(client.chat.completions, "stream", None) or client.beta.chat.completions.stream
    with streams(**options) as helper:
        final = helper.get_final_completion()
    assert [choice.message.content for choice in final.choices] == texts


def c16(client, model):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    options = {"model": model, "messages": STORY, "tools": [tool], "tool_choice": "required", "seed": 1}
    whole = client.chat.completions.create(**options).choices[0]
    assert whole.finish_reason == "tool_calls"
    names, arguments = {}, {}
    for chunk in client.chat.completions.create(stream=True, **options):
        for call in chunk.choices[0].delta.tool_calls or []:
            if call.id:
                assert call.index not in names
                names[call.index] = call.function.name
            arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
    told = whole.message.tool_calls
    assert list(names.values()) == [call.function.name for call in told] == ["add"] * len(told)
    assert list(arguments.values()) == [call.function.arguments for call in told]
    assert all(isinstance(json.loads(text), dict) for text in arguments.values())


def c36(client, model):
    with client.responses.stream(model=model, input="Tell me a story.") as helper:
        numbers = [event.sequence_number for event in helper]
        assert helper.get_final_response().output_text
    assert numbers == sorted(numbers)
    tool = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": False}
    options = {
        "model": model,
        "input": "Add.",
        "tools": [tool],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    with client.responses.stream(**options) as helper:
        for _ in helper:
            pass
        (call,) = helper.get_final_response().output
    assert call.type == "function_call" and call.name == "add" and isinstance(json.loads(call.arguments), dict)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
    asked = [{"role": "user", "content": "Add."}, call.to_dict(), result]
    assert client.responses.create(model=model, input=asked, tools=[tool]).output_text
    background = client.responses.create(model=model, input="Tell me a story.", background=True)
    while background.status in ("queued", "in_progress"):
        time.sleep(0.1)
        background = client.responses.retrieve(background.id)
    assert background.status == "completed"
    rest = list(client.responses.retrieve(background.id, stream=True, starting_after=4))
    assert rest[0].sequence_number == 5 and rest[-1].type == "response.completed"


def main():
    url, model = sys.argv[1:]
    failed = 0
    with OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        for check in (c3, c5, c7, c16, c36):
            try:
                result = check(client, model) or "ok"
            except Exception:
                failed += 1
                result = "FAILED\n" + traceback.format_exc()
            print(f"openai {openai.__version__:8} {check.__name__.upper():4} {result}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
