"""Options of the job process: those of the api, for it runs the same requests, and its own drain."""

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from api.settings import ApiSettings


class JobSettings(ApiSettings):
    model_config = SettingsConfigDict(cli_prog_name="python -m api.jobs")

    max_batches: int = Field(default=8, ge=1, le=256, description="Batches that this process runs at a time.")
