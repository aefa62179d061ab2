"""Which templates a model fills, and where the block of one begins. Pure rules."""

from shared.commands import Generate
from shared.events import FailCode
from shared.holes import HOLE
from worker.models.spec import Attention, Commit, ModelSpec


def can_fill(spec: ModelSpec) -> bool:
    """True if the family decides a block whose positions are partly given.

    Its keys must not depend on the order of decisions, and no position may be proposed from outside of its block.
    """
    match spec.commit:
        case Commit.REFRESHED:
            return True
        case Commit.FUSED:
            return spec.logit_shift == 0 and spec.attention is not Attention.CAUSAL
        case Commit.SEEDED | Commit.REORDERED | Commit.ENCODED:
            return False


def origin_of(prompt_length: int, spec: ModelSpec) -> int:
    """Return where a template's block begins: at the prompt's end, or at that of its last whole block."""
    if spec.blocks_after_prompt or spec.commit is not Commit.FUSED or not spec.block_length:
        return prompt_length
    return prompt_length // spec.block_length * spec.block_length


def refusal_of(request: Generate, spec: ModelSpec) -> tuple[FailCode, str, str | None] | None:
    """Return why a request's template cannot be filled, or its draft not be tested; None if it can."""
    if request.draft is not None:
        return _refusal_of_draft(request, spec)
    template = request.template or ()
    if not can_fill(spec):
        return "unsupported", "this model decides from left to right and fills no holes", "template"
    if request.embed:
        return "invalid_request", "an embedding has no template", "template"
    if HOLE not in template:
        return "invalid_request", "a template without a hole leaves nothing to decide", "template"
    if not all(token < spec.vocab_size for token in template):
        return "invalid_request", f"token ids must be in [0, {spec.vocab_size})", "template"
    if len(request.prompt) + len(template) > spec.max_model_len:
        told = f"prompt and template have {len(request.prompt) + len(template)} tokens"
        return "too_long", f"{told}; this model takes {spec.max_model_len} in all", "template"
    if request.block_length is not None:
        return "invalid_request", "a template is one block; leave block_length out", "block_length"
    if request.constraint is not None:
        return "unsupported", "a template is filled without a grammar", "constraint"
    return None


def _refusal_of_draft(request: Generate, spec: ModelSpec) -> tuple[FailCode, str, str | None] | None:
    if not can_fill(spec):
        return "unsupported", "this model decides from left to right and tests no draft", "draft"
    if not all(token < spec.vocab_size for token in request.draft or ()):
        return "invalid_request", f"token ids must be in [0, {spec.vocab_size})", "draft"
    if request.template is not None or request.constraint is not None or request.embed:
        return "invalid_request", "a draft cannot be combined with a template, a grammar or an embedding", "draft"
    return None
