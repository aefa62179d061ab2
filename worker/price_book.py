"""What steps take, agreed upon by a fleet's workers of one kind: for the same load they choose the same length."""

import hashlib
import json
import logging
import math
import platform
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import cast

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

Measure = Callable[[], StepPrices]
Agree = Callable[[Measure], StepPrices]
"""Return the prices to go by; the function measures them, where nobody has."""


def alone(measure: Measure) -> StepPrices:
    """Go by what is measured here."""
    return measure()


class PriceBook:
    """Prices in Redis. The first worker of a kind measures them; those that start later take what it has written."""

    def __init__(self, client: Redis, model: str, kind: str) -> None:
        """`kind` names all that prices depend on, as `kind_of` tells it."""
        self._client = client
        self._key = step_prices(model, kind)

    def agree(self, measure: Measure) -> StepPrices:
        """Return the fleet's prices, measured now if there are none; what is measured, where Redis cannot tell."""
        measured: StepPrices | None = None
        try:
            known = self._read()
            if known is not None:
                log.info("prices of steps: as a worker of this kind has measured them before")
                return known
            measured = measure()
            content = json.dumps({"positions": measured.positions, "seconds": measured.seconds})
            # The first of several that have measured at the same time decides.
            self._client.set(self._key, content, ex=KEPT_S, nx=True)
            found = self._read()
            if found is not None:
                return found
            self._client.set(self._key, content, ex=KEPT_S)  # what is there, nobody can read
        except (exceptions.RedisError, OSError) as error:
            log.warning("prices of steps: measured for this worker alone, the fleet's cannot be reached: %s", error)
        return measured or measure()

    def _read(self) -> StepPrices | None:
        content = cast("bytes | None", self._client.get(self._key))
        prices = None if content is None else _parse(content)
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


def _parse(content: bytes) -> StepPrices | None:
    """Read what `agree` has written; None for anything else."""
    try:
        fields = json.loads(content)
        counts, seconds = tuple(map(int, fields["positions"])), tuple(map(float, fields["seconds"]))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    rising = all(left < right for left, right in pairwise((0, *counts)))
    if not counts or len(counts) != len(seconds) or not rising:
        return None
    return StepPrices(counts, seconds) if all(0 < each < math.inf for each in seconds) else None
