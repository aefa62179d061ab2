"""What the host reads of a step is its answer: nothing before it waits for the device."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import worker.runner
from shared.commands import Sampling
from shared.decoding import Decoding, JointThreshold, LowConfidenceStatic, Renoise, Threshold
from tests.pretended_card import CARD, counted_waits, pretended_card
from tests.worker.parallel.ranks import SilentPeers
from tests.worker.tiny_checkpoints import write_checkpoint
from worker.engine.plan import Canvas, Guide, Plan, Row, visible_ends
from worker.models import LoadedModel, load_model
from worker.models.checkpoint import read_checkpoint
from worker.parallel.loading import load_share
from worker.parallel.messages import Batch, Message, Propose
from worker.parallel.proposing import propose_as_told
from worker.runner import Runner

BLOCK = 4
PAGE = 8
MASK = 60
ANSWER = ["tolist"] * 4
"""What is accepted, the tokens, how sure they are, and which rows are broken."""
STRATEGIES = [kind for kind in get_args(get_args(Decoding)[0]) if kind is not Renoise]
HOT = Sampling(temperature=0.8, seed=3)
CUT = Sampling(temperature=0.8, top_k=5, top_p=0.9, min_p=0.01, seed=3)
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"sampling": HOT},
    "ranked": {"sampling": HOT, "decoding": Threshold(threshold=0.5, confidence="model")},
    "forbidden": {"forbidden": (3, 40, 59)},
    "last": {"last": True},
}
"""Those for which ranks exchange statistics."""
WHOLE: dict[str, dict[str, Any]] = {
    "cut": {"sampling": CUT},
    "edited": {"edits": ((5, 2.0, 1.0),)},
    "ranked without stops": {"stop_token_ids": (3,), "decoding": Threshold(threshold=0.5, stops_last=True)},
}
"""Those that need the logits in one place."""


@pytest.fixture(autouse=True)
def card() -> Iterator[None]:
    with pretended_card():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def model(folder: Path) -> LoadedModel:
    return load_model(folder, device=CARD)


@dataclass
class Told:
    """Implements `worker.models.Lead`: the other ranks, which are told and say nothing."""

    messages: list[Message] = field(default_factory=list[Message])

    def tell(self, message: Message) -> None:
        self.messages.append(message)


def share_of(folder: Path, rank: int) -> LoadedModel:
    return load_share(read_checkpoint(folder), SilentPeers(rank, 2), device=CARD, dtype=torch.float32)


def plan_of(model: LoadedModel, changes: Sequence[dict[str, Any]], guided: bool = False) -> Plan:
    """Return a plan with a canvas for each of the changes, each on pages of its own."""
    rows: list[Row] = []
    for number, change in enumerate(changes):
        tokens = (11, 12, 13, 14, *(MASK,) * BLOCK)
        guide = Guide((MASK,) * len(tokens), (2 * number + 1,), 0.5) if guided else None
        common: dict[str, Any] = {"sampling": Sampling(), "decoding": Threshold(threshold=0.5), "stop_token_ids": ()}
        canvas = replace(Canvas(BLOCK, (True,) * BLOCK, 0, False, **common), **change)
        ends = visible_ends(model.spec.attention, 0, len(tokens), BLOCK, len(tokens))
        rows.append(Row(str(number), 0, tokens, ends, (2 * number,), canvas, guide=guide))
    return Plan(tuple(rows))


def waits_of(runner: Runner, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return all that a step waits with behind its forward; how that attends differs from device to device."""
    forward = worker.runner.run_batch
    with counted_waits() as waits:

        def run_batch(*given: Any) -> torch.Tensor:
            hidden = forward(*given)
            waits.clear()
            return hidden

        monkeypatch.setattr("worker.runner.run_batch", run_batch)
        assert not any(runner(plan).failed)
        return [*waits]


@pytest.mark.parametrize("guided", [False, True], ids=["alone", "guided"])
@pytest.mark.parametrize("kinds", [*([kind] for kind in KINDS | WHOLE), [*KINDS, *WHOLE]], ids=", ".join)
def test_no_way_to_draw_waits_before_the_answer(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, kinds: list[str], guided: bool
) -> None:
    plan = plan_of(model, [(KINDS | WHOLE)[kind] for kind in kinds], guided)
    assert waits_of(Runner(model, 32, PAGE, CARD), plan, monkeypatch) == ANSWER


@pytest.mark.parametrize("kind", STRATEGIES, ids=lambda kind: kind.__name__)
def test_no_strategy_waits_before_the_answer(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, kind: type[Any]
) -> None:
    editable = (True, False, False, False)
    change: dict[str, Any] = {"decoding": kind(), "undecided_at_first": BLOCK}
    if kind is JointThreshold:
        change |= {"masked": (False, True, True, True), "editable": editable}
    plan = plan_of(model, [change, {"decoding": LowConfidenceStatic(steps=2), "undecided_at_first": BLOCK}])
    assert waits_of(Runner(model, 32, PAGE, CARD), plan, monkeypatch) == ANSWER


@pytest.mark.parametrize("kinds", [*([kind] for kind in KINDS), [*KINDS]], ids=", ".join)
def test_no_rank_waits_before_the_answer(folder: Path, monkeypatch: pytest.MonkeyPatch, kinds: list[str]) -> None:
    told, first, second = Told(), share_of(folder, 0), share_of(folder, 1)
    runner = Runner(replace(first, lead=told), 32, PAGE, CARD)

    found = waits_of(runner, plan_of(first, [KINDS[kind] for kind in kinds]), monkeypatch)

    assert found == ANSWER
    (message,) = (message for message in told.messages if isinstance(message, Propose))
    (batch,) = (message for message in told.messages if isinstance(message, Batch))
    hidden = torch.zeros((len(batch.wanted), first.spec.hidden_size), device=CARD)
    with counted_waits() as waits:
        propose_as_told(second.module, hidden, runner.barred, message)
        assert waits == []
