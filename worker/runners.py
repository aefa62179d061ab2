"""Which runner a model needs."""

import torch

from worker.canvas_runner import CanvasRunner
from worker.engine.ports import Forward
from worker.models import LoadedModel
from worker.models.spec import Commit
from worker.runner import Runner


def make_runner(model: LoadedModel, num_pages: int, page_size: int, device: torch.device | str = "cpu") -> Forward:
    """Return the runner for a model: canvases of noise have one of their own."""
    if model.spec.commit is Commit.ENCODED:
        return CanvasRunner(model, num_pages, page_size, device)
    return Runner(model, num_pages, page_size, device)
