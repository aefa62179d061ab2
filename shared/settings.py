"""Settings that every process has, and how they are read.

One pydantic-settings class for each process is the only place where an option is declared: its environment variable
(`DIFFLEET_<FIELD>`), its command-line flag (`--field`) and its Helm value derive from the field.
"""

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, cast
from urllib.parse import quote, urlsplit

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, CliApp, CliSettingsSource, SettingsConfigDict

from shared.keys import MODEL_NAME

T = TypeVar("T", bound=BaseSettings)

REDIS_SCHEMES = ("redis://", "rediss://", "unix://", "redis+sentinel://", "redis+cluster://", "rediss+cluster://")


class ServiceSettings(BaseSettings):
    """Options of every process of the fleet."""

    model_config = SettingsConfigDict(
        env_prefix="DIFFLEET_",
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_implicit_flags=True,
        cli_show_env_vars=True,
    )

    redis_url: str = Field(
        default="redis://127.0.0.1:6379/0",
        description="URL of the queue: redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://.",
    )
    redis_username: str | None = Field(
        default=None, description="User of the queue, if it is not in the URL; unset: the default user."
    )
    redis_password: SecretStr | None = Field(
        default=None, description="Password of the queue, as it is, if it is not in the URL."
    )
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


def read_flags(settings: type[T], arguments: Sequence[str]) -> T:
    """Read flags, then the environment; raises pydantic's ValidationError, SystemExit for --help or a wrong flag."""
    source = CliSettingsSource[Any](settings, add_argument_method=_add_argument)
    return CliApp.run(settings, cli_args=list(arguments), cli_settings_source=source)


_IN_WORDS = {"str": "TEXT", "SecretStr": "TEXT", "Path": "PATH", "int": "NUMBER", "float": "NUMBER"}
"""What --help calls a value, by its type."""


def _add_argument(parser: ArgumentParser, *flags: str, **how: Any) -> Any:
    if metavar := how.get("metavar"):
        kind, many, _ = str(metavar).removeprefix("tuple[").partition(",...]")
        how["metavar"] = _IN_WORDS.get(kind, kind) + (",..." if many else "")
    if text := how.get("help"):
        how["help"] = text.replace(" (default: null)", "")
    return parser.add_argument(*flags, **how)


def check_model_name(name: str) -> str:
    if not MODEL_NAME.fullmatch(name):
        raise ValueError(f"{name!r} must match {MODEL_NAME.pattern}")
    return name
