"""DiffusionGemma's canvases against the reference's recorded passes and draws; see test_goldens for all others."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kernels.attention import plan_attention
from shared.commands import Generate, Limits, Sampling
from shared.decoding import Renoise
from tests.goldens.folder import Entry, GoldenFolder, find_folders
from tests.goldens.test_goldens import LOGIT_TOLERANCE, NoText, run
from worker.canvas_runner import CanvasModel, CanvasRunner
from worker.engine.engine import Engine
from worker.engine.plan import Plan, near_view
from worker.engine.ports import Decision
from worker.engine.scheduler import BatchLimits, CacheShape
from worker.models.layers import ForwardContext
from worker.models.spec import Attention, kv_shapes
