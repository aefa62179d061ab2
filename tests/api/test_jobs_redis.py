from typing import Any

import pytest

from api.jobs.service import open_queue


async def test_arq_connects_as_the_url_says_escaped_passwords_and_private_authorities_too() -> None:
    url = "rediss://a%40b:p%2Fw@queue.example:6380/3?ssl_ca_certs=/ca.crt"
    settings: Any = open_queue(url).connection_pool.connection_kwargs
    assert (settings["host"], settings["port"], settings["db"]) == ("queue.example", 6380, 3)
    assert (settings["username"], settings["password"]) == ("a@b", "p/w")
    assert (settings["ssl_ca_certs"], settings["ssl_check_hostname"]) == ("/ca.crt", True)


async def test_a_url_may_say_that_names_in_certificates_do_not_matter() -> None:
    url = "rediss://queue.example/0?ssl_check_hostname=false"
    assert open_queue(url).connection_pool.connection_kwargs["ssl_check_hostname"] is False


@pytest.mark.parametrize(
    ("url", "option", "value"),
    [("unix:///tmp/x.sock", "path", "/tmp/x.sock"), ("redis+sentinel://a:1,b:2/fleet/3", "db", 3)],
)
async def test_arq_follows_sockets_and_sentinels(url: str, option: str, value: object) -> None:
    assert open_queue(url).connection_pool.connection_kwargs[option] == value
