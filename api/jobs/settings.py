"""Options of the job process: those of the api, for it runs the same requests, and its own drain."""

from typing import Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from api.settings import ApiSettings
from shared.cluster import SCHEMES as CLUSTER_SCHEMES


class JobSettings(ApiSettings):
    model_config = SettingsConfigDict(cli_prog_name="python -m api.jobs")

    max_batches: int = Field(default=8, ge=1, le=256, description="Batches that this process runs at a time.")
    jobs_redis_url: str | None = Field(
        default=None,
        description="URL of the server for arq's own queue, which cannot be in a Cluster; unset: redis_url.",
    )

    @model_validator(mode="after")
    def _arq_has_a_server(self) -> Self:
        if (self.jobs_redis_url or self.redis_url).startswith(CLUSTER_SCHEMES):
            raise ValueError("arq cannot use a Cluster: set jobs_redis_url to a server for its queue")
        return self
