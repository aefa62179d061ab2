"""Settings that every process has, and how they are read.

One pydantic-settings class for each process is the only place where an option is declared: its environment variable
(`DIFFLEET_<FIELD>`), its command-line flag (`--field`) and its Helm value derive from the field.
"""

import csv
import json
import re
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast, get_origin
from urllib.parse import quote, urlsplit

from pydantic import AfterValidator, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    CliApp,
    CliSettingsSource,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from shared.keys import MODEL_NAME

T = TypeVar("T", bound=BaseSettings)

REDIS_SCHEMES = ("redis://", "rediss://", "unix://", "redis+sentinel://", "redis+cluster://", "rediss+cluster://")


def check_redis_url(url: str) -> str:
    """Return the URL; raises ValueError, without repeating a password, if its scheme, port or database is none."""
    if not url.startswith(REDIS_SCHEMES):
        raise ValueError(f"the URL must begin with one of {', '.join(REDIS_SCHEMES)}")
    # The client library takes database 0 then, and where a password has a bare slash, a server on this machine.
    if url.startswith(("redis://", "rediss://")):
        if not re.fullmatch(r"/?[0-9]*/?", urlsplit(url).path):
            raise ValueError("the URL must end in /N, the number of a database; in a password / is written %2F")
        _check_port(url)
    return url


def _check_port(url: str) -> None:
    try:
        _ = urlsplit(url).port
    except ValueError:
        # The library's words quote what it takes for the port: the beginning of a password with a bare # or ?.
        told = "the URL's port must be a number of 65535 at most; in a password # is written %23, and ? %3F"
        raise ValueError(told) from None


RedisUrl = Annotated[str, AfterValidator(check_redis_url)]


class QueueSettings(BaseSettings):
    """Where the queue is: all that a command needs to know of the environment."""

    model_config = SettingsConfigDict(
        env_prefix="DIFFLEET_",
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_implicit_flags=True,
        cli_show_env_vars=True,
        hide_input_in_errors=True,  # it may hold a password
    )

    redis_url: RedisUrl = Field(
        default="redis://127.0.0.1:6379/0",
        description="URL of the queue: redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://.",
    )
    redis_username: str | None = Field(
        default=None, description="User of the queue, if it is not in the URL; unset: the default user."
    )
    redis_password: SecretStr | None = Field(
        default=None, description="Password of the queue, as it is, if it is not in the URL."
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, _Environment(settings_cls)

    @model_validator(mode="before")
    @classmethod
    def _join_credentials(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Put the credentials into `redis_url`, escaped, so that whoever connects needs nothing else."""
        username, password = given.get("redis_username"), given.get("redis_password")
        if not username and not password:
            return given
        secret = password.get_secret_value() if isinstance(password, SecretStr) else str(password or "")
        parts = urlsplit(str(given.get("redis_url") or cast(str, cls.model_fields["redis_url"].default)))
        if "@" in parts.netloc:
            raise ValueError("redis_url has credentials, so redis_username and redis_password must not be set")
        credentials = f"{quote(str(username or ''), safe='')}:{quote(secret, safe='')}"
        return {**given, "redis_url": parts._replace(netloc=f"{credentials}@{parts.netloc}").geturl()}


def queue_url(given: str | None = None) -> str:
    """Return the URL of the queue, by default the environment's, with the credentials that the environment has apart.

    Raises ValueError, without repeating a password; it names the variable if that is at fault.
    """
    try:
        return (QueueSettings() if given is None else QueueSettings(redis_url=given)).redis_url
    except ValidationError as error:
        told = complaints(error)[0].removeprefix("redis_url: ")
        raise ValueError(f"DIFFLEET_REDIS_URL: {told}" if given is None else told) from None


class ServiceSettings(QueueSettings):
    """Options of every process of the fleet."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["json", "text"] = "json"
    otlp_endpoint: str | None = Field(
        default=None,
        pattern=r"^https?://",
        description="OTLP receiver for traces, e.g. http://collector:4318 (extra otel); unset: none are recorded.",
    )
    trace_share: float = Field(
        default=1.0, ge=0.0, le=1.0, description="Share of traces to keep, of those that no caller has begun."
    )
    data_dir: Path = Field(
        default=Path.home() / ".local" / "share" / "diffleet",
        description="Where the embedded server and the logs live.",
    )

    @field_validator("*")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        return expanded(value) if isinstance(value, Path) else value


class _Environment(EnvSettingsSource):
    """The environment's variables; a list is written as its flag takes it, `a,b`, or as JSON, `["a", "b"]`."""

    def __call__(self) -> dict[str, Any]:
        try:
            return super().__call__()
        except SettingsError as error:
            if isinstance(error.__cause__, SettingsError):
                raise error.__cause__ from None
            raise

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        if get_origin(field.annotation) is not tuple:
            return super().decode_complex_value(field_name, field, value)
        try:
            return _items_of(value)
        except (ValueError, csv.Error) as error:
            variable = f"{self.env_prefix}{field_name}".upper()
            raise SettingsError(f'{variable}: must be a list such as a,b or ["a", "b"]: {error}') from None


def _items_of(text: str) -> list[Any]:
    """Return the items of `a,b` or of a JSON list, none of an empty text; raises ValueError, csv.Error."""
    if text.lstrip().startswith("["):
        return json.loads(text)
    items = [item.strip() for item in next(csv.reader([text.strip()], skipinitialspace=True, strict=True), ())]
    if "" in items:
        raise ValueError(f"item {items.index('') + 1} is empty")
    return items


def read_flags(settings: type[T], arguments: Sequence[str]) -> T:
    """Read flags, then the environment.

    Raises pydantic's ValidationError, SettingsError for what is no list, SystemExit for --help or a wrong flag.
    """
    source = CliSettingsSource[Any](settings, add_argument_method=_add_argument)
    return CliApp.run(settings, cli_args=list(arguments), cli_settings_source=source)


def complaints(error: ValidationError | SettingsError) -> list[str]:
    """Return a line for each fault, the setting's name first where it is one setting's; values are not quoted."""
    if isinstance(error, SettingsError):
        return [str(error)]
    faults = error.errors(include_url=False, include_input=False)
    return [": ".join(filter(None, (".".join(map(str, fault["loc"])), _said(fault)))) for fault in faults]


def _said(fault: ErrorDetails) -> str:
    # What a validator of ours says is a sentence of its own.
    return fault["msg"].removeprefix("Value error, ")


_IN_WORDS = {"str": "TEXT", "SecretStr": "TEXT", "Path": "PATH", "int": "NUMBER", "float": "NUMBER"}
"""What --help calls a value, by its type."""
_LIST_BY_DEFAULT = re.compile(r"\(default: \((.*?),?\)\)")


def _add_argument(parser: ArgumentParser, *flags: str, **how: Any) -> Any:
    if metavar := how.get("metavar"):
        kind, many, _ = str(metavar).removeprefix("tuple[").partition(",...]")
        how["metavar"] = _IN_WORDS.get(kind, kind) + (",..." if many else "")
    if text := how.get("help"):
        text = text.replace(" (default: null)", "")
        how["help"] = _LIST_BY_DEFAULT.sub(lambda found: f"(default: {found[1] or 'none'})".replace("'", ""), text)
    return parser.add_argument(*flags, **how)


def expanded(path: Path) -> Path:
    """Return the path with a leading `~` or `~user` replaced; raises ValueError if that has no home."""
    try:
        return path.expanduser()
    except RuntimeError:
        raise ValueError(f"{str(path)!r}: no home folder is known for {path.parts[0]!r}") from None


def check_model_name(name: str) -> str:
    if not MODEL_NAME.fullmatch(name):
        raise ValueError(f"{name!r} must match {MODEL_NAME.pattern}")
    return name
