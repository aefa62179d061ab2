"""Decoding strategies as data: what a request may ask of the sampler, one class for each strategy.

The rules themselves are pure functions in `worker.decoding`; this module only names their parameters, so that a
front or a direct submitter can build and check them without torch. The union is discriminated by `strategy`.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Confidence = Literal["model", "filtered"]

STEPS_LIMIT = 2**31
"""Beyond any block's length; a payload from anywhere must not overflow a worker's integers."""


class _Decoding(BaseModel):
    """Parameters that every strategy has."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    confidence: Confidence = Field(
        default="model",
        description="Whose probability ranks positions: the model's own, softmax(logits / temperature), or the one "
        "left after top-k and top-p filtering (SDAR's published loop).",
    )
    filler_rules: bool = Field(
        default=True,
        description="A position whose best token is filler takes no turn, and a block closes without further forwards "
        "once its stop token is committed with no mask before it. Off where a reference must be matched exactly.",
    )
    early_stop: bool = Field(
        default=True,
        description="End as soon as the stop token stands with no mask before it; else when its block is decided.",
    )


class Threshold(_Decoding):
    """Accept every mask with confidence >= threshold, and always the best one (Fast-dLLM, arXiv 2505.22618)."""

    strategy: Literal["threshold"] = "threshold"
    threshold: float = Field(default=0.9, ge=0.0, le=1.0)


class LowConfidenceStatic(_Decoding):
    """Accept the k most confident positions, k an even split of the block over `steps` (SDAR, LLaDA)."""

    strategy: Literal["low_confidence_static"] = "low_confidence_static"
    steps: int | None = Field(
        default=None, ge=1, lt=STEPS_LIMIT, description="Denoise steps a block; unset: one position a step."
    )


class LowConfidenceDynamic(_Decoding):
    """Accept all with confidence > threshold if they fill the step's quota, else as many as the quota (SDAR)."""

    strategy: Literal["low_confidence_dynamic"] = "low_confidence_dynamic"
    threshold: float = Field(default=0.9, ge=0.0, le=1.0)
    steps: int | None = Field(default=None, ge=1, lt=STEPS_LIMIT)
    fallback: Literal["confidence", "leftmost"] = Field(
        default="confidence",
        description="Which positions fill the quota: the most confident (SDAR), or the leftmost (JetEngine).",
    )


class Sequential(_Decoding):
    """Accept the first mask and the k - 1 positions after it (SDAR)."""

    strategy: Literal["sequential"] = "sequential"
    steps: int | None = Field(default=None, ge=1, lt=STEPS_LIMIT)


class RandomOrder(_Decoding):
    """Accept k masked positions drawn uniformly, seeded by the request (LLaDA's `random` remasking)."""

    strategy: Literal["random"] = "random"
    steps: int | None = Field(default=None, ge=1, lt=STEPS_LIMIT)


class EntropyBounded(_Decoding):
    """Accept positions by rising entropy while the running sum stays below the bound (EB-sampler, JetEngine)."""

    strategy: Literal["entropy_bounded"] = "entropy_bounded"
    bound: float = Field(default=0.35, gt=0.0)


class SubBlock(_Decoding):
    """Accept all with confidence > threshold and always the best, in one sub-block after the other (Fast-dLLM v2)."""

    strategy: Literal["sub_block"] = "sub_block"
    threshold: float = Field(default=0.9, ge=0.0, le=1.0)
    sub_block_length: int = Field(default=8, ge=1, lt=2**31)
    block_cache: bool = Field(
        default=False, description="Run a sub-block alone once the whole block has been run, on the block's stale keys."
    )


class JointThreshold(_Decoding):
    """Fill masks and revise tokens in one forward (LLaDA2.1).

    Masks: all with confidence > threshold if they are at least `num_to_transfer`, else that many of the most confident.
    Decided positions of the block: replaced where the best token differs and its probability > `editing_threshold`.
    """

    strategy: Literal["joint_threshold"] = "joint_threshold"
    threshold: float = Field(default=0.95, ge=0.0, le=1.0)
    editing_threshold: float = Field(default=0.9, ge=0.0, le=1.0)
    num_to_transfer: int = Field(default=1, ge=1, lt=2**31)
    max_post_steps: int = Field(
        default=16, ge=0, lt=2**31, description="Budget of forwards that only edit, after the block's last mask."
    )


Decoding = Annotated[
    Threshold
    | LowConfidenceStatic
    | LowConfidenceDynamic
    | Sequential
    | RandomOrder
    | EntropyBounded
    | SubBlock
    | JointThreshold,
    Field(discriminator="strategy"),
]
