"""Arguments that are wrong are refused by name, before anything is started."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from shared.cli import commands
from shared.cli.exits import Exit
from tests.cli.fleet_process import diffleet

NOBODY = "redis://127.0.0.1:1/0"


@pytest.mark.parametrize("more", [[], ["--redis-url", NOBODY]])
@pytest.mark.parametrize("command", [["generate"], ["models", "--url"], ["generate", "hi", "--model"]])
def test_an_argument_that_is_not_utf_8_is_refused_in_one_line(command: list[str], more: list[str]) -> None:
    ended = CliRunner().invoke(commands.app, [*command, "\udcff\udcfe hi", *more])
    assert ended.exit_code == Exit.USAGE
    assert ended.stderr.rstrip().endswith("is not UTF-8")


def test_bytes_of_a_shell_that_are_not_utf_8_are_refused_without_a_traceback() -> None:
    ended = diffleet("generate", "\udcff hi")
    assert ended.returncode == Exit.USAGE
    assert "Traceback" not in ended.stderr and "argument 2 is not UTF-8" in ended.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def refused(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """Return why `up` refuses the arguments, having started nothing."""
    monkeypatch.setattr("shared.cli.up.serve", lambda *_: pytest.fail("it was started"))
    ended = CliRunner().invoke(commands.app, ["up", *arguments])
    assert ended.exit_code == Exit.USAGE, ended.output
    return ended.stderr


@pytest.mark.parametrize("url", ["foo", "http://localhost", "localhost:6379", "redis://localhost:port", ""])
def test_up_refuses_what_is_no_redis_url_without_repeating_a_password(
    monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    assert "--redis-url" in refused(monkeypatch, "--redis-url", url)
    assert "secret" not in refused(monkeypatch, "--redis-url", "foo://user:secret@localhost")


@pytest.mark.parametrize("name", ["a b", "", "-x", "a" * 97, "näme"])
def test_up_refuses_a_model_name_that_requests_could_not_ask_for(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert "--model-name" in refused(monkeypatch, f"--model-name={name}")


@pytest.mark.parametrize("config", [b"", b"[]", b"{", b"\xff"])
def test_up_refuses_a_folder_whose_config_is_broken(
    monkeypatch: pytest.MonkeyPatch, folder: Path, config: bytes
) -> None:
    (folder / "config.json").write_bytes(config)
    assert "config.json" in refused(monkeypatch, "--model", str(folder))


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_up_refuses_a_folder_that_lacks_a_file(monkeypatch: pytest.MonkeyPatch, folder: Path, missing: str) -> None:
    (folder / missing).unlink()
    assert missing.removeprefix("model") in refused(monkeypatch, "--model", str(folder))


def test_up_ends_in_one_line_if_no_redis_answers(tmp_path: Path) -> None:
    ended = diffleet("up", "--redis-url", NOBODY, "--port", "0", "--data-dir", str(tmp_path / "data"))
    assert ended.returncode == Exit.NOT_STARTED
    assert len(ended.stderr.splitlines()) == 1 and "no Redis answers" in ended.stderr
    assert not (tmp_path / "data").exists()
