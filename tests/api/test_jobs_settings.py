import pytest
from pydantic import ValidationError

from api.jobs.process import main
from api.jobs.settings import JobSettings


def test_jobs_on_a_cluster_name_a_server_for_arq() -> None:
    with pytest.raises(ValidationError, match="jobs_redis_url"):
        JobSettings(redis_url="redis+cluster://a:1,b:2")
    settings = JobSettings(redis_url="redis+cluster://a:1,b:2", jobs_redis_url="redis://c:3/0")
    assert settings.jobs_redis_url == "redis://c:3/0"


@pytest.mark.parametrize(
    ("flag", "url", "told"),
    [
        ("--redis-url", "ftp://a", "redis_url: the URL must begin"),
        ("--redis-url", "redis+sentinel://a:b/fleet", "redis_url: 'a:b' is not a sentinel's host:port"),
        ("--jobs-redis-url", "ftp://a", "jobs_redis_url: the URL must begin"),
        ("--jobs-redis-url", "redis+sentinel://a:b/fleet", "jobs_redis_url: 'a:b' is not a sentinel's host:port"),
        ("--jobs-redis-url", "redis://a?socket_timeout=soon", "jobs_redis_url: Invalid value for 'socket_timeout'"),
    ],
)
def test_jobs_end_at_a_wrong_url_and_name_its_setting(
    flag: str, url: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([flag, url]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(told)
