"""Whether a worker chooses block lengths by its load, and from which."""

import logging
import time
from collections.abc import Collection, Mapping
from itertools import pairwise

from shared.block_lengths import InvalidBlockLengths, eligible, read_block_lengths
from worker.engine.load_aware import LoadAware, can_choose
from worker.engine.ports import Forward
from worker.engine.scheduler import BatchLimits, CacheShape
from worker.led_prices import LedSteps
from worker.models import ModelError
from worker.models.spec import ModelSpec
from worker.price_book import Agree, Prices, alone
from worker.settings import WorkerSettings
from worker.step_prices import Clock, measure_prices

log = logging.getLogger(__name__)


def lengths_to_choose_from(
    settings: WorkerSettings, spec: ModelSpec, page_size: int, limits: BatchLimits
) -> dict[int, float]:
    """Return the tokens per forward of each block length that is chosen from by load, the model's own among them.

    Empty if none is to be chosen, or where there is no choice, which is logged with its reason. Raises `ModelError` for
    a file that is not one.
    """
    if settings.block_length == "model":
        return {}
    try:
        table = read_block_lengths(settings.folder)
    except InvalidBlockLengths as error:
        raise ModelError(f"{settings.folder}: {error}") from error
    lengths = dict[int, float]()
    if table is None:
        reason = "the model's folder does not say how good others are"
    elif not can_choose(spec) or settings.adapter is not None:
        reason = "this model has one block length"
    else:
        found = eligible(table, spec.block_length, spec.decoding.model_dump(mode="json"))
        # What fits with the model's own length has to fit with any, and texts shall share their pages.
        room = limits.largest_block
        lengths = {length: tokens for length, tokens in found.items() if length <= room and page_size % length == 0}
        reason = "no other fits, and is as often right under the model's default strategy"
    if len(lengths) > 1:
        return lengths
    log.warning("block_length auto: %s, so all requests that name none get the model's own", reason)
    return {}


def choose_length(
    lengths: Mapping[int, float],
    settings: WorkerSettings,
    spec: ModelSpec,
    cache: CacheShape,
    limits: BatchLimits,
    forward: Forward,
    clock: Clock = time.perf_counter,
    agree: Agree = alone,
) -> LoadAware | None:
    """Return what chooses among block lengths by load, at the prices of `forward` that workers `agree` upon; None if
    there are no lengths."""
    if not lengths:
        return None

    def measure(wanted: Collection[int]) -> Prices:
        if limits.pages_ahead:
            return {length: LedSteps(forward, spec, cache, limits, length, clock).prices() for length in wanted}
        # Rows of all lengths share a step there, whose price is one of its positions.
        width = max(length + tokens for length, tokens in lengths.items())
        most = min(limits.token_budget, int(settings.max_rows * width))
        return dict.fromkeys(wanted, measure_prices(forward, spec, cache, most, clock))

    began = time.perf_counter()
    prices = agree(tuple(lengths), measure)
    log.info("prices of steps are known after %.1f s", time.perf_counter() - began)
    chooser = LoadAware(spec.block_length, lengths, prices, limits.token_budget)
    log.info("block lengths by requests that run together: %s", told(chooser, settings.max_rows))
    return chooser


def told(chooser: LoadAware, max_rows: int) -> str:
    """Return the choices in words, such as `16 up to 3, 8 beyond`."""
    choices = [chooser(requests) for requests in range(1, max_rows + 1)]
    parts = [f"{length} up to {at}" for at, (length, after) in enumerate(pairwise(choices), 1) if length != after]
    return ", ".join([*parts, f"{choices[-1]} beyond" if parts else f"{choices[-1]} always"])
