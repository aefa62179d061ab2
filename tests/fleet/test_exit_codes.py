"""A worker that cannot start says why, in a line, and exits with the code of the reason."""

import json
from pathlib import Path

import pytest

from shared.embedded import EmbeddedServer
from tests.fleet.models import write_tiny_model
from tests.fleet.processes import run_worker
from worker.exits import ExitCode
from worker.process import main


@pytest.mark.parametrize(
    ("flags", "environment", "says"),
    [
        (("--max-rows", "0"), {}, "max_rows: Input should be greater than or equal to 1"),
        ((), {"DIFFLEET_LEASE_MS": "soon"}, "lease_ms: Input should be a valid integer"),
        (("--num-pages", "1", "--kv-cache-mb", "1"), {}, "num_pages and kv_cache_mb exclude each other"),
        (("--redis-url", "http://localhost"), {}, "redis_url: the URL must begin with one of redis://"),
        ((), {"DIFFLEET_MODEL_NAME": "a b"}, "'a b' must match"),
    ],
)
def test_a_wrong_setting_is_named_in_one_line(
    flags: tuple[str, ...],
    environment: dict[str, str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(flags) == ExitCode.BAD_SETTINGS
    [line] = capsys.readouterr().err.splitlines()
    assert says in line


def test_an_unknown_flag_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--no-such-flag"])
    assert ended.value.code == ExitCode.BAD_SETTINGS
    assert "--no-such-flag" in capsys.readouterr().err


def test_a_dead_redis_is_named_without_its_password() -> None:
    ended = run_worker("--redis-url", "redis://user:hunter2@127.0.0.1:1/0", "--redis-wait-s", "0")
    assert (ended.returncode, "Traceback" in ended.stderr) == (ExitCode.REDIS_UNREACHABLE, False)
    assert "redis://127.0.0.1:1/0" in ended.stderr
    assert "hunter2" not in ended.stderr


def test_a_bad_model_folder(fleet_server: EmbeddedServer, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "broken")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    ended = run_worker("--redis-url", fleet_server.url, "--model", str(folder))
    assert (ended.returncode, "Traceback" in ended.stderr) == (ExitCode.BAD_MODEL, False)
    assert "mlp." in ended.stderr


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--adapter", "nope"), "adapter: nope: adapter_config.json: is missing"),
        (("--token-budget", "15"), "token_budget: 15 is too little for this model's blocks of"),
        (("--kv-cache-mb", "0.001"), "kv_cache_mb: "),
    ],
)
def test_a_setting_that_does_not_suit_the_model_is_named_and_not_the_model(
    flags: tuple[str, ...], says: str, fleet_server: EmbeddedServer, tiny_model: Path
) -> None:
    ended = run_worker("--redis-url", fleet_server.url, "--model", str(tiny_model), *flags)
    assert ended.returncode in (ExitCode.BAD_MODEL, ExitCode.BAD_SETTINGS) and "Traceback" not in ended.stderr
    assert says in ended.stderr and "model: " not in ended.stderr
