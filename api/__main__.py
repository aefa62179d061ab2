"""Serve the front: `python -m api [--port 8000] [--redis-url redis://...]`."""

from collections.abc import Callable

from shared.cli.entry import start


def _load() -> Callable[[], int]:
    from api.process import main

    return main


if __name__ == "__main__":
    start(_load)
