"""Submit requests to the fleet, follow, abort and read them, from any program: all through Redis.

    async with FleetClient.connect("redis://localhost:6379/0") as fleet:
        async for event in fleet.generate("demo", "Once upon a time"):
            print(event)

`Fleet` is the same without asyncio.
"""

import asyncio
import contextlib
import hashlib
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from threading import RLock, Thread, current_thread
from typing import Any, Self, TypeVar, cast

import orjson

from shared.admission import Admission
from shared.arguments import InvalidArgument, check_count, check_text, checked, prompt_parts
from shared.card import ModelCard, unpack
from shared.commands import LANES, WIRE_VERSION, Generate, Lane, Limits, Preview, Sampling, encode_command
from shared.connection import Argument, FleetUnavailable, Link
from shared.dead_letters import DeadLetter, DeadLetters, Fate
from shared.decoding import Decoding
from shared.events import Delta, Event, Failed, Finished, Queued, decode_event, encode_event
from shared.flights import Flights
from shared.keys import GROUP, MODEL_NAME, MODELS, Keys, model_of, new_request_id, partition, pick_partition
from shared.keys import card as card_key
from shared.lora import AdapterRecord, AdapterRegistry
from shared.lua import script
from shared.memory import NO_BULK, NO_WORK, MemoryGauge
from shared.model_choice import NoDefaultModel, default_model, read_alive
from shared.queue_state import QueueState, read_queue
from shared.roster import WorkerInfo, read_roster
from shared.settings import queue_url
from shared.subscriber import Subscriber, Unknown
from shared.text import InvalidText, TemplateError, Tokenizer
from shared.webhooks import encode_hook

__all__ = [
    "DeadLetter",
    "Fleet",
    "FleetClient",
    "FleetUnavailable",
    "IdempotencyConflict",
    "InvalidArgument",
    "NoDefaultModel",
    "OutputTooLong",
    "PromptTooLong",
    "QueueFull",
    "Result",
    "Submitted",
    "TenantFull",
    "UnknownModel",
    "UnknownRequest",
]

QUEUE_LIMIT = 256
"""Queued and running requests of one lane, beyond which a submit is refused."""
RETENTION_MS = 3_600_000
"""How long an ended request can still be read."""
LONGEST_LIFE_MS = 86_400_000
"""Deadline of a request that names none: no key lives for ever."""
IDEMPOTENCY_MS = 86_400_000
DEFAULT_MAX_TOKENS = 512
CARD_FRESH_S = 2.0
"""Seconds for which a card that was read is taken for the one in force."""
_LOG_CAP_SPARE = 64
"""Events beyond one for each token before a runaway log is trimmed; an honest one never reaches it."""
_ABORT_SPARE_MS = 60_000
_MEMORY_WAIT_S = 10
_CLOSED = "this Fleet is closed"

T = TypeVar("T")


class QueueFull(Exception):
    """The lane has as many requests as it may, or Redis is nearly full; try again after `retry_after_s`."""

    def __init__(self, retry_after_s: int, what: str = "the queue is full") -> None:
        super().__init__(f"{what}; try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class TenantFull(QueueFull):
    """The tenant has as many requests queued and running as it may."""


class UnknownModel(Exception):
    """No worker has ever announced this model here."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        super().__init__(f"model {name!r} is not served here; known: {', '.join(known) or 'none yet'}")
        self.name = name
        self.known = tuple(known)


class UnknownRequest(Exception):
    """No request of this id, or its retention is over."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request {request_id[:120]!r} is not known, or no longer")
        self.request_id = request_id


class PromptTooLong(Exception):
    """The prompt leaves no room for a token."""

    def __init__(self, length: int, max_model_len: int) -> None:
        super().__init__(f"the prompt is {length} tokens; this model takes {max_model_len} with the answer")
        self.length = length
        self.max_model_len = max_model_len


class OutputTooLong(PromptTooLong):
    """The prompt and `max_tokens` together are more than the model takes."""

    def __init__(self, length: int, max_tokens: int, max_model_len: int) -> None:
        super().__init__(length, max_model_len)
        room = max_model_len - length
        self.args = (
            f"max_tokens is {max_tokens} and the prompt is {length} tokens; this model takes {max_model_len} together, "
            f"which leaves {room} for the answer",
        )
        self.max_tokens = max_tokens


class IdempotencyConflict(Exception):
    """The idempotency key was used for another request; `request_id` is that one."""

    def __init__(self, request_id: str) -> None:
        super().__init__("this idempotency key was used with another request")
        self.request_id = request_id


@dataclass(frozen=True, slots=True)
class Submitted:
    id: str
    """Of the request to follow: an older one, if the idempotency key names it."""
    duplicate: bool = False
    """It was accepted before."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a request has produced so far."""

    id: str
    state: str
    """queued | running | done | failed | aborted | expired | dead"""
    model: str
    """As it was asked for."""
    text: str
    token_ids: list[int]
    end: Finished | Failed | None
    """Its terminal event, if it has ended."""
    deltas: Sequence[Delta] = ()
    """What the text and the ids came in."""


class FleetClient:
    """The fleet as its users see it. For one event loop; enter it before use. Any number of concurrent calls."""

    def __init__(self, link: Link, subscriber: Subscriber, admission: Admission | None = None) -> None:
        self._link = link
        self._admission = admission or Admission()
        self._memory = MemoryGauge(link)
        self._subscriber = subscriber
        self._dead_letters = DeadLetters(link)
        self._cards: dict[str, tuple[float, ModelCard]] = {}
        self._model_reads = Flights[list[str]]()
        self._choices = Flights[str]()
        # A card is large and a tokenizer more so: a burst of requests would make as many.
        self._card_reads = Flights[ModelCard]()
        self._tokenizers: dict[str, Tokenizer] = {}
        self._tokenizer_builds = Flights[Tokenizer]()

    @classmethod
    def connect(cls, url: str, connections: int = 16, admission: Admission | None = None) -> Self:
        """Build a client; nothing is sent before it is entered. Raises ValueError for a bad URL."""
        link = Link.open(url, connections)
        return cls(link, Subscriber(url, link), admission)

    async def __aenter__(self) -> Self:
        await self._subscriber.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._subscriber.__aexit__(*error)
        self._choices.cancel()
        self._model_reads.cancel()
        self._card_reads.cancel()
        self._tokenizer_builds.cancel()
        await self._link.close()

    async def ping(self) -> None:
        """Ask Redis for a sign of life, once; raises `FleetUnavailable`."""
        await self._link.command("PING")

    async def submit(
        self,
        command: Generate,
        *,
        queue_limit: int | None = None,
        idempotency_key: str | None = None,
        tenant: str = "",
        retention_ms: int = RETENTION_MS,
    ) -> Submitted:
        """Queue a request. Submitting the same id again changes nothing. Unset, `queue_limit` is `QUEUE_LIMIT`.

        Raises `UnknownModel`, `QueueFull`, `TenantFull`, `IdempotencyConflict`, `FleetUnavailable` (then a retry with
        the same command is safe), `InvalidArgument`, also for an id that is not one of the model's.
        """
        _check_owner(command)
        check_count("queue_limit", QUEUE_LIMIT if queue_limit is None else queue_limit, least=0)
        check_count("retention_ms", retention_ms, least=1)
        card = await self.card(command.model)
        keys = Keys.of(command.id)
        await self._check_memory(keys, command.lane)
        names = [keys.request(command.id), keys.log(command.id), keys.channel(command.id), keys.abort(command.id)]
        names += [keys.lane(command.lane), keys.rate(), keys.tenant(tenant)]
        if idempotency_key is not None:
            names.append(keys.idempotency(tenant, idempotency_key))
        total_ms = command.limits.total_ms or LONGEST_LIFE_MS
        queue_ms = min(command.limits.queue_ms or total_ms, total_ms)
        lifetimes: list[Argument] = [
            QUEUE_LIMIT if queue_limit is None else queue_limit,
            queue_ms,
            total_ms,
            retention_ms,
        ]
        sizes: list[Argument] = [command.limits.max_tokens + _LOG_CAP_SPARE, len(command.prompt), WIRE_VERSION]
        head: list[Argument] = [command.id, encode_command(command), command.lane]
        # Looked at and kept beside the key only.
        body_hash = "" if idempotency_key is None else _body_hash(command)
        tail: list[Argument] = [body_hash, IDEMPOTENCY_MS, encode_event(Queued(command.id)), GROUP]
        admission = self._admission
        # Each partition counts for itself.
        share = -(-admission.tenant_limit // card.partitions)
        terms: list[Argument] = [keys.request("").removesuffix("r:"), tenant, share, admission.replicas]
        terms.append(command.asked or "")
        args = [*head, *lifetimes, *sizes, *tail, *terms]
        if command.webhook is not None:
            args.append(encode_hook(command.webhook, tenant, command.asked))
        if admission.replicas:
            reply = await self._link.run_waited(
                script("submit"), names, args, admission.replicas, admission.replica_wait_ms
            )
        else:
            reply = await self._link.run_again(script("submit"), names, args)
        status: str = reply[0].decode()
        known_id: str = reply[1].decode()
        match status:
            case "busy":
                raise QueueFull(_retry_after_s(length=reply[2], rate=float(reply[3])))
            case "crowded":
                wait_s = _retry_after_s(length=reply[2], rate=float(reply[3]))
                raise TenantFull(wait_s, f"{reply[2]} requests of this tenant are queued or running")
            case "conflict":
                raise IdempotencyConflict(known_id)
            case _:
                return Submitted(known_id, duplicate=status in ("dup", "idem"))

    async def _check_memory(self, keys: Keys, lane: Lane) -> None:
        share = await self._memory.share(keys)
        if share >= (NO_BULK if lane == "bulk" else NO_WORK):
            raise QueueFull(_MEMORY_WAIT_S, f"the queue's memory is {share:.0%} full")

    async def stream(self, request_id: str, after: int = 0, previews: bool = True) -> AsyncGenerator[Event]:
        """Yield the events with seq > `after` up to the terminal one: no gap, no repeat, whoever runs the request.

        Previews come between them, if wanted. A request that Redis has lost ends with `Failed(code="lost")`. Raises
        `UnknownRequest`, `FleetUnavailable`, `InvalidArgument`.
        """
        _check_id(request_id)
        check_count("after", after, least=0)
        async with self._subscriber.attach(request_id, after, previews) as mailbox:
            try:
                async for event in self._subscriber.events(mailbox):
                    yield event
            except Unknown:
                raise UnknownRequest(request_id) from None

    async def run(
        self,
        command: Generate,
        *,
        previews: bool = True,
        queue_limit: int | None = None,
        idempotency_key: str | None = None,
        tenant: str = "",
        retention_ms: int = RETENTION_MS,
    ) -> AsyncGenerator[Event]:
        """Submit and stream: subscribed before the submit, so that not even the first event waits for the log.

        Raises as `submit` and `stream`. Leaving the iteration does not abort the request.
        """
        async with self._subscriber.attach(command.id, 0, previews, fresh=True) as mailbox:
            submitted = await self.submit(
                command,
                queue_limit=queue_limit,
                idempotency_key=idempotency_key,
                tenant=tenant,
                retention_ms=retention_ms,
            )
            if submitted.duplicate:
                mailbox.mark_behind()
            if submitted.id == command.id:
                async for event in self._subscriber.events(mailbox):
                    yield event
                return
        async with contextlib.aclosing(self.stream(submitted.id, previews=previews)) as events:
            async for event in events:
                yield event

    async def generate(
        self,
        model: str | None,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
        *,
        max_tokens: int | None = None,
        seed: int | None = None,
        temperature: float | None = None,
        top_p: float = 1.0,
        top_k: int = 0,
        stop: str | Sequence[str] = (),
        decoding: Decoding | None = None,
        previews: bool = False,
        lane: Lane = "std",
        total_ms: int | None = None,
    ) -> AsyncGenerator[Event]:
        """Continue a text, token ids, or chat messages (dicts with `role` and `content`), and yield its events.

        Without a model, that of `default_model`.
        Unset, `max_tokens` is what the model has room for, 512 at most; `seed` is random; `temperature` the model's
        own. Raises as `run`, `NoDefaultModel`, `PromptTooLong`, `OutputTooLong` for more `max_tokens` than there is
        room for, and `InvalidArgument` for whatever else is wrong.
        """
        command = await self.command(
            model,
            prompt,
            sampling=checked(Sampling, {"top_p": top_p, "top_k": top_k}),
            temperature=temperature,
            seed=seed,
            limits=checked(Limits, {"stop": _stops(stop), "total_ms": total_ms}),
            max_tokens=max_tokens,
            decoding=decoding,
            preview=Preview() if previews else None,
            lane=lane,
        )
        async with contextlib.aclosing(self.run(command, previews=previews)) as events:
            async for event in events:
                yield event

    async def command(
        self,
        model: str | None,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
        *,
        sampling: Sampling,
        temperature: float | None,
        seed: int | None,
        limits: Limits,
        max_tokens: int | None,
        decoding: Decoding | None,
        preview: Preview | None,
        lane: Lane,
    ) -> Generate:
        """Build the command of `generate`: tokenised, with its seed drawn and the model's defaults filled in.

        Raises `UnknownModel`, `NoDefaultModel`, `PromptTooLong`, `OutputTooLong`, `InvalidArgument`.
        """
        if model is None:
            model = await self.default_model()
        check_text("model", model)
        card = await self.card(model)
        chosen = {
            "seed": secrets.randbits(63) if seed is None else seed,
            "temperature": card.temperature if temperature is None else temperature,
        }
        own_sampling = checked(Sampling, sampling.model_dump() | chosen)
        longest = DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens
        own_limits = checked(Limits, limits.model_dump() | {"max_tokens": longest})
        token_ids = await self.encode(card, prompt)
        room = card.max_model_len - len(token_ids)
        if room < 1:
            raise PromptTooLong(len(token_ids), card.max_model_len)
        if max_tokens is not None and own_limits.max_tokens > room:
            raise OutputTooLong(len(token_ids), own_limits.max_tokens, card.max_model_len)
        given = {
            "id": new_request_id(model, pick_partition(card.partitions)),
            "model": model,
            "prompt": tuple(token_ids),
            "sampling": own_sampling,
            "limits": own_limits.model_copy(update={"max_tokens": min(own_limits.max_tokens, room)}),
            "decoding": decoding,
            "preview": preview,
            "lane": lane,
        }
        return checked(Generate, given)

    async def encode(self, card: ModelCard, prompt: str | Sequence[int] | Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the token ids of a text, of ids, or of chat messages; raises `InvalidArgument`."""
        try:
            if isinstance(prompt, str):
                token_ids = (await self.tokenizer(card)).encode(prompt)
            else:
                parts = prompt_parts(prompt, card.vocab_size)
                messages = [part for part in parts if isinstance(part, dict)]
                token_ids = [part for part in parts if isinstance(part, int)]
                if messages:
                    token_ids = (await self.tokenizer(card)).encode_chat(messages)
        except (InvalidText, TemplateError) as error:
            raise InvalidArgument("prompt", str(error)) from None
        if not token_ids:
            raise InvalidArgument("prompt", "is empty")
        return token_ids

    async def tokenizer(self, card: ModelCard) -> Tokenizer:
        """Return the tokenizer of a card, built once for each digest, off the event loop."""
        tokenizer = self._tokenizers.get(card.digest)
        if tokenizer is None:
            return await self._tokenizer_builds.join(card.digest, lambda: self._build_tokenizer(card))
        return tokenizer

    async def _build_tokenizer(self, card: ModelCard) -> Tokenizer:
        tokenizer = self._tokenizers[card.digest] = await asyncio.to_thread(Tokenizer.from_files, card.files)
        return tokenizer

    async def abort(self, request_id: str, reason: str = "aborted") -> str:
        """Ask for the end of a request and return its state; asking again is harmless.

        "aborted": it was queued and has ended; "running": its worker will end it within a few denoising steps; another
        terminal state: it had ended; "unknown": no such request, and a later submit of the id is born aborted.
        """
        _check_id(request_id)
        keys = Keys.of(request_id)
        names = [keys.request(request_id), keys.log(request_id), keys.channel(request_id), keys.abort(request_id)]
        names += [keys.rate(), *[keys.lane(lane) for lane in LANES]]
        args = [request_id, GROUP, reason, LONGEST_LIFE_MS + _ABORT_SPARE_MS]
        state: bytes = await self._link.run_again(script("abort"), names, args)
        return state.decode()

    async def result(self, request_id: str) -> Result:
        """Return what a request has produced so far; raises `UnknownRequest`, `FleetUnavailable`."""
        _check_id(request_id)
        keys = Keys.of(request_id)
        names = [keys.request(request_id), keys.log(request_id)]
        reply = await self._link.run_again(script("replay"), names, [1, 1_000_000])
        if not reply:
            raise UnknownRequest(request_id)
        events = [decode_event(payload) for payload in reply[3][1::2]]
        deltas = [event for event in events if isinstance(event, Delta)]
        return Result(
            id=request_id,
            state=reply[0].decode(),
            model=model_of(request_id) if not reply[4] else reply[4].decode(errors="replace"),
            text="".join(delta.text for delta in deltas),
            token_ids=[token for delta in deltas for token in delta.token_ids],
            end=next((event for event in events if isinstance(event, Finished | Failed)), None),
            deltas=deltas,
        )

    async def dead_letters(self, model: str, limit: int = 100) -> list[DeadLetter]:
        """Return the newest requests of a model that were given up because they kill their workers, newest first.

        Raises `UnknownModel`, `FleetUnavailable`.
        """
        card = await self.card(model)
        return await self._dead_letters.list(model, card.partitions, limit)

    async def dead_command(self, request_id: str) -> Generate:
        """Return what a dead request had asked for; raises `UnknownRequest`, `FleetUnavailable`."""
        _check_id(request_id)
        command = await self._dead_letters.command(request_id)
        if command is None:
            raise UnknownRequest(request_id)
        return command

    async def replay(self, request_id: str) -> Submitted:
        """Submit the command of a dead request again, under a new id; its dead letter is then discarded.

        Replayed once more it has the same new id, and is a duplicate for as long as that one is known. Raises as
        `dead_command` and `submit`.
        """
        command = await self.dead_command(request_id)
        fresh = await self._dead_letters.name_replay(request_id)
        if fresh is None:
            raise UnknownRequest(request_id)
        tenant = await self._dead_letters.tenant(request_id)
        submitted = await self.submit(command.model_copy(update={"id": fresh}), tenant=tenant)
        await self._dead_letters.discard(request_id)
        return submitted

    async def discard(self, request_id: str) -> bool:
        """Remove a dead letter from the list; return whether it was there. The request itself can still be read."""
        _check_id(request_id)
        return await self._dead_letters.discard(request_id)

    async def dead_fate(self, request_id: str) -> Fate:
        """Tell what became of a dead request; raises `UnknownRequest`."""
        _check_id(request_id)
        fate = await self._dead_letters.fate(request_id)
        if fate is None:
            raise UnknownRequest(request_id)
        return fate

    async def models(self) -> list[str]:
        """Return the names of all models that have a card, sorted."""
        return list(await self._model_reads.join("", self._read_models))

    async def _read_models(self) -> list[str]:
        names: set[bytes] = await self._link.read("SMEMBERS", MODELS)
        return sorted(name.decode() for name in names)

    async def alive(self, models: Sequence[str]) -> set[str]:
        """Return those models that have a live worker, in two round trips for them all; raises `FleetUnavailable`."""
        return await read_alive(self._link, models)

    async def default_model(self) -> str:
        """Return the model of who names none: the only one with a live worker; if none has one, the only one there is.

        Raises `NoDefaultModel`, `FleetUnavailable`. All who ask at the same time are answered from one look.
        """
        return await self._choices.join("", self._choose)

    async def _choose(self) -> str:
        names = await self.models()
        return default_model(names, await self.alive(names) if names[1:] else ())

    async def card(self, name: str) -> ModelCard:
        """Return a model's card; a changed one is seen within two seconds. Raises `UnknownModel`."""
        checked, card = self._cards.get(name, (0.0, None))
        if card is not None and time.monotonic() - checked < CARD_FRESH_S:
            return card
        return await self._card_reads.join(name, lambda: self._read_card(name, card))

    async def _read_card(self, name: str, card: ModelCard | None) -> ModelCard:
        try:
            key = card_key(name)
        except ValueError:
            raise UnknownModel(name, await self.models()) from None
        if card is None or await self._link.read("HGET", key, "digest") != card.digest.encode():
            fields: dict[bytes, bytes] = await self._link.read("HGETALL", key)
            if not fields:
                self._cards.pop(name, None)
                raise UnknownModel(name, await self.models())
            card = unpack(fields)
        self._cards[name] = (time.monotonic(), card)
        return card

    async def find_adapters(self, model: str, names: Sequence[str]) -> dict[str, AdapterRecord]:
        """Return those of the named adapters that are registered for a model."""
        return await AdapterRegistry(self._link).find(model, names)

    async def adapters(self, model: str) -> list[AdapterRecord]:
        """Return the adapters that are registered for a model, by name; `AdapterRecord.use` is what a command takes.

        Raises `UnknownModel`.
        """
        return await self._known(model, AdapterRegistry(self._link).list)

    async def workers(self, model: str) -> list[WorkerInfo]:
        """Return the workers of a model that have beaten within their lease; raises `UnknownModel`."""
        return await self._known(model, lambda name: read_roster(self._link, Keys(partition(name))))

    async def _known(self, model: str, read: Callable[[str], Awaitable[list[T]]]) -> list[T]:
        """Return what a model has; whether there is such a model is only asked where that is nothing."""
        found = await read(model) if MODEL_NAME.fullmatch(model) else []
        if not found and model not in (known := await self.models()):
            raise UnknownModel(model, known)
        return found

    async def queue(self, model: str) -> QueueState:
        """Return how full a model's lanes are, and how long requests wait in them; raises `UnknownModel`."""
        parts = [Keys(partition(model, number)) for number in range((await self.card(model)).partitions)]
        return await read_queue(self._link, parts)

    @property
    def reconnects(self) -> int:
        """How often the subscription was made anew."""
        return self._subscriber.reconnects

    @property
    def replays(self) -> int:
        """How often the event log was read, to begin with or to close a gap."""
        return self._subscriber.replays

    async def depth(self, model: str) -> int:
        """Return how many requests of a model are queued or running; raises `UnknownModel`."""
        parts = [Keys(partition(model, number)) for number in range((await self.card(model)).partitions)]
        lengths: list[int] = [await self._link.read("XLEN", keys.lane(lane)) for keys in parts for lane in LANES]
        return sum(lengths)


class Fleet:
    """`FleetClient` for programs without asyncio: it runs the event loop in a thread of its own.

        with Fleet("redis://localhost:6379/0") as fleet:
            for event in fleet.generate("demo", "Once upon a time"):
                print(event)

    Without a URL it takes that of the environment (`DIFFLEET_REDIS_URL`). Calls may come from any thread. It is entered
    once; at the end of the block calls that still wait, and iterators that are not at their end, raise RuntimeError.
    Raises ValueError for a variable that holds no such URL.
    """

    def __init__(self, url: str | None = None) -> None:
        self._url = queue_url() if url is None else url
        self._client: FleetClient | None = None
        self._entered = False
        self._calls: set[asyncio.Task[Any]] = set()
        self._closers: set[Callable[[], Coroutine[Any, Any, None]]] = set()
        # Nothing is begun in a loop that has been stopped. The garbage collector may close an iterator at any time.
        self._gate = RLock()

    def __enter__(self) -> Self:
        with self._gate:
            if self._entered:
                raise RuntimeError(_CLOSED if self._client is None else "this Fleet is open already")
            self._entered = True
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="fleet", daemon=True)
        self._thread.start()

        async def enter() -> FleetClient:
            return await FleetClient.connect(self._url).__aenter__()

        try:
            self._client = _result(asyncio.run_coroutine_threadsafe(enter(), self._loop))
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        client = self._fleet
        with self._gate:
            self._client = None

        async def leave() -> None:
            try:
                for call in self._calls:
                    call.cancel()
                await asyncio.gather(*self._calls, return_exceptions=True)
                for close in list(self._closers):
                    await close()
            finally:
                await client.__aexit__(*error)

        try:
            _result(asyncio.run_coroutine_threadsafe(leave(), self._loop))
        finally:
            self._stop()

    def submit(self, command: Generate) -> Submitted:
        return self._wait(self._fleet.submit(command))

    def stream(self, request_id: str, after: int = 0, previews: bool = True) -> Iterator[Event]:
        return self._iterate(lambda: self._fleet.stream(request_id, after, previews))

    def run(self, command: Generate, *, previews: bool = True) -> Iterator[Event]:
        return self._iterate(lambda: self._fleet.run(command, previews=previews))

    def generate(
        self,
        model: str | None,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
        *,
        max_tokens: int | None = None,
        seed: int | None = None,
        temperature: float | None = None,
        stop: str | Sequence[str] = (),
        decoding: Decoding | None = None,
        previews: bool = False,
    ) -> Iterator[Event]:
        """See `FleetClient.generate`."""
        return self._iterate(
            lambda: self._fleet.generate(
                model,
                prompt,
                max_tokens=max_tokens,
                seed=seed,
                temperature=temperature,
                stop=stop,
                decoding=decoding,
                previews=previews,
            )
        )

    def abort(self, request_id: str, reason: str = "aborted") -> str:
        return self._wait(self._fleet.abort(request_id, reason))

    def result(self, request_id: str) -> Result:
        return self._wait(self._fleet.result(request_id))

    def dead_letters(self, model: str, limit: int = 100) -> list[DeadLetter]:
        return self._wait(self._fleet.dead_letters(model, limit))

    def dead_command(self, request_id: str) -> Generate:
        return self._wait(self._fleet.dead_command(request_id))

    def replay(self, request_id: str) -> Submitted:
        return self._wait(self._fleet.replay(request_id))

    def discard(self, request_id: str) -> bool:
        return self._wait(self._fleet.discard(request_id))

    def models(self) -> list[str]:
        return self._wait(self._fleet.models())

    def default_model(self) -> str:
        return self._wait(self._fleet.default_model())

    def card(self, name: str) -> ModelCard:
        return self._wait(self._fleet.card(name))

    def workers(self, model: str) -> list[WorkerInfo]:
        return self._wait(self._fleet.workers(model))

    def depth(self, model: str) -> int:
        return self._wait(self._fleet.depth(model))

    @property
    def _closed(self) -> bool:
        return self._client is None

    @property
    def _fleet(self) -> FleetClient:
        if self._client is None:
            raise RuntimeError(_CLOSED if self._entered else "use Fleet as a context manager")
        return self._client

    def _iterate(self, build: Callable[[], AsyncGenerator[Event]]) -> Iterator[Event]:
        events = build()
        # A step that is given up ends a little later, and only then can the generator be closed.
        turn = asyncio.Lock()

        async def step() -> Event | None:
            async with turn:
                return await anext(events, None)

        async def close() -> None:
            async with turn:
                await events.aclose()
            self._closers.discard(close)

        self._closers.add(close)
        try:
            while (event := self._wait(step())) is not None:
                yield event
        finally:
            # The end of the block has closed it, or does.
            if not self._closed:
                self._close(close())

    def _close(self, call: Coroutine[Any, Any, None]) -> None:
        if current_thread() is self._thread:
            # The garbage collector found it there: to wait would be for ever.
            self._calls.add(self._loop.create_task(self._tracked(call)))
            return
        try:
            self._wait(call)
        except RuntimeError:
            # Closed by the end of the block meanwhile.
            if not self._closed:
                raise

    def _wait(self, call: Coroutine[Any, Any, T]) -> T:
        with self._gate:
            if self._client is None:
                call.close()
                raise RuntimeError(_CLOSED)
            future = asyncio.run_coroutine_threadsafe(self._tracked(call), self._loop)
        try:
            return _result(future)
        except CancelledError:
            if self._closed:
                raise RuntimeError(_CLOSED) from None
            raise

    async def _tracked(self, call: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        try:
            return await call
        finally:
            self._calls.discard(task)

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _result(future: Future[T]) -> T:
    """Wait for what a loop in another thread does; who does not wait to the end ends it."""
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def _stops(stop: object) -> object:
    """Return the stop strings as they are kept; one string is a sequence too, of its letters."""
    return (stop,) if isinstance(stop, str) else tuple(cast(list[object], stop)) if isinstance(stop, list) else stop


def _check_owner(command: Generate) -> None:
    with contextlib.suppress(ValueError):
        if model_of(command.id) == command.model:
            return
    raise InvalidArgument("id", f"must be a request id of model {command.model!r}, which {command.id[:120]!r} is not")


def _check_id(request_id: str) -> None:
    check_text("request_id", request_id)
    try:
        model_of(request_id)
    except ValueError:
        raise UnknownRequest(request_id) from None


def _body_hash(command: Generate) -> str:
    """Return a hash of what was asked for, without the names it was asked under."""
    # The name of a webhook's subject is made for each call.
    # What is unset is no part of it, so that a field which is new here changes nothing for calls without it.
    exclude = {"id": True, "trace": True, "webhook": {"name"}}
    body = command.model_dump(mode="json", exclude_none=True, exclude=exclude)
    return hashlib.sha256(orjson.dumps(body, option=orjson.OPT_SORT_KEYS)).hexdigest()


def _retry_after_s(length: int, rate: float) -> int:
    """Return whole seconds until the lane is drained at `rate` (requests/s): 1 to 120, and 5 if the rate is unknown."""
    return 5 if rate <= 0 else max(1, min(120, round(length / rate)))
