"""A class as the form of an answer, by OpenAI's client."""

import sys

from openai import OpenAI
from pydantic import BaseModel

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"


class Person(BaseModel):
    name: str
    age: int
    city: str


client = OpenAI(base_url=f"{URL}/v1", api_key="none")
answer = client.chat.completions.parse(
    model="demo",
    messages=[{"role": "user", "content": "Extract name, age and city as JSON: Maria is 31 and lives in Lisbon."}],
    max_tokens=96,
    response_format=Person,
)
print(repr(answer.choices[0].message.parsed))
if answer.usage:
    print(f"{answer.usage.completion_tokens} tokens in {answer.usage.nfe} forwards")
