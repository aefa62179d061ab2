"""Chat with OpenAI's client; what only a diffusion model has goes into `extra_body`."""

import sys

from openai import OpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"

client = OpenAI(base_url=f"{URL}/v1", api_key="none")
stream = client.chat.completions.create(
    model="demo",
    messages=[{"role": "user", "content": "What is the capital of Japan?"}],
    max_tokens=32,
    stream=True,
    stream_options={"include_usage": True},
    extra_body={"diffusion": {"strategy": "threshold", "threshold": 0.8}},
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    if chunk.usage:
        print(f"\n{chunk.usage.completion_tokens} tokens in {chunk.usage.nfe} forwards")
