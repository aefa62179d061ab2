"""The fact tables beside this module: tab-separated, ``#`` starts a comment line."""

from functools import cache
from pathlib import Path

DATA = Path(__file__).parent / "data"


@cache
def rows(name: str) -> tuple[tuple[str, ...], ...]:
    """Read ``data/<name>.tsv``; every row has as many cells as the first."""
    lines = (DATA / f"{name}.tsv").read_text(encoding="utf-8").splitlines()
    table = tuple(tuple(line.split("\t")) for line in lines if line and not line.startswith("#"))
    widths = {len(row) for row in table}
    if len(widths) != 1:
        raise ValueError(f"{name}.tsv has rows of {sorted(widths)} cells")
    return table


@cache
def column(name: str, index: int = 0) -> tuple[str, ...]:
    """One column of a table."""
    return tuple(row[index] for row in rows(name))


@cache
def words(name: str) -> tuple[str, ...]:
    """Read ``data/<name>.txt``: entries separated by commas or line ends."""
    text = (DATA / f"{name}.txt").read_text(encoding="utf-8")
    lines = (line for line in text.splitlines() if not line.startswith("#"))
    return tuple(entry.strip() for line in lines for entry in line.split(",") if entry.strip())


@cache
def paragraphs(name: str) -> tuple[str, ...]:
    """Read ``data/<name>.txt``: entries separated by blank lines."""
    lines = (DATA / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#"))
    return tuple(part.strip() for part in text.split("\n\n") if part.strip())
