import base64
import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks import Webhook as Verifier
from standardwebhooks.webhooks import WebhookVerificationError

from api.webhooks.signing import InvalidSecrets, Secrets, decode_secret, new_secret, sign

keys = st.binary(min_size=24, max_size=64)
ids = st.text("abcdefghijklmnopqrstuvwxyz0123456789_", min_size=1, max_size=40)


def secret_of(key: bytes) -> str:
    return "whsec_" + base64.b64encode(key).decode()


@given(st.lists(keys, min_size=1, max_size=3), ids, st.text(max_size=60), keys)
def test_the_reference_takes_what_any_of_the_secrets_has_signed(
    secrets: list[bytes], message_id: str, text: str, other: bytes
) -> None:
    body = json.dumps({"text": text}).encode()
    headers = sign(secrets, message_id, int(time.time()), body)
    for key in secrets:
        assert Verifier(secret_of(key)).verify(body, headers) == {"text": text}
    if other not in secrets:
        with pytest.raises(WebhookVerificationError):
            Verifier(secret_of(other)).verify(body, headers)


def test_an_old_message_cannot_be_sent_again_by_somebody_else() -> None:
    key = decode_secret(new_secret())
    headers = sign([key], "evt_1", int(time.time()) - 3600, b"{}")
    with pytest.raises(WebhookVerificationError):
        Verifier(secret_of(key)).verify(b"{}", headers)


def test_each_key_has_secrets_of_its_own_and_the_others_those_of_anyone(tmp_path: Path) -> None:
    path = tmp_path / "secrets.json"
    team, anyone = new_secret(), new_secret()
    path.write_text(json.dumps({"team": [team], "*": [anyone]}))
    secrets = Secrets.load(path)
    assert secrets.of("team") == [decode_secret(team)]
    assert secrets.of("other") == secrets.of("") == [decode_secret(anyone)]
    path.write_text(json.dumps({"team": [team]}))
    assert not Secrets.load(path).of("other") and not Secrets.load(None).of("team")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[]", "must be a JSON object"),
        ('{"a": []}', "a: has no secret"),
        ('{"a": ["whsec_c2hvcnQ="]}', r"a\[0\]: must be whsec_"),
        ('{"a": ["c2hvcnRzaG9ydHNob3J0c2hvcnRzaG9ydA=="]}', r"a\[0\]: must be whsec_"),
        ('{"a": ["whsec_***"]}', r"a\[0\]: must be whsec_"),
    ],
)
def test_a_file_that_holds_no_secrets_is_refused_without_repeating_it(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "secrets.json"
    path.write_text(content)
    with pytest.raises(InvalidSecrets, match=said) as refused:
        Secrets.load(path)
    assert "c2hv" not in str(refused.value)
    with pytest.raises(InvalidSecrets, match="No such file"):
        Secrets.load(tmp_path / "missing")
