"""Decoding strategies as data: what a request may ask of the sampler, one class for each strategy.

The rules themselves are pure functions in `worker.decoding`; this module only names their parameters, so that a
front or a direct submitter can build and check them without torch. The union is discriminated by `strategy`.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

Confidence = Literal["model", "tempered", "filtered"]

STEPS_LIMIT = 2**31
"""Beyond any block's length; a payload from anywhere must not overflow a worker's integers."""


class _Decoding(BaseModel):
    """Parameters that every strategy has."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    confidence: Confidence = Field(
        default="model",
        description="Which distribution ranks positions: the model's own, softmax(logits), whatever the temperature "
        "that tokens are drawn with; softmax(logits / temperature), which a low temperature makes sure of everything "
        "(Fast-dLLM, WeDLM, JetEngine); or what top-k and top-p leave of that (SDAR's published loop, Dream).",
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
    stops_last: bool = Field(
        default=False,
        description="Rank positions as if stop tokens had no probability, so that one which proposes a stop comes last "
        "(LLaDA's confidence_eos_eot_inf). The proposals themselves do not change.",
    )
    renewal_decides: Literal["block", "first"] = Field(
        default="block",
        description="What the forward over everything, which begins each block of a bidirectional family, may decide: "
        "any position of the block, or only its first (Fast-dLLM's block loop for Dream).",
    )


class Threshold(_Decoding):
    """Accept every mask with confidence >= threshold, and always the best one (Fast-dLLM, arXiv 2505.22618)."""

    strategy: Literal["threshold"] = "threshold"
    threshold: float = Field(default=0.9, ge=0.0, le=1.0)


class Factor(_Decoding):
    """Accept the most confident, as many as have confidence >= 1 - factor / (rank + 1), at least one (Fast-dLLM)."""

    strategy: Literal["factor"] = "factor"
    factor: float = Field(default=1.0, gt=0.0, le=1e6)


class ThresholdQuota(_Decoding):
    """A share of the masks a step, what it refuses carried over; in it the best and all with confidence >= threshold.

    Fast-dLLM's loop for Dream without cache: after `steps` steps everything that is left stands for choice.
    """

    strategy: Literal["threshold_quota"] = "threshold_quota"
    threshold: float = Field(default=0.9, ge=0.0, le=1.0)
    steps: int | None = Field(default=None, ge=1, lt=STEPS_LIMIT)


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


class AdaptiveParallel(_Decoding):
    """Take the most confident masks, as many as the steps left ask for, `max_parallel` at most (dfastllm's APD).

    Of these accept all with confidence >= threshold and always the best; what waits raises the share of later steps.
    """

    strategy: Literal["adaptive_parallel"] = "adaptive_parallel"
    max_parallel: int = Field(default=8, ge=1, lt=STEPS_LIMIT)
    threshold: float = Field(default=0.3, ge=0.0, le=1.0)
    steps: int | None = Field(
        default=None,
        ge=1,
        lt=STEPS_LIMIT,
        description="Denoise steps a block; unset: as few as `max_parallel` allows.",
    )


class _Timed(_Decoding):
    """Dream's schedule: time runs from 1 to eps in `steps` even steps; from t to s a share 1 - s / t is decided.

    A share that is less than one position decides nothing; the last step decides everything.
    """

    steps: int | None = Field(
        default=None, ge=1, lt=STEPS_LIMIT, description="Denoise steps a block; unset: as many as it has masks."
    )
    eps: float = Field(default=1e-3, gt=0.0, lt=1.0)


class Origin(_Timed):
    """Each position is decided with the probability of the step's share, drawn by the request's seed (Dream)."""

    strategy: Literal["origin"] = "origin"


class MaskgitPlus(_Timed):
    """The step's share of most confident positions (Dream)."""

    strategy: Literal["maskgit_plus"] = "maskgit_plus"


class TopkMargin(_Timed):
    """The step's share of positions whose best token leads the second-best by most (Dream)."""

    strategy: Literal["topk_margin"] = "topk_margin"


class Entropy(_Timed):
    """The step's share of positions of lowest entropy (Dream)."""

    strategy: Literal["entropy"] = "entropy"


Timed = Origin | MaskgitPlus | TopkMargin | Entropy


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


class Renoise(_Decoding):
    """Sample the whole canvas in each step, keep what is certain, and fill the rest with noise (DiffusionGemma).

    The temperature falls linearly from `t_max` to `t_min`. Positions are kept by rising entropy while the sum of the
    entropies before them is at most `bound`. A canvas is decided, by its argmax, when that has not changed for
    `stability_threshold` steps and the mean entropy is below `confidence_threshold`, or after its last step.
    """

    strategy: Literal["entropy_bound_renoise"] = "entropy_bound_renoise"
    bound: float = Field(default=0.1, ge=0.0)
    max_denoising_steps: int = Field(default=48, ge=1, lt=STEPS_LIMIT)
    t_min: float = Field(default=0.4, gt=0.0)
    t_max: float = Field(default=0.8, gt=0.0)
    stability_threshold: int = Field(default=1, ge=0, le=64)
    confidence_threshold: float = Field(default=0.005, ge=0.0)
    filler_rules: bool = Field(default=False, description="Not used: nothing on a canvas is decided before all of it.")


class MultiBlock(_Decoding):
    """Decide several blocks of a request at once, each seeing those before it as they are (D2F, Diffulex).

    In each block: all masks with confidence > tau_acc. Where there is none, the best one, if the block is fully
    activated: the first one of the window, or one behind a block of which at least tau_semi is decided. Before the
    next forward the window gets one more block if at least tau_add of its last one is decided.
    """

    strategy: Literal["multi_block"] = "multi_block"
    tau_add: float = Field(default=0.1, gt=0.0, le=1.0)
    tau_semi: float = Field(default=0.9, ge=0.0, le=1.0)
    tau_acc: float = Field(default=0.9, ge=0.0, le=1.0)
    max_blocks: int = Field(default=4, ge=1, le=64, description="Blocks in the window at most.")


class StreamingWindow(_Decoding):
    """A window of one block's length that slides over the text: its decided front is committed at once (WeDLM).

    Accepts all masks with entropy + position_penalty * distance < bound, and always the lowest; the distance is that
    from the window's first mask, in tokens.
    """

    strategy: Literal["streaming_window"] = "streaming_window"
    bound: float = Field(default=0.4, gt=0.0)
    position_penalty: float = Field(default=0.02, ge=0.0)


class LinearSpeculation(_Decoding):
    """Draft a block by diffusion, check it by one causal forward: the tokens of causal decoding (Nemotron)."""

    strategy: Literal["linear_speculation"] = "linear_speculation"
    threshold: float | None = Field(
        default=None,
        ge=0.0,
        le=1.0,
        description="Confidence >= threshold, or the best, is drafted in a forward; unset: the whole block in one.",
    )
    filler_rules: bool = Field(default=False, description="Not used: the order in which drafts come does not matter.")


Decoding = Annotated[
    Threshold
    | Factor
    | ThresholdQuota
    | LowConfidenceStatic
    | LowConfidenceDynamic
    | Sequential
    | RandomOrder
    | EntropyBounded
    | AdaptiveParallel
    | Origin
    | MaskgitPlus
    | TopkMargin
    | Entropy
    | SubBlock
    | JointThreshold
    | Renoise
    | MultiBlock
    | StreamingWindow
    | LinearSpeculation,
    Field(discriminator="strategy"),
]

Strategy = Literal[
    "threshold",
    "factor",
    "threshold_quota",
    "low_confidence_static",
    "low_confidence_dynamic",
    "sequential",
    "random",
    "entropy_bounded",
    "adaptive_parallel",
    "maskgit_plus",
    "topk_margin",
    "entropy",
    "multi_block",
    "streaming_window",
    "linear_speculation",
]
"""What a caller may ask for by name; the others are chosen by what a family is."""

STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)

KINDS: Mapping[str, type[BaseModel]] = {
    kind.model_fields["strategy"].default: kind for kind in get_args(get_args(Decoding)[0])
}
"""Each strategy's class, by its name."""
_DECODING: TypeAdapter[Decoding] = TypeAdapter(Decoding)


class ForeignOption(ValueError):
    """The strategy has no such option."""

    def __init__(self, option: str, strategy: str) -> None:
        super().__init__(f"{option} does not apply to strategy {strategy}")
        self.option = option


def chosen(strategy: str | None, options: Mapping[str, object], default: Decoding) -> Decoding:
    """Return what is asked for. Options that are unset are the default's, or the strategy's if that is another one.

    Raises `ForeignOption`, pydantic's ValidationError.
    """
    name = default.strategy if strategy is None else strategy
    if name in KINDS and (foreign := [option for option in options if option not in KINDS[name].model_fields]):
        raise ForeignOption(foreign[0], name)
    base: dict[str, Any] = default.model_dump() if name == default.strategy else {"strategy": name}
    return _DECODING.validate_python(base | dict(options))
