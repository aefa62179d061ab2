import pytest
from pydantic import ValidationError

from api.jobs.settings import JobSettings


def test_jobs_on_a_cluster_name_a_server_for_arq() -> None:
    with pytest.raises(ValidationError, match="jobs_redis_url"):
        JobSettings(redis_url="redis+cluster://a:1,b:2")
    settings = JobSettings(redis_url="redis+cluster://a:1,b:2", jobs_redis_url="redis://c:3/0")
    assert settings.jobs_redis_url == "redis://c:3/0"
