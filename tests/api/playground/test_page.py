"""The playground's files, without a browser."""

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import get_args

import pytest

from api.access import hash_key
from api.routes.playground import MEDIA_TYPES, PAGE
from api.schemas import DiffusionOptions, Strategy
from shared.decoding import KINDS
from tests.api.scripted import Caller, ScriptedFleet, running

FOLDER = files("api") / "playground"
SOURCES = {name: (FOLDER / name).read_text() for name in MEDIA_TYPES}


async def test_the_root_is_the_page_under_a_strict_policy(caller: Caller) -> None:
    answer = await caller.get("/")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy and "*" not in policy and "http" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", sorted(set(MEDIA_TYPES) - {PAGE}))
async def test_every_file_is_served_with_its_type(caller: Caller, name: str) -> None:
    answer = await caller.get(f"/playground/{name}")
    assert answer.status == 200
    assert answer.headers["content-type"] == MEDIA_TYPES[name]
    assert answer.body.decode() == SOURCES[name]


async def test_a_known_version_is_not_sent_again(caller: Caller) -> None:
    first = await caller.get("/playground/main.js")
    again = await caller.get("/playground/main.js", {"if-none-match": first.headers["etag"]})
    assert (again.status, again.body) == (304, b"")


@pytest.mark.parametrize("name", ["nothing.js", "..%2fapp.py", "__init__.py"])
async def test_nothing_else_is_served(caller: Caller, name: str) -> None:
    answer = await caller.get(f"/playground/{name}")
    assert answer.status == 404
    assert answer.error["code"] == "not_found"


async def test_the_page_needs_no_key_and_what_it_asks_does(fleet: ScriptedFleet, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps([{"id": "a", "sha256": hash_key("secret")}]))
    async with running(fleet, api_keys_file=keys) as caller:
        assert (await caller.get("/")).status == 200
        assert (await caller.get("/playground/main.js")).status == 200
        assert (await caller.get("/v1/models")).status == 401


def test_the_folder_holds_what_is_served_and_nothing_else() -> None:
    assert {file.name for file in FOLDER.iterdir()} == set(MEDIA_TYPES)


@pytest.mark.parametrize("name", sorted(MEDIA_TYPES))
def test_no_file_names_an_outside_host_or_writes_markup_from_text(name: str) -> None:
    hosts = {host for host in re.findall(r"https?://([\w.-]+)", SOURCES[name]) if host != "www.w3.org"}
    assert hosts == set()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", SOURCES[name])
    assert 'style="' not in SOURCES[name] and " onclick=" not in SOURCES[name]


def test_every_import_and_reference_is_served() -> None:
    for name, source in SOURCES.items():
        wanted = re.findall(r'from "\./([\w.]+)"', source) + re.findall(r'"/playground/([\w.]+)"', source)
        assert set(wanted) <= set(MEDIA_TYPES), name


def test_the_strategies_offered_are_those_that_the_api_takes() -> None:
    offered = set(
        re.findall(
            r'<option value="(\w+)"', SOURCES[PAGE].partition('data-knob="strategy"')[2].partition("</select>")[0]
        )
    )
    assert offered == set(get_args(Strategy))


def test_every_diffusion_knob_is_a_field_of_the_api() -> None:
    named = re.search(r"const \{ ([\w, ]+), \.\.\.flat \} = knobs", SOURCES["request.js"])
    assert named is not None
    assert set(named[1].split(", ")) <= set(DiffusionOptions.model_fields)


def test_every_number_of_a_strategy_has_a_knob_that_is_shown_with_it() -> None:
    applies = dict(re.findall(r"^  (\w+): \[([^\]]*)\],$", SOURCES["request.js"], re.M))
    choices = {"strategy", "confidence", "fallback", "filler_rules", "early_stop"}
    for strategy, kind in KINDS.items():
        if strategy in get_args(Strategy):
            options = {*kind.model_fields} & {*DiffusionOptions.model_fields} - choices
            assert set(re.findall(r"\w+", applies[strategy])) == options, strategy
            assert all(f'data-knob="{option}"' in SOURCES[PAGE] for option in options)
