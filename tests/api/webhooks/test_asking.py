"""What callers may ask for, and what of it reaches the command."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from api.catalog import ServedModel
from api.errors import ApiError
from api.requests import Call, to_generate
from api.schemas import GenerateBody, parse
from api.webhooks.signing import new_secret
from shared.commands import Webhook
from shared.decoding import Threshold
from tests.api.scripted import CARD, Caller, ScriptedFleet, running
from tests.shared.tokenizers_for_tests import byte_level

HOOK = {"url": "https://receiver.example/hook", "metadata": {"order": "7"}}


@pytest.fixture
async def telling(tmp_path: Path) -> AsyncIterator[Caller]:
    """An app with a secret."""
    path = tmp_path / "secrets.json"
    path.write_text(json.dumps({"*": [new_secret()]}))
    async with running(ScriptedFleet(), webhook_secrets_file=path) as caller:
        yield caller


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/completions", {"prompt": "x"}),
    ],
)
async def test_a_webhook_reaches_the_command(telling: Caller, path: str, body: dict[str, Any]) -> None:
    answer = await telling.post(path, body | {"webhook": HOOK})
    assert answer.status == 200, answer.body
    (command,) = telling.fleet.commands
    assert command.webhook == Webhook(url=HOOK["url"], metadata=HOOK["metadata"])


async def test_each_choice_is_told_by_itself(telling: Caller) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "n": 3, "webhook": HOOK}
    assert (await telling.post("/v1/chat/completions", body)).status == 200
    hooks = [command.webhook for command in telling.fleet.commands]
    assert [hook.choice for hook in hooks if hook is not None] == [0, 1, 2]


async def test_a_server_without_secrets_says_that_it_has_no_webhooks(caller: Caller) -> None:
    answer = await caller.post("/generate", {"prompt": "x", "webhook": HOOK})
    assert answer.status == 400 and answer.error["param"] == "webhook"
    assert answer.error["code"] == "webhooks_not_enabled" and not caller.fleet.commands


@pytest.mark.parametrize(
    ("hook", "param"),
    [
        ({"url": "http://receiver.example/"}, "webhook.url"),
        ({"url": "https://169.254.169.254/"}, "webhook.url"),
        ({"url": "https://[::1]/"}, "webhook.url"),
        ({"url": "https://user:pass@receiver.example/"}, "webhook.url"),
        ({"url": ""}, "webhook.url"),
        ({}, "webhook.url"),
        ({"url": 7}, "webhook.url"),
        ("https://receiver.example/", "webhook"),
        (HOOK | {"metadata": {"a": 1}}, "webhook.metadata"),
        (HOOK | {"metadata": {str(i): "" for i in range(17)}}, "webhook.metadata"),
        (HOOK | {"metadata": {"a" * 65: ""}}, "webhook.metadata"),
    ],
)
async def test_a_webhook_that_cannot_be_is_refused_by_name(telling: Caller, hook: object, param: str) -> None:
    answer = await telling.post("/generate", {"prompt": "x", "webhook": hook})
    assert answer.status == 400 and str(answer.error["param"]).startswith(param), answer.body
    assert "pass" not in answer.body.decode() and not telling.fleet.commands


async def test_a_line_of_a_batch_names_no_webhook_of_its_own() -> None:
    body = parse(GenerateBody, {"prompt": "x", "webhook": HOOK})
    model = ServedModel(CARD, byte_level(), Threshold())
    with pytest.raises(ApiError) as refused:
        to_generate(body, [[5]], model, "prompt", Call(1.0))
    assert refused.value.param == "webhook"
