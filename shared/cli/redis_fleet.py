"""A fleet behind its Redis, without an api: submit, follow, and abort what is left unfinished."""

import contextlib
from collections.abc import AsyncGenerator, Callable

from pydantic import TypeAdapter, ValidationError

from shared.cli.canvas import Canvas, Cell
from shared.cli.exits import Exit, Stop
from shared.cli.loras import stop_unknown
from shared.cli.operations import stopping
from shared.cli.question import Question
from shared.client import (
    FleetClient,
    InvalidArgument,
    NoDefaultModel,
    PromptTooLong,
    QueueFull,
    UnknownModel,
)
from shared.commands import Generate, Limits, LoraUse, Preview, Sampling
from shared.constraints import JsonSchema
from shared.decoding import STRATEGIES, Decoding, ForeignOption, chosen
from shared.events import Delta, Event, Failed, Finished, Queued, Snapshot, Started
from shared.settings import queue_url

_DECODING: TypeAdapter[Decoding] = TypeAdapter(Decoding)


@contextlib.asynccontextmanager
async def ask(redis_url: str, question: Question, *, frames: bool) -> AsyncGenerator[AsyncGenerator[Canvas]]:
    """Yield the growing answer; `frames` asks for the canvas between commits too. Raises `Stop`."""
    try:
        client = FleetClient.connect(queue_url(redis_url))
    except ValueError as error:
        raise Stop(Exit.USAGE, f"--redis-url: {error}") from error
    try:
        with stopping("no Redis answers at the given --redis-url: {}"):
            async with client as fleet:
                command = await _command(fleet, question, frames)
                tokenizer = await fleet.tokenizer(await fleet.card(command.model))
                events = fleet.run(command, previews=frames)
                async with contextlib.aclosing(
                    _states(fleet, command, events, lambda one: tokenizer.decode([one]))
                ) as states:
                    yield states
    except ForeignOption as error:
        raise Stop(Exit.REFUSED, f"diffusion.{error}; set diffusion.strategy to one that has it") from error
    except ValidationError as error:
        raise Stop(Exit.REFUSED, _complaint(error)) from error
    except (UnknownModel, NoDefaultModel, PromptTooLong, InvalidArgument) as error:
        raise Stop(Exit.REFUSED, str(error)) from error
    except QueueFull as error:
        raise Stop(Exit.FAILED, str(error)) from error


def _complaint(error: ValidationError) -> str:
    fault = error.errors(include_input=False, include_url=False)[0]
    if fault["type"] == "union_tag_invalid":
        return f"strategy: {fault['ctx']['tag']!r} is none of {', '.join(STRATEGIES)}"  # pyright: ignore[reportTypedDictNotRequiredAccess]
    name = next((str(part) for part in reversed(fault["loc"]) if isinstance(part, str)), "")
    return f"{name}: {fault['msg']}" if name else fault["msg"]


async def _command(fleet: FleetClient, question: Question, frames: bool) -> Generate:
    model = await fleet.default_model() if question.model is None else question.model
    command = await fleet.command(
        model,
        question.prompt if question.raw else question.messages,
        sampling=Sampling(),
        temperature=question.temperature,
        seed=question.seed,
        limits=Limits(),
        max_tokens=question.max_tokens,
        decoding=await _decoding(fleet, model, question),
        preview=Preview() if frames else None,
        lane="rt",
    )
    constraint = None if question.json_schema is None else JsonSchema(json_schema=question.json_schema)
    lora = await _loras(fleet, command.model, question) if question.loras else ()
    return command.model_copy(update={"block_length": question.block_length, "constraint": constraint, "lora": lora})


async def _decoding(fleet: FleetClient, model: str, question: Question) -> Decoding | None:
    """Return what the api makes of the same question; raises `ForeignOption`, ValidationError."""
    options = question.decoding
    if not options:
        return None
    strategy = options.pop("strategy", None)
    default = _DECODING.validate_python((await fleet.card(model)).decoding)
    return chosen(None if strategy is None else str(strategy), options, default)


async def _loras(fleet: FleetClient, model: str, question: Question) -> tuple[LoraUse, ...]:
    known = await fleet.find_adapters(model, [name for name, _ in question.loras])
    for name, _ in question.loras:
        if name not in known:
            raise stop_unknown(model, name)
    return tuple(known[name].use(scale) for name, scale in question.loras)


async def _states(
    fleet: FleetClient, command: Generate, events: AsyncGenerator[Event], spell: Callable[[int], str]
) -> AsyncGenerator[Canvas]:
    canvas, ended = Canvas(), False
    try:
        async with contextlib.aclosing(events):
            async for event in events:
                ended = isinstance(event, Finished | Failed)
                canvas = after(canvas, event, spell)
                yield canvas
    finally:
        if not ended:
            await fleet.abort(command.id, "the terminal left")


def after(canvas: Canvas, event: Event, spell: Callable[[int], str]) -> Canvas:
    """Return the canvas after an event; raises `Stop` if the request has failed. `spell` gives the text of a token."""
    match event:
        case Queued() | Started():
            return canvas
        case Snapshot():
            confidence = [*event.confidence, *[0.0] * len(event.token_ids)]
            cells = (
                Cell(None if token_id is None else spell(token_id), sure)
                for token_id, sure in zip(event.token_ids, confidence, strict=False)
            )
            return canvas.denoised(tuple(cells), event.step, event.nfe)
        case Delta():
            return canvas.committed(event.text, len(event.token_ids), event.nfe)
        case Finished():
            return canvas.finished(event.detail, event.usage.completion_tokens, event.usage.nfe)
        case Failed():
            code = Exit.REFUSED if event.code in {"invalid_request", "unsupported", "too_long"} else Exit.FAILED
            field = f" ({event.param})" if event.param else ""
            raise Stop(code, f"{event.message}{field}")
