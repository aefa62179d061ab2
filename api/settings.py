"""Options of the api process."""

from ipaddress import ip_network
from pathlib import Path

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from shared.settings import ServiceSettings


class ApiSettings(ServiceSettings):
    model_config = SettingsConfigDict(cli_prog_name="python -m api")

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8000, ge=0, le=65_535, description="Port to listen on; 0: any free one.")
    max_body_bytes: int = Field(default=2**20, ge=1024, description="Longest request body; longer ones get 413.")
    queue_limit: int = Field(default=256, ge=1, description="Requests queued and running of one model; more get 503.")
    bulk_queue_limit: int | None = Field(
        default=None, ge=1, description="The same for lines of batches, which wait for room; unset: queue_limit."
    )
    tenant_limit: int = Field(
        default=0, ge=0, description="Requests queued and running of one API key and model; more get 429. 0: no limit."
    )
    redis_replicas: int = Field(
        default=0, ge=0, le=16, description="Replicas of the queue that must have a request before it is accepted."
    )
    keepalive_s: float = Field(
        default=10.0, gt=0.0, le=300.0, description="A stream silent for so long gets a comment, so that proxies wait."
    )
    request_timeout_s: float = Field(default=600.0, gt=0.0, le=86_400.0, description="Longest life of a request.")
    timeout_grace_s: float = Field(
        default=5.0, ge=0.0, le=300.0, description="Time for a worker to end a request by its deadline before 504."
    )
    abort_wait_s: float = Field(default=2.0, gt=0.0, le=60.0, description="Longest wait for an abort to be stored.")
    health_timeout_s: float = Field(default=2.0, gt=0.0, le=60.0, description="Longest wait of a health check.")
    ready_without_workers: bool = Field(
        default=False,
        description="/health/ready asks for Redis only: where workers scale to zero, the first request must get in.",
    )
    drain_delay_s: float = Field(
        default=0.0, ge=0.0, le=600.0, description="After SIGTERM: time of serving on with /health/ready at 503."
    )
    drain_s: float = Field(
        default=25.0, ge=0.0, le=3600.0, description="After that: time for open requests before they get an error."
    )
    cors_origins: tuple[str, ...] = Field(default=("*",), description="Origins that browsers may call from.")
    api_keys_file: Path | None = Field(
        default=None, description="JSON list of API keys (see `python -m api.keys`); unset: everyone may call."
    )
    requests_per_minute: int | None = Field(
        default=None, ge=1, description="Rate of each API key that has none of its own; unset: no limit."
    )
    tokens_per_minute: int | None = Field(
        default=None, ge=1, description="Prompt and output tokens a minute, likewise; unset: no limit."
    )
    response_ttl_s: int = Field(
        default=86_400, ge=60, le=2_592_000, description="How long a stored response can be read and resumed."
    )
    max_file_bytes: int = Field(
        default=32 * 2**20, ge=1024, le=512 * 2**20, description="Longest uploaded file; files live in Redis."
    )
    file_quota_bytes: int = Field(
        default=256 * 2**20, ge=1024, description="All files of one API key together, those of batches included."
    )
    file_ttl_s: int = Field(
        default=604_800,
        ge=3600,
        le=2_592_000,
        description="How long files and batches are kept, if not told otherwise.",
    )
    batch_window_s: int = Field(
        default=86_400, ge=1, le=604_800, description="Time for a batch, after which what is left of it expires."
    )
    batch_concurrency: int = Field(default=16, ge=1, le=1024, description="Lines of one batch that run at a time.")
    webhook_secrets_file: Path | None = Field(
        default=None,
        description="JSON object of API key ids, or *, to lists of secrets that sign webhooks; unset: there are none. "
        "`python -m api.webhooks` makes a secret.",
    )
    webhook_allow_http: bool = Field(default=False, description="Webhooks may go to http:// as well.")
    webhook_networks: tuple[str, ...] = Field(
        default=(), description="Networks (CIDR) outside the public internet that webhooks may go to all the same."
    )
    model_store: Path | None = Field(
        default=None, description="Folder with the adapters that operators may register; workers see the same one."
    )
    vllm_metrics: bool = Field(default=True, description="Export metrics under vLLM's names as well.")

    @field_validator("webhook_networks")
    @classmethod
    def _are_networks(cls, networks: tuple[str, ...]) -> tuple[str, ...]:
        for network in networks:
            ip_network(network)  # raises ValueError, which names it
        return networks
