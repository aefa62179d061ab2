"""Batches of packed rows, generated on the fly by worker processes."""

import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from queue import Full
from random import Random
from types import TracebackType

import numpy as np
from tokenizers import Tokenizer

from worker.demo.mix import Mix
from worker.demo.rows import BLOCK_LENGTHS, Int16, document, encode, pack

# Forked before anything touches the GPU: a spawned process would import torch first, which takes longer than the test.
_CONTEXT = multiprocessing.get_context("fork")


def documents(tokenizer: Tokenizer, seed: int) -> Iterator[Int16]:
    """Generate training documents without end."""
    rng, noise, mix = Random(seed), np.random.default_rng(seed), Mix()
    while True:
        yield document(encode(mix.conversation(rng), tokenizer), rng.choice(BLOCK_LENGTHS), noise)


class Feed:
    """Hands out batches [6, rows, row_len]; with no processes it makes them in the caller's."""

    def __init__(self, tokenizer: Path, row_count: int, row_len: int, processes: int, seed: int) -> None:
        self._stop = _CONTEXT.Event()
        self._queue = _CONTEXT.Queue(maxsize=max(1, 2 * processes))
        job = (tokenizer, row_count, row_len)
        self._workers = [
            _CONTEXT.Process(target=self._produce, args=(*job, seed * 1000 + i), daemon=True) for i in range(processes)
        ]
        for worker in self._workers:
            worker.start()
        self._own = None if processes else _batches(*job, seed * 1000)

    def __enter__(self) -> "Feed":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for worker in self._workers:
            worker.terminate()
            worker.join(timeout=5)

    def next(self) -> Int16:
        """Return the next batch."""
        return next(self._own) if self._own else self._queue.get(timeout=120)

    def _produce(self, tokenizer: Path, row_count: int, row_len: int, seed: int) -> None:
        for batch in _batches(tokenizer, row_count, row_len, seed):
            while not self._stop.is_set():
                try:
                    self._queue.put(batch, timeout=1)
                    break
                except Full:
                    continue
            if self._stop.is_set():
                return


def _batches(tokenizer: Path, row_count: int, row_len: int, seed: int) -> Iterator[Int16]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    stream = documents(Tokenizer.from_file(str(tokenizer / "tokenizer.json")), seed)
    while True:
        yield pack(stream, row_count, row_len)
