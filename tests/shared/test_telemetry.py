import asyncio
import io
import json
import logging
from collections.abc import Iterator

import pytest
from pydantic import BaseModel

from shared.telemetry import JsonLines, TextLines, bind, describe, note


@pytest.fixture
def logger() -> Iterator[tuple[logging.Logger, io.StringIO]]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    logger = logging.Logger("test")
    logger.addHandler(handler)
    yield logger, stream


def test_a_line_has_the_fields_of_its_request(logger: tuple[logging.Logger, io.StringIO]) -> None:
    log, stream = logger
    with bind(request_id="r1"):
        note(status=200)
        log.info("request finished", extra={"ms": 5})
    log.info("outside")
    inside, outside = map(json.loads, stream.getvalue().splitlines())
    assert inside["message"] == "request finished"
    assert (inside["request_id"], inside["status"], inside["ms"], inside["level"]) == ("r1", 200, 5, "info")
    assert set(outside) == {"time", "level", "logger", "message"}


def test_notes_outside_of_a_request_go_nowhere() -> None:
    note(status=1)
    with bind() as bound:
        assert bound == {}


def test_an_exception_is_told_by_type_and_place_without_its_text(logger: tuple[logging.Logger, io.StringIO]) -> None:
    class Body(BaseModel):
        count: int

    log, stream = logger
    try:
        try:
            Body.model_validate({"count": "secret prompt"})
        except ValueError as error:
            raise RuntimeError("secret prompt") from error
    except RuntimeError:
        log.exception("request failed")
    assert "secret" not in stream.getvalue()
    exception = json.loads(stream.getvalue())["exception"]
    assert exception[0] == "builtins.RuntimeError"
    assert any("ValidationError" in line for line in exception)
    assert any("test_telemetry.py" in line for line in exception)


def test_a_cycle_of_causes_ends() -> None:
    first, second = ValueError(), KeyError()
    first.__cause__, second.__cause__ = second, first
    assert describe(first) == ["builtins.ValueError", "builtins.KeyError"]


def test_a_text_line_is_one_line() -> None:
    record = logging.LogRecord("n", logging.INFO, "f", 1, "two\nlines", None, None)
    assert TextLines().format(record).endswith("info    n: two\\nlines")


def test_the_exceptions_in_a_group_are_told_with_their_places_and_without_their_texts() -> None:
    async def fail() -> None:
        try:
            raise KeyError("secret")
        except KeyError as error:
            raise OSError("secret") from error

    async def work() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fail())

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(work())
    lines = describe(caught.value)
    assert lines[0] == "builtins.ExceptionGroup"
    assert [line for line in lines if line.endswith("Error")] == ["  builtins.OSError", "  builtins.KeyError"]
    assert any(line.startswith("    test_telemetry.py:") and line.endswith(" fail") for line in lines)
    assert "secret" not in "".join(lines)


def _grouped(*errors: Exception) -> Exception:
    """Return a group as a plain exception: its type would otherwise grow with each turn of a loop."""
    return ExceptionGroup("secret", list(errors))


def test_a_wide_or_deep_group_is_told_in_few_lines() -> None:
    wide = ExceptionGroup("secret", [ValueError("secret") for _ in range(1000)])
    assert "  and 992 more" in describe(wide)
    deep: Exception = wide
    for _ in range(500):
        deep = _grouped(deep, wide)
    assert len(describe(deep)) < 200
