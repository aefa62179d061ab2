import json
import re
from pathlib import Path
from typing import Any

import pytest

from api.access import InvalidKeys, find_key, hash_key, load_keys
from api.keys import main
from api.process import main as serve
from tests.api.scripted import ScriptedFleet, running

ROOT = Path(__file__).parents[2]


def write(path: Path, *entries: dict[str, object]) -> Path:
    path.write_text(json.dumps(entries))
    return path


def test_a_made_key_is_found_by_its_entry_and_by_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--id", "team-a", "--tokens-per-minute", "5", "--scopes", "inference,admin"]) == 0
    printed = capsys.readouterr()
    secret, entry = printed.err.strip(), json.loads(printed.out)
    assert secret not in printed.out
    keys = load_keys(write(tmp_path / "keys.json", entry))
    found = find_key(keys, secret)
    assert found and (found.id, found.scopes, found.tokens_per_minute) == ("team-a", ("inference", "admin"), 5)
    assert find_key(keys, secret + "x") is None and find_key((), secret) is None


@pytest.mark.parametrize("arguments", [["--id", "has space"], [], ["--id", "x", "--scopes", '["all"]']])
def test_a_key_that_cannot_be_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err


def test_a_broken_key_file_is_named_without_its_content_and_ends_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "keys.json", {"id": "a", "sha256": "not-a-hash-but-a-secret"})
    with pytest.raises(InvalidKeys) as caught:
        load_keys(path)
    assert "[0].sha256" in str(caught.value) and "secret" not in str(caught.value)
    assert serve(["--api-keys-file", str(path)]) == 2
    assert "api_keys_file" in capsys.readouterr().err
    with pytest.raises(InvalidKeys):
        load_keys(tmp_path / "missing.json")


def test_a_file_of_one_entry_outside_a_list_is_told_to_be_no_list(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"id": "a", "sha256": hash_key("one")}))
    with pytest.raises(InvalidKeys, match=r"keys\.json: must be a JSON list of keys"):
        load_keys(path)
    path.write_text("{")
    with pytest.raises(InvalidKeys) as caught:
        load_keys(path)
    assert ": :" not in str(caught.value)


def test_a_key_that_anyone_guesses_opens_nothing(tmp_path: Path) -> None:
    for guessed in ("", "foo", "dfk_", "changeme"):
        with pytest.raises(InvalidKeys, match=r"\[1\]\.sha256: is the hash of a key that anyone guesses"):
            load_keys(
                write(
                    tmp_path / "keys.json",
                    {"id": "a", "sha256": hash_key("one")},
                    {"id": "b", "sha256": hash_key(guessed)},
                )
            )


def test_a_key_file_of_the_documentation_is_one_once_it_has_a_hash_of_ones_own(tmp_path: Path) -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "helm").rglob("*.md")]
    shown = [text for page in pages for text in re.findall(r"```json\n(.*?)```", page.read_text(), re.S)]
    samples = [entries for text in shown if '"sha256"' in text for entries in [json.loads(text)]]
    assert [[entry["id"] for entry in entries] for entries in samples] == [["team-a"]]
    for entries in samples:
        with pytest.raises(InvalidKeys, match=r"\[0\]\.sha256: must be the 64 hexadecimal digits"):
            load_keys(write(tmp_path / "keys.json", *entries))
        own = [{**entry, "sha256": hash_key("one")} for entry in entries]
        assert [key.id for key in load_keys(write(tmp_path / "keys.json", *own))] == ["team-a"]


def test_help_for_keys_is_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    told = capsys.readouterr().out
    assert ended.value.code == 0 and "{inference,admin},..." in told
    assert "(default: inference)" in " ".join(told.split())
    assert "tuple" not in told and "null" not in told


async def test_scopes_open_what_they_name(tmp_path: Path) -> None:
    path = write(
        tmp_path / "keys.json",
        {"id": "a", "sha256": hash_key("one")},
        {"id": "b", "sha256": hash_key("two"), "scopes": ["admin"]},
    )
    async with running(ScriptedFleet(), api_keys_file=path) as caller:

        async def status(path: str, key: str) -> int:
            return (await caller.get(path, {"authorization": f"Bearer {key}"})).status

        assert [await status("/v1/models", key) for key in ("one", "two", "three")] == [200, 403, 401]
        assert [await status("/admin/loras", key) for key in ("one", "two", "three")] == [403, 200, 401]
        assert [await status(path, "three") for path in ("/health/live", "/metrics", "/docs")] == [200, 200, 200]
        assert (await caller.get("/v1/models")).error["code"] == "invalid_api_key"


async def test_a_key_is_given_and_taken_while_the_server_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.kept_file.LOOK_S", 0.0)
    path = write(tmp_path / "keys.json", {"id": "a", "sha256": hash_key("one")})
    async with running(ScriptedFleet(), api_keys_file=path) as caller:

        async def statuses() -> list[int]:
            return [
                (await caller.get("/v1/models", {"authorization": f"Bearer {key}"})).status for key in ("one", "two")
            ]

        assert await statuses() == [200, 401]
        write(path, {"id": "a", "sha256": hash_key("one")}, {"id": "a", "sha256": hash_key("two")})
        assert await statuses() == [200, 200]
        write(path, {"id": "a", "sha256": hash_key("two"), "scopes": ["inference"]})
        assert await statuses() == [401, 200]
        path.write_text("[{")
        assert await statuses() == [401, 200]


@pytest.mark.parametrize(
    ("origin", "options", "status"),
    [
        ("https://elsewhere.example", {}, 403),
        ("null", {}, 403),
        ("http://fleet:8000", {}, 200),
        (None, {}, 200),
        ("https://elsewhere.example", {"cors_origins": ("https://elsewhere.example",)}, 200),
    ],
)
async def test_without_keys_no_page_of_another_host_administers_the_fleet(
    origin: str | None, options: dict[str, Any], status: int
) -> None:
    headers = {"host": "fleet:8000"} | ({} if origin is None else {"origin": origin})
    async with running(ScriptedFleet(), **options) as caller:
        assert (await caller.get("/admin/workers", headers)).status == status
        assert (await caller.get("//admin/workers/", headers)).status == status
        assert (await caller.get("/v1/models", headers)).status == 200
