"""Options of the worker: one declaration gives environment, flags and help."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from worker.exits import ExitCode
from worker.settings import WorkerSettings, read_settings


def from_flags(*argv: str) -> WorkerSettings:
    return read_settings(argv)


def test_every_option_has_a_flag_and_an_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIFFLEET_MAX_ROWS", "7")
    settings = from_flags("--lease-ms", "1500", "--model", "demo-nano")

    assert (settings.max_rows, settings.lease_ms, settings.model) == (7, 1500, "demo-nano")
    assert settings.beat_s == 0.375


def test_a_flag_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIFFLEET_DRAIN_S", "1")

    assert from_flags("--drain-s", "2").drain_s == 2


def test_options_of_other_processes_in_the_environment_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIFFLEET_PORT", "8000")

    assert WorkerSettings().max_rows == 32


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (("--max-rows", "0"), "max_rows"),
        (("--lease-ms", "soon"), "lease_ms"),
        (("--device", "tpu"), "device"),
        (("--model-name", "a b"), "model_name: 'a b' must match"),
        (("--model", "~nobody-here/x"), "model\n.*no home folder is known"),
        (("--adapter", "~nobody-here/x"), "adapter\n.*no home folder is known"),
        (("--num-pages", "4", "--kv-cache-mb", "4"), "exclude"),
    ],
)
def test_a_wrong_value_is_refused_by_name(flags: tuple[str, ...], field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        from_flags(*flags)


def test_the_served_name_is_the_bundled_name_or_the_folders(tmp_path: Path) -> None:
    assert WorkerSettings(model="demo").served_name == "demo"
    assert WorkerSettings(model=str(tmp_path / "sdar-tiny")).served_name == "sdar-tiny"
    assert WorkerSettings(model=str(tmp_path), model_name="org/other").served_name == "org/other"


def test_help_lists_every_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        from_flags("--help")

    printed = capsys.readouterr().out
    assert all(f"{code.value}  {code.name}" in printed for code in ExitCode)
    assert "DIFFLEET_LEASE_MS" in printed


@pytest.mark.parametrize(
    "url",
    [
        "redis://a:1/0",
        "rediss://a:1/0",
        "unix:///tmp/a.sock",
        "redis+sentinel://a:1,b:2/fleet",
        "redis+cluster://a:1,b:2",
        "rediss+cluster://a:1,b:2",
    ],
)
def test_a_worker_takes_every_url_that_the_queue_has_a_client_for(url: str) -> None:
    assert WorkerSettings(model="demo", redis_url=url).redis_url == url
