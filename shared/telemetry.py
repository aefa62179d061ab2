"""Logging for every process: one line for each record, JSON or text, with the fields of the request at hand.

Prompts and generated text never get into a line. Callers log sentences with named fields and never put user input into
them; and an exception is shown by its type and the places it passed, without its message, because messages of parsers
and validators quote their input.
"""

import logging
import sys
import time
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Literal, TextIO, cast

import orjson

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message", "taskName"}
_MOST_LINES = 120
_MOST_INNER = 8
_DEEPEST_INDENT = 16
_context: ContextVar[dict[str, object] | None] = ContextVar("log_fields", default=None)


@contextmanager
def bind(**fields: object) -> Generator[dict[str, object]]:
    """Add fields to every line that is logged inside; the yielded dict takes more of them on the way."""
    bound = {**(_context.get() or {}), **fields}
    token = _context.set(bound)
    try:
        yield bound
    finally:
        _context.reset(token)


def note(**fields: object) -> None:
    """Add fields to the lines that follow within the innermost `bind`; nothing happens outside of one."""
    bound = _context.get()
    if bound is not None:
        bound.update(fields)


def configure_logging(level: str, style: Literal["json", "text"], stream: TextIO | None = None) -> None:
    """Send all loggers of the process to `stream` (stderr), replacing earlier handlers of the root."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if style == "json" else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {"time": _utc(record.created), "level": record.levelname.lower(), "logger": record.name}
        line |= {"message": record.getMessage()} | _fields(record)
        return orjson.dumps(line, default=str, option=orjson.OPT_NON_STR_KEYS).decode()


class TextLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={value}" for name, value in _fields(record).items())
        line = f"{_utc(record.created)} {record.levelname.lower():7} {record.name}: {record.getMessage()}{fields}"
        return line.replace("\n", "\\n")


def _fields(record: logging.LogRecord) -> dict[str, object]:
    own = {name: value for name, value in vars(record).items() if name not in _STANDARD}
    fields = {**(_context.get() or {}), **own}
    if record.exc_info and record.exc_info[1] is not None:
        fields["exception"] = describe(record.exc_info[1])
    return fields


def describe(error: BaseException) -> list[str]:
    """Return the type of an exception, of each of its causes, and where each was raised: no message, no values.

    What a group holds is told behind it, indented; of a wide group the first few.
    """
    lines: list[str] = []
    seen: set[int] = set()

    def tell(cause: BaseException | None, indent: str) -> None:
        while cause is not None and id(cause) not in seen and len(lines) < _MOST_LINES:
            seen.add(id(cause))
            lines.append(f"{indent}{type(cause).__module__}.{type(cause).__qualname__}")
            lines.extend(indent + place for place in _places(cause.__traceback__))
            if isinstance(cause, BaseExceptionGroup) and len(indent) < _DEEPEST_INDENT:
                group = cast(BaseExceptionGroup[BaseException], cause)
                for inner in group.exceptions[:_MOST_INNER]:
                    tell(inner, indent + "  ")
                if len(group.exceptions) > _MOST_INNER:
                    lines.append(f"{indent}  and {len(group.exceptions) - _MOST_INNER} more")
            cause = cause.__cause__ or cause.__context__

    tell(error, "")
    return lines


def _places(trace: TracebackType | None) -> list[str]:
    frames = traceback.extract_tb(trace, limit=-12)
    return [f"  {frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}" for frame in frames]


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(seconds * 1000) % 1000:03d}Z"
