"""A setting that is a list, in its environment variable."""

import json
from collections.abc import Callable
from typing import get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_settings import SettingsError

import api.jobs.process
import api.process
from api.jobs.settings import JobSettings
from api.settings import ApiSettings
from shared.settings import ServiceSettings, read_flags
from worker.settings import WorkerSettings

# More than one value of each, written as its flag takes them.
WRITTEN = {
    "cors_origins": ("http://a, https://b:8443", ("http://a", "https://b:8443")),
    "webhook_networks": ("127.0.0.0/8,fd00::/8", ("127.0.0.0/8", "fd00::/8")),
    "webhook_retry_s": ("5,0.5,1e3", (5.0, 0.5, 1000.0)),
}
LISTS = [
    pytest.param(kind, name, id=f"{kind.__name__}-{name}")
    for kind in (ApiSettings, JobSettings, WorkerSettings)
    for name, field in kind.model_fields.items()
    if get_origin(field.annotation) in (tuple, list, set, frozenset)
]
ITEM = st.text(st.characters(codec="ascii", exclude_characters=',"[]\\', exclude_categories=("C", "Z")), min_size=1)


def variable(name: str) -> str:
    return f"DIFFLEET_{name.upper()}"


@pytest.mark.parametrize(("kind", "name"), LISTS)
def test_every_list_is_read_with_commas_and_as_json_and_as_its_flag_is(
    kind: type[ServiceSettings], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, items = WRITTEN[name]
    for written in (text, f" {text} ", json.dumps(items)):
        monkeypatch.setenv(variable(name), written)
        assert getattr(kind(), name) == getattr(read_flags(kind, []), name) == items
    monkeypatch.setenv(variable(name), text.partition(",")[0])
    flag = f"--{name.replace('_', '-')}"
    assert getattr(read_flags(kind, [flag, text]), name) == items
    assert getattr(kind(), name) == items[:1]
    for none in ("", "[]"):
        monkeypatch.setenv(variable(name), none)
        assert getattr(kind(), name) == ()


@given(st.lists(ITEM, min_size=1))
def test_a_list_with_commas_is_the_list_that_json_writes(items: list[str]) -> None:
    for text in (",".join(items), json.dumps(items), ", ".join(f'"{item}"' for item in items)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DIFFLEET_CORS_ORIGINS", text)
            assert ApiSettings().cors_origins == tuple(items)


@pytest.mark.parametrize("text", ["[1,", '["a" "b"]', "a,,b", "a,", ",", '"a'])
@pytest.mark.parametrize(("kind", "name"), LISTS)
def test_what_is_no_list_is_named_by_its_variable(
    kind: type[ServiceSettings], name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable(name), text)
    with pytest.raises(SettingsError, match=f"^{variable(name)}: must be a list such as a,b"):
        read_flags(kind, [])


@pytest.mark.parametrize("main", [api.process.main, api.jobs.process.main])
@pytest.mark.parametrize(
    ("text", "told"), [("[1,", "DIFFLEET_WEBHOOK_NETWORKS: "), ("localhost", "webhook_networks: ")]
)
def test_a_process_ends_with_2_and_blames_no_other_setting(
    main: Callable[[list[str]], int],
    text: str,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("DIFFLEET_WEBHOOK_NETWORKS", text)
    assert main([]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(told) and "redis_url" not in printed
