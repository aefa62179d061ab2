"""Run batches, deliver webhooks: `python -m api.jobs [--redis-url redis://...]`. Any number of processes may run."""

from collections.abc import Callable

from shared.cli.entry import start


def _load() -> Callable[[], int]:
    from api.jobs.process import main

    return main


if __name__ == "__main__":
    start(_load)
