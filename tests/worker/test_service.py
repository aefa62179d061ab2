"""The decode loop between a scripted engine and a scripted queue side."""

from collections.abc import Callable
from pathlib import Path

import pytest

from shared.commands import Generate
from shared.events import Event, Finished, Usage
from shared.keys import new_request_id
from worker.bridge import BridgeError
from worker.engine.ports import Arrival, Inbox, Load, Outbox
from worker.exits import ExitCode
from worker.mailbox import Mailbox
from worker.metrics import Metrics
from worker.pulse import Pulse
from worker.readiness import Readiness
from worker.service import Service


class ScriptedEngine:
    """Runs each request for `length` steps; gives back all of them when told."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.left: dict[str, int] = {}
        self.steps = 0
        self.free_pages = 1
        self.on_step: Callable[[int], None] = lambda number: None

    @property
    def idle(self) -> bool:
        return not self.left

    def step(self, inbox: Inbox) -> Outbox:
        self.steps += 1
        self.on_step(self.steps)
        outbox = Outbox()
        for arrival in inbox.arrivals:
            self.left[arrival.request.id] = self.length
        for request_id in list(self.left):
            self.left[request_id] -= 1
            if inbox.hand_back:
                outbox.handed_back.append(request_id)
                del self.left[request_id]
            elif self.left[request_id] == 0:
                outbox.events.append(Finished(request_id, 2, 1, "stop", "stop_token", Usage(1, 4, 2, 1)))
                del self.left[request_id]
        return outbox

    def load(self) -> Load:
        return Load(len(self.left), 0, self.free_pages, 1, self.steps)


class ScriptedBridge:
    def __init__(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox
        self.events: list[Event] = []
        self.handed_back: list[str] = []
        self.late: list[Arrival] = []
        """Claims that were under way when the drain began."""
        self.claims_ended = False
        self.closed = False
        self.broken = False

    def check(self) -> None:
        if self.broken:
            raise BridgeError("the bridge has ended")

    def deliver(self, outbox: Outbox, waiting: int) -> None:
        self.events += outbox.events
        self.handed_back += outbox.handed_back

    def held(self) -> dict[str, int]:
        return {}

    def stop_taking(self) -> None:
        for arrival in self.late:
            self.mailbox.arrive(arrival)
        self.claims_ended = True

    def close(self, timeout_s: float) -> bool:
        self.closed = True
        return True


class Worker:
    def __init__(self, tmp_path: Path, length: int = 3, drain_s: float = 60.0) -> None:
        self.mailbox = Mailbox()
        self.engine = ScriptedEngine(length)
        self.bridge = ScriptedBridge(self.mailbox)
        self.pulse = Pulse(30.0)
        self.ready_file = tmp_path / "ready"
        self.metrics = Metrics("tiny")
        self.service = Service(
            self.engine, self.bridge, self.mailbox, self.pulse, Readiness(self.ready_file, "w1"), self.metrics, drain_s
        )

    def arrive(self) -> Arrival:
        arrival = Arrival(Generate(id=new_request_id("tiny"), model="tiny", prompt=(1,)), 1)
        self.mailbox.arrive(arrival)
        return arrival

    def stop_at(self, step: int) -> None:
        self.engine.on_step = lambda number: self.service.stop() if number == step else None


def test_a_drain_finishes_what_runs_and_what_was_claimed_meanwhile(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    first = worker.arrive()
    late = Arrival(Generate(id=new_request_id("tiny"), model="tiny", prompt=(1,)), 1)
    worker.bridge.late.append(late)
    worker.stop_at(2)

    assert worker.service.run() is ExitCode.CLEAN
    assert {event.id for event in worker.bridge.events} == {first.request.id, late.request.id}
    assert worker.bridge.closed


def test_a_drain_without_time_hands_everything_back(tmp_path: Path) -> None:
    worker = Worker(tmp_path, length=10**6, drain_s=0.0)
    requests = [worker.arrive().request.id for _ in range(3)]
    worker.stop_at(2)

    assert worker.service.run() is ExitCode.CLEAN
    assert worker.bridge.handed_back == requests
    assert worker.bridge.events == []


def test_the_ready_file_is_there_from_the_first_claim_to_the_drain(tmp_path: Path) -> None:
    worker = Worker(tmp_path, length=4)
    worker.arrive()
    seen: list[tuple[bool, str]] = []

    def look(number: int) -> None:
        seen.append((worker.ready_file.exists(), worker.service.state))
        if number == 2:
            assert worker.ready_file.read_text() == "w1\n"
            worker.service.stop()

    worker.engine.on_step = look
    worker.service.run()
    assert seen == [(True, "ready"), (True, "ready"), (False, "draining"), (False, "draining")]
    assert list(tmp_path.iterdir()) == []


def test_an_error_in_a_step_ends_the_worker_without_half_a_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(tmp_path)
    worker.arrive()

    def fail(number: int) -> None:
        raise MemoryError

    worker.engine.on_step = fail
    assert worker.service.run() is ExitCode.INTERNAL
    assert worker.bridge.events == [] and not worker.bridge.closed
    assert not worker.ready_file.exists()
    assert "a step has failed" in caplog.text


def test_pages_that_belong_to_nobody_end_an_idle_worker_loudly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(tmp_path)
    worker.arrive()
    worker.engine.free_pages = 0
    assert worker.service.run() is ExitCode.INTERNAL
    (failure,) = [record.exc_info for record in caplog.records if record.exc_info]
    assert failure is not None and "1 KV pages belong to nobody" in str(failure[1])
    assert len(worker.bridge.events) == 1


def test_an_idle_worker_notices_that_its_bridge_has_died(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    worker.bridge.broken = True
    assert worker.service.run() is ExitCode.INTERNAL


def test_the_pulse_advances_while_idle_and_while_stepping(tmp_path: Path) -> None:
    worker = Worker(tmp_path, length=5)
    worker.arrive()
    worker.stop_at(3)
    worker.service.run()
    assert worker.pulse.count >= 5


def test_steps_and_their_outcome_are_counted(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    worker.arrive()
    worker.stop_at(1)
    worker.service.run()
    lines = worker.metrics.render().decode().splitlines()
    assert 'diffleet_model_forwards_total{model="tiny"} 3.0' in lines
    assert 'diffleet_requests_total{model="tiny",outcome="stop_token"} 1.0' in lines
    assert 'diffleet_mean_tokens_per_forward{model="tiny"} 2.0' in lines
