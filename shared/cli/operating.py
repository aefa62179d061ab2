"""Subcommands for those who run a fleet, and for those who talk to one at length."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from shared.cli.exits import Exit, Stop
from shared.cli.numbers import finite, number, whole
from shared.cli.paths import file, folder
from shared.cli.question import Question
from shared.cli.reporting import reporting, run
from shared.settings import ServiceSettings

T = TypeVar("T")

DEFAULT_URL = "http://127.0.0.1:8000"
DATA_DIR = ServiceSettings.model_fields["data_dir"].default

app = typer.Typer()


def _unless_a_folder_is_named(context: typer.Context, redis_url: str | None) -> str | None:
    """Return no URL where it is a variable's and the folder an option's: what is typed is what is meant."""
    # What is typed has been read by now.
    sources = [context.get_parameter_source(name) for name in ("redis_url", "data_dir")]
    typed = [source is not None and source.name == "COMMANDLINE" for source in sources]
    return None if typed == [False, True] else redis_url


Url = Annotated[
    str, typer.Option(envvar="DIFFLEET_URL", help="Address of the fleet's api, which is shown the DIFFLEET_API_KEY.")
]
RedisUrl = Annotated[
    str | None,
    typer.Option(
        callback=_unless_a_folder_is_named,
        envvar="DIFFLEET_REDIS_URL",
        help="URL of the queue; unset: that of `diffleet up` here.",
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option(
        parser=folder,
        metavar="<path>",
        envvar="DIFFLEET_DATA_DIR",
        help=f"Data folder of `diffleet up`; unset: {DATA_DIR}.",
    ),
]
Model = Annotated[str | None, typer.Option("--model", "-m", help="Which model; unset: the only one that has workers.")]
ModelOrAll = Annotated[str | None, typer.Option("--model", "-m", help="Which model; unset: all.")]
Ids = Annotated[list[str], typer.Argument(metavar="REQUEST...", help="Ids, as `diffleet requests` lists them.")]


@app.command()
def chat(
    url: Url = DEFAULT_URL,
    model: Model = None,
    system: Annotated[str, typer.Option(help="What the model is told before everything.")] = "",
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", "-n", min=1, help="Most tokens of an answer.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(callback=finite, min=0.0, help="0 takes the most probable tokens.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Same seed, same answer.")] = None,
    strategy: Annotated[
        str | None, typer.Option(help="Which positions are accepted in a step; the README lists the strategies.")
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(callback=finite, min=0.0, max=1.0, help="Accept tokens at least this probable.")
    ] = None,
    block_length: Annotated[int | None, typer.Option(min=1, help="Positions denoised together.")] = None,
) -> None:
    """Talk with a model: the conversation is remembered, and /set changes how the next answer is made.

    /help lists the commands. Ctrl-C ends an answer, Ctrl-D the chat. Lines from a pipe are asked one after the other.
    """
    from shared.cli.chat import Conversation
    from shared.cli.chat import chat as converse

    settings = Question(
        "",
        model=model,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        strategy=strategy,
        threshold=threshold,
        block_length=block_length,
    )
    with reporting():
        converse(url, Conversation(settings, system))


@app.command()
def top(
    redis_url: RedisUrl = None,
    data_dir: DataDir = None,
    url: Annotated[
        str | None, typer.Option(envvar="DIFFLEET_URL", help="Address of an api, for tokens per forward.")
    ] = DEFAULT_URL,
    model: ModelOrAll = None,
    interval: Annotated[
        float, typer.Option(callback=finite, min=0.2, max=60.0, help="Seconds from one look to the next.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and end.")] = False,
) -> None:
    """Show a fleet, live: workers, lanes, the age of the oldest request, rates.

    Workers and lanes come from Redis, tokens per forward from the api's metrics, which count a request when it ends.
    """
    from shared.cli.top import samples, watch

    run(watch(samples(_queue(redis_url, data_dir), interval, url, model), once=once))


@app.command()
def bench(
    url: Url = DEFAULT_URL,
    against: Annotated[str | None, typer.Option(help="A second server, to be compared with.")] = None,
    model: Model = None,
    requests: Annotated[int, typer.Option("--requests", "-r", min=1, help="Requests of each round.")] = 32,
    concurrency: Annotated[
        str, typer.Option("--concurrency", "-c", help="Requests at a time, one round for each: 1,4,16.")
    ] = "1,4,16",
    rate: Annotated[
        str | None,
        typer.Option(
            help="Arrivals a second with exponential pauses, one round for each: 0.5,1,2. Replaces the sweep."
        ),
    ] = None,
    burstiness: Annotated[
        float,
        typer.Option(
            callback=finite,
            min=0.01,
            max=1000.0,
            help="With --rate: below 1 arrivals come in bursts, above 1 more evenly.",
        ),
    ] = 1.0,
    prompts: Annotated[
        Path | None,
        typer.Option(
            parser=file,
            metavar="<path>",
            help="JSON lines, each a text or an object with `text` or `prompt`: asked in turn.",
        ),
    ] = None,
    prompt_tokens: Annotated[str, typer.Option(help="Length of made-up prompts: 64, or 16-128.")] = "64",
    output_tokens: Annotated[str, typer.Option(help="Length of answers: 64, or 16-128.")] = "64",
    threshold: Annotated[
        float | None, typer.Option(callback=finite, min=0.0, max=1.0, help="Confidence threshold of the load.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same load.")] = 0,
    slo_first_ms: Annotated[
        float | None, typer.Option(callback=finite, min=1.0, help="A good request's first block comes by then.")
    ] = None,
    slo_block_ms: Annotated[
        float | None, typer.Option(callback=finite, min=1.0, help="And its blocks so often, on average.")
    ] = None,
    slo_token_ms: Annotated[
        float | None,
        typer.Option(callback=finite, min=0.01, help="And its tokens behind the first block so often, on average."),
    ] = None,
    slo_total_ms: Annotated[float | None, typer.Option(callback=finite, min=1.0, help="And its end by then.")] = None,
    json: Annotated[
        Path | None, typer.Option(parser=file, metavar="<path>", help="Write everything measured there.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(parser=file, metavar="<path>", help="Draw a PNG there (needs the extra `plot`).")
    ] = None,
) -> None:
    """Measure a fleet under load: time to the first block, per block and whole, tokens/s, tokens per forward.

    The load asks for exact lengths and ignores stop tokens, so that two servers do the same work. Ctrl-C ends it with
    what was measured until then.
    """
    from shared.cli.bench import Outputs
    from shared.cli.bench import bench as measure
    from shared.cli.load import Load, Range, read_prompts
    from shared.cli.load_report import Objective

    with reporting():
        asked = () if prompts is None else _parsed("--prompts", lambda name: read_prompts(Path(name)), str(prompts))
        lengths = _parsed("--prompt-tokens", Range.parse, prompt_tokens)
        outputs = _parsed("--output-tokens", Range.parse, output_tokens)
        if rate is None:
            points = [(_parsed("--concurrency", _whole, part), None) for part in concurrency.split(",")]
        else:
            points = [(requests, _parsed("--rate", _positive, part)) for part in rate.split(",")]
    loads = [Load(requests, size, one, lengths, outputs, seed, threshold, burstiness, asked) for size, one in points]
    objective = Objective(*map(_seconds, (slo_first_ms, slo_block_ms, slo_total_ms, slo_token_ms)))
    servers = [url] if against is None else [url, against]
    run(measure(servers, model, loads, objective, Outputs(json, plot)))


@app.command()
def doctor(
    redis_url: Annotated[
        str | None, typer.Option(envvar="DIFFLEET_REDIS_URL", help="URL of the queue; unset: `diffleet up` starts one.")
    ] = None,
    data_dir: Annotated[
        Path,
        typer.Option(parser=folder, metavar="<path>", envvar="DIFFLEET_DATA_DIR", help="Data folder of `diffleet up`."),
    ] = DATA_DIR,
    host: Annotated[str, typer.Option(envvar="DIFFLEET_HOST", help="Where the api would listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(envvar="DIFFLEET_PORT", min=1, max=65_535, help="Its port.")] = 8000,
) -> None:
    """Look at what a fleet needs here: Redis, GPU, packages, ports, permissions; each fault with its remedy.

    Ends with 1 if there is a fault; notes are no faults.
    """
    from shared.cli.doctor import examine, print_findings

    with reporting():
        if print_findings(examine(redis_url, data_dir, host, port)):
            raise Stop(Exit.FAILED, "there are faults")


@app.command()
def requests(
    request: Annotated[
        str | None, typer.Argument(help="Id of one request; unset: all open ones, oldest first.")
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="Print only what the request has produced.")] = False,
    redis_url: RedisUrl = None,
    data_dir: DataDir = None,
    model: ModelOrAll = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="At most so many.")] = 50,
) -> None:
    """List the open requests, or tell about one: state, worker, age, tokens, forwards."""
    from shared.cli.requests import print_one, print_open

    where = _queue(redis_url, data_dir)
    run(print_open(where, model, limit) if request is None else print_one(where, request, text=text))


@app.command()
def abort(ids: Ids, redis_url: RedisUrl = None, data_dir: DataDir = None) -> None:
    """End requests, queued or running; asking again is harmless."""
    from shared.cli.requests import abort_all

    run(abort_all(_queue(redis_url, data_dir), ids))


@app.command(name="dead-letters")
def dead_letters(
    replay: Annotated[list[str] | None, typer.Option(help="Submit this one again; repeat it.")] = None,
    discard: Annotated[list[str] | None, typer.Option(help="Take this one off the list; repeat it.")] = None,
    redis_url: RedisUrl = None,
    data_dir: DataDir = None,
    model: ModelOrAll = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="At most so many.")] = 50,
) -> None:
    """List the requests that were given up because they kill their workers; replay or discard them."""
    from shared.cli.requests import discard_all, print_dead_letters, replay_all

    where = _queue(redis_url, data_dir)
    if replay:
        run(replay_all(where, replay))
    if discard:
        run(discard_all(where, discard))
    if not replay and not discard:
        run(print_dead_letters(where, model, limit))


@app.command()
def forget(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Names, as `diffleet models` lists them.")],
    redis_url: RedisUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Forget models that nobody serves any more: their cards, adapters and dead letters. Takes some seconds each.

    A model outlives its workers, so that requests may wait for the next one. It is kept while it has a live worker, an
    open request or a webhook to send. A worker that starts later announces it anew.
    """
    from shared.cli.forget import forget_all

    run(forget_all(_queue(redis_url, data_dir), models))


@app.command()
def webhooks(
    due: Annotated[bool, typer.Option("--due", help="List those that wait for their next try instead.")] = False,
    replay: Annotated[
        list[str] | None, typer.Option(help="Send the one about this request or batch once more; repeat it.")
    ] = None,
    discard: Annotated[list[str] | None, typer.Option(help="Forget the one about this; repeat it.")] = None,
    redis_url: RedisUrl = None,
    data_dir: DataDir = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="At most so many.")] = 50,
) -> None:
    """List the webhooks that were given up because their receivers did not take them; replay or discard them."""
    from shared.cli.webhooks import discard_webhooks, print_webhooks, replay_webhooks

    where = _queue(redis_url, data_dir)
    if replay:
        run(replay_webhooks(where, replay))
    if discard:
        run(discard_webhooks(where, discard))
    if not replay and not discard:
        run(print_webhooks(where, due, limit))


loras = typer.Typer(
    help="The adapters of a fleet, which requests may name.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(loras, name="loras")


@loras.command(name="list")
def list_loras(url: Url = DEFAULT_URL, model: ModelOrAll = None) -> None:
    """List the adapters, and the workers that have each one loaded."""
    from shared.cli.loras import print_loras

    run(print_loras(url, model))


@loras.command(name="add")
def add(
    name: Annotated[str, typer.Argument(help="What requests call it.")],
    path: Annotated[str, typer.Argument(help="Its folder in the model store.")],
    url: Url = DEFAULT_URL,
    model: Model = None,
) -> None:
    """Register an adapter for every worker of a model, in the place of one of its name."""
    from shared.cli.loras import add_lora

    run(add_lora(url, model, name, path))


@loras.command(name="remove")
def remove(
    name: Annotated[str, typer.Argument(help="As `diffleet loras list` has it.")],
    url: Url = DEFAULT_URL,
    model: Model = None,
) -> None:
    """Forget an adapter. Requests that were accepted with it are finished; its files stay."""
    from shared.cli.loras import remove_lora

    run(remove_lora(url, model, name))


def _queue(redis_url: str | None, data_dir: Path | None) -> str:
    """Return the URL of the queue that was named; ends the command where there is none."""
    from shared.cli.operations import find_redis

    with reporting():
        return find_redis(redis_url, data_dir)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _whole(text: str) -> int:
    value = whole(text)
    if value < 1:
        raise ValueError(f"{value} is below 1")
    return value


def _positive(text: str) -> float:
    value = number(text)
    if not 0 < value < 1e6:
        raise ValueError(f"{text} is not above 0 and below a million")
    return value


def _parsed(option: str, parse: Callable[[str], T], text: str) -> T:
    try:
        return parse(text.strip())
    except ValueError as error:
        raise Stop(Exit.USAGE, f"{option}: {error}") from None
