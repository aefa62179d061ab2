"""Paths that are typed: a shell leaves `~` alone behind `--option=`, and an unset variable is an empty text."""

from pathlib import Path

import typer

from shared.settings import expanded


def file(text: str | Path, option: str | None = None) -> Path:
    """Return the path of an option; raises `typer.BadParameter` for an empty one, or a `~user` that is nobody.

    Who parses the option knows its name: elsewhere it is `option`.
    """
    if text == "":
        raise typer.BadParameter("is empty", param_hint=option)
    try:
        return expanded(Path(text))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def folder(text: str | Path) -> Path:
    """Return what `file` does, absolute and without links; raises likewise, also for links that lead nowhere."""
    try:
        return file(text).resolve()
    except (OSError, RuntimeError):
        # A RuntimeError for a loop of links, until Python 3.13.
        raise typer.BadParameter(f"{str(text)!r} is a loop of links, or cannot be looked at") from None
