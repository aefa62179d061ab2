"""The whole path through HTTP and Redis over the engine alone, and where either spends the time of a round."""

import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from shared.cli.exits import Stop
from shared.cli.local_fleet import LocalFleet, LocalFleetOptions
from shared.cli.progress import Reporter
from shared.embedded import EmbeddedServer
from shared.heap import keep_for_good
from tests.bench.gpu.random_worker import flags, use_random_weights
from tests.bench.gpu.shapes import SHAPES
from tests.bench.gpu.timeline import read, record, tell
from tests.bench.load import Run, engine_job, http_job, timed
from worker.loop import EngineLoop
from worker.settings import read_settings

CONTEXT = 1024
PRODUCE = 256
BUDGET = 4096

Job = Callable[[], Awaitable[int]]
Report = Callable[[dict[str, object]], None]


@dataclass(frozen=True, slots=True)
class Way:
    """What both engines run."""

    model: str
    block: int
    steps: int
    emulated: bool = False


@dataclass
class Side:
    """One of the two that are compared, and the file that its engine writes its steps to."""

    name: str
    job: Callable[[str], Job]
    steps: Path
    runs: list[Run]
    told: list[dict[str, object]]

    async def round(self, texts: list[str]) -> None:
        began, ends = time.monotonic(), list[float]()

        def noted(job: Job) -> Job:
            async def run() -> int:
                tokens = await job()
                ends.append(time.monotonic())
                return tokens

            return run

        self.runs.append(await timed([noted(self.job(text)) for text in texts]))
        await asyncio.sleep(0.05)  # the last step's line may still be on its way
        answers = {"first_answer": (min(ends) - began) * 1e3, "last_answer": (max(ends) - began) * 1e3}
        self.told.append(tell(read(self.steps, began), began) | answers)

    @property
    def rate(self) -> float:
        return median(run.rate for run in self.runs[1:] or self.runs)

    @property
    def stages_ms(self) -> dict[str, float]:
        """The medians of what was told in numbers."""
        values: dict[str, list[float]] = {}
        for told in self.told[1:] or self.told:
            for name, value in told.items():
                if isinstance(value, int | float):
                    values.setdefault(name, []).append(value)
        return {name: round(median(each), 1) for name, each in values.items()}


def write_folder(folder: Path, vocab: int) -> None:
    """Write the files of a checkpoint without weights: every id is a word."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(vocab)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"architectures": ["random"]}))


def _out() -> Path:
    return Path(os.environ.get("OUT", "."))


def a_text(seed: int) -> str:
    draw = random.Random(seed)
    return " ".join(f"w{draw.randrange(1000)}" for _ in range(CONTEXT))


async def bench_path(way: Way, report: Report, concurrencies: list[int], rounds: int, fresh: bool) -> None:
    """Alternate rounds of the two. All but the first find their prompts in the cache, unless they are `fresh`."""
    async with _both(way, max(concurrencies)) as (loop, url, steps_alone, steps_served):
        for concurrent in concurrencies:
            sides = [
                Side("engine", lambda text: engine_job(loop, text, PRODUCE), steps_alone, [], []),
                Side("path", lambda text: http_job(url, text, PRODUCE), steps_served, [], []),
            ]
            for number in range(rounds):
                first = 7919 * (1 + number * fresh)
                texts = [a_text(first + each) for each in range(concurrent)]
                for side in sides:
                    await side.round(texts)
            alone, path = sides
            report(
                {
                    "bench": "path",
                    "model": way.model,
                    "emulated": way.emulated,
                    "block": way.block,
                    "concurrent": concurrent,
                    "fresh": fresh,
                    "engine_tokens_s": alone.rate,
                    "path_tokens_s": path.rate,
                    "ratio": path.rate / alone.rate,
                    "rounds": [(round(a.rate), round(p.rate)) for a, p in zip(alone.runs, path.runs, strict=True)],
                    "engine_ms": alone.stages_ms,
                    "path_ms": path.stages_ms,
                }
            )
            with (_out() / "path-rounds.jsonl").open("a") as file:
                for side in sides:
                    for number, told in enumerate(side.told):
                        file.write(json.dumps({"side": side.name, "of": concurrent, "round": number, **told}) + "\n")


@contextlib.asynccontextmanager
async def _both(way: Way, rows: int) -> AsyncGenerator[tuple[EngineLoop, str, Path, Path]]:
    """Serve what an engine of this process has as well; yields it, the url and the files of both engines' steps."""
    with tempfile.TemporaryDirectory(prefix="df-gpu-") as root:
        folder = Path(root) / "model"
        folder.mkdir()
        write_folder(folder, SHAPES[way.model].vocab)
        argv = flags(folder, rows, BUDGET)
        ready = Path(root) / "worker.ready"
        steps_alone, steps_served = Path(root) / "alone.steps", Path(root) / "served.steps"
        options = LocalFleetOptions(
            host="127.0.0.1", port=8123, workers=0, model=str(folder), model_name="random", redis_url=None,
            data_dir=Path(root) / "data", start_timeout_s=60.0, drain_s=1.0,
        )  # fmt: skip
        try:
            served_by = await LocalFleet(options, Reporter(sys.stderr)).__aenter__()
        except Stop as stop:
            raise RuntimeError("\n".join([str(stop), *stop.details])) from stop
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_exit(served_by)
            env = {**os.environ, "DIFFLEET_REDIS_URL": EmbeddedServer(options.data_dir).url}
            what = [way.model, str(way.block), str(way.steps), "emulated" if way.emulated else "real"]
            command = [sys.executable, "-m", "tests.bench.gpu.random_worker", *what, str(steps_served)]
            with (_out() / "worker.log").open("w") as log:
                worker = subprocess.Popen(
                    [*command, *argv, "--ready-file", str(ready)], env=env, stdout=log, stderr=log
                )
                try:
                    # One after the other: each measures what its steps take, and must have the card for itself.
                    while not ready.exists():
                        if worker.poll() is not None:
                            raise RuntimeError(f"the worker ended with {worker.returncode}")
                        await asyncio.sleep(0.1)
                    use_random_weights(*what)
                    record(steps_alone)
                    async with EngineLoop.load(read_settings(argv)) as loop:
                        keep_for_good()  # as the processes of the fleet do
                        yield loop, options.url, steps_alone, steps_served
                finally:
                    worker.terminate()
                    worker.wait(30)
