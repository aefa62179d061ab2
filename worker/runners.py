"""Which runner a model needs."""

import logging
import time
from collections.abc import Sequence as ReadOnly
from dataclasses import replace

import torch

from worker.adapters.bank import AdapterBank
from worker.adapters.stack import Residents
from worker.canvas_runner import CanvasRunner
from worker.engine.ports import Forward
from worker.lanes import Lanes, make_lanes
from worker.leadable import goes_ahead
from worker.models import LoadedModel
from worker.models.spec import Commit, ModelSpec
from worker.runner import Runner

log = logging.getLogger(__name__)

_TELL_EVERY_S = 1.0
"""A GPU captures for seconds to minutes, a CPU has nothing to capture."""


def runs_ahead(spec: ModelSpec, device: torch.device, asked: str) -> bool:
    """Tell whether the device leads the rows itself; `asked` is the setting `step_ahead`."""
    return goes_ahead(spec) and (asked == "on" or (asked == "auto" and device.type == "cuda"))


def make_runner(
    model: LoadedModel,
    num_pages: int,
    page_size: int,
    device: torch.device | str = "cpu",
    *,
    max_rows: int = 32,
    max_model_len: int | None = None,
    ahead: bool = False,
    lengths: ReadOnly[int] = (),
    adapters: Residents | None = None,
    bank: AdapterBank | None = None,
) -> Forward:
    """Return the runner for a model: canvases of noise have one of their own.

    With `ahead` the steps of up to `max_rows` rows are captured, which takes seconds and is logged: for the model's own
    block length, and for the other `lengths`. No text is longer than `max_model_len`. `adapters` has those that rows
    run under, `bank` places for those that captured steps carry.
    """
    if model.spec.commit is Commit.ENCODED:
        return CanvasRunner(model, num_pages, page_size, device, adapters=adapters)
    if max_model_len is not None:
        model = replace(model, spec=replace(model.spec, max_model_len=max_model_len))
    runner = Runner(model, num_pages, page_size, device, adapters=adapters, bank=bank if ahead else None)
    if not ahead:
        return runner
    lanes = make_lanes(runner, max_rows, lengths)
    leader = lanes[0] if len(lanes) == 1 else Lanes(runner, lanes)
    began = told = time.perf_counter()

    def progress(done: int, of: int) -> None:
        nonlocal told
        now = time.perf_counter()
        if done == of or now - told >= _TELL_EVERY_S:
            told = now
            log.info("captured %d of %d steps, %.1f s", done, of, now - began)

    leader.capture(progress)
    return leader
