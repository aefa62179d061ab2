"""Options of the api process."""

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from shared.settings import ServiceSettings


class ApiSettings(ServiceSettings):
    model_config = SettingsConfigDict(cli_prog_name="python -m api")

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8000, ge=0, le=65_535, description="Port to listen on; 0: any free one.")
    max_body_bytes: int = Field(default=2**20, ge=1024, description="Longest request body; longer ones get 413.")
    queue_limit: int = Field(default=256, ge=1, description="Requests queued and running of one model; more get 503.")
    keepalive_s: float = Field(
        default=10.0, gt=0.0, le=300.0, description="A stream silent for so long gets a comment, so that proxies wait."
    )
    request_timeout_s: float = Field(default=600.0, gt=0.0, le=86_400.0, description="Longest life of a request.")
    timeout_grace_s: float = Field(
        default=5.0, ge=0.0, le=300.0, description="Time for a worker to end a request by its deadline before 504."
    )
    abort_wait_s: float = Field(default=2.0, gt=0.0, le=60.0, description="Longest wait for an abort to be stored.")
    health_timeout_s: float = Field(default=2.0, gt=0.0, le=60.0, description="Longest wait of a health check.")
    drain_delay_s: float = Field(
        default=0.0, ge=0.0, le=600.0, description="After SIGTERM: time of serving on with /health/ready at 503."
    )
    drain_s: float = Field(
        default=25.0, ge=0.0, le=3600.0, description="After that: time for open requests before they get an error."
    )
    cors_origins: tuple[str, ...] = Field(default=("*",), description="Origins that browsers may call from.")
