"""From a checked body to commands: resolve it against the model's card, or refuse it before anything is queued."""

import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, assert_never

from api.catalog import ServedModel
from api.errors import ApiError, invalid, unsupported
from api.infill import Fill
from api.penalties import edits_of
from api.schemas import MOST_CHOICES, DiffusionOptions, GenerationBody, Preset, WebhookBody
from shared.card import ModelCard
from shared.commands import Generate, Lane, Limits, Preview, Sampling, Webhook
from shared.complaints import path_of
from shared.constraints import Constraint
from shared.decoding import Decoding, ForeignOption, chosen
from shared.keys import new_request_id, pick_partition
from shared.vocabulary import find_foreign

_DECODING_OPTIONS = (
    "threshold",
    "steps",
    "bound",
    "factor",
    "max_parallel",
    "fallback",
    "tau_add",
    "tau_semi",
    "tau_acc",
    "max_blocks",
    "position_penalty",
    "confidence",
    "filler_rules",
)
_REFUSED_OPTIONS = ("canvas_length",)
"""Options of `diffusion` that no worker acts on yet."""
_FAST_THRESHOLD = 0.7


@dataclass(frozen=True, slots=True)
class Call:
    """What is known of a call beside its body."""

    timeout_s: float
    trace: Mapping[str, str] = field(default_factory=dict[str, str])
    idempotency_key: str | None = None
    lane: Lane | None = None
    """Unset: what the body asks for."""
    name_request: Callable[[str, int], str] | None = None
    """Makes a request id of a model and an index. Unset: a fresh one."""
    check_webhook: Callable[[str], None] | None = None
    """Raises `ApiError` for a URL that may not be called; None: no webhooks here."""

    def request_id(self, card: ModelCard, index: int) -> str:
        """Return the id of a request, in any partition of its model; of the same call always in the same one."""
        if self.name_request is not None:
            return self.name_request(card.name, index)
        return new_request_id(card.name, pick_partition(card.partitions, self.idempotency_key))


def to_generate(
    body: GenerationBody,
    prompts: Sequence[list[int]],
    model: ServedModel,
    prompt_field: str,
    call: Call,
    constraint: Constraint | None = None,
    fill: Fill | None = None,
) -> list[Generate]:
    """Return the commands, one for each choice of each prompt, in the order of their indexes.

    `prompt_field` is what the prompts came from. Raises `ApiError` naming the field.
    """
    if len(prompts) * body.choices > MOST_CHOICES:
        raise invalid(
            prompt_field if len(prompts) > 1 else "n",
            f"{len(prompts)} prompts with n {body.choices} make {len(prompts) * body.choices} choices; "
            f"one call may ask for {MOST_CHOICES}",
        )
    options = body.diffusion or DiffusionOptions()
    _check_options(options)
    if options.template is not None and fill is None:
        raise unsupported("diffusion.template", "here: send it to /v1/chat/completions or /v1/completions")
    if fill is not None and constraint is not None:
        raise invalid(fill.field, f"{fill.field} cannot be combined with a schema, a grammar or tools")
    webhook = _webhook(body.webhook, call)
    seed = _seed(body, call)
    commands: list[Generate] = []
    for prompt in prompts:
        first = _command(body, options, prompt, model, prompt_field, call)
        first = first.model_copy(update={"constraint": constraint})
        if fill is not None:
            first = fill.shape(first, model.card)
        for choice in range(body.choices):
            index = len(commands)
            chosen = first.sampling.model_copy(update={"seed": derived_seed(seed, choice)})
            hook = None if webhook is None else webhook.model_copy(update={"choice": index})
            update = {"id": call.request_id(model.card, index), "sampling": chosen, "webhook": hook}
            commands.append(first.model_copy(update=update))
    return commands


def _webhook(body: WebhookBody | None, call: Call) -> Webhook | None:
    if body is None:
        return None
    if call.check_webhook is None:
        raise invalid("webhook", "a line of a batch has no webhook of its own: name one for the batch")
    call.check_webhook(body.url)
    return Webhook(url=body.url, metadata=body.metadata or {})


def derived_seed(seed: int, choice: int) -> int:
    """Return the seed of one choice: the given one for the first, and one that nobody else has for each other."""
    if choice == 0:
        return seed
    digest = hashlib.sha256(f"{seed} {choice}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % 2**63


def _command(
    body: GenerationBody, options: DiffusionOptions, prompt: list[int], model: ServedModel, field_: str, call: Call
) -> Generate:
    card = model.card
    check_prompt(prompt, card, field_)
    max_tokens = _max_tokens(body, len(prompt), card, field_)
    if body.min_tokens is not None and body.min_tokens > max_tokens:
        raise invalid("min_tokens", f"min_tokens is {body.min_tokens}, more than the {max_tokens} tokens of the output")
    preview = None
    if body.stream and body.canvas_stream != "append":
        interval = options.frame_interval_ms
        preview = Preview() if interval is None else Preview(interval_ms=interval)
    return Generate(
        id=call.request_id(card, 0),
        model=card.name,
        asked=model.other_name,
        prompt=tuple(prompt),
        sampling=_sampling(body, card),
        limits=Limits(
            max_tokens=max_tokens,
            min_tokens=body.min_tokens or 0,
            max_nfe=_one_of("max_nfe", body.max_nfe, options.max_nfe),
            deadline_ms=options.deadline_ms,
            max_repetition_run=body.max_repetition_run,
            ignore_eos=bool(body.ignore_eos),
            stop=tuple(body.stop or ()),
            stop_token_ids=_stop_token_ids(body, card),
            total_ms=round(call.timeout_s * 1000),
        ),
        decoding=_decoding(options, model.decoding),
        block_length=_block_length(body, options, card),
        cache_prompt=body.cache_prompt is not False,
        cfg_scale=_cfg_scale(options, card),
        edits=edits_of(body, card),
        logprobs=body.wanted_logprobs,
        preview=preview,
        lora=model.adapters,
        lane=_lane(body) if call.lane is None else call.lane,
        user=body.user,
        trace=dict(call.trace),
    )


def _check_options(options: DiffusionOptions) -> None:
    for name in _REFUSED_OPTIONS:
        if getattr(options, name) is not None:
            raise unsupported(f"diffusion.{name}", "by this server, with any value")


def _lane(body: GenerationBody) -> Lane:
    if body.priority is not None and body.priority != 0:
        return "rt" if body.priority < 0 else "bulk"
    match body.service_tier:
        case "priority" | "fast":
            return "rt"
        case "flex":
            return "bulk"
        case None | "auto" | "default" | "scale":
            return "std"
        case _:
            assert_never(body.service_tier)


def _seed(body: GenerationBody, call: Call) -> int:
    if body.seed is not None:
        return body.seed % 2**63
    if call.idempotency_key is not None:
        # The same call must make the same command.
        return int.from_bytes(hashlib.sha256(call.idempotency_key.encode()).digest()[:8], "big") % 2**63
    # A fresh seed where none is given: two unseeded requests must not repeat each other.
    return secrets.randbits(63)


def check_prompt(prompt: list[int], card: ModelCard, field: str) -> None:
    """Raises `ApiError` for a prompt that is empty or has ids that are none of the model's."""
    if not prompt:
        raise invalid(field, f"{field} is empty")
    check_token_ids(prompt, card, field)


def check_token_ids(token_ids: Sequence[int], card: ModelCard, field: str) -> None:
    """Raises `ApiError` for ids that are none of the model's."""
    if foreign := find_foreign(token_ids, card.vocab_size):
        index, told = foreign
        where = path_of((field, index))
        raise invalid(where, f"{where} {told}")


def _max_tokens(body: GenerationBody, prompt_tokens: int, card: ModelCard, prompt_field: str) -> int:
    field, wanted = body.wanted_tokens
    room = card.max_model_len - prompt_tokens
    if room < 1:
        raise ApiError(
            400,
            "context_length_exceeded",
            f"{prompt_field} is {prompt_tokens} tokens; this model's context is {card.max_model_len} tokens, "
            "prompt and output together",
            prompt_field,
        )
    if wanted is None:
        return min(body.default_max_tokens, room)
    if wanted > room:
        raise ApiError(
            400,
            "context_length_exceeded",
            f"{prompt_field} is {prompt_tokens} tokens and {field} is {wanted}: {prompt_tokens + wanted} together; "
            f"this model's context is {card.max_model_len} tokens, which leaves {room} for the output",
            field,
        )
    return wanted


def _sampling(body: GenerationBody, card: ModelCard) -> Sampling:
    # A share of nothing still has its first token, as OpenAI has it.
    greedy = body.top_p == 0
    return Sampling(
        temperature=card.temperature if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None or greedy else body.top_p,
        top_k=1 if greedy else max(0, body.top_k or 0),
        min_p=body.min_p or 0.0,
    )


def _stop_token_ids(body: GenerationBody, card: ModelCard) -> tuple[int, ...]:
    ids = tuple(body.stop_token_ids or ())
    check_token_ids(ids, card, "stop_token_ids")
    return ids


def _one_of(name: str, flat: int | None, nested: int | None) -> int | None:
    """Return the value of a field that may stand at the top and in `diffusion`, but not with two values."""
    if flat is not None and nested is not None and flat != nested:
        raise invalid(f"diffusion.{name}", f"{name} is {flat} and diffusion.{name} is {nested}; send one of them")
    return nested if flat is None else flat


def _block_length(body: GenerationBody, options: DiffusionOptions, card: ModelCard) -> int | None:
    wanted = _one_of("block_length", body.block_length, options.block_length)
    field = "diffusion.block_length" if body.block_length is None else "block_length"
    if wanted is not None and card.fixed_block_length and wanted != card.block_length:
        raise invalid(field, f"{field} is {wanted}; this model works only with {card.block_length}")
    if wanted is not None and card.largest_block is not None and wanted > card.largest_block:
        raise invalid(field, f"{field} is {wanted}; this model takes {card.largest_block} at most")
    return wanted


def _cfg_scale(options: DiffusionOptions, card: ModelCard) -> float:
    if options.cfg_scale and "guidance" not in card.capabilities:
        raise unsupported("diffusion.cfg_scale", "by this model, but for 0")
    return options.cfg_scale or 0.0


def _decoding(options: DiffusionOptions, default: Decoding) -> Decoding | None:
    """Return the asked strategy; unset options are the model's own, or the strategy's if that is another one."""
    strategy = _strategy(options)
    given = {name: getattr(options, name) for name in _DECODING_OPTIONS if getattr(options, name) is not None}
    if options.early_stop is not None:
        given.setdefault("filler_rules", options.early_stop)
    if strategy is None and "threshold" not in given and "steps" not in given and options.preset is not None:
        preset = _preset(options.preset)
        strategy = preset.pop("strategy", None)
        given = preset | given
    if strategy is None and not given:
        return None
    try:
        return chosen(strategy, given, default)
    except ForeignOption as error:
        message = f"diffusion.{error}; set diffusion.strategy to one that has it"
        raise invalid(f"diffusion.{error.option}", message) from None


def _preset(preset: Preset) -> dict[str, Any]:
    """Return the decoding options that a preset stands for; empty: the model's own."""
    match preset:
        case "fast":
            return {"strategy": "threshold", "threshold": _FAST_THRESHOLD}
        case "balanced":
            return {}
        case "quality":
            return {"strategy": "low_confidence_static"}
        case _:
            assert_never(preset)


def _strategy(options: DiffusionOptions) -> str | None:
    alias = "low_confidence_static" if options.remasking == "low_confidence" else options.remasking
    if options.strategy and alias and options.strategy != alias:
        raise invalid(
            "diffusion.remasking", f"diffusion.strategy is {options.strategy} and diffusion.remasking {alias}; send one"
        )
    return options.strategy or alias
