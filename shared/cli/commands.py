"""Subcommands of `diffleet`: each reads its options and calls one module. Drawing goes to stderr, results to stdout."""

import importlib.metadata
import importlib.util
import inspect
import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from shared.cli import operating
from shared.cli.answer import holes_of
from shared.cli.canvas import Canvas
from shared.cli.exits import Exit, Stop
from shared.cli.infill import Infill, parse, rooms_of, text_of
from shared.cli.numbers import finite
from shared.cli.paths import file, folder
from shared.cli.question import Question, as_typed, schema_of
from shared.cli.reporting import reporting, run
from shared.settings import ServiceSettings, check_model_name, queue_url

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_PROMPT = "Tell me a story about a rabbit named Clover."
DATA_DIR = ServiceSettings.model_fields["data_dir"].default

# The mark keeps the lines as they are.
_EPILOG = "\b\n" + inspect.cleandoc(Exit.__doc__ or "").replace("\n\n", "\n", 1)


class _Commands(typer.core.TyperGroup):
    """The commands, for arguments that are text: what is not UTF-8 could not be sent to anybody."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for number, argument in enumerate(args, start=1):
            try:
                argument.encode()
            except UnicodeEncodeError:
                raise typer.BadParameter(f"argument {number} is not UTF-8", ctx) from None
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="diffleet",
    cls=_Commands,
    help="Serve diffusion language models: start a fleet, ask a fleet.",
    epilog=_EPILOG,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# What operators need has a module of its own.
app.add_typer(operating.app)

# The flags of these commands belong to the processes that they start.
_PASS_ON: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

Url = Annotated[
    str, typer.Option(envvar="DIFFLEET_URL", help="Address of the fleet's api, which is shown the DIFFLEET_API_KEY.")
]
RedisUrl = Annotated[
    str | None, typer.Option(envvar="DIFFLEET_REDIS_URL", help="redis://, rediss:// or unix:// URL of the queue.")
]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"diffleet {importlib.metadata.version('diffleet')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    del version
    # What goes wrong is told by the commands; libraries that log it as well would only repeat it.
    logging.getLogger().addHandler(logging.NullHandler())


@app.command()
def up(
    host: Annotated[str, typer.Option(envvar="DIFFLEET_HOST", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(envvar="DIFFLEET_PORT", min=0, max=65_535, help="Port of the api; 0: any free one.")
    ] = 8000,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Worker processes.")] = 1,
    model: Annotated[
        str, typer.Option(envvar="DIFFLEET_MODEL", help="Name of a bundled model, or folder of a checkpoint.")
    ] = "demo",
    model_name: Annotated[
        str | None, typer.Option(envvar="DIFFLEET_MODEL_NAME", help="Name that requests ask for.")
    ] = None,
    redis_url: RedisUrl = None,
    data_dir: Annotated[
        Path,
        typer.Option(
            parser=folder,
            metavar="<path>",
            envvar="DIFFLEET_DATA_DIR",
            help="Where the embedded server and the logs live.",
        ),
    ] = DATA_DIR,
    prompt: Annotated[str, typer.Option(help="Answered once at the start; empty: none.")] = DEFAULT_PROMPT,
    start_timeout: Annotated[
        float, typer.Option(callback=finite, min=1.0, help="Seconds until everything must be ready.")
    ] = 180.0,
    drain_s: Annotated[
        float,
        typer.Option(
            callback=finite, envvar="DIFFLEET_DRAIN_S", min=0.0, help="Seconds to finish running requests at the end."
        ),
    ] = 10.0,
    lease_ms: Annotated[
        int,
        typer.Option(
            envvar="DIFFLEET_LEASE_MS",
            min=400,
            max=600_000,
            help="A worker silent for so long loses its requests to another, milliseconds.",
        ),
    ] = 3000,
    model_store: Annotated[
        Path | None,
        typer.Option(
            parser=folder,
            metavar="<path>",
            envvar="DIFFLEET_MODEL_STORE",
            help="Folder with the adapters that requests may run under.",
        ),
    ] = None,
    fake: Annotated[
        bool,
        typer.Option("--fake", help="Workers make answers up: no weights, no torch. To develop what talks to a fleet."),
    ] = False,
) -> None:
    """Start a whole fleet on this machine, answer one prompt, serve until Ctrl-C.

    A Redis server of its own is started unless --redis-url names one. Workers take further options from the
    environment (`diffleet worker --help` lists them). A second Ctrl-C does not wait for running requests.
    """
    from shared.cli.local_fleet import LocalFleetOptions, free_port
    from shared.cli.up import serve

    if port == 0:
        with reporting():
            port = free_port(host)
    options = LocalFleetOptions(
        host=host,
        port=port,
        workers=workers,
        model=_tokenizer_folder(model) if fake else _known_model(model),
        model_name=(model_name or Path(model).name) if fake else model_name,
        redis_url=_known_redis(redis_url),
        data_dir=data_dir,
        start_timeout_s=start_timeout,
        drain_s=drain_s,
        lease_ms=lease_ms,
        fake=fake,
        model_store=None if model_store is None else _known_store(model_store),
    )
    try:
        check_model_name(options.served_name if model_name is None else model_name)
    except ValueError as error:
        raise typer.BadParameter(f"{error}; choose another --model-name", param_hint="--model-name") from error
    run(serve(options, prompt))


@app.command()
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="What to ask; '-' reads it from standard input. May be left out with --infill.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show the canvas while it is denoised.")] = False,
    url: Url = DEFAULT_URL,
    redis_url: Annotated[
        str | None, typer.Option(help="Submit through this Redis instead of the api: redis:// or unix:// URL.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Which model; unset: the only one that has workers.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", "-n", min=1, help="Most tokens to make.")] = None,
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
    options: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Another option of the decoding strategy; repeat it."),
    ] = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[:SCALE]", help="Run under this adapter; repeat it, their effects are summed."),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it stands: no chat template.")] = False,
    json_schema: Annotated[
        str | None, typer.Option(help="The answer is JSON that this schema accepts: a file, or the schema itself.")
    ] = None,
    infill: Annotated[
        str | None,
        typer.Option(help="Fill the holes of this text: the text itself, a file, or '-' for standard input."),
    ] = None,
    hole: Annotated[
        list[str] | None, typer.Option(metavar="NAME=TOKENS", help="Room of a hole of --infill; repeat it.")
    ] = None,
    holes: Annotated[
        bool, typer.Option("--holes", help="With --infill: print what was put into each hole, as JSON.")
    ] = False,
) -> None:
    """Ask a running fleet, and print the answer.

    With --watch, masks and tokens, coloured by confidence, are drawn on standard error while they change, if that is a
    terminal. The answer is printed once, on standard output.

    Holes of --infill are {{name}}, {{name:12}} for one of 12 tokens, or ___ and ___12 for those without a name. They
    are filled together; the text around them comes back as it is. With a PROMPT the text is the answer to it, or with
    --raw its continuation; without one the text stands for itself.
    """
    template = _infill(infill, hole or [], holes, redis_url, prompt)
    leading = ""
    if prompt is None:
        if template is None:
            raise typer.BadParameter("is missing", param_hint="PROMPT")
        try:
            leading, template = template.split()
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--infill") from error
    question = Question(
        prompt=leading if prompt is None else _stdin() if prompt == "-" else prompt,
        model=model,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        strategy=strategy,
        threshold=threshold,
        block_length=block_length,
        raw=raw or prompt is None,
        json_schema=None if json_schema is None else _schema(json_schema),
        infill=template,
        loras=tuple(map(_lora, lora or ())),
        options=_strategy_options(options or [], strategy, threshold),
    )

    def tell(canvas: Canvas) -> str:
        return holes_of(canvas) if holes else leading + canvas.text

    run(_generate(question, watch, url, redis_url, tell))


def _lora(argument: str) -> tuple[str, float]:
    from shared.cli.loras import use_of

    try:
        return use_of(argument)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--lora") from error


def _strategy_options(given: list[str], strategy: str | None, threshold: float | None) -> dict[str, object]:
    if not given:
        return {}
    from shared.cli.strategy_options import options_from

    try:
        options = options_from(given, strategy)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--set") from error
    if threshold is not None and "threshold" in options:
        raise typer.BadParameter("threshold is given by --threshold too", param_hint="--set")
    return options


async def _generate(
    question: Question, watch: bool, url: str, redis_url: str | None, tell: Callable[[Canvas], str]
) -> None:
    from shared.cli import http_fleet, redis_fleet
    from shared.cli.answer import show_answer

    answer = (
        http_fleet.ask(url, question, frames=watch)
        if redis_url is None
        else redis_fleet.ask(redis_url, question, frames=watch)
    )
    try:
        async with answer as states:
            await show_answer(states, watch=watch, tell=tell)
    except Stop as stop:
        raise Stop(stop.exit_code, as_typed(str(stop)), stop.details) from stop


@app.command(context_settings=_PASS_ON)
def api(context: typer.Context) -> None:
    """Run the HTTP api alone (`python -m api`); its own options follow: `diffleet api --help`."""
    _become("api", context.args)


@app.command(context_settings=_PASS_ON)
def worker(context: typer.Context) -> None:
    """Run one worker alone (`python -m worker`); its own options follow: `diffleet worker --help`."""
    _become("worker", context.args)


@app.command(context_settings=_PASS_ON)
def jobs(context: typer.Context) -> None:
    """Run the jobs process alone (`python -m api.jobs`); its own options follow: `diffleet jobs --help`."""
    _become("api.jobs", context.args)


@app.command()
def models(url: Url = DEFAULT_URL) -> None:
    """List the bundled models, and those of the fleet if one answers."""
    from shared.cli.tables import print_models

    run(print_models(url))


@app.command(name="eval")
def evaluation(
    model: Annotated[str, typer.Argument(help="Name of a bundled model.")] = "demo",
) -> None:
    """Print how a bundled model did on its held-out tasks."""
    from shared.cli.tables import print_evaluation

    with reporting():
        print_evaluation(model)


def _known_model(model: str) -> str:
    """Return the model as the worker takes it: a bundled name, or a folder made absolute."""
    from shared.cli.bundled import bundled_models

    bundled = bundled_models()
    if model in bundled:
        return model
    checkpoint = file(model, "--model")
    if not (checkpoint / "config.json").is_file():
        names = ", ".join(bundled) or "none here"
        what = "has no config.json" if checkpoint.is_dir() else "is neither a folder nor a bundled model"
        raise typer.BadParameter(f"{model!r} {what} (bundled: {names})", param_hint="--model")
    _check_checkpoint(checkpoint)
    return str(checkpoint.resolve())


def _known_store(store: Path) -> Path:
    if not store.is_dir():
        raise typer.BadParameter(f"{str(store)!r} is not a folder", param_hint="--model-store")
    return store


def _tokenizer_folder(model: str) -> str:
    """Return the folder whose tokenizer a fake worker takes."""
    from shared.cli.bundled import bundled_models

    bundled = bundled_models()
    source = bundled[model].folder if model in bundled else file(model, "--model")
    for name in ("config.json", "tokenizer.json"):
        if not (source / name).is_file():
            raise typer.BadParameter(f"{model!r} has no {name}", param_hint="--model")
    return str(source.resolve())


def _check_checkpoint(checkpoint: Path) -> None:
    """Refuse a folder that no worker could load, as far as that shows without loading it."""
    try:
        whole = isinstance(json.loads((checkpoint / "config.json").read_bytes()), dict)
    except (OSError, ValueError):
        whole = False
    if not whole:
        raise typer.BadParameter(f"{checkpoint}: config.json is not a JSON object", param_hint="--model")
    for what in ("tokenizer.json", "*.safetensors"):
        if not any(path.is_file() for path in checkpoint.glob(what)):
            raise typer.BadParameter(f"{checkpoint} has no {what}", param_hint="--model")


def _known_redis(url: str | None) -> str | None:
    """Return the URL if it is one; raises `BadParameter` without repeating it, for it may hold a password."""
    if url is None:
        return None
    from shared.connection import open_sync_client

    try:
        open_sync_client(queue_url(url)).close()
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--redis-url") from None
    return url


def _become(module: str, args: list[str]) -> None:
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        print(f"diffleet: the package {package!r} is not installed: pip install 'diffleet[{package}]'", file=sys.stderr)
        raise typer.Exit(Exit.USAGE)
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *args])


def _schema(argument: str) -> dict[str, Any]:
    try:
        return schema_of(argument)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--json-schema") from error


def _infill(
    argument: str | None, rooms: list[str], holes: bool, redis_url: str | None, prompt: str | None
) -> Infill | None:
    if argument is None:
        for option, given in (("--hole", bool(rooms)), ("--holes", holes)):
            if given:
                raise typer.BadParameter("goes with --infill", param_hint=option)
        return None
    if redis_url is not None:
        raise typer.BadParameter("goes through the api: leave --redis-url out", param_hint="--infill")
    if argument == prompt == "-":
        raise typer.BadParameter("PROMPT is read from standard input already", param_hint="--infill")
    try:
        sizes = rooms_of(rooms)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--hole") from error
    try:
        return parse(text_of(argument), sizes)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--infill") from error


def _stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"standard input is not UTF-8: {error.reason}", param_hint="prompt") from error
