"""Run a worker: `python -m worker [--model demo] [--redis-url redis://...]`."""

from collections.abc import Callable

from shared.cli.entry import start


def _load() -> Callable[[], int]:
    from worker.process import main

    return main


if __name__ == "__main__":
    start(_load)
