"""`diffleet top`, `doctor`, `requests`, `abort` and `dead-letters`, over what is known and against a live fleet."""

import contextlib
import re
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from redis import Redis
from rich.console import Console
from typer.testing import CliRunner

from shared.cli.census import Census, LaneView, ModelView, take_census
from shared.cli.doctor import Verdict, check_data_dir, check_gpu, check_packages, check_port, check_redis, judge_redis
from shared.cli.exits import Exit, Stop
from shared.cli.exposition import sums
from shared.cli.operating import app
from shared.cli.operations import find_redis
from shared.cli.top import Sample, draw
from shared.client import FleetClient
from shared.commands import Generate, Limits, encode_command
from shared.connection import Link
from shared.embedded import EmbeddedServer
from shared.heart import Heart
from shared.keys import Keys, new_request_id
from shared.queue import WorkerQueue
from shared.roster import WorkerInfo
from tests.cli.fleet_process import Up, diffleet
from tests.fleet.processes import until
from tests.shared.protocol_for_tests import MODEL, card_of

HEALTHY: Mapping[str, Any] = {
    "redis_version": "7.4.0", "role": "master", "maxmemory_policy": "noeviction", "aof_enabled": 1,
    "used_memory": 1, "maxmemory": 100,
}  # fmt: skip


def shown(sample: Sample, before: Sample | None = None, width: int = 120) -> str:
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        console.print(draw(sample, before))
    return capture.get()


def census(steps: int, *, workers: int = 1) -> Census:
    ones = [
        WorkerInfo(
            f"w{n}",
            "m",
            "ready",
            slots=8,
            free=5,
            steps=steps,
            tokens=3 * steps,
            pages=64,
            pages_free=40,
            reclaims=2,
            pid=77,
            device="cpu",
        )
        for n in range(workers)
    ]
    lanes = (LaneView("rt", 0, None), LaneView("std", 4, 12.5), LaneView("bulk", 0, None))
    return Census(1000, (ModelView("m", tuple(ones), lanes, 0),))


def test_top_shows_lanes_workers_and_the_rates_since_an_earlier_look() -> None:
    before = Sample(
        10.0, census(100), {"m": {"diffleet_completion_tokens_total": 10.0, "diffleet_denoising_forwards_total": 5.0}}
    )
    now = Sample(
        12.0, census(150), {"m": {"diffleet_completion_tokens_total": 40.0, "diffleet_denoising_forwards_total": 17.0}}
    )
    text = shown(now, before)
    assert "1 worker · 3 running · 4 open · 75.0 tokens/s · 2.50 tokens/forward · 2 reclaims" in text
    assert re.search(r"std +4 +12.5 s", text)
    assert re.search(r"w0 +ready +cpu +3/8 +38% +75.0 +25.0 .* 77", text)


def test_top_says_what_it_means_that_no_worker_lives() -> None:
    assert "no worker is alive: requests wait until one comes" in shown(Sample(0.0, census(0, workers=0)), width=80)


def test_top_names_the_workers_whose_card_is_not_the_one_in_force() -> None:
    (view,) = census(0, workers=2).models
    strange = Sample(0.0, Census(1000, (replace(view, strangers=("w1",)),)))
    assert "other cards than the one that fronts follow: w1" in shown(strange)
    assert "other cards" not in shown(Sample(0.0, census(0, workers=2)))


async def test_top_and_doctor_see_a_worker_with_another_card(redis_url: str) -> None:
    ours, other = card_of(), replace(card_of(), digest="", max_model_len=32)
    queue = WorkerQueue.connect(redis_url, MODEL, "w1")
    await queue.publish_card(ours)
    async with FleetClient.connect(redis_url) as fleet, contextlib.AsyncExitStack() as stack:
        link = Link.open(redis_url)
        stack.push_async_callback(link.close)
        stack.push_async_callback(queue.close)
        for name, card in (("w1", ours), ("w2", other)):
            heart = stack.enter_context(contextlib.closing(Heart.connect(redis_url, name, MODEL)))
            told = [one.fact for one in check_redis(redis_url) if one.subject == f"model {MODEL}"]
            assert told == []
            heart.beat({}, WorkerInfo(name, MODEL, "ready", card=card.digest))
        assert [view.strangers for view in (await take_census(fleet, link)).models] == [("w2",)]
        (finding,) = [one for one in check_redis(redis_url) if one.subject == f"model {MODEL}"]
        assert finding.verdict is Verdict.NOTE and finding.fact.startswith("w2 of 2 workers have another card")


def test_an_api_that_has_started_anew_gives_no_negative_rate() -> None:
    counts = {"diffleet_completion_tokens_total": 900.0, "diffleet_denoising_forwards_total": 90.0}
    before = Sample(10.0, census(100), {"m": counts})
    now = Sample(12.0, census(120), {"m": {name: value / 30 for name, value in counts.items()}})
    assert "10.00 tokens/forward" in shown(now, before)


def test_a_worker_that_has_just_come_has_no_rates() -> None:
    text = shown(Sample(12.0, census(100, workers=2)), Sample(10.0, census(90, workers=1)))
    assert re.search(r"w0 .* 15.0 +5.0 ", text) and re.search(r"w1 .* - +- ", text)


def test_the_table_fits_80_columns_whatever_the_figures() -> None:
    worker = WorkerInfo(
        "vm-c41c0d93", "m", "draining", slots=256, free=0, steps=10**6, device="cuda:0", pages=65536, pid=4194304
    )
    sample = Sample(0.0, Census(1000, (ModelView("m", (worker,), (), 0),)))
    later = Sample(1.0, Census(1000, (ModelView("m", (replace(worker, tokens=99999, steps=10**6 + 99),), (), 0),)))
    console = Console(width=80, no_color=True)
    with console.capture() as capture:
        console.print(draw(later, sample))
    assert "…" not in capture.get() and "4194304" in capture.get()


def test_metrics_are_summed_over_all_labels_but_the_model() -> None:
    text = '# HELP a x\na{model="m",code="1"} 2.0\na{model="m",code="2"} 3\na{model="other"} 7\nb{model="m"} 1e3\n'
    assert sums(text, ("a", "b", "c"), "m") == {"a": 5.0, "b": 1000.0}


def test_a_healthy_server_has_no_finding_but_ok() -> None:
    assert {finding.verdict for finding in judge_redis(HEALTHY)} == {Verdict.OK}


@pytest.mark.parametrize(
    ("field", "value", "verdict", "remedy"),
    [
        ("redis_version", "6.2.1", Verdict.FAULT, "Redis 7"),
        ("maxmemory_policy", "allkeys-lru", Verdict.FAULT, "noeviction"),
        ("role", "slave", Verdict.FAULT, "primary"),
        ("aof_enabled", 0, Verdict.NOTE, "appendonly"),
        ("used_memory", 95, Verdict.FAULT, "maxmemory"),
        ("maxmemory", 0, Verdict.NOTE, "maxmemory"),
    ],
)
def test_every_fault_of_a_server_has_its_remedy(field: str, value: object, verdict: Verdict, remedy: str) -> None:
    (finding,) = [one for one in judge_redis({**HEALTHY, field: value}) if one.verdict is not Verdict.OK]
    assert finding.verdict is verdict and remedy in finding.remedy


def test_missing_packages_gpu_port_and_rights_are_found(tmp_path: Path) -> None:
    assert [one.verdict for one in check_packages(lambda name: name != "torch")] == [Verdict.OK, Verdict.NOTE]
    assert check_gpu(None).verdict is Verdict.NOTE and check_gpu("NVIDIA H100, 80 GiB\n").verdict is Verdict.OK
    assert check_data_dir(tmp_path / "new" / "folder").verdict is Verdict.OK
    (tmp_path / "file").write_text("")
    assert check_data_dir(tmp_path / "file" / "folder").verdict is Verdict.FAULT
    assert check_port("127.0.0.1", 0).verdict is Verdict.OK


def test_the_server_of_a_local_fleet_is_found_and_a_named_one_wins(tmp_path: Path) -> None:
    assert find_redis("redis://elsewhere/1", tmp_path) == "redis://elsewhere/1"
    with pytest.raises(Stop, match=f"no fleet runs in {re.escape(str(tmp_path))};") as refused:
        find_redis(None, tmp_path)
    assert refused.value.exit_code is Exit.UNREACHABLE
    place = EmbeddedServer(tmp_path).socket_path
    place.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place))
        assert find_redis(None, tmp_path) == f"unix://{place}"
        assert find_redis("redis://elsewhere/1", tmp_path) == "redis://elsewhere/1"
    place.unlink()


def test_credentials_at_two_places_are_told_of_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIFFLEET_REDIS_PASSWORD", "x")
    named = ["--redis-url", "redis://:y@127.0.0.1:1/0"]
    for command in ("top", "requests"):
        ended = CliRunner().invoke(app, [command, *named])
        assert (ended.exit_code, ended.stderr.count("\n")) == (Exit.USAGE, 1)
        assert "--redis-url: redis_url has credentials" in ended.stderr
    looked = CliRunner().invoke(app, ["doctor", *named])
    assert re.search(r"fault +redis +redis_url has credentials", looked.stdout)
    assert "-> correct --redis-url" in looked.stdout


def data_dir_commands() -> list[str]:
    """Return the commands that look for a fleet in a data folder, or in a Redis."""
    group: Any = typer.main.get_command(app)
    found = [name for name, command in group.commands.items() if QUEUE <= {one.name for one in command.params}]
    # It looks at what a fleet would need here, also before there is one.
    return [name for name in found if name != "doctor"]


QUEUE = {"redis_url", "data_dir"}
NEEDED = {"abort": ["r_demo.0_01M8FSCHXA2GAKV0ZMCY4G3EC7"], "forget": ["demo"]}


def test_commands_for_a_data_folder_are_found() -> None:
    assert {"top", "requests", "abort", "dead-letters", "webhooks"} <= set(data_dir_commands())


@pytest.mark.parametrize("name", data_dir_commands())
def test_what_is_meant_for_a_folder_without_a_fleet_reaches_no_other(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(FleetClient, "connect", lambda url, **_: asked.append(url))
    typo = str(tmp_path / "typo")
    by_flag = ([name, *NEEDED.get(name, []), "--data-dir", typo], {"DIFFLEET_REDIS_URL": "redis://elsewhere/1"})
    by_variable = ([name, *NEEDED.get(name, [])], {"DIFFLEET_DATA_DIR": typo})
    for arguments, variables in (by_flag, by_variable):
        ended = CliRunner().invoke(app, arguments, env=variables)
        assert (ended.exit_code, f"no fleet runs in {typo}" in ended.stderr) == (Exit.UNREACHABLE, True)
    assert asked == []


@pytest.fixture
def slow_fleet(tiny_model: Path, short_folder: Path) -> Iterator[Up]:
    """A fleet that takes some ten minutes for 4,000 tokens, so that no request ends before it is looked at."""
    up = Up(short_folder, tiny_model, "--model-name", "demo", "--fake", "--prompt", "", DIFFLEET_STEP_MS="600")
    try:
        yield up.wait_serving()
        assert up.stop() == 0
    finally:
        up.put_down()


@pytest.mark.slow
def test_an_open_request_is_listed_told_about_and_aborted(slow_fleet: Up) -> None:
    where = ("--redis-url", slow_fleet.redis_url)
    body = {"prompt": "Once", "max_tokens": 4000, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{slow_fleet.url}/generate", json=body, trust_env=False, timeout=60) as response:
        parts = response.iter_bytes()
        next(part for part in parts if re.search(rb'"text":"[^"]', part))
        listed = diffleet("requests", *where)
        (request_id,) = re.findall(r"^(r_\S+) +running", listed.stdout, re.M)
        told = diffleet("requests", request_id, *where)
        assert re.search(r"state +running", told.stdout) and re.search(r"tries +1", told.stdout)
        ended = diffleet("abort", request_id, *where)
        assert ended.returncode == 0 and "aborting" in ended.stdout
        rest = b"".join(parts)
    assert b'"aborted"' in rest
    assert f"{request_id}  aborted" in diffleet("abort", request_id, *where).stdout
    assert diffleet("requests", request_id, "--text", *where).stdout.strip()
    until(lambda: "no open request" in diffleet("requests", *where).stdout, "nothing is open")


@pytest.mark.slow
def test_an_unknown_request_ends_with_4(live_fleet: Up) -> None:
    where = ("--redis-url", live_fleet.redis_url)
    nobody = "r_demo.0_01M8FSCHXA2GAKV0ZMCY4G3EC7"
    for command in (("requests", nobody), ("abort", nobody), ("dead-letters", "--replay", nobody)):
        done = diffleet(*command, *where)
        assert done.returncode == 4 and "not known" in done.stderr, command
    assert "no dead letter" in diffleet("dead-letters", *where).stdout


@pytest.mark.slow
def test_what_became_of_a_dead_letter_is_told(live_fleet: Up) -> None:
    where = ("--redis-url", live_fleet.redis_url)
    replayed, discarded, nobody = (new_request_id("demo") for _ in range(3))
    with Redis.from_url(live_fleet.redis_url) as redis:
        for name in (replayed, discarded):
            keys = Keys.of(name)
            command = Generate(id=name, model="demo", prompt=(10, 11), limits=Limits(max_tokens=4))
            redis.hset(keys.request(name), mapping={"st": "dead", "in": encode_command(command)})
            redis.expire(keys.request(name), 600)
            redis.xadd(keys.dead_letters(), {"id": name, "att": 4, "why": "alone", "lost": "w1 w2"})

    def asked(option: str, *names: str) -> tuple[int, str, str]:
        done = diffleet("dead-letters", *(part for name in names for part in (option, name)), *where)
        return done.returncode, done.stdout, done.stderr

    code, out, _ = asked("--replay", replayed)
    (fresh,) = re.findall(rf"^{replayed}  again as (\S+)$", out, re.M)
    assert code == 0
    assert asked("--replay", replayed)[:2] == (0, f"{replayed}  replayed already, as {fresh}\n")
    assert asked("--discard", replayed)[:2] == (0, f"{replayed}  off the list already: replayed as {fresh}\n")
    until(lambda: re.search(r"state +done", diffleet("requests", fresh, *where).stdout), "the replay is done")

    # What is refused keeps nothing from being done, and is told of at the end.
    code, out, err = asked("--discard", nobody, fresh, discarded)
    assert (code, out) == (4, f"{discarded}  discarded\n")
    assert f"request '{nobody}' is not known, or no longer" in err and "is no dead letter: it is done" in err
    assert asked("--discard", discarded)[:2] == (0, f"{discarded}  off the list already\n")
    assert asked("--replay", fresh)[0] == 4


@pytest.mark.slow
def test_top_prints_one_picture_of_a_live_fleet(live_fleet: Up) -> None:
    done = diffleet("top", "--once", "--interval", "0.2", "--redis-url", live_fleet.redis_url, "--url", live_fleet.url)
    assert done.returncode == 0, done.stderr
    assert "demo  1 worker · " in done.stdout and " ready " in done.stdout
    assert "\x1b" not in done.stdout


@pytest.mark.slow
def test_doctor_finds_a_local_fleet_by_its_data_folder(live_fleet: Up) -> None:
    done = diffleet("doctor", "--data-dir", str(live_fleet.data_dir))
    assert done.returncode == 0, done.stdout
    assert re.search(r"ok +redis +valkey 9", done.stdout) and "may read df:* and run scripts" in done.stdout


@pytest.mark.slow
def test_doctor_tells_a_diffleet_from_another_listener(live_fleet: Up) -> None:
    place = ("--data-dir", str(live_fleet.data_dir), "--port")
    assert "a Diffleet serves there: demo" in diffleet("doctor", *place, live_fleet.url.rpartition(":")[2]).stdout
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        assert "something else listens there" in diffleet("doctor", *place, str(other.getsockname()[1])).stdout


@pytest.mark.slow
def test_top_names_the_process_of_a_worker(live_fleet: Up) -> None:
    done = diffleet("top", "--once", "--interval", "0.2", "--redis-url", live_fleet.redis_url, "--url", live_fleet.url)
    (pid,) = re.findall(r" ready .* (\d+)$", done.stdout, re.M)
    assert b"worker" in Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.slow
def test_a_redis_that_does_not_answer_is_a_fault_with_a_remedy() -> None:
    began = time.monotonic()
    sick = diffleet("doctor", "--redis-url", "redis://127.0.0.1:1/0")
    assert sick.returncode == 1 and "does not answer" in sick.stdout and "-> start it" in sick.stdout
    assert diffleet("top", "--once", "--redis-url", "redis://127.0.0.1:1/0").returncode == 3
    assert diffleet("requests", "--redis-url", "ftp://x").returncode == 2
    assert time.monotonic() - began < 90
