"""What the chat and completion shapes share: finish reasons, usage over several requests, opt-in costs."""

from collections.abc import Mapping, Sequence
from typing import Any

from api.catalog import ServedModel
from api.relay import Follow
from api.transcript import Transcript, usage_of
from shared.events import Finished, Usage


def finish_fields(end: Finished, told: Mapping[str, object] | None = None) -> dict[str, object]:
    """Return why a choice has ended, and what of diffusion there is to tell of it, `told` before that."""
    # OpenAI's words only. An abort from elsewhere cuts the text, which is what `length` tells.
    fields: dict[str, object] = {
        "finish_reason": "stop" if end.reason == "stop" else "length",
        "finish_detail": end.detail,
    }
    diffusion = dict(told or {})
    if end.detail in ("deadline", "max_nfe"):
        diffusion |= {"truncated_by": end.detail, "forwards": end.usage.nfe}
    if diffusion:
        fields["diffusion"] = diffusion
    return fields


def total_usage(follows: Sequence[Follow], transcripts: Sequence[Transcript], choices: int) -> Usage:
    """Return the sums so far; a prompt with several choices counts once. A block length is told once all have ended, if
    all had the same."""
    prompt_tokens = sum(follow.subject.prompt_tokens for follow in follows[::choices])
    ends = [transcript.end for transcript in transcripts]
    lengths = {0 if end is None else end.usage.block_length for end in ends}
    return Usage(
        prompt_tokens,
        sum(
            len(transcript.token_ids) if end is None else end.usage.completion_tokens
            for transcript, end in zip(transcripts, ends, strict=True)
        ),
        sum(transcript.nfe for transcript in transcripts),
        sum(0 if end is None else end.usage.blocks for end in ends),
        sum(0 if end is None else end.usage.cached_tokens for end in ends[::choices]),
        sum(0 if end is None else end.usage.accepted_draft_tokens for end in ends),
        sum(0 if end is None else end.usage.rejected_draft_tokens for end in ends),
        lengths.pop() if len(lengths) == 1 else 0,
    )


def usage_fields(follows: Sequence[Follow], transcripts: Sequence[Transcript], choices: int) -> dict[str, Any]:
    return usage_of(total_usage(follows, transcripts, choices))


def report_fields(transcript: Transcript, model: ServedModel) -> dict[str, object]:
    """Return what `diffusion.report` asks for: what one answer cost, and when."""
    assert transcript.end is not None, "a report is made at the end"
    usage = transcript.end.usage
    length = usage.block_length or model.card.block_length
    return {
        "forwards": usage.nfe,
        "blocks": usage.blocks,
        "tokens_per_forward": round(usage.completion_tokens / usage.nfe, 3) if usage.nfe else 0.0,
        "block_length": length,
        "canvas_tokens": usage.blocks * length,
        **transcript.timings,
    }
