"""One headless Chromium for the tests of a module, and a place for what it has seen."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, ViewportSize, sync_playwright

from tests.api.live import serving
from tests.api.playground.denoising import denoise
from tests.api.scripted import ScriptedFleet

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
DESKTOP = ViewportSize(width=1360, height=900)
PHONE = ViewportSize(width=390, height=844)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Of one module: while it lives, Playwright's event loop occupies the thread, and no asynchronous test can run."""
    if not CHROMIUM.exists():
        pytest.skip(f"{CHROMIUM} is not installed: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page in a context of its own, whose console must stay silent."""
    context = browser.new_context(viewport=DESKTOP, reduced_motion="reduce")
    context.set_default_timeout(15_000)
    page = context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    # The browser itself reports answers of 4xx and 5xx, which some tests ask for.
    page.on(
        "console", lambda said: faults.append(said.text) if said.type == "error" and not _expected(said.text) else None
    )
    yield page
    context.close()
    assert faults == []


def _expected(text: str) -> bool:
    return text.startswith("Failed to load resource: the server responded with a status of")


@pytest.fixture
def fleet() -> ScriptedFleet:
    return ScriptedFleet(denoise())


@pytest.fixture
def url(fleet: ScriptedFleet) -> Iterator[str]:
    with serving(fleet) as url:
        yield url


@pytest.fixture(scope="session")
def artifacts() -> Path:
    """Where screenshots are kept: `DIFFLEET_ARTIFACTS`, or a new folder."""
    folder = Path(os.environ.get("DIFFLEET_ARTIFACTS") or tempfile.mkdtemp(prefix="diffleet-artifacts-"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder
