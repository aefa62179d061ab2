"""Settings that every process has, and how they are read.

One pydantic-settings class for each process is the only place where an option is declared: its environment variable
(`DIFFLEET_<FIELD>`), its command-line flag (`--field`) and its Helm value derive from the field.
"""

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from shared.keys import MODEL_NAME


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
    )

    redis_url: str = Field(
        default="redis://127.0.0.1:6379/0", description="redis://, rediss:// or unix:// URL of the queue."
    )
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["json", "text"] = "json"
    data_dir: Path = Field(
        default=Path.home() / ".local" / "share" / "diffleet",
        description="Where the embedded server and the logs live.",
    )


def check_model_name(name: str) -> str:
    if not MODEL_NAME.fullmatch(name):
        raise ValueError(f"{name!r} must match {MODEL_NAME.pattern}")
    return name
