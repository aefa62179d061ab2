"""The reference at /docs in a real browser: everything comes from this server, and what it shows can be sent."""

import json
import re
from importlib.resources import files
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from tests.api.playground.conftest import PHONE
from tests.api.playground.denoising import TEXT, hanging_in_the_first_block
from tests.api.scripted import ScriptedFleet

FOLDER = files("api") / "reference"
pytestmark = pytest.mark.slow


def visit(page: Page, url: str, anchor: str = "") -> None:
    page.goto(f"{url}/docs{anchor}")
    expect(page.locator("#found")).to_contain_text("operations")


def test_no_other_host_is_asked(browser: Browser, url: str) -> None:
    context = browser.new_context()
    page = context.new_page()
    asked: list[str] = []
    context.on("request", lambda request: asked.append(request.url))
    refused: list[str] = []
    page.on("console", lambda said: refused.append(said.text) if "Content Security Policy" in said.text else None)
    visit(page, url, "#post-generate")
    expect(page.locator("#post-generate .fields").first).to_be_visible()
    context.close()
    assert len(asked) >= 7
    assert {urlsplit(one).netloc for one in asked} == {urlsplit(url).netloc}
    assert refused == []


def test_every_operation_of_the_description_is_shown(page: Page, url: str) -> None:
    visit(page, url)
    described = page.request.get(f"{url}/openapi.json").json()["paths"]
    wanted = sorted(f"{verb.upper()} {path}" for path, verbs in described.items() for verb in verbs)
    shown = page.locator(".operation > summary").evaluate_all(
        "all => all.map(one => one.querySelector('.verb').textContent + ' ' + one.querySelector('.path').textContent)"
    )
    assert sorted(shown) == wanted and len(wanted) > 25
    for summary in page.locator(".operation > summary").all():
        summary.click()
    # A part is filled once its toggle event has come.
    expect(page.locator(".operation .inside")).to_have_count(len(wanted))


def test_fields_are_told_with_type_bounds_and_meaning_down_to_the_strategies(page: Page, url: str) -> None:
    visit(page, url, "#post-generate")
    row = page.locator("#post-generate .fields tr", has=page.locator("code", has_text=re.compile("^temperature$")))
    expect(row.first).to_contain_text("number, from 0 to 5")
    expect(row.first).to_contain_text("Unset: the model's own default.")
    diffusion = page.locator("#post-generate .fields tr", has=page.locator("code", has_text=re.compile("^diffusion$")))
    diffusion.first.locator("summary").first.click()
    expect(diffusion.first).to_contain_text("threshold")


def test_a_request_is_sent_and_its_answer_shown(page: Page, url: str, fleet: ScriptedFleet) -> None:
    visit(page, url, "#post-generate")
    form = page.locator("#post-generate .attempt")
    body = form.get_by_label("Body")
    assert "prompt" in json.loads(body.input_value())
    body.fill('{"prompt": "What does the fox say?"}')
    form.get_by_role("button", name="Send").click()
    expect(form.get_by_role("status")).to_contain_text("200")
    expect(form.get_by_label("Answer")).to_contain_text(TEXT[:20])
    assert len(fleet.commands) == 1


def test_an_error_is_shown_as_it_is(page: Page, url: str) -> None:
    visit(page, url, "#post-generate")
    form = page.locator("#post-generate .attempt")
    form.get_by_label("Body").fill('{"prompt": "x", "max_tokens": 0}')
    form.get_by_role("button", name="Send").click()
    expect(form.get_by_role("status")).to_contain_text("400")
    expect(form.get_by_label("Answer")).to_contain_text("max_tokens")


def test_a_stream_is_shown_as_it_comes_and_can_be_stopped(page: Page, url: str, fleet: ScriptedFleet) -> None:
    fleet.script = hanging_in_the_first_block
    visit(page, url, "#post-generate")
    form = page.locator("#post-generate .attempt")
    form.get_by_label("Body").fill('{"prompt": "x", "stream": true, "stream_mode": "denoise"}')
    form.get_by_role("button", name="Send").click()
    expect(form.get_by_label("Answer")).to_contain_text("buffer_snapshot")
    form.get_by_role("button", name="Stop").click()
    expect(form.get_by_role("status")).to_contain_text("Stopped")
    expect(form.get_by_role("button", name="Send")).to_be_enabled()


def test_a_word_finds_operations_by_path_or_field(page: Page, url: str) -> None:
    visit(page, url)
    page.get_by_label("Find").fill("max_nfe")
    expect(page.locator("#found")).to_contain_text(" of ")
    assert page.locator(".operation:visible").count() < page.locator(".operation").count()
    expect(page.locator("#post-generate")).to_be_visible()
    expect(page.locator("#get-ping")).to_be_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_serious_is_wrong_for_those_who_cannot_see_or_point(
    page: Page, url: str, scheme: str, artifacts: Path
) -> None:
    page.emulate_media(color_scheme=scheme)  # pyright: ignore[reportArgumentType]
    visit(page, url, "#post-generate")
    expect(page.locator("#post-generate .attempt")).to_be_visible()
    page.screenshot(path=artifacts / f"reference-{scheme}.png")
    found = Axe().run(page).response["violations"]
    assert [one["id"] for one in found if one["impact"] in ("serious", "critical")] == []


def test_on_a_phone_nothing_is_wider_than_the_screen(browser: Browser, url: str, artifacts: Path) -> None:
    context = browser.new_context(viewport=PHONE)
    page = context.new_page()
    visit(page, url, "#post-v1-chat-completions")
    expect(page.locator(".attempt")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    page.screenshot(path=artifacts / "reference-phone.png")
    context.close()
