"""Prometheus text, as far as the command line needs it: sums of a metric over all its labels but one."""

import re
from collections.abc import Iterable

_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)")


def sums(text: str, names: Iterable[str], model: str) -> dict[str, float]:
    """Return the sum of each named sample whose label `model` is this one; samples that are missing are left out."""
    wanted, found = set(names), dict[str, float]()
    label = f'model="{model}"'
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is None or match[1] not in wanted or label not in (match[2] or "").split(","):
            continue
        found[match[1]] = found.get(match[1], 0.0) + float(match[3])
    return found
