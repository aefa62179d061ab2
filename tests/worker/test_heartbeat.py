"""Leases are renewed while the loop advances, and no longer."""

import threading
from collections.abc import Mapping

from shared.connection import FleetUnavailable
from shared.heart import Held, HeldState
from shared.roster import WorkerInfo
from worker.heartbeat import Heartbeat
from worker.pulse import Pulse

BEAT_S = 0.005
INFO = WorkerInfo("w1", "tiny", "ready")
HELD = {"a": 1, "b": 4}


class Heart:
    def __init__(self) -> None:
        self.beats: list[dict[str, int]] = []
        self.answers: dict[str, Held] = {}
        self.down = 0
        self.beaten = threading.Semaphore(0)

    def beat(self, held: Mapping[str, int], info: WorkerInfo) -> dict[str, Held]:
        assert info == INFO
        self.beaten.release()
        if self.down:
            self.down -= 1
            raise FleetUnavailable("told so")
        self.beats.append(dict(held))
        return self.answers

    def wait(self, beats: int) -> None:
        for _ in range(beats):
            assert self.beaten.acquire(timeout=10)


class Chest:
    def __init__(self, patience_s: float) -> None:
        self.heart = Heart()
        self.pulse = Pulse(patience_s)
        self.judged: list[tuple[dict[str, int], dict[str, Held]]] = []
        self.judgement = threading.Event()
        self.stuck = threading.Event()
        self.heartbeat = Heartbeat(
            self.heart,  # type: ignore[arg-type]
            self.pulse,
            BEAT_S,
            lambda: dict(HELD),
            self._judge,
            lambda: INFO,
            self.stuck.set,
        )

    def _judge(self, beaten: Mapping[str, int], verdicts: Mapping[str, Held]) -> None:
        self.judged.append((dict(beaten), dict(verdicts)))
        self.judgement.set()


def test_it_beats_for_all_that_is_held_and_reports_what_is_not_well() -> None:
    chest = Chest(patience_s=60)
    chest.heart.answers = {"a": Held(HeldState.OK), "b": Held(HeldState.FENCED)}
    chest.heartbeat.start()
    assert chest.judgement.wait(10)
    chest.heartbeat.stop()
    assert chest.heart.beats[0] == HELD
    assert chest.judged[0] == (HELD, chest.heart.answers)


def test_a_loop_that_stands_still_loses_its_leases_and_its_process() -> None:
    chest = Chest(patience_s=4 * BEAT_S)
    chest.heartbeat.start()
    assert chest.stuck.wait(10)
    chest.heartbeat.stop()
    assert 1 <= len(chest.heart.beats) <= 4


def test_a_loop_that_advances_keeps_them() -> None:
    chest = Chest(patience_s=4 * BEAT_S)
    ended = threading.Event()

    def advance() -> None:
        while not ended.wait(BEAT_S / 5):
            chest.pulse.advance()

    loop = threading.Thread(target=advance)
    loop.start()
    chest.heartbeat.start()
    chest.heart.wait(12)
    assert not chest.stuck.is_set()
    chest.heartbeat.stop()
    ended.set()
    loop.join()


def test_a_declared_phase_may_take_longer() -> None:
    chest = Chest(patience_s=2 * BEAT_S)
    with chest.pulse.declare(60):
        chest.heartbeat.start()
        chest.heart.wait(12)
        assert not chest.stuck.is_set()
    assert chest.stuck.wait(10)
    chest.heartbeat.stop()


def test_a_beat_that_fails_is_followed_by_the_next() -> None:
    chest = Chest(patience_s=60)
    chest.heart.down = 3
    chest.heartbeat.start()
    chest.heart.wait(5)
    chest.heartbeat.stop()
    assert chest.heart.beats
