"""Structured output on the bundled model: valid texts, and tokens per step beside unconstrained decoding.

    python -m tests.bench.structured --model demo-nano --seeds 200

Figures are counts, so a busy machine does not change them.
"""

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jsonschema

from shared.commands import Generate, Limits, Sampling
from shared.constraints import Constraint, JsonSchema
from shared.decoding import Decoding
from shared.events import Delta, Failed, Finished
from shared.keys import new_request_id
from worker.assembly import Assembly, assemble
from worker.engine.ports import Arrival, Inbox
from worker.settings import WorkerSettings

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "home": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "street": {"type": "string"}},
            "required": ["city", "street"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "home"],
    "additionalProperties": False,
}
_RECURSIVE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["value", "children"],
            "additionalProperties": False,
        }
    },
}

_KNOWN = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
"""What the bundled model has learned to write."""

SCHEMAS: Mapping[str, dict[str, Any]] = {
    "nested object": _PERSON,
    "enum": {
        "type": "object",
        "properties": {
            "color": {"enum": ["red", "green", "blue", "dark green"]},
            "size": {"enum": [1, 2, 3, None]},
        },
        "required": ["color", "size"],
        "additionalProperties": False,
    },
    "array": {
        "type": "object",
        "properties": {"words": {"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 6}},
        "required": ["words"],
        "additionalProperties": False,
    },
    "regex": {
        "type": "object",
        "properties": {
            "date": {"type": "string", "pattern": "^[0-9]{4}-(0[1-9]|1[0-2])-[0-3][0-9]$"},
            "phone": {"type": "string", "pattern": "^[0-9]{3}-[0-9]{4}$"},
        },
        "required": ["date", "phone"],
        "additionalProperties": False,
    },
    "recursive": _RECURSIVE,
    "flat, learned": _KNOWN,
}
"""The five kinds that are asked for, and one whose question the bundled model knows."""
QUESTIONS: Mapping[str, str] = {
    "nested object": "Extract name, age and home as JSON: Maria is 31 years old and lives in Lisbon, in Long Street.",
    "enum": "Return color and size as JSON. The car is blue, of size 2.",
    "array": "Give me a JSON object with words. Some words are apple, river, stone.",
    "regex": "Extract date and phone as JSON: On 2024-05-17 Tom could be reached at 555-1234.",
    "flat, learned": "Extract name, age and city as JSON: Maria is 31 years old and lives in Lisbon.",
    "recursive": "Write a tree as JSON with the keys value and children.",
}


@dataclass(slots=True)
class Tally:
    requests: int = 0
    whole: int = 0
    """Ended by themselves."""
    valid: int = 0
    """Of the whole ones: the schema accepts them."""
    cut: int = 0
    """Ended by their length."""
    tokens: int = 0
    forwards: int = 0
    faults: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, slots=True)
class Answer:
    id: str
    text: str
    end: Finished | Failed


def run(assembly: Assembly, requests: Sequence[Generate]) -> Iterator[Answer]:
    """Decode all in one batch after another; yields the answers as they end."""
    texts = {request.id: "" for request in requests}
    inbox = Inbox(arrivals=[Arrival(request, epoch=1) for request in requests])
    while True:
        outbox = assembly.engine.step(inbox)
        inbox = Inbox()
        for event in outbox.events:
            match event:
                case Delta():
                    texts[event.id] += event.text
                case Finished() | Failed():
                    yield Answer(event.id, texts[event.id], event)
                case _:
                    pass
        if assembly.engine.idle:
            return


def ask(
    assembly: Assembly,
    question: str,
    seed: int,
    constraint: Constraint | None,
    *,
    temperature: float = 1.0,
    max_tokens: int = 128,
    decoding: Decoding | None = None,
) -> Generate:
    prompt = assembly.tokenizer.encode_chat([{"role": "user", "content": question}])
    return Generate(
        id=new_request_id("local"),
        model="local",
        prompt=tuple(prompt),
        sampling=Sampling(temperature=temperature, seed=seed),
        limits=Limits(max_tokens=max_tokens),
        decoding=decoding,
        constraint=constraint,
    )


def tally(answers: Iterator[Answer], schema: Mapping[str, Any] | None) -> Tally:
    """Count; `schema` None takes every text that ended by itself for valid."""
    found = Tally()
    for answer in answers:
        found.requests += 1
        if isinstance(answer.end, Failed):
            found.faults.append(answer.end.message)
            continue
        found.tokens += answer.end.usage.completion_tokens
        found.forwards += answer.end.usage.nfe
        if answer.end.reason != "stop":
            found.cut += 1
            continue
        found.whole += 1
        try:
            value = json.loads(answer.text)
            if schema is not None:
                jsonschema.validate(value, schema)
            found.valid += 1
        except (ValueError, jsonschema.ValidationError) as error:
            if schema is not None:
                found.faults.append(f"{type(error).__name__}: {answer.text[:200]}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo-nano")
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=128)
    options = parser.parse_args()
    assembly = assemble(WorkerSettings(model=options.model, device="cpu", max_rows=32))
    print(f"{options.model}, temperature {options.temperature}, {options.seeds} seeds, {options.max_tokens} tokens")
    print(
        f"{'schema':14} {'':13} {'whole':>6} {'valid':>6} {'length':>6} {'tokens':>7} {'forwards':>8} "
        f"{'tok/step':>8} {'s CPU':>6}"
    )
    for name, schema in SCHEMAS.items():
        for label, constraint in (("constrained", JsonSchema(json_schema=schema)), ("free", None)):
            began = time.process_time()
            requests = [
                ask(
                    assembly,
                    QUESTIONS[name],
                    seed,
                    constraint,
                    temperature=options.temperature,
                    max_tokens=options.max_tokens,
                )
                for seed in range(options.seeds)
            ]
            found = tally(run(assembly, requests), schema)
            rate = found.tokens / found.forwards if found.forwards else 0.0
            print(
                f"{name:14} {label:13} {found.whole:6} {found.valid:6} {found.cut:6} {found.tokens:7} "
                f"{found.forwards:8} {rate:8.2f} {time.process_time() - began:6.1f}",
                flush=True,
            )
            if constraint is not None:
                for fault in found.faults[:5]:
                    print("   ", fault)


if __name__ == "__main__":
    main()
