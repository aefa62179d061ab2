"""The reference's files, without a browser."""

import re
from importlib.resources import files

from api.routes.reference import NAMES
from tests.api.scripted import Caller

FOLDER = files("api") / "reference"


async def test_the_page_and_its_files_come_under_a_policy_that_lets_nothing_in(caller: Caller) -> None:
    for path in ("/docs", *(f"/docs/{name}" for name in NAMES)):
        answer = await caller.get(path)
        assert answer.status == 200, path
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; ")
        assert "unsafe" not in policy and "*" not in policy and "http" not in policy
        assert not re.search(r"https?://", answer.body.decode()), path
    assert (await caller.get("/docs/nothing.js")).status == 404
    assert (await caller.get("/redoc")).status == 404


def test_the_folder_holds_what_is_served_and_no_file_makes_markup_from_text() -> None:
    assert {file.name for file in FOLDER.iterdir()} == {"index.html", *NAMES}
    for file in FOLDER.iterdir():
        text = file.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
        assert 'style="' not in text
