from api.jobs.service import redis_settings


def test_arq_connects_as_the_url_says_escaped_passwords_and_private_authorities_too() -> None:
    settings = redis_settings("rediss://user:a%2Fb%40@queue.example:6380/3?ssl_ca_certs=/ca.crt")
    assert (settings.host, settings.port, settings.database) == ("queue.example", 6380, 3)
    assert (settings.username, settings.password) == ("user", "a/b@")
    assert (settings.ssl, settings.ssl_ca_certs) == (True, "/ca.crt")
