"""One thread: these models are too small to share, and the results should not depend on the machine.

Every run ends with a table by family; `DIFFLEET_GOLDENS_REPORT` names a file for it and the one by setting.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.goldens.folder import GoldenFolder
from tests.goldens.report import WAYS, Outcome, columns, markdown

_OUTCOME = pytest.StashKey[Outcome]()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def told_in_the_report(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> None:
    """Say which family, way and setting the test is about."""
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    folder, name = parameters.get("folder"), request.node.originalname
    way = WAYS.get(name) or WAYS.get(f"{name}[{parameters.get('way')}]")
    if way is None or not isinstance(folder, GoldenFolder):
        return
    record_property("family", folder.name)
    record_property("way", way)
    runs = parameters.get("runs")
    # Without either it runs all of the folder.
    count = len(runs) if runs is not None else 1 if "entry" in parameters else len(folder.generate)
    record_property("runs", count)
    record_property("setting", parameters.get("entry", {}).get("name", ""))


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_OUTCOME] = Outcome()
    config.pluginmanager.register(_Listener(config.stash[_OUTCOME]), "goldens-report")


class _Listener:
    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and not report.skipped:
            self._outcome.add(dict(report.user_properties), report.passed)  # pyright: ignore[reportArgumentType]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    outcome = config.stash[_OUTCOME]
    if not outcome.tallies:
        return
    terminalreporter.section("goldens: runs equal to their reference in tokens and forwards")
    for line in columns(outcome.by_family()):
        terminalreporter.write_line(line)
    if path := os.environ.get("DIFFLEET_GOLDENS_REPORT"):
        Path(path).write_text(f"{markdown(outcome.by_family())}\n{markdown(outcome.by_setting())}")
