"""The playground in a real browser, against the real app on a scripted fleet."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from shared.client import FleetUnavailable
from shared.events import Failed
from shared.holes import HOLE
from tests.api.playground.conftest import DESKTOP, PHONE
from tests.api.playground.denoising import BLOCK, TEXT, denoise, hanging_in_the_first_block, token_count
from tests.api.scripted import CARD, ScriptedFleet, steps
from tests.shared.tokenizers_for_tests import byte_level

pytestmark = pytest.mark.slow

MODES = ("chat", "continue", "json", "infill")


def visit(page: Page, url: str) -> None:
    page.goto(url)
    expect(page.locator("#model")).to_be_enabled()


def generate(page: Page, prompt: str = "What does the fox say?") -> None:
    page.get_by_label("Prompt").fill(prompt)
    page.get_by_role("button", name="Generate").click()


def ended(page: Page, word: str = "finished") -> None:
    for state in page.locator(".card .state").all():
        expect(state).to_have_text(word)


def text_of(page: Page) -> str:
    return "".join(page.locator(".canvas .cell").all_text_contents())


def test_an_answer_is_generated_with_its_costs(page: Page, url: str, fleet: ScriptedFleet) -> None:
    visit(page, url)
    generate(page)
    ended(page)
    assert text_of(page) == TEXT
    expect(page.locator("[data-cost=tokens]")).to_have_text(str(token_count()))
    blocks = -(-token_count() // BLOCK)
    expect(page.locator("[data-cost=nfe]")).to_have_text(str(3 * blocks))
    expect(page.locator("[data-cost=steps]")).to_have_text(str(3 * blocks))
    assert fleet.commands[0].preview is not None


def test_masks_heat_and_the_frame_of_the_active_block_are_shown_while_it_denoises(
    page: Page, url: str, fleet: ScriptedFleet
) -> None:
    fleet.script = hanging_in_the_first_block
    visit(page, url)
    generate(page)
    expect(page.locator(".block.active .cell.mask").first).to_be_visible()
    assert page.locator(".block.active .cell.guess").count() == BLOCK // 2
    kinds = page.locator(".block.active .cell.guess").evaluate_all("cells => cells.map(cell => cell.className)")
    assert len({kind.split()[-1] for kind in kinds}) > 1
    page.get_by_role("button", name="Stop").click()
    ended(page, "stopped")


def test_any_step_can_be_seen_again(page: Page, url: str) -> None:
    visit(page, url)
    generate(page)
    ended(page)
    scrub = page.get_by_role("slider", name="Step of Answer")
    scrub.focus()
    page.keyboard.press("Home")
    expect(page.locator(".canvas .cell")).to_have_count(0)
    page.keyboard.press("ArrowRight")
    expect(page.locator(".canvas .cell.mask")).to_have_count(BLOCK // 2)
    page.keyboard.press("ArrowRight")
    expect(page.locator(".canvas .cell.mask")).to_have_count(BLOCK // 4)
    expect(page.locator(".where")).to_contain_text("block 1, step 2 · frame 2 of")
    page.keyboard.press("End")
    expect(page.locator(".canvas .cell.mask")).to_have_count(0)
    page.get_by_label("Speed of the replay of Answer").select_option("4")
    page.get_by_role("button", name="Replay").click()
    expect(page.get_by_role("button", name="Replay")).to_be_visible()
    assert text_of(page) == TEXT


def test_a_token_tells_when_and_how_surely_it_was_accepted_by_keyboard_alone(page: Page, url: str) -> None:
    visit(page, url)
    generate(page)
    ended(page)
    page.get_by_role("group", name="Canvas of Answer").focus()
    page.keyboard.press("Home")
    inspector = page.locator(".inspector")
    expect(inspector).to_contain_text("Token 1, block 1")
    expect(inspector).to_contain_text("accepted at step 1 · confidence 0.250")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    expect(inspector).to_contain_text("accepted in the forward that closed its block")


def test_stop_ends_the_request_in_the_fleet(page: Page, url: str, fleet: ScriptedFleet) -> None:
    fleet.script = denoise(hang_after=2)
    visit(page, url)
    generate(page)
    expect(page.locator(".block")).to_have_count(2)
    page.keyboard.press("Escape")
    ended(page, "stopped")
    expect(page.get_by_role("button", name="Generate")).to_be_enabled()
    for _ in range(100):
        if fleet.aborts:
            break
        page.wait_for_timeout(50)
    assert [request for request, _ in fleet.aborts] == [fleet.commands[0].id]


def test_a_refusal_is_told_in_words_with_its_field(page: Page, url: str) -> None:
    visit(page, url)
    page.get_by_label("Most tokens").first.evaluate("input => { input.max = 5000; input.value = 5000; }")
    generate(page)
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("max_tokens is 5000")
    expect(alert).to_contain_text("HTTP 400 · context_length_exceeded · req_")
    ended(page, "failed")


def test_an_error_in_mid_stream_keeps_what_was_shown(page: Page, url: str, fleet: ScriptedFleet) -> None:
    def play(command):  # type: ignore[no-untyped-def]
        for number, step in enumerate(denoise()(command)):
            if number == 8:
                yield Failed(command.id, 9, 1, "internal", "a worker failed")
                return
            yield step

    fleet.script = play
    visit(page, url)
    generate(page)
    expect(page.get_by_role("alert")).to_be_visible()
    ended(page, "failed")
    assert text_of(page) and text_of(page) in TEXT


def test_an_unreachable_queue_is_told(page: Page, url: str, fleet: ScriptedFleet) -> None:
    visit(page, url)
    fleet.down = FleetUnavailable("gone")
    generate(page)
    expect(page.get_by_role("alert")).to_contain_text("HTTP 503")
    expect(page.get_by_role("alert")).to_contain_text("Try again in")


def test_a_reload_keeps_the_result_its_replay_and_the_settings(page: Page, url: str) -> None:
    visit(page, url)
    page.get_by_label("Strategy").first.select_option("sequential")
    generate(page)
    ended(page)
    page.reload()
    expect(page.locator("#model")).to_be_enabled()
    assert text_of(page) == TEXT
    expect(page.get_by_label("Strategy").first).to_have_value("sequential")
    page.get_by_role("slider", name="Step of Answer").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".canvas .cell.mask")).to_have_count(BLOCK // 2)


def test_a_reload_in_the_middle_follows_the_same_request_to_its_end(page: Page, url: str, fleet: ScriptedFleet) -> None:
    fleet.script = denoise(hang_after=2)
    visit(page, url)
    generate(page)
    expect(page.locator(".block")).to_have_count(2)
    fleet.script = denoise()
    page.reload()
    ended(page)
    assert text_of(page) == TEXT
    first, again = fleet.idempotency_keys
    assert first is not None and first == again
    assert fleet.aborts == []
    expect(page.get_by_role("button", name="Generate")).to_be_enabled()
    generate(page, "Another question")
    ended(page)
    assert len(set(fleet.idempotency_keys)) == 2


def test_two_settings_run_side_by_side_on_one_seed(page: Page, url: str, fleet: ScriptedFleet, artifacts: Path) -> None:
    visit(page, url)
    page.get_by_label("Compare two settings").check()
    generate(page)
    ended(page)
    expect(page.locator(".card")).to_have_count(2)
    rows = page.locator("#verdict tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.first.locator("td")).to_have_count(6)
    seeds = {command.sampling.seed for command in fleet.commands}
    assert len(fleet.commands) == 2 and len(seeds) == 1
    strategies = {command.decoding and command.decoding.strategy for command in fleet.commands}
    assert strategies == {None, "low_confidence_static"}
    page.screenshot(path=artifacts / "playground-compare.png", full_page=True)


def test_a_chat_remembers_and_can_begin_anew(page: Page, url: str, fleet: ScriptedFleet) -> None:
    visit(page, url)
    generate(page, "First question")
    ended(page)
    generate(page, "Second question")
    expect(page.locator(".history li")).to_have_count(2)
    ended(page)
    assert len(fleet.commands[1].prompt) > len(fleet.commands[0].prompt) + token_count()
    page.get_by_role("button", name="New chat").click()
    generate(page, "First question")
    ended(page)
    assert fleet.commands[2].prompt == fleet.commands[0].prompt


def test_a_raw_text_is_continued_without_a_template(page: Page, url: str, fleet: ScriptedFleet) -> None:
    visit(page, url)
    page.get_by_text("Continue a text").click()
    generate(page, "The quick")
    ended(page)
    assert text_of(page) == TEXT
    page.get_by_text("Chat", exact=True).click()
    generate(page, "The quick")
    ended(page)
    assert len(fleet.commands[0].prompt) < len(fleet.commands[1].prompt)


def test_the_copied_curl_asks_for_the_same(page: Page, url: str, fleet: ScriptedFleet) -> None:
    visit(page, url)
    page.get_by_label("Strategy").first.select_option("low_confidence_static")
    generate(page, 'It\'s a "test" with ümlauts')
    ended(page)
    page.get_by_role("button", name="Copy Answer as code").click()
    command = page.locator("#snippet code").inner_text()
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30)
    assert "[DONE]" in done.stdout, done.stderr
    asked, again = fleet.commands
    assert (again.prompt, again.decoding, again.limits) == (asked.prompt, asked.decoding, asked.limits)


def test_the_copied_python_asks_for_the_same(page: Page, url: str, fleet: ScriptedFleet, tmp_path: Path) -> None:
    visit(page, url)
    page.get_by_label("Strategy").first.select_option("entropy_bounded")
    generate(page, 'Quotes " and \\ and\nlines')
    ended(page)
    page.get_by_role("button", name="Copy Answer as code").click()
    page.get_by_role("button", name="Python").click()
    (tmp_path / "snippet.py").write_text(page.locator("#snippet code").inner_text())
    done = subprocess.run([sys.executable, tmp_path / "snippet.py"], capture_output=True, text=True, timeout=60)
    assert done.stdout == TEXT + "\n", done.stderr
    asked, again = fleet.commands
    assert (again.prompt, again.decoding, again.limits) == (asked.prompt, asked.decoding, asked.limits)


def test_text_of_a_model_is_never_markup(page: Page, url: str, fleet: ScriptedFleet) -> None:
    evil = "<img src=x onerror=alert(1)><b>bold</b>"
    fleet.script = denoise(evil)
    visit(page, url)
    generate(page, evil)
    ended(page)
    assert text_of(page) == evil
    assert page.locator("main img, .canvas b").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("device", ["desktop", "phone"])
def test_it_is_accessible_and_fits_the_screen(
    browser: Browser, url: str, fleet: ScriptedFleet, artifacts: Path, scheme: str, device: str
) -> None:
    """No finding of axe-core at all, with a run on the screen and with the dialog open; no sideways scrolling."""
    fleet.script = denoise(hang_after=2)
    size = DESKTOP if device == "desktop" else PHONE
    # axe is injected, which the page's own policy forbids.
    context = browser.new_context(
        viewport=size,
        color_scheme="dark" if scheme == "dark" else "light",
        reduced_motion="reduce",
        has_touch=device == "phone",
        bypass_csp=True,
    )
    page = context.new_page()
    visit(page, url)
    generate(page)
    expect(page.locator(".block")).to_have_count(2)
    page.screenshot(path=artifacts / f"playground-{device}-{scheme}.png", full_page=True)
    assert findings(page) == []
    wide = page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
    assert not wide
    page.get_by_role("button", name="Stop").click()
    page.get_by_role("button", name="Copy Answer as code").click()
    assert findings(page) == []
    context.close()


def findings(page: Page) -> list[str]:
    violations = Axe().run(page).response["violations"]
    return [json.dumps([one["id"], one["impact"], [node["html"][:160] for node in one["nodes"]]]) for one in violations]


def test_the_keyboard_reaches_everything_in_reading_order(page: Page, url: str) -> None:
    visit(page, url)
    generate(page)
    ended(page)
    page.reload()
    expect(page.locator("#model")).to_be_enabled()
    reached: list[str] = []
    for _ in range(32):
        page.keyboard.press("Tab")
        name = page.evaluate(
            "document.activeElement.id || document.activeElement.className || document.activeElement.name"
        )
        reached.append(str(name))
    wanted = ["model", "key-open", "theme", "mode", "prompt", "run", "compare", "canvas", "scrub"]
    places = [next((at for at, name in enumerate(reached) if one == name), -1) for one in wanted]
    assert -1 not in places, reached
    assert places == sorted(places), reached


def test_a_rejected_script_says_no_more_than_the_api_does(page: Page, url: str, fleet: ScriptedFleet) -> None:
    fleet.script = steps(ValueError("a secret of the server"))
    visit(page, url)
    generate(page)
    expect(page.get_by_role("alert")).to_contain_text("HTTP 500")
    assert "secret" not in page.content()


def test_an_answer_can_be_asked_for_as_json_of_a_schema(page: Page, url: str, fleet: ScriptedFleet) -> None:
    visit(page, url)
    page.get_by_text("JSON", exact=True).click()
    schema = page.get_by_label("JSON schema of the answer")
    schema.fill('{"type": "object"')
    page.get_by_label("Prompt").fill("Who?")
    page.get_by_role("button", name="Generate").click()
    expect(page.locator("#schema-said")).to_contain_text("No JSON")
    assert fleet.commands == []
    schema.fill('{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}')
    generate(page, "Who?")
    ended(page)
    constraint = fleet.commands[0].constraint
    assert constraint is not None and '"name"' in constraint.model_dump_json().replace("\\", "")
    page.reload()
    expect(schema).to_have_value(re.compile("required"))


def test_holes_of_a_text_are_filled_together(page: Page, url: str, fleet: ScriptedFleet) -> None:
    visit(page, url)
    page.get_by_text("Fill holes", exact=True).click()
    generate(page, "No hole here.")
    expect(page.locator("#infill-said")).to_contain_text("no hole")
    generate(page, "___ begins.")
    expect(page.locator("#infill-said")).to_contain_text("Begin with some text")
    box = page.get_by_label("Prompt")
    box.fill("The quick brown fox jumps over the lazy dog.")
    box.evaluate("box => box.setSelectionRange(4, 9)")
    page.get_by_role("button", name="Make a hole").click()
    expect(box).to_have_value("The ___8 brown fox jumps over the lazy dog.")
    generate(page, "The ___8 brown fox jumps over the ___3 dog.")
    ended(page)
    (command,) = fleet.commands
    assert command.template is not None and command.template.count(HOLE) == 11
    assert byte_level().decode(command.prompt) == "The "


def test_the_model_that_has_workers_is_shown_and_followed_until_one_is_chosen(
    page: Page, url: str, fleet: ScriptedFleet
) -> None:
    for name in ("a-former", "later"):
        fleet.cards[name] = replace(CARD, name=name)
    fleet.departed = {"a-former", "later"}
    page.clock.install()
    visit(page, url)
    menu, facts = page.locator("#model"), page.locator("#facts")
    expect(menu).to_have_value(CARD.name)
    expect(facts).not_to_contain_text("no worker")

    fleet.departed = {"a-former", CARD.name}
    page.clock.fast_forward(6_000)
    expect(menu).to_have_value("later")
    fleet.departed = {CARD.name}
    page.clock.fast_forward(6_000)
    expect(menu.locator("option")).to_have_count(3)
    expect(menu).to_have_value("later")

    menu.select_option(CARD.name)
    expect(facts).to_contain_text("no worker now")
    fleet.departed = set()
    page.clock.fast_forward(6_000)
    expect(facts).not_to_contain_text("no worker")
    fleet.departed = {CARD.name}
    page.clock.fast_forward(6_000)
    expect(facts).to_contain_text("no worker now")
    expect(menu).to_have_value(CARD.name)
    page.reload()
    expect(facts).to_contain_text("no worker now")
    expect(menu).to_have_value(CARD.name)


def test_only_modes_in_which_the_model_answers_are_offered(page: Page, url: str, fleet: ScriptedFleet) -> None:
    bare = tuple(name for name in CARD.capabilities if name != "chat")
    fleet.cards["bare"] = replace(CARD, name="bare", capabilities=bare, digest="")
    fleet.cards["plain"] = replace(CARD, name="plain", capabilities=("generate", "chat"), digest="")
    visit(page, url)
    menu, modes = page.locator("#model"), page.locator("input[name=mode]")
    chat, on, form, holes = (page.locator(f"input[name=mode][value={name}]") for name in MODES)

    menu.select_option("bare")
    expect(on).to_be_checked()
    assert [modes.nth(n).is_disabled() for n in range(4)] == [True, False, True, False]
    assert chat.locator("..").get_attribute("title") == "This model has no chat template."
    generate(page)
    ended(page)
    page.reload()
    expect(menu).to_have_value("bare")
    expect(on).to_be_checked()

    menu.select_option(CARD.name)
    expect(chat).to_be_checked()
    holes.locator("..").click()
    menu.select_option("plain")
    expect(chat).to_be_checked()
    assert form.is_disabled() and holes.is_disabled() and not chat.locator("..").get_attribute("title")
    menu.select_option(CARD.name)
    expect(holes).to_be_checked()
    expect(page.locator("#infill-box")).to_be_visible()


def test_a_page_that_was_there_before_any_model_finds_the_first_one(page: Page, url: str, fleet: ScriptedFleet) -> None:
    fleet.cards = {}
    page.clock.install()
    page.goto(url)
    expect(page.get_by_role("alert")).to_contain_text("No worker has announced a model yet")
    fleet.cards = {CARD.name: CARD}
    page.clock.fast_forward(6_000)
    expect(page.locator("#model")).to_have_value(CARD.name)
    expect(page.get_by_role("alert")).to_be_hidden()
    generate(page)
    ended(page)


def test_what_is_set_stays_while_models_are_asked_for_anew(page: Page, url: str, fleet: ScriptedFleet) -> None:
    page.clock.install()
    visit(page, url)
    temperature = page.locator("#knobs-a [data-knob=temperature]")
    temperature.fill("0.7")
    fleet.cards["later"] = replace(CARD, name="later")
    page.clock.fast_forward(6_000)
    expect(page.locator("#model option")).to_have_count(2)
    expect(temperature).to_have_value("0.7")
