"""Run a fake worker: `python -m shared.fake --model FOLDER --model-name NAME`."""

from collections.abc import Callable

from shared.cli.entry import start


def _load() -> Callable[[], int]:
    from shared.fake.process import main

    return main


if __name__ == "__main__":
    start(_load)
