"""Requests that need an adapter, and orders of operators, at the queue's side of a worker."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import pytest

import worker.bridge
from shared.commands import Generate, LoraUse
from shared.events import Failed
from shared.keys import new_request_id
from shared.orders import Orders
from tests.worker.queue_for_tests import QueueForTests
from tests.worker.test_bridge import CARD, PACE, Desk, finished, until
from worker.adapters.ports import AdapterFaulty, AdaptersFull, AdapterUnavailable
from worker.bridge import Bridge
from worker.engine.ports import Inbox

USE = LoraUse(name="fox", path="fox", digest="0" * 64)


class Shelf:
    """Loads for as long as `gate` is shut; fails if `error` is set."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.gate = threading.Event()
        self.gate.set()
        self.asked = 0
        self.holds = 0

    def hold(self, uses: Sequence[LoraUse]) -> None:
        self.asked += 1
        assert self.gate.wait(10)
        if self.error is not None:
            raise self.error
        self.holds += len(uses)

    def release(self, uses: Sequence[LoraUse]) -> None:
        self.holds -= len(uses)


@contextmanager
def running(queue: QueueForTests, shelf: Shelf | None, drains: list[int] | None = None) -> Iterator[Desk]:
    desk = Desk(queue)
    desk.bridge = Bridge(
        lambda: queue,  # type: ignore[arg-type, return-value]
        CARD,
        desk.mailbox,
        PACE,
        "w1",
        desk.metrics,
        shelf,
        lambda: (drains if drains is not None else []).append(1),
    )
    desk.bridge.start(10)
    try:
        yield desk
    finally:
        if shelf is not None:
            shelf.gate.set()
        assert desk.bridge.close(10)


def ask(uses: tuple[LoraUse, ...] = (USE,)) -> Generate:
    return Generate(id=new_request_id("tiny"), model="tiny", prompt=(3, 4), lora=uses)


def test_a_request_arrives_once_its_adapter_is_there_and_others_do_not_wait_for_it() -> None:
    queue, shelf = QueueForTests(), Shelf()
    shelf.gate.clear()
    slow, plain = ask(), ask(())
    queue.submit(slow)
    queue.submit(plain)
    with running(queue, shelf) as desk:
        assert [arrival.request.id for arrival in desk.arrivals(1)] == [plain.id]
        # It is held, so that its lease is renewed.
        assert slow.id in desk.bridge.held()
        shelf.gate.set()
        assert [arrival.request for arrival in desk.arrivals(1)] == [slow]
        assert shelf.holds == 1
        desk.say(finished(slow.id, 2))
        until(lambda: slow.id not in desk.bridge.held())
        assert shelf.holds == 0


@pytest.mark.parametrize(
    "error", [AdapterUnavailable("adapter fox: gone"), RuntimeError("a fault")], ids=["gone", "fault"]
)
def test_a_request_whose_adapter_cannot_be_loaded_fails_after_some_workers_have_tried(error: Exception) -> None:
    queue, shelf = QueueForTests(), Shelf(error)
    request = ask()
    with running(queue, shelf) as desk:
        for attempt in range(1, 4):
            queue.submit(request, epoch=attempt)
            until(lambda attempt=attempt: shelf.asked == attempt and request.id not in desk.bridge.held())
            handed_back = queue.requests[request.id].handed_back_ms
            assert (handed_back is not None) == (attempt < 3)
        end = queue.requests[request.id].terminal
        assert isinstance(end, Failed)
        assert (end.code, end.param, end.message) == ("unsupported", "lora", str(error))


@pytest.mark.parametrize("param", ["lora", "model"])
def test_a_request_whose_adapter_no_worker_can_load_fails_at_once(param: Literal["lora", "model"]) -> None:
    use = USE.model_copy(update={"param": param})
    queue, shelf = QueueForTests(), Shelf(AdapterFaulty.of(use, "r: is 8, but the tensors have rank 4"))
    request = ask((use,))
    with running(queue, shelf):
        queue.submit(request)
        until(lambda: queue.requests[request.id].terminal is not None)
        assert shelf.asked == 1 and queue.requests[request.id].handed_back_ms is None
        end = queue.requests[request.id].terminal
        assert isinstance(end, Failed)
        assert (end.code, end.param) == ("unsupported", param)
        assert end.message == "adapter fox: r: is 8, but the tensors have rank 4"


def test_a_request_whose_adapter_has_no_room_waits_however_often_it_is_taken() -> None:
    queue, shelf = QueueForTests(), Shelf(AdaptersFull("adapter fox: no room"))
    request = ask()
    with running(queue, shelf) as desk:
        for attempt in range(1, 7):
            queue.submit(request, epoch=attempt)
            until(lambda attempt=attempt: shelf.asked == attempt and request.id not in desk.bridge.held())
            assert queue.requests[request.id].handed_back_ms
        assert not queue.unable
        shelf.error = None
        queue.submit(request, epoch=7)
        assert [arrival.request for arrival in desk.arrivals(1)] == [request]


def test_without_a_model_store_the_request_says_so() -> None:
    queue = QueueForTests()
    request = ask()
    queue.unable[request.id] = 2
    queue.submit(request)
    with running(queue, None):
        until(lambda: queue.requests[request.id].terminal is not None)
        end = queue.requests[request.id].terminal
        assert isinstance(end, Failed) and "no model store" in end.message


def test_an_abort_during_the_load_reaches_the_engine_behind_the_arrival() -> None:
    queue, shelf = QueueForTests(), Shelf()
    shelf.gate.clear()
    request = ask()
    queue.submit(request)
    with running(queue, shelf) as desk:
        until(lambda: shelf.asked == 1)
        queue.abort_reasons[request.id] = "disconnected"
        time.sleep(20 * PACE.abort_poll_s)
        shelf.gate.set()
        inbox = Inbox()

        def more() -> None:
            new = desk.mailbox.collect(0.01)
            inbox.arrivals += new.arrivals
            if inbox.arrivals:
                inbox.aborts += new.aborts

        until(lambda: bool(inbox.aborts), more)
        assert inbox.aborts == [(request.id, "disconnected")]


def test_a_drain_during_the_load_hands_the_request_back_and_lets_the_adapter_go() -> None:
    queue, shelf = QueueForTests(), Shelf()
    shelf.gate.clear()
    request = ask()
    queue.submit(request)
    with running(queue, shelf) as desk:
        until(lambda: shelf.asked == 1)
        desk.bridge.stop_taking()
        time.sleep(0.02)
        assert not desk.bridge.claims_ended
        shelf.gate.set()
        until(lambda: desk.bridge.claims_ended and not desk.bridge.held())
        assert queue.requests[request.id].handed_back_ms == 0
        assert shelf.holds == 0
        assert not desk.mailbox.collect(0).arrivals


def test_an_operator_may_end_a_worker_and_empty_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.bridge, "_CARD_CHECK_S", 0.005)
    queue, drains = QueueForTests(), list[int]()
    queue.orders_now = Orders(flush="old")
    flushes: list[bool] = []
    with running(queue, None, drains) as desk:
        time.sleep(0.1)
        # What was asked before the worker began is done: its cache was empty.
        assert not desk.mailbox.collect(0).flush and not drains
        queue.orders_now = Orders(flush="new")
        until(lambda: any(flushes), lambda: flushes.append(desk.mailbox.collect(0.01).flush))
        queue.orders_now = Orders(drain=True, flush="new")
        until(lambda: bool(drains))
        time.sleep(0.05)
        assert drains == [1] and not desk.mailbox.collect(0).flush


def test_an_order_given_before_a_workers_first_look_round_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.bridge, "_CARD_CHECK_S", 0.2)
    queue = QueueForTests()
    queue.orders_now = Orders(flush="old")
    flushes: list[bool] = []
    with running(queue, None, list[int]()) as desk:
        queue.orders_now = Orders(flush="new")
        until(lambda: any(flushes), lambda: flushes.append(desk.mailbox.collect(0.01).flush))
