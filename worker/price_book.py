"""What steps take, agreed upon by a fleet's workers of one kind: for the same load they choose the same length."""

import hashlib
import json
import logging
import math
import platform
import re
from collections.abc import Callable, Collection
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from redis import Redis, exceptions

from shared.keys import step_prices
from worker.device import Placement
from worker.engine.load_aware import StepPrices
from worker.settings import WorkerSettings

log = logging.getLogger(__name__)

KEPT_S = 7 * 86_400
"""From the last start of a worker that goes by them: what a machine's update changes is not kept for ever."""
_CPU_INFO = Path("/proc/cpuinfo")

Prices = dict[int, StepPrices]
"""By block length."""
Measure = Callable[[Collection[int]], Prices]
"""For these block lengths."""
Agree = Callable[[Collection[int], Measure], Prices]
"""Return the prices to go by; the function measures them, where nobody has."""


def alone(lengths: Collection[int], measure: Measure) -> Prices:
    """Go by what is measured here."""
    return measure(lengths)


class PriceBook:
    """Prices in Redis. The first worker of a kind measures them; those that start later take what it has written."""

    def __init__(self, client: Redis, model: str, kind: str) -> None:
        """`kind` names all that prices depend on, as `kind_of` tells it."""
        self._client = client
        self._key = step_prices(model, kind)

    def agree(self, lengths: Collection[int], measure: Measure) -> Prices:
        """Return the fleet's prices, measured now if there are none; what is measured, where Redis cannot tell."""
        measured: Prices | None = None
        try:
            known = self._read(lengths)
            if known is not None:
                log.info("prices of steps: as a worker of this kind has measured them before")
                return known
            measured = measure(lengths)
            content = json.dumps({str(length): asdict(prices) for length, prices in measured.items()})
            # The first of several that have measured at the same time decides.
            self._client.set(self._key, content, ex=KEPT_S, nx=True)
            found = self._read(lengths)
            if found is not None:
                return found
            self._client.set(self._key, content, ex=KEPT_S)  # what is there, nobody can read
        except (exceptions.RedisError, OSError) as error:
            log.warning("prices of steps: measured for this worker alone, the fleet's cannot be reached: %s", error)
        return measured or measure(lengths)

    def _read(self, lengths: Collection[int]) -> Prices | None:
        content = cast("bytes | None", self._client.get(self._key))
        prices = None if content is None else _parse(content, lengths)
        if prices is not None:
            self._client.expire(self._key, KEPT_S)
        return prices


def kind_of(settings: WorkerSettings, placement: Placement) -> str:
    """Return a name for all workers whose steps take the same time: device, numbers, batch, and the model's shape."""
    try:
        config = (settings.folder / "config.json").read_bytes()
    except OSError:
        config = b""
    facts = (
        hashlib.sha256(config).hexdigest(),
        _device_name(placement.device),
        str(placement.dtype),
        placement.threads,
        settings.weights,
        settings.head,
        settings.kv_dtype,
        settings.tensor_parallel,
        settings.step_ahead,
        settings.max_rows,
        settings.token_budget,
        settings.page_size,
    )
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        named = re.search(r"^model name\s*: (.*)$", _CPU_INFO.read_text(), re.M)
    except OSError:
        named = None
    return f"{device.type} {platform.machine()} {named[1] if named else platform.processor()}"


def _parse(content: bytes, lengths: Collection[int]) -> Prices | None:
    """Read what `agree` has written of these block lengths; None for anything else."""
    try:
        told = json.loads(content)
        found = {length: _prices(told[str(length)]) for length in lengths}
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    return {length: prices for length, prices in found.items() if prices is not None} if all(found.values()) else None


def _prices(fields: Any) -> StepPrices | None:
    counts, seconds = tuple(map(int, fields["positions"])), tuple(map(float, fields["seconds"]))
    rising = all(left < right for left, right in pairwise((0, *counts)))
    if not counts or len(counts) != len(seconds) or not rising:
        return None
    return StepPrices(counts, seconds) if all(0 < each < math.inf for each in seconds) else None
