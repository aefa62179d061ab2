"""A fleet that plays a script, and ways to call the app that need no network."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
from fastapi import FastAPI

from api.app import create_app
from api.settings import ApiSettings
from shared.card import ModelCard
from shared.client import Result, UnknownModel, UnknownRequest
from shared.commands import Generate
from shared.events import Delta, Event, Finished, Queued, Started, Usage
from shared.keys import model_of
from shared.lora import AdapterRecord
from shared.model_choice import default_model
from shared.queue_state import QueueState
from shared.roster import WorkerInfo
from shared.text import Tokenizer
from tests.shared.tokenizers_for_tests import byte_level, byte_level_files

Step = Event | Exception | float
"""An event to yield, an exception to raise, or seconds to wait."""
Script = Callable[[Generate], Iterator[Step]]

CARD = ModelCard(
    name="org/demo",
    family="sdar",
    max_model_len=256,
    block_length=4,
    fixed_block_length=False,
    decoding={"strategy": "threshold", "threshold": 0.8},
    temperature=0.25,
    capabilities=("chat", "generate", "infill", "guidance", "constraints"),
    stop_token_ids=(2,),
    mask_token_id=3,
    vocab_size=400,
    files=byte_level_files(),
)


def answer(text: str = "Hello, wörld 🎉", reason: Any = "stop", detail: Any = "stop_token") -> Script:
    """Play a request that answers `text`, one delta for each two tokens."""

    def play(command: Generate) -> Iterator[Step]:
        ids = byte_level().encode(text)
        yield Queued(command.id)
        yield Started(command.id, 1, "w1")
        stream = byte_level().detokenizer()
        seq = 1
        for offset in range(0, len(ids), 2):
            part = ids[offset : offset + 2]
            seq += 1
            said = stream.push(part)
            yield Delta(command.id, seq, 1, offset // 2, offset, part, said, offset // 2 + 1)
        usage = Usage(len(command.prompt), len(ids), (len(ids) + 1) // 2, (len(ids) + 1) // 2)
        yield Finished(command.id, seq + 1, 1, reason, detail, usage)

    return play


def steps(*given: Callable[[str], Step] | Step) -> Script:
    """Play the given steps; functions get the request id."""

    def play(command: Generate) -> Iterator[Step]:
        for step in given:
            yield step(command.id) if callable(step) else step

    return play


@dataclass
class ScriptedFleet:
    script: Script = field(default_factory=answer)
    cards: dict[str, ModelCard] = field(default_factory=lambda: {CARD.name: CARD})
    registered: list[AdapterRecord] = field(default_factory=list[AdapterRecord])
    live: int = 1
    """Workers of each model."""
    departed: set[str] = field(default_factory=set[str])
    """Models that have none."""
    down: Exception | None = None
    """Raised by every call but `abort`."""
    commands: list[Generate] = field(default_factory=list[Generate])
    aborts: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    queue_limits: list[int] = field(default_factory=list[int])
    idempotency_keys: list[str | None] = field(default_factory=list[str | None])
    closed: int = 0
    queues: dict[str, QueueState] = field(default_factory=dict[str, QueueState])
    reconnects: int = 0
    replays: int = 0
    waits: int = 0
    """Scripts that have come to a wait."""

    async def reached_waits(self, count: int) -> None:
        """Return once `count` scripts wait, and what they said before has gone its way."""
        async with asyncio.timeout(10):
            while self.waits < count:
                await asyncio.sleep(0)
            for _ in range(50):
                await asyncio.sleep(0)

    async def run(
        self,
        command: Generate,
        *,
        queue_limit: int | None = None,
        idempotency_key: str | None = None,
        tenant: str = "",
        retention_ms: int = 0,
    ) -> AsyncGenerator[Event]:
        self._check()
        self.commands.append(command)
        self.queue_limits.append(queue_limit or 0)
        self.idempotency_keys.append(idempotency_key)
        try:
            for step in self.script(command):
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, float | int):
                    self.waits += 1
                    await asyncio.sleep(step)
                else:
                    yield step
        finally:
            self.closed += 1

    async def submit(
        self, command: Generate, *, queue_limit: int | None = None, tenant: str = "", retention_ms: int = 0
    ) -> object:
        raise NotImplementedError

    def stream(self, request_id: str, after: int = 0, previews: bool = True) -> AsyncGenerator[Event]:
        raise NotImplementedError

    async def result(self, request_id: str) -> Result:
        if request_id not in {command.id for command in self.commands}:
            raise UnknownRequest(request_id)
        return Result(request_id, "running", model_of(request_id), "", [], None)

    async def abort(self, request_id: str, reason: str = "aborted") -> str:
        self.aborts.append((request_id, reason))
        return "running"

    async def models(self) -> Sequence[str]:
        self._check()
        return list(self.cards)

    async def default_model(self) -> str:
        return default_model(sorted(await self.models()), await self.alive(list(self.cards)))

    async def alive(self, models: Sequence[str]) -> Collection[str]:
        self._check()
        return [name for name in models if self.live and name not in self.departed]

    async def card(self, name: str) -> ModelCard:
        self._check()
        if name not in self.cards:
            raise UnknownModel(name, list(self.cards))
        return self.cards[name]

    async def tokenizer(self, card: ModelCard) -> Tokenizer:
        return byte_level()

    async def find_adapters(self, model: str, names: Sequence[str]) -> Mapping[str, AdapterRecord]:
        return {record.name: record for record in await self.adapters(model) if record.name in names}

    async def adapters(self, model: str) -> Sequence[AdapterRecord]:
        await self.card(model)
        return self.registered

    async def workers(self, model: str) -> Sequence[WorkerInfo]:
        await self.card(model)
        live = 0 if model in self.departed else self.live
        return [WorkerInfo(f"w{number}", model, "ready") for number in range(live)]

    async def queue(self, model: str) -> QueueState:
        self._check()
        return self.queues.get(model, QueueState((), 0))

    async def ping(self) -> None:
        self._check()

    def _check(self) -> None:
        if self.down is not None:
            raise self.down


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        content = self.json()
        assert "detail" not in content
        assert set(content["error"]) == {"message", "type", "param", "code"}
        assert content["error"]["message"] and content["error"]["type"] and content["error"]["code"]
        return content["error"]

    @property
    def frames(self) -> list[str]:
        """The data of each event; checks the hygiene of the stream on the way."""
        text = self.body.decode()
        assert text.endswith("\n\n")
        assert "\r" not in text
        blocks = text[:-2].split("\n\n")
        assert all(block.startswith(("data: ", ": ")) and "\n" not in block for block in blocks)
        return [block.removeprefix("data: ") for block in blocks if block.startswith("data: ")]

    @property
    def events(self) -> list[Any]:
        frames = self.frames
        assert frames[-1] == "[DONE]"
        assert "[DONE]" not in frames[:-1]
        return [orjson.loads(frame) for frame in frames[:-1]]


class Caller:
    """Calls the app as a server would, one ASGI scope for each request."""

    def __init__(self, app: FastAPI, fleet: ScriptedFleet) -> None:
        self.app = app
        self.fleet = fleet

    async def post(self, path: str, body: object, headers: Mapping[str, str] | None = None) -> Answer:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.call("POST", path, content, {"content-type": "application/json", **(headers or {})})

    async def get(self, path: str, headers: Mapping[str, str] | None = None) -> Answer:
        return await self.call("GET", path, b"", headers or {})

    async def call(
        self,
        method: str,
        path: str,
        body: bytes | Sequence[bytes],
        headers: Mapping[str, str],
        leave: asyncio.Event | None = None,
    ) -> Answer:
        """Send a request, its body in one piece or several; the caller leaves when `leave` is set, or never."""
        pieces = [body] if isinstance(body, bytes) else list(body)
        inbox: list[dict[str, Any]] = [
            {"type": "http.request", "body": piece, "more_body": number < len(pieces)}
            for number, piece in enumerate(pieces, 1)
        ]
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            if inbox:
                return inbox.pop(0)
            await (leave or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)
            # A real server yields to the loop here.
            await asyncio.sleep(0)

        path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "state": {},
        }
        async with asyncio.timeout(10):
            await self.app(scope, receive, send)
        if not sent:
            return Answer(0, {}, b"")
        head = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return Answer(sent[0]["status"], head, b"".join(message.get("body", b"") for message in sent[1:]))


@asynccontextmanager
async def running(fleet: ScriptedFleet, **options: Any) -> AsyncIterator[Caller]:
    """Run the app on a scripted fleet."""
    app = create_app(ApiSettings(**options), fleet)
    async with app.router.lifespan_context(app):
        yield Caller(app, fleet)
