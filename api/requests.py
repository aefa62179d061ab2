"""From a checked body to a command: resolve it against the model's card, or refuse it before anything is queued."""

import secrets
from typing import Any

from pydantic import TypeAdapter, ValidationError

from api.catalog import ServedModel
from api.errors import ApiError, invalid, path_of
from api.schemas import DiffusionOptions, GenerationBody
from shared.card import ModelCard
from shared.commands import Generate, Limits, Preview, Sampling
from shared.decoding import Decoding
from shared.keys import new_request_id

DEFAULT_MAX_TOKENS = 512
_DECODING: TypeAdapter[Decoding] = TypeAdapter(Decoding)
_DECODING_OPTIONS = ("threshold", "steps", "bound", "fallback", "confidence", "filler_rules")


def to_generate(
    body: GenerationBody, prompt: list[int], model: ServedModel, prompt_field: str, timeout_s: float
) -> Generate:
    """Return the command; raises `ApiError` naming the field. `prompt_field` is what the prompt came from."""
    options = body.diffusion or DiffusionOptions()
    card = model.card
    _check_prompt(prompt, card, prompt_field)
    max_tokens = _max_tokens(body, len(prompt), card, prompt_field)
    if body.min_tokens is not None and body.min_tokens > max_tokens:
        raise invalid("min_tokens", f"min_tokens is {body.min_tokens}, more than the {max_tokens} tokens of the output")
    preview = None
    if body.stream and body.stream_mode == "denoise":
        interval = options.frame_interval_ms
        preview = Preview() if interval is None else Preview(interval_ms=interval)
    return Generate(
        id=new_request_id(card.name),
        model=card.name,
        prompt=tuple(prompt),
        sampling=_sampling(body, card),
        limits=Limits(
            max_tokens=max_tokens,
            min_tokens=body.min_tokens or 0,
            max_nfe=_one_of("max_nfe", body.max_nfe, options.max_nfe),
            max_repetition_run=body.max_repetition_run,
            ignore_eos=bool(body.ignore_eos),
            stop=tuple(body.stop or ()),
            stop_token_ids=_stop_token_ids(body, card),
            total_ms=round(timeout_s * 1000),
        ),
        decoding=_decoding(options, model.decoding),
        block_length=_block_length(_one_of("block_length", body.block_length, options.block_length), card),
        preview=preview,
        user=body.user,
    )


def _check_prompt(prompt: list[int], card: ModelCard, field: str) -> None:
    if not prompt:
        raise invalid(field, f"{field} is empty")
    wrong = next((index for index, token in enumerate(prompt) if not 0 <= token < card.vocab_size), None)
    if wrong is not None:
        where = path_of((field, wrong))
        raise invalid(where, f"{where} is {prompt[wrong]}; token ids of this model are 0 to {card.vocab_size - 1}")


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
        return min(DEFAULT_MAX_TOKENS, room)
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
    return Sampling(
        temperature=card.temperature if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(0, body.top_k or 0),
        min_p=body.min_p or 0.0,
        # A fresh seed where none is given: two unseeded requests must not repeat each other.
        seed=secrets.randbits(63) if body.seed is None else body.seed % 2**63,
    )


def _stop_token_ids(body: GenerationBody, card: ModelCard) -> tuple[int, ...]:
    ids = tuple(body.stop_token_ids or ())
    for index, token in enumerate(ids):
        if not 0 <= token < card.vocab_size:
            where = path_of(("stop_token_ids", index))
            raise invalid(where, f"{where} is {token}; token ids of this model are 0 to {card.vocab_size - 1}")
    return ids


def _one_of(name: str, flat: int | None, nested: int | None) -> int | None:
    """Return the value of a field that may stand at the top and in `diffusion`, but not with two values."""
    if flat is not None and nested is not None and flat != nested:
        raise invalid(f"diffusion.{name}", f"{name} is {flat} and diffusion.{name} is {nested}; send one of them")
    return nested if flat is None else flat


def _block_length(wanted: int | None, card: ModelCard) -> int | None:
    if wanted is not None and card.fixed_block_length and wanted != card.block_length:
        raise invalid("block_length", f"block_length is {wanted}; this model works only with {card.block_length}")
    return wanted


def _decoding(options: DiffusionOptions, default: Decoding) -> Decoding | None:
    """Return the asked strategy; unset options are the model's own, or the strategy's if that is another one."""
    strategy = _strategy(options)
    chosen = {name: getattr(options, name) for name in _DECODING_OPTIONS if getattr(options, name) is not None}
    if strategy is None and not chosen:
        return None
    base: dict[str, Any] = default.model_dump() if strategy in (None, default.strategy) else {"strategy": strategy}
    try:
        return _DECODING.validate_python(base | chosen)
    except ValidationError as error:
        # The values were checked one by one: what remains is an option that the strategy does not have.
        name = error.errors(include_input=False, include_url=False)[0]["loc"][-1]
        message = (
            f"diffusion.{name} does not apply to strategy {base['strategy']}; set diffusion.strategy to one that has it"
        )
        raise invalid(f"diffusion.{name}", message) from None


def _strategy(options: DiffusionOptions) -> str | None:
    alias = "low_confidence_static" if options.remasking == "low_confidence" else options.remasking
    if options.strategy and alias and options.strategy != alias:
        raise invalid(
            "diffusion.remasking", f"diffusion.strategy is {options.strategy} and diffusion.remasking {alias}; send one"
        )
    return options.strategy or alias
