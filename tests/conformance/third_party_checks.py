# pyright: reportMissingImports=false
"""Smoke of one client library against a server: `python third_party_checks.py NAME BASE_URL MODEL`.

Stands alone, because each library has an environment of its own. Prints one line.
"""

import asyncio
import importlib.metadata
import json
import sys

QUESTION = "What is 12 + 30?"
SCHEMA = {
    "title": "Answer",
    "type": "object",
    "properties": {"value": {"type": "integer"}},
    "required": ["value"],
    "additionalProperties": False,
}
_NUMBERS = {"a": {"type": "integer"}, "b": {"type": "integer"}}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": _NUMBERS, "required": ["a", "b"]},
    },
}


def ollama(url, model):
    import ollama as library

    client = library.Client(host=url.removesuffix("/v1"))
    assert model in [entry.model for entry in client.list().models]
    assert "completion" in client.show(model).capabilities
    messages = [{"role": "user", "content": QUESTION}]
    options = {"seed": 1, "num_predict": 32}
    whole = client.chat(model=model, messages=messages, options=options)
    assert whole.done and whole.message.content and whole.eval_count
    parts = list(client.chat(model=model, messages=messages, options=options, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert client.generate(model=model, prompt=QUESTION, options=options).response == whole.message.content
    assert client.generate(model=model, prompt="Once", suffix=" the end.", options=options).response
    try:
        client.chat(model="nobody", messages=messages)
    except library.ResponseError as error:
        assert error.status_code == 404 and "nobody" in error.error
    else:
        raise AssertionError("an unknown model is an error")


def litellm(url, model):
    import litellm as library

    options = {"model": f"openai/{model}", "api_base": url, "api_key": "none"}
    messages = [{"role": "user", "content": QUESTION}]
    whole = library.completion(messages=messages, seed=1, **options)
    assert whole.choices[0].message.content
    chunks = list(library.completion(messages=messages, seed=1, stream=True, **options))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    called = library.completion(messages=messages, seed=1, tools=[TOOL], tool_choice="required", **options)
    (call,) = called.choices[0].message.tool_calls
    assert call.function.name == "add" and set(json.loads(call.function.arguments)) == {"a", "b"}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    told = library.completion(messages=messages, seed=1, response_format=form, **options)
    assert isinstance(json.loads(told.choices[0].message.content)["value"], int)


def langchain(url, model):
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model=model, base_url=url, api_key="none", seed=1)
    whole = chat.invoke(QUESTION)
    assert whole.content and whole.usage_metadata["output_tokens"]
    assert "".join(part.content for part in chat.stream(QUESTION)) == whole.content
    for method in ("json_schema", "function_calling"):
        told = chat.with_structured_output(SCHEMA, method=method).invoke(QUESTION)
        assert isinstance(told["value"], int)
    tools = chat.bind_tools([TOOL], tool_choice="add")
    (call,) = tools.invoke(QUESTION).tool_calls
    assert call["name"] == "add" and set(call["args"]) == {"a", "b"}
    parts = list(tools.stream(QUESTION))
    joined = parts[0]
    for part in parts[1:]:
        joined = joined + part
    assert joined.tool_calls[0]["args"] == call["args"]


def instructor(url, model):
    import instructor as library
    import openai
    from pydantic import BaseModel

    class Answer(BaseModel):
        value: int

    for mode in (library.Mode.JSON_SCHEMA, library.Mode.TOOLS):
        client = library.from_openai(openai.OpenAI(base_url=url, api_key="none"), mode=mode)
        messages = [{"role": "user", "content": QUESTION}]
        answer = client.chat.completions.create(model=model, response_model=Answer, messages=messages, max_retries=1)
        assert isinstance(answer.value, int)


def pydantic_ai(url, model):
    from pydantic import BaseModel
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    chat = OpenAIChatModel(model, provider=OpenAIProvider(base_url=url, api_key="none"))
    agent = Agent(chat)
    assert agent.run_sync(QUESTION).output

    class Answer(BaseModel):
        value: int

    for kind in (ToolOutput(Answer), NativeOutput(Answer)):
        assert isinstance(Agent(chat, output_type=kind).run_sync(QUESTION).output.value, int)

    async def streamed():
        async with agent.run_stream(QUESTION) as run:
            return await run.get_output()

    assert asyncio.run(streamed())


def openai_agents(url, model):
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI
    from pydantic import BaseModel

    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=url, api_key="none")
    sums = []

    class Sum(BaseModel):
        total: int

    @function_tool
    def add(first: int, second: int) -> int:
        """Add two numbers."""
        sums.append(first + second)
        return first + second

    async def with_tool_and_type(chat):
        calling = ModelSettings(tool_choice="required", parallel_tool_calls=False)
        agent = Agent(name="a", model=chat, tools=[add], model_settings=calling)
        for streamed in (False, True):
            before = len(sums)
            run = Runner.run_streamed(agent, QUESTION) if streamed else await Runner.run(agent, QUESTION)
            if streamed:
                async for _ in run.stream_events():
                    pass
            assert len(sums) > before and run.final_output
        told = await Runner.run(Agent(name="a", model=chat, output_type=Sum), QUESTION)
        assert isinstance(told.final_output.total, int)

    async def both():
        for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
            agent = Agent(name="a", instructions="Be brief.", model=kind(model=model, openai_client=client))
            assert (await Runner.run(agent, QUESTION)).final_output
            run = Runner.run_streamed(agent, QUESTION)
            async for _ in run.stream_events():
                pass
            assert run.final_output
            await with_tool_and_type(agent.model)

    asyncio.run(both())


def llama_index(url, model):
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike
    from pydantic import BaseModel

    chat = OpenAILike(model=model, api_base=url, api_key="none", is_chat_model=True, context_window=1024)
    assert chat.complete(QUESTION).text
    assert "".join(part.delta or "" for part in chat.stream_complete(QUESTION))
    raw = OpenAILike(model=model, api_base=url, api_key="none", is_chat_model=False, context_window=1024)
    assert raw.complete("1 2 3 4").text is not None

    class Answer(BaseModel):
        value: int

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    options = {"is_function_calling_model": True, "context_window": 1024}
    caller = OpenAILike(model=model, api_base=url, api_key="none", is_chat_model=True, **options)
    reply = caller.chat_with_tools([FunctionTool.from_defaults(add)], user_msg=QUESTION, tool_required=True)
    (call,) = caller.get_tool_calls_from_response(reply)
    assert call.tool_name == "add" and set(call.tool_kwargs) == {"a", "b"}
    assert isinstance(caller.as_structured_llm(Answer).complete(QUESTION).raw.value, int)


PACKAGES = {
    "litellm": (litellm, "litellm"),
    "langchain": (langchain, "langchain-openai"),
    "instructor": (instructor, "instructor"),
    "pydantic-ai": (pydantic_ai, "pydantic-ai-slim"),
    "openai-agents": (openai_agents, "openai-agents"),
    "llama-index": (llama_index, "llama-index-llms-openai-like"),
    "ollama": (ollama, "ollama"),
}


def main():
    name, url, model = sys.argv[1:]
    check, package = PACKAGES[name]
    result = check(url + "/v1", model) or "ok"
    print(f"{package} {importlib.metadata.version(package)}: {result}")


if __name__ == "__main__":
    main()
