"""Options of a worker process."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from shared.settings import ServiceSettings, check_model_name, expanded, read_flags
from worker.bundled import BUNDLED, bundled_folder
from worker.exits import ExitCode


class WorkerSettings(ServiceSettings):
    model_config = SettingsConfigDict(cli_prog_name="python -m worker")

    model: str = Field(default="demo", description="Folder of a checkpoint, or the name of a bundled model.")
    model_name: str | None = Field(
        default=None, description="Name that requests ask for; unset: the bundled name, or the folder's own name."
    )
    partitions: int = Field(default=1, ge=1, le=1000, description="Partitions of the model's queue.")

    device: Literal["auto", "cuda", "mps", "cpu"] = Field(default="auto", description="auto: cuda, then mps, then cpu.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="auto: bfloat16 on cuda, float32 elsewhere."
    )
    weights: Literal["stored", "fp8", "wide"] = Field(
        default="stored",
        description="fp8: the layers' products run on weights of 8 bits, made at load with a scale for each output. "
        "stored: those that a checkpoint has in 8 bits run so where the GPU has products for them; wide: nowhere.",
    )
    head: Literal["stored", "fp8"] = Field(
        default="stored",
        description="fp8: the vocabulary head too runs on weights of 8 bits, made at load with a scale for each token.",
    )
    tensor_parallel: int = Field(
        default=1,
        ge=1,
        le=64,
        description="GPUs of this host that share the model, one process each (on a CPU just processes); experts are "
        "shared out as well. Excludes adapters.",
    )
    threads: int = Field(
        default=0, ge=0, le=1024, description="Threads of CPU arithmetic; 0: all cores but one, which serves the queue."
    )

    kv_dtype: Literal["auto", "fp8"] = Field(
        default="auto",
        description="fp8: keys and values lie in 8 bits, each head of a token under a scale: nearly twice the pages.",
    )
    page_size: int | None = Field(
        default=None, ge=1, le=4096, description="Tokens in a KV page; unset: a multiple of the block length near 32."
    )
    num_pages: int | None = Field(default=None, ge=1, description="KV pages; unset: from kv_cache_mb.")
    kv_cache_mb: int | None = Field(
        default=None,
        ge=1,
        description="MiB for the KV cache; unset: 95 % of what weights and steps leave of a GPU, or 256 on a CPU.",
    )
    max_rows: int = Field(default=32, ge=1, le=4096, description="Requests decoded at the same time.")
    step_ahead: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="The device leads rows from step to step by itself, one step ahead of the host, where the model "
        "allows it; auto: on cuda.",
    )
    token_budget: int = Field(
        default=2048, ge=1, description="Query tokens of one step, shared by prompts and denoising."
    )
    block_length: Literal["model", "auto"] = Field(
        default="model",
        description="Of requests that name none. model: the model's own. auto: by load, the one that gives most tokens "
        "a second, of those that the model's folder tells to be as often right; then a seed alone repeats no answer.",
    )

    adapter: Path | None = Field(
        default=None,
        description="Folder of a PEFT adapter that is part of the model: its weights hold it from the start.",
    )
    adapter_block_length: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="The adapter makes a bidirectional model block-causal (D2F): its blocks.",
    )
    model_store: Path | None = Field(
        default=None, description="Folder with the adapters that requests may name; unset: the base model only."
    )
    lora_memory_mb: int = Field(
        default=1024, ge=1, description="MiB for loaded adapters; as much again holds those of a batch side by side."
    )
    lora_slots: int = Field(
        default=8,
        ge=0,
        le=256,
        description="Adapters that rows led by the device run under at one time; others run beside them, step by step.",
    )
    lora_rank: int = Field(
        default=32, ge=1, le=512, description="Highest rank of one of them. Slots times rank is memory of its own."
    )

    lease_ms: int = Field(
        default=15_000, ge=400, le=600_000, description="A worker silent for so long loses its requests to another."
    )
    max_attempts: int = Field(
        default=4,
        ge=1,
        le=100,
        description="Workers lost with a request before it is given up, if it was alone on the last one.",
    )
    abort_poll_ms: int = Field(default=25, ge=1, le=10_000, description="Time between looks at the abort keys.")
    claim_poll_ms: int = Field(default=20, ge=1, le=10_000, description="Least time between claims while decoding.")
    preview_interval_ms: int = Field(
        default=40, ge=0, le=60_000, description="Least time between previews of one request, whatever it asks for."
    )
    redis_wait_s: float = Field(default=10.0, ge=0.0, le=600.0, description="Patience for Redis at start.")
    drain_s: float = Field(
        default=25.0, ge=0.0, le=86_400.0, description="After SIGTERM: time to finish before the rest is handed back."
    )
    stuck_s: float = Field(default=30.0, gt=0.0, le=3600.0, description="A step longer than this ends the process.")
    load_s: float = Field(default=900.0, gt=0.0, le=86_400.0, description="The same for loading the model.")

    metrics_host: str = Field(default="0.0.0.0", description="Address of /metrics and /health.")
    metrics_port: int = Field(default=0, ge=0, le=65_535, description="Port of /metrics and /health; 0: none.")
    ready_file: Path | None = Field(default=None, description="Exists while the worker takes requests.")

    @field_validator("model")
    @classmethod
    def _check_model(cls, model: str) -> str:
        if model not in BUNDLED:
            expanded(Path(model))
        return model

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_pages is not None and self.kv_cache_mb is not None:
            raise ValueError("num_pages and kv_cache_mb exclude each other")
        if self.adapter_block_length is not None and self.adapter is None:
            raise ValueError("adapter_block_length needs an adapter")
        if self.tensor_parallel > 1:
            for name in ("adapter", "model_store"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name}: adapters cannot be used with tensor_parallel {self.tensor_parallel}")
        try:
            check_model_name(self.served_name)
        except ValueError as error:
            raise ValueError(f"model_name: {error}") from None
        return self

    @property
    def folder(self) -> Path:
        """Where the checkpoint lies; a bundled name wins over a folder of that name beside the process."""
        return bundled_folder(self.model) if self.model in BUNDLED else expanded(Path(self.model))

    @property
    def served_name(self) -> str:
        if self.model_name is not None:
            return self.model_name
        return self.model if self.model in BUNDLED else self.folder.resolve().name

    @property
    def beat_s(self) -> float:
        """Seconds between heartbeats: a quarter of the lease, so that three may be lost."""
        return self.lease_ms / 4000


# The text of --help: argparse shows it as it stands.
WorkerSettings.__doc__ = f"Decode requests of one model from the queue.\n\n{ExitCode.__doc__}"


def read_settings(argv: Sequence[str]) -> WorkerSettings:
    """Read flags, then the environment; raises as `read_flags`."""
    return read_flags(WorkerSettings, argv)
