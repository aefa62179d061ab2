from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from redis.connection import parse_url

from api.jobs.settings import JobSettings
from api.settings import ApiSettings
from shared.client import Fleet
from shared.connection import open_client, open_pool, open_sync_client
from shared.fake.process import FakeSettings
from shared.settings import ServiceSettings, check_redis_url, complaints, queue_url
from worker.settings import WorkerSettings

# What a process environment can hold.
CREDENTIAL = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), min_size=1)


@given(username=CREDENTIAL, password=CREDENTIAL)
def test_the_client_library_reads_back_the_credentials_that_were_given_apart(username: str, password: str) -> None:
    settings = ServiceSettings.model_validate({"redis_username": username, "redis_password": password})
    options = parse_url(settings.redis_url)
    assert (options["username"], options["password"]) == (username, password)
    assert (options["host"], options["port"], options["db"]) == ("127.0.0.1", 6379, 0)


def test_a_password_alone_is_that_of_the_default_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIFFLEET_REDIS_URL", "rediss://queue.example:6380/3?ssl_ca_certs=/ca.crt")
    monkeypatch.setenv("DIFFLEET_REDIS_PASSWORD", "a/b@c:d")
    parts = urlsplit(ServiceSettings().redis_url)
    assert (parts.username, unquote(parts.password or "")) == ("", "a/b@c:d")
    assert (parts.hostname, parts.port, parts.path, parts.query) == (
        "queue.example",
        6380,
        "/3",
        "ssl_ca_certs=/ca.crt",
    )


def test_without_credentials_the_url_stays_as_it_is() -> None:
    assert ServiceSettings(redis_url="redis://:x@h:1/2").redis_url == "redis://:x@h:1/2"


def test_credentials_at_two_places_are_refused() -> None:
    with pytest.raises(ValidationError, match="redis_url has credentials"):
        ServiceSettings.model_validate({"redis_url": "redis://:x@h/0", "redis_password": "y"})


def test_a_password_is_not_shown_beside_the_url() -> None:
    settings = ServiceSettings.model_validate({"redis_password": "hunter2"})
    assert "hunter2" not in repr(settings.redis_password)


@pytest.mark.parametrize("given", ["~/x", Path("~/x")])
def test_a_path_may_begin_with_the_home_folder(
    given: str | Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ServiceSettings.model_validate({"data_dir": given}).data_dir == tmp_path / "x"


def test_complaints_name_the_setting_and_are_no_ones_types() -> None:
    said: list[str] = []
    for wrong in ({"data_dir": "~nobody-here/x"}, {"redis_url": "redis://:x@h/0", "redis_password": "y"}):
        with pytest.raises(ValidationError) as refused:
            ServiceSettings.model_validate(wrong)
        said += complaints(refused.value)
    assert said[0] == "data_dir: '~nobody-here/x': no home folder is known for '~nobody-here'"
    assert said[1].startswith("redis_url has credentials")


@pytest.mark.parametrize("take", [check_redis_url, open_client, open_pool, open_sync_client])
@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("", "must begin with one of redis://, .*redis[+]sentinel://.*redis[+]cluster://"),
        ("localhost:6379", "must begin with one of"),
        ("redis://h:6379/x", "must end in /N"),
        ("rediss://h/1/2", "must end in /N"),
        ("redis://:hunter/2@h:6379/0", "in a password / is written %2F"),
        ("redis://:hunter#2@h:6379/0", "in a password # is written %23"),
        ("rediss://:hunter?2@h:6379/0", "port must be a number"),
        ("redis://h:65536/0", "port must be a number of 65535 at most"),
    ],
)
def test_a_url_that_would_lead_elsewhere_is_refused_without_its_password(
    take: Callable[[str], object], url: str, why: str
) -> None:
    with pytest.raises(ValueError, match=why) as refused:
        take(url)
    assert "hunter" not in str(refused.value)


@pytest.mark.parametrize("kind", [ApiSettings, JobSettings, WorkerSettings, FakeSettings])
def test_every_process_names_the_setting_of_a_url_that_is_none(kind: type[ServiceSettings]) -> None:
    given = {"redis_url": "http://user:hunter2@h/0", "model": "demo", "model_name": "demo"}
    with pytest.raises(ValidationError) as refused:
        kind.model_validate({name: value for name, value in given.items() if name in kind.model_fields})
    (told,) = complaints(refused.value)
    assert told.startswith("redis_url: the URL must begin with one of redis://")
    assert "hunter2" not in told + str(refused.value)


def test_commands_name_a_wrong_url_and_take_the_credentials_given_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIFFLEET_LOG_LEVEL", "no command reads it")
    monkeypatch.setenv("DIFFLEET_REDIS_PASSWORD", "x")
    assert queue_url("redis://h:1/2") == "redis://:x@h:1/2"
    with pytest.raises(ValueError, match="^redis_url has credentials"):
        queue_url("redis://:y@h")
    monkeypatch.delenv("DIFFLEET_REDIS_PASSWORD")
    with pytest.raises(ValueError, match="^the URL must begin"):
        queue_url("ftp://:hunter2@h")
    monkeypatch.setenv("DIFFLEET_REDIS_URL", "ftp://:hunter2@h")
    with pytest.raises(ValueError, match="^DIFFLEET_REDIS_URL: the URL must begin") as refused:
        Fleet()
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    ["redis://h", "redis://h/", "redis://h:1/12", "rediss://:p%2Fq@h:1/0?ssl_ca_certs=/ca.crt", "unix:///run/a.sock"],
)
def test_a_url_of_one_server_is_taken(url: str) -> None:
    assert check_redis_url(url) == url
    open_sync_client(url).close()
