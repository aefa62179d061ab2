"""A rank that repeats what rank 0 does. It knows no requests: only batches, pages and captured steps."""

from dataclasses import replace
from pathlib import Path
from typing import assert_never

import torch
from torch import Tensor

from kernels.attention import upload
from kernels.canvas import Layout
from worker.batch import Batch, run_batch
from worker.device import free_memory
from worker.graphs import Recorder, StepGraphs
from worker.models import LoadedModel
from worker.models.fp8 import with_small_pages
from worker.parallel.graphs import LED
from worker.parallel.messages import (
    BrokenMessage,
    Channel,
    End,
    Graphs,
    Join,
    Least,
    MakePages,
    Message,
    OnGraphs,
    Propose,
    Start,
)
from worker.parallel.peers import TorchPeers
from worker.parallel.proposing import propose_as_told
from worker.runner import Runner


class Follower:
    """Does what it is told; an error is the end of its process, and so of the group."""

    def __init__(self, model: LoadedModel, folder: Path, peers: TorchPeers) -> None:
        self._model = model
        self._folder = folder
        self._peers = peers
        self._runner: Runner | None = None
        self._graphs: list[StepGraphs] = []
        self._recorder: Recorder | None = None
        self._hidden: Tensor | None = None

    def follow(self, channel: Channel) -> bool:
        """Return True once told to leave, False if rank 0 is gone. Raises whatever goes wrong."""
        while (message := channel.receive()) is not None:
            if isinstance(message, End):
                return True
            self._do(message)
        return False

    @torch.inference_mode()
    def _do(self, message: Message) -> None:
        match message:
            case Batch():
                runner = self._pages_made()
                self._hidden = run_batch(self._model, message, runner.kv, runner.page_size, self._model.device)
            case OnGraphs():
                if message.number >= len(self._graphs) or message.method not in LED:
                    raise BrokenMessage(f"no captured steps {message.number} to {message.method}")
                getattr(self._graphs[message.number], message.method)(*message.arguments)
            case Propose():
                propose_as_told(self._model.module, self._last_hidden(), self._pages_made().barred, message)
            case Join():
                places = upload(torch.tensor(message.places, dtype=torch.int64), self._model.device)
                self._model.module.logits(self._last_hidden()[places])
            case MakePages():
                self._drop_pages()
                spec = replace(
                    self._model.spec,
                    text_vocab_size=message.text_vocab_size,
                    mask_token_id=message.mask_token_id,
                    never_sampled=(*message.never_sampled,),
                    filler_ids=(*message.filler_ids,),
                )
                model = replace(self._model, spec=spec)
                if message.in_8_bits:
                    model = with_small_pages(model, self._folder)
                self._runner = Runner(model, message.num_pages, message.page_size, model.device)
            case Graphs():
                self._graphs = self._graphs[: message.number]
                runner, layout = self._pages_made(), Layout(**message.layout)
                recorder = self._recorder if self._graphs else None
                self._recorder = recorder or Recorder(runner.model.device)
                made = StepGraphs(
                    *(runner.model, runner.kv, runner.barred, runner.filler_ids, layout, message.max_rows),
                    recorder=self._recorder,
                )
                self._graphs.append(made)
            case Least():
                # It is asked before pages are made: what was there to be measured goes first.
                self._drop_pages()
                self._peers.least(own_number(message.what, self._model.device))
            case Start() | End():
                raise BrokenMessage(f"{type(message).__name__} has no place here")
            case _:
                assert_never(message)

    def _drop_pages(self) -> None:
        self._runner = self._recorder = self._hidden = None
        self._graphs.clear()
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()

    def _pages_made(self) -> Runner:
        if self._runner is None:
            raise BrokenMessage("there are no pages yet")
        return self._runner

    def _last_hidden(self) -> Tensor:
        if self._hidden is None:
            raise BrokenMessage("there was no batch yet")
        return self._hidden


def own_number(what: str, device: torch.device) -> int:
    """Return what a rank has of something that the smallest one decides."""
    if what != "free_memory":
        raise BrokenMessage(f"nobody knows how much {what} there is")
    free = free_memory(device)
    return 2**62 if free is None else free
