"""Options of the job process: those of the api, for it runs the same requests, and its own drain."""

from typing import Annotated, Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from api.settings import ApiSettings
from api.webhooks.schedule import DELAYS_S
from shared.cluster import SCHEMES as CLUSTER_SCHEMES
from shared.settings import RedisUrl


class JobSettings(ApiSettings):
    model_config = SettingsConfigDict(cli_prog_name="python -m api.jobs")

    max_batches: int = Field(default=8, ge=1, le=256, description="Batches that this process runs at a time.")
    jobs_redis_url: RedisUrl | None = Field(
        default=None,
        description="URL of the server for arq's own queue, which cannot be in a Cluster; unset: redis_url.",
    )

    webhook_timeout_s: float = Field(
        default=15.0, gt=0.0, le=120.0, description="Longest wait for a receiver of a webhook to answer."
    )
    webhook_retry_s: tuple[Annotated[float, Field(gt=0.0, le=172_800.0)], ...] = Field(
        default=DELAYS_S,
        max_length=32,
        description="Seconds between the tries of a webhook that fails, each up to a fifth more or less.",
    )
    webhook_concurrency: int = Field(
        default=32, ge=1, le=1024, description="Webhooks under way at a time; a quarter of them to one host."
    )

    @model_validator(mode="after")
    def _arq_has_a_server(self) -> Self:
        if (self.jobs_redis_url or self.redis_url).startswith(CLUSTER_SCHEMES):
            raise ValueError("arq cannot use a Cluster: set jobs_redis_url to a server for its queue")
        return self
