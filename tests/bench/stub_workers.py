"""Workers without a model: they claim, sleep for a step, commit a block for each of their requests, and beat.

python -m tests.bench.stub_workers <redis url> <model> <workers> <slots> <ms a step>
"""

import asyncio
import math
import sys
import threading
from pathlib import Path

import orjson

from shared.card import ModelCard
from shared.commands import decode_command
from shared.events import Delta, Finished, Usage
from shared.heart import Heart
from shared.queue import Claim, WorkerQueue
from shared.roster import WorkerInfo
from worker.settings import WorkerSettings

BLOCK = 32
TEXT = "the quick brown fox jumps over the lazy dog and then some more "
_TOKENIZER = Path(__file__).parents[2] / "worker" / "demo" / "models" / "demo"


def card_of(model: str) -> ModelCard:
    """Return the card of a model that has the bundled tokenizer."""
    files = {name: (_TOKENIZER / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}
    vocabulary: int = orjson.loads((_TOKENIZER / "config.json").read_bytes())["vocab_size"]
    return ModelCard(
        model, "sdar", 4096, BLOCK, False, {"strategy": "threshold"}, 0.0, ("generate",), (1,), 2, vocabulary, files
    )


class StubWorker:
    def __init__(self, queue: WorkerQueue, slots: int, step_s: float, settings: WorkerSettings) -> None:
        self._queue = queue
        self._slots = slots
        self._step_s = step_s
        self._settings = settings
        self._held: dict[str, tuple[Claim, int]] = {}

    async def run(self) -> None:
        await asyncio.gather(self._claim(), self._step(), self._poll())

    async def _claim(self) -> None:
        while True:
            room = self._slots - len(self._held)
            claims = await self._queue.take(room, len(self._held)) if room else []
            if not claims and not self._held:
                claims = await self._queue.wait(1000)
            for claim in claims:
                blocks = math.ceil(decode_command(claim.payload).limits.max_tokens / BLOCK)
                self._held[claim.id] = (claim, blocks)
            if self._held and not claims:
                await asyncio.sleep(self._queue.pause_s(self._settings.claim_poll_ms / 1000, found=False))

    async def _step(self) -> None:
        done: dict[str, int] = {}
        while True:
            await asyncio.sleep(self._step_s)
            deltas: list[Delta] = []
            ends: list[tuple[Delta, Finished]] = []
            for claim, blocks in self._held.values():
                number = done.get(claim.id, 0)
                ids, seq = [7] * BLOCK, claim.seq + number + 1
                delta = Delta(claim.id, seq, claim.epoch, number, number * BLOCK, ids, TEXT, number + 1)
                done[claim.id] = number + 1
                if number + 1 < blocks:
                    deltas.append(delta)
                else:
                    usage = Usage(1, blocks * BLOCK, blocks, blocks)
                    ends.append((delta, Finished(claim.id, seq + 1, claim.epoch, "length", "max_tokens", usage)))
            await asyncio.gather(self._queue.emit(deltas), self._queue.finish_all(ends))
            for _, end in ends:
                del self._held[end.id], done[end.id]

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._settings.abort_poll_ms / 1000)
            if self._held:
                await self._queue.find_aborted(list(self._held))


def beat(hearts: list[Heart], model: str) -> None:
    """Announce all, for as long as the process lives."""
    pause = threading.Event()
    while True:
        for number, heart in enumerate(hearts):
            heart.beat({}, WorkerInfo(f"w{number}", model, "ready"))
        pause.wait(hearts[0].interval_s)


async def main(url: str, model: str, workers: int, slots: int, step_ms: float) -> None:
    settings = WorkerSettings(model=model)
    names = [f"w{number}" for number in range(workers)]
    queues = [WorkerQueue.connect(url, model, name, slots=slots) for name in names]
    await queues[0].publish_card(card_of(model))
    hearts = [Heart.connect(url, name, model) for name in names]
    threading.Thread(target=beat, args=(hearts, model), daemon=True).start()
    print("ready", flush=True)
    await asyncio.gather(*(StubWorker(queue, slots, step_ms / 1000, settings).run() for queue in queues))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])))
