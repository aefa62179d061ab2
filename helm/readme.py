"""The chart's README: the page in `README.md.in`, with tables made from values.yaml and its comments."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

_KEY = re.compile(r"(?P<indent> *)(?P<key>[A-Za-z][A-Za-z0-9]*):(?P<rest>.*)")


@dataclass(frozen=True, slots=True)
class Value:
    """One documented key of values.yaml."""

    path: str
    default: object
    text: str


def readme(chart: Path) -> str:
    """Return the page with its `{{values}}` and `{{version}}` filled in."""
    facts = yaml.safe_load((chart / "Chart.yaml").read_text())
    page = (chart.parent / "README.md.in").read_text()
    return page.replace("{{version}}", facts["version"]).replace("{{values}}", _tables(chart / "values.yaml"))


def documented(values: Path) -> list[Value]:
    """Return every key that has a `# --` comment; raises ValueError for a leaf without one."""
    whole = yaml.safe_load(values.read_text())
    found = [Value(path, _at(whole, path), text) for path, text in _commented(values.read_text().splitlines())]
    paths = {value.path for value in found}
    undocumented = [path for path in leaves(whole) if not any(path == p or path.startswith(f"{p}.") for p in paths)]
    if undocumented:
        raise ValueError(f"values.yaml: no comment above {', '.join(undocumented)}")
    return found


def leaves(whole: object, prefix: str = "") -> Iterator[str]:
    """Yield the paths of what is no map, or an empty one."""
    if isinstance(whole, dict) and whole:
        for key, value in whole.items():
            yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix


def _commented(lines: list[str]) -> Iterator[tuple[str, str]]:
    path: list[tuple[int, str]] = []
    text = ""
    for line in lines:
        if line.lstrip().startswith("# -- "):
            text = line.strip().removeprefix("# -- ")
        elif match := _KEY.fullmatch(line):
            indent = len(match["indent"])
            path = [(depth, key) for depth, key in path if depth < indent] + [(indent, match["key"])]
            if text:
                yield ".".join(key for _, key in path), text
            text = ""


def _at(whole: object, path: str) -> object:
    for key in path.split("."):
        assert isinstance(whole, dict)
        whole = whole[key]
    return whole


def _tables(values: Path) -> str:
    sections: dict[str, list[Value]] = {}
    for value in documented(values):
        sections.setdefault(value.path.partition(".")[0] if "." in value.path else "", []).append(value)
    return "\n\n".join(_table(name, rows) for name, rows in sections.items())


def _table(name: str, rows: list[Value]) -> str:
    head = [f"### `{name}`" if name else "### Top level", "", "| key | default | |", "| --- | --- | --- |"]
    body = [f"| `{row.path}` | `{json.dumps(row.default)}` | {row.text.replace('|', chr(92) + '|')} |" for row in rows]
    return "\n".join(head + body)
