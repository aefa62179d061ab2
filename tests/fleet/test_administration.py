"""Adapters and administration over HTTP: real fronts, real workers, several pools on one server."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from redis import Redis
from safetensors.torch import load_file, save_file

from shared.adapters import WEIGHTS
from shared.client import FleetClient
from shared.commands import Generate, Limits, encode_command
from shared.embedded import EmbeddedServer
from shared.events import Finished
from shared.keys import Keys, new_request_id
from tests.conformance.fleet import Front
from tests.fleet.conftest import SpawnWorker
from tests.fleet.processes import WorkerProcess, until
from tests.worker.adapter_folders import read_weights, write_adapter
from worker.adapters.targets import find_targets, shapes_of
from worker.models import load_model

POOL = "adapted"
OTHER = "plain"
PROMPT = "once upon a time"


@pytest.fixture(scope="module")
def store(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("store")
    shapes, weights = shapes_of(find_targets(load_model(tiny_model))), read_weights(tiny_model)
    for seed, name in enumerate(("fox", "owl", "brief", "gone", "unloved"), 1):
        write_adapter(store / name, weights, shapes, seed=seed)
    return store


@pytest.fixture(scope="module")
def workers(spawn_worker: SpawnWorker, store: Path) -> list[WorkerProcess]:
    flags = ("--model-store", str(store))
    started = [spawn_worker(POOL, *flags), spawn_worker(POOL, *flags), spawn_worker(OTHER)]
    return [worker.wait_ready() for worker in started]


@pytest.fixture(scope="module")
def http(
    workers: list[WorkerProcess], fleet_server: EmbeddedServer, store: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    front = Front(tmp_path_factory.mktemp("front"), fleet_server.url, "--model-store", str(store)).wait_live()
    with httpx.Client(base_url=front.url, timeout=120) as client:
        yield client
    front.end()


def answer(http: httpx.Client, model: str = POOL, **body: Any) -> list[int]:
    asked = {"model": model, "prompt": PROMPT, "max_tokens": 12, "ignore_eos": True, "temperature": 0}
    reply = http.post("/generate", json=asked | body)
    assert reply.status_code == 200, reply.text
    return reply.json()["token_ids"]


def register(http: httpx.Client, name: str, path: str | None = None) -> dict[str, Any]:
    reply = http.post("/admin/loras", json={"name": name, "path": path or name, "model": POOL})
    assert reply.status_code == 200, reply.text
    return reply.json()


def holders(http: httpx.Client, name: str) -> set[str]:
    listed = http.get("/admin/loras", params={"model": POOL}).json()["data"]
    return {worker for entry in listed if entry["name"] == name for worker in entry["workers"]}


def test_an_adapter_that_was_posted_once_serves_on_every_worker_and_on_one_that_comes_later(
    http: httpx.Client, spawn_worker: SpawnWorker, store: Path
) -> None:
    told = register(http, "fox")
    assert (told["rank"], told["path"], told["workers"]) == (4, "fox", [])
    wanted, base = answer(http, lora=[{"name": "fox"}]), answer(http)
    assert wanted != base
    assert answer(http, model=f"{POOL}:fox") == wanted
    assert answer(http, lora=[{"name": "fox", "scale": 0}]) == base
    assert answer(http, model=f"{POOL}:fox", lora=[{"name": "fox", "scale": -1}]) == base

    async def crowd() -> list[list[int]]:
        """Ask often enough at once that one worker has not the room for all."""
        asked = {"model": f"{POOL}:fox", "prompt": PROMPT, "max_tokens": 12, "ignore_eos": True, "temperature": 0}
        async with httpx.AsyncClient(base_url=str(http.base_url), timeout=120) as client:
            replies = await asyncio.gather(*(client.post("/generate", json=asked) for _ in range(48)))
        return [reply.json()["token_ids"] for reply in replies]

    def both_hold_it() -> bool:
        assert all(tokens == wanted for tokens in asyncio.run(crowd()))
        return len(holders(http, "fox")) >= 2

    until(both_hold_it, "both workers have loaded it")

    late = spawn_worker(POOL, "--model-store", str(store)).wait_ready()
    assert late.id not in holders(http, "fox")

    def late_holds_it() -> bool:
        assert all(tokens == wanted for tokens in asyncio.run(crowd()))
        return late.id in holders(http, "fox")

    until(late_holds_it, "the new worker has loaded it when it was asked for")
    late.end()


def test_what_is_read_later_tells_the_model_by_the_name_that_was_asked_for(http: httpx.Client) -> None:
    register(http, "owl")
    for model in (POOL, f"{POOL}:owl"):
        asked = {"model": model, "prompt": PROMPT, "max_tokens": 4}
        reply = http.post("/generate", json=asked, headers={"Idempotency-Key": model}).json()
        assert reply["model"] == model
        assert http.get(f"/generate/{reply['id']}").json()["model"] == model


def test_every_name_of_the_same_files_is_shown_as_loaded_and_a_name_of_other_files_no_longer(
    http: httpx.Client, workers: list[WorkerProcess]
) -> None:
    for name in ("twin-a", "twin-b"):
        register(http, name, "owl")
    answer(http, model=f"{POOL}:twin-b")
    until(lambda: bool(holders(http, "twin-a")), "the files are told of as loaded")
    assert holders(http, "twin-a") == holders(http, "twin-b")

    def shown() -> list[set[str]]:
        listed = http.get("/admin/workers", params={"model": POOL}).json()["data"]
        return [set(worker["adapters"]) & {"twin-a", "twin-b"} for worker in listed if worker["adapters"]]

    assert {"twin-a", "twin-b"} in shown()
    assert register(http, "twin-b", "unloved")["workers"] == []
    assert holders(http, "twin-a") and not holders(http, "twin-b")
    assert {"twin-a"} in shown() and {"twin-a", "twin-b"} not in shown()


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_an_adapter_with_a_value_that_is_not_finite_is_refused_when_it_is_registered(
    http: httpx.Client, store: Path, kind: str
) -> None:
    folder = shutil.copytree(store / "fox", store / f"broken-{kind}")
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
    weights = {name: value.to(dtype) for name, value in load_file(folder / WEIGHTS).items()}
    faulty = sorted(weights)[-1]
    weights[faulty][-1, -1] = float("-inf")
    save_file(weights, folder / WEIGHTS)
    reply = http.post("/admin/loras", json={"name": "broken", "path": folder.name, "model": POOL})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, "invalid_adapter", WEIGHTS)
    assert faulty in error["message"] and "not finite" in error["message"]


def test_models_list_their_adapters(http: httpx.Client) -> None:
    register(http, "owl")
    listed = {entry["id"]: entry for entry in http.get("/v1/models").json()["data"]}
    assert listed[f"{POOL}:owl"]["parent"] == POOL
    assert http.get(f"/v1/models/{POOL}:owl").json() == listed[f"{POOL}:owl"]
    assert http.get(f"/v1/models/{POOL}:nobody").status_code == 404
    for body, param in (({"model": f"{POOL}:nobody"}, "model"), ({"lora": [{"name": "nobody"}]}, "lora[0].name")):
        reply = http.post("/generate", json={"model": POOL, "prompt": PROMPT} | body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (404, param)
    assert not any(name.startswith(f"{OTHER}:") for name in listed)


def test_embeddings_run_under_adapters_too(http: httpx.Client) -> None:
    register(http, "owl")

    def embed(**body: Any) -> list[float]:
        return http.post("/v1/embeddings", json={"model": POOL, "input": PROMPT} | body).json()["data"][0]["embedding"]

    assert embed(model=f"{POOL}:owl") == pytest.approx(embed(lora=[{"name": "owl"}]), abs=1e-5)
    assert embed(model=f"{POOL}:owl") != pytest.approx(embed(), abs=1e-2)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"r": 8}, "r"),
        ({"target_modules": ["lm_head"]}, "target_modules"),
        ({"bias": "all"}, "bias"),
        ({"peft_type": "IA3"}, "peft_type"),
    ],
)
def test_a_bad_adapter_is_refused_by_its_field(
    http: httpx.Client, store: Path, tmp_path: Path, change: dict[str, Any], field: str
) -> None:
    folder = store / tmp_path.name
    shutil.copytree(store / "fox", folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    error = http.post("/admin/loras", json={"name": "bad", "path": folder.name, "model": POOL}).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_adapter", field)


def test_pickles_paths_outside_and_models_without_adapters_are_refused(
    http: httpx.Client, store: Path, tmp_path: Path
) -> None:
    pickled = store / "pickled"
    shutil.copytree(store / "fox", pickled)
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    outside = shutil.copytree(store / "fox", tmp_path / "outside")
    for body, field in (
        ({"path": "pickled"}, "adapter_model.bin"),
        ({"path": str(outside)}, "path"),
        ({"path": "../fox"}, "path"),
        ({"path": "nowhere"}, "path"),
        ({"name": "a:b"}, "name"),
        ({"model": OTHER}, "model"),
        ({"model": "nobody"}, "model"),
    ):
        reply = http.post("/admin/loras", json={"name": "bad", "path": "fox", "model": POOL} | body)
        assert reply.status_code in (400, 404), reply.text
        assert reply.json()["error"]["param"] == field
    assert "bad" not in {entry["name"] for entry in http.get("/admin/loras").json()["data"]}


def test_more_adapters_at_one_time_than_a_worker_has_memory_for_take_turns(
    http: httpx.Client, spawn_worker: SpawnWorker, tiny_model: Path, store: Path
) -> None:
    pool, count = "crowded", 9
    shapes, weights = shapes_of(find_targets(load_model(tiny_model))), read_weights(tiny_model)
    # A MiB has room for four of these.
    for seed in range(count):
        write_adapter(store / f"wide-{seed}", weights, shapes, rank=16, seed=seed)
    worker = spawn_worker(pool, "--model-store", str(store), "--lora-memory-mb", "1").wait_ready()
    for seed in range(count):
        reply = http.post("/admin/loras", json={"name": f"w{seed}", "path": f"wide-{seed}", "model": pool})
        assert reply.status_code == 200, reply.text
    alone = [answer(http, model=f"{pool}:w{seed}") for seed in range(count)]

    async def crowd() -> list[httpx.Response]:
        asked = {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True, "temperature": 0}
        async with httpx.AsyncClient(base_url=str(http.base_url), timeout=120) as client:
            bodies = [asked | {"model": f"{pool}:w{number % count}"} for number in range(4 * count)]
            return await asyncio.gather(*(client.post("/generate", json=body) for body in bodies))

    replies = asyncio.run(crowd())

    assert [(reply.status_code, reply.json().get("token_ids")) for reply in replies] == [
        (200, tokens) for tokens in alone * 4
    ]
    assert worker.metrics()["diffleet_handed_back_total"] > 0, "there was room for all"
    worker.end()


async def test_what_was_accepted_before_an_adapter_was_deleted_is_finished(
    http: httpx.Client, fleet: FleetClient
) -> None:
    register(http, "brief")
    wanted = answer(http, lora=[{"name": "brief"}])
    (record,) = [each for each in await fleet.adapters(POOL) if each.name == "brief"]

    assert http.delete("/admin/loras/brief", params={"model": POOL}).json()["deleted"] is True

    prompt = await fleet.encode(await fleet.card(POOL), PROMPT)
    limits = Limits(max_tokens=12, ignore_eos=True)
    command = Generate(id=new_request_id(POOL), model=POOL, prompt=tuple(prompt), limits=limits, lora=(record.use(),))
    events = [event async for event in fleet.run(command)]
    assert isinstance(events[-1], Finished)
    assert (await fleet.result(command.id)).token_ids == wanted
    assert http.post("/generate", json={"model": f"{POOL}:brief", "prompt": PROMPT}).status_code == 404
    assert http.delete("/admin/loras/brief", params={"model": POOL}).status_code == 404


def test_a_request_whose_adapter_has_gone_fails_by_name_after_a_few_workers_have_tried(
    http: httpx.Client, store: Path
) -> None:
    shutil.copytree(store / "gone", store / "soon-gone")
    register(http, "soon-gone")
    shutil.rmtree(store / "soon-gone")
    by_name = {"model": f"{POOL}:soon-gone"}
    for body, param in ((by_name, "model"), ({"model": POOL, "lora": [{"name": "soon-gone"}]}, "lora")):
        reply = http.post("/generate", json={"prompt": PROMPT} | body)
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, param)
        assert "soon-gone" in error["message"]
    for text in ("hello", [3, 4]):
        reply = http.post("/v1/embeddings", json={"input": text} | by_name)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "model")
    # The workers serve on.
    assert answer(http) == answer(http)


def test_pools_on_one_server_serve_their_own_models(http: httpx.Client) -> None:
    listed = http.get("/admin/workers").json()["data"]
    assert {worker["model"] for worker in listed} >= {POOL, OTHER}
    assert {worker["model"] for worker in http.get("/admin/workers", params={"model": OTHER}).json()["data"]} == {OTHER}
    # Both have the same weights, so they must agree, and each counts for itself.
    assert answer(http, model=OTHER) == answer(http, model=POOL)
    assert http.post("/generate", json={"prompt": PROMPT}).json()["error"]["param"] == "model"
    for worker in listed:
        assert worker["state"] == "ready" and worker["slots"] == 32 and worker["version"] and worker["beat_ms"]


def test_a_worker_that_is_told_to_drain_ends_cleanly(http: httpx.Client, spawn_worker: SpawnWorker) -> None:
    worker = spawn_worker("short-lived").wait_ready()
    name = worker.id
    until(lambda: name in {w["id"] for w in http.get("/admin/workers").json()["data"]}, "it is announced")
    told = http.post(f"/admin/workers/{name}/drain")
    assert (told.status_code, told.json()["drain_requested"]) == (202, True)
    assert worker.wait_exit() == 0
    until(lambda: http.post(f"/admin/workers/{name}/drain").status_code == 404, "it is gone")
    assert http.post(f"/admin/workers/{name}/drain").json()["error"]["param"] == "worker_id"


def test_a_request_is_told_of_without_its_text(http: httpx.Client) -> None:
    done = http.post("/generate", json={"model": POOL, "prompt": "a secret house", "max_tokens": 5, "ignore_eos": True})
    found = http.get(f"/admin/requests/{done.json()['id']}")
    facts = found.json()
    assert (facts["state"], facts["completion_tokens"], facts["attempts"]) == ("done", 5, 1)
    assert facts["owner"] in {worker["id"] for worker in http.get("/admin/workers").json()["data"]}
    assert facts["ended_ms"] >= facts["submitted_ms"] > 0
    assert "secret" not in found.text
    for name in (new_request_id(POOL), "nonsense"):
        unknown = http.get(f"/admin/requests/{name}")
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "request_id")


def test_dead_letters_are_listed_replayed_and_discarded(http: httpx.Client, redis_client: Redis) -> None:
    dead, other = new_request_id(POOL), new_request_id(POOL)
    for name in (dead, other):
        keys = Keys.of(name)
        command = Generate(id=name, model=POOL, prompt=(10, 11), limits=Limits(max_tokens=4))
        redis_client.hset(keys.request(name), mapping={"st": "dead", "in": encode_command(command)})
        redis_client.expire(keys.request(name), 600)
        redis_client.xadd(keys.dead_letters(), {"id": name, "att": 4, "why": "alone", "lost": "w1 w2"})

    listed = {letter["id"]: letter for letter in http.get("/admin/dead-letters").json()["data"]}
    assert listed[dead]["lost_workers"] == ["w1", "w2"] and listed[dead]["model"] == POOL
    assert http.delete(f"/admin/dead-letters/{other}").json()["deleted"] is True
    replayed = http.post(f"/admin/dead-letters/{dead}/replay").json()
    until(lambda: http.get(f"/admin/requests/{replayed['id']}").json()["state"] == "done", "the replay is done")
    assert http.post(f"/admin/dead-letters/{dead}/replay").json() == replayed
    for name, said in (
        (dead, f"is off the list already: it was replayed as {replayed['id']}"),
        (other, "is off the list already"),
        (replayed["id"], "is no dead letter: it is done"),
    ):
        refused = http.delete(f"/admin/dead-letters/{name}")
        assert refused.status_code == 404 and refused.json()["error"]["message"].endswith(said)
    assert not {dead, other} & {letter["id"] for letter in http.get("/admin/dead-letters").json()["data"]}
    for name in (new_request_id(POOL), "nonsense"):
        for refused in (http.post(f"/admin/dead-letters/{name}/replay"), http.delete(f"/admin/dead-letters/{name}")):
            assert (refused.status_code, refused.json()["error"]["param"]) == (404, "request_id")


def test_a_flush_makes_workers_read_a_prompt_again(http: httpx.Client, workers: list[WorkerProcess]) -> None:
    def cached() -> float:
        return sum(worker.metrics()[METRIC] for worker in workers[:2])

    long = " ".join([PROMPT] * 30)

    def hits() -> float:
        before = cached()
        for _ in range(6):
            answer(http, prompt=long)
        return cached() - before

    hits()
    warm = hits()
    assert http.post("/admin/prefix-cache/flush", json={"model": POOL}).status_code == 202

    def cold() -> float:
        # The first round behind the workers' next look at their orders is cold.
        found = hits()
        return found if found < warm else 0

    assert 0 < until(cold, "a prompt is read again") < warm


METRIC = "diffleet_prefix_hit_tokens_total"
