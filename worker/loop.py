"""The engine in process: an asyncio face over an engine thread, without Redis, for tests and embedders."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Self

from shared.commands import Generate, Limits, Preview, Sampling
from shared.constraints import Constraint
from shared.decoding import Decoding
from shared.events import Delta, Event, Failed, FinishDetail, Finished, FinishReason, Usage, is_terminal
from shared.keys import new_request_id
from shared.text import Message, Tokenizer
from worker.assembly import assemble
from worker.engine.ports import Arrival
from worker.mailbox import Mailbox
from worker.service import Stepper
from worker.settings import WorkerSettings

_REST_S = 0.25


class GenerationFailed(Exception):
    """A request ended without a result; `event` tells why."""

    def __init__(self, event: Failed) -> None:
        super().__init__(event.message)
        self.event = event


class LoopStopped(Exception):
    """The loop has ended, or was never started; the engine's error, if any, is chained."""


@dataclass(frozen=True, slots=True)
class Generated:
    text: str
    token_ids: tuple[int, ...]
    reason: FinishReason
    detail: FinishDetail
    usage: Usage


class EngineLoop:
    """Decode concurrent requests in one batch.

    Made and used in one event loop; the engine runs in a thread. A generation that is cancelled, or whose iterator is
    closed early, is aborted in the engine and its pages are freed.
    """

    def __init__(self, engine: Stepper, tokenizer: Tokenizer, model: str = "local") -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._model = model
        self._mailbox = Mailbox()
        self._listeners: dict[str, asyncio.Queue[Event | None]] = {}
        self._stopping = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def load(cls, settings: WorkerSettings) -> Self:
        """Build the engine that the settings describe; raises `ModelError`, `DeviceError`."""
        assembly = assemble(settings)
        return cls(assembly.engine, assembly.tokenizer, settings.served_name)

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after its current step; generations under way raise `LoopStopped`."""
        self._stopping = True
        self._mailbox.wake()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)
        self._hang_up()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def render_chat_prompt(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """Return the text that the model's chat template makes; raises `TemplateError`, `InvalidText`."""
        return self._tokenizer.render_chat(messages, add_generation_prompt=add_generation_prompt)

    async def generate(
        self,
        prompt: str | Sequence[int],
        *,
        sampling: Sampling | None = None,
        limits: Limits | None = None,
        decoding: Decoding | None = None,
        block_length: int | None = None,
        constraint: Constraint | None = None,
    ) -> Generated:
        """Return the finished result; raises `GenerationFailed`, `LoopStopped`, `InvalidText`."""
        text: list[str] = []
        token_ids: list[int] = []
        stream = self.generate_stream(
            prompt,
            sampling=sampling,
            limits=limits,
            decoding=decoding,
            block_length=block_length,
            constraint=constraint,
        )
        async for event in stream:
            match event:
                case Delta():
                    text.append(event.text)
                    token_ids.extend(event.token_ids)
                case Finished():
                    return Generated("".join(text), tuple(token_ids), event.reason, event.detail, event.usage)
                case Failed():
                    raise GenerationFailed(event)
                case _:
                    pass
        raise LoopStopped("the stream ended without a terminal event")

    async def generate_stream(
        self,
        prompt: str | Sequence[int],
        *,
        sampling: Sampling | None = None,
        limits: Limits | None = None,
        decoding: Decoding | None = None,
        block_length: int | None = None,
        preview: Preview | None = None,
        constraint: Constraint | None = None,
    ) -> AsyncGenerator[Event]:
        """Yield `Delta` and, if `preview` is given, `Snapshot` events, and one `Finished` or `Failed` at the end.

        A prompt as text is encoded as it stands, special tokens included. Raises `LoopStopped`, `InvalidText`.
        """
        if self._loop is None or not self._thread.is_alive():
            raise LoopStopped("the loop is not running") from self._error
        token_ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        request = Generate(
            id=new_request_id(self._model),
            model=self._model,
            prompt=tuple(token_ids),
            sampling=sampling or Sampling(),
            limits=limits or Limits(),
            decoding=decoding,
            block_length=block_length,
            preview=preview,
            constraint=constraint,
        )
        events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._listeners[request.id] = events
        ended = False
        try:
            self._mailbox.arrive(Arrival(request, epoch=1))
            while not ended:
                event = await events.get()
                if event is None:
                    ended = True
                    raise LoopStopped("the loop has ended") from self._error
                ended = is_terminal(event)
                yield event
        finally:
            del self._listeners[request.id]
            if not ended:
                self._mailbox.abort(request.id, "cancelled")

    # --- the engine's thread

    def _main(self) -> None:
        assert self._loop is not None
        try:
            while not self._stopping:
                idle = self._engine.idle
                inbox = self._mailbox.collect(_REST_S if idle else 0.0)
                if idle and not inbox.arrivals:
                    continue
                outbox = self._engine.step(inbox)
                if outbox.events:
                    self._loop.call_soon_threadsafe(self._hand_out, outbox.events)
        except BaseException as error:
            self._error = error
            self._loop.call_soon_threadsafe(self._hang_up)

    def _hand_out(self, events: list[Event]) -> None:
        for event in events:
            listener = self._listeners.get(event.id)
            if listener is not None:
                listener.put_nowait(event)

    def _hang_up(self) -> None:
        for listener in self._listeners.values():
            listener.put_nowait(None)
