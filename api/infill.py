"""Infilling: text with holes on its way to a worker, and what was put into them on its way back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from api.catalog import ServedModel
from api.errors import ApiError, invalid, unsupported
from api.schemas import ChatBody, CompletionBody, GenerationBody, HoleOption
from shared.card import ModelCard
from shared.commands import Generate
from shared.events import Delta, Finished
from shared.holes import HOLE, filling, spans
from shared.text import Tokenizer, find_stop

_CONTEXT = 8
"""Tokens before a hole that its first ones may join."""


@dataclass(frozen=True, slots=True)
class Fill:
    """A template: text that stands, and holes by name."""

    field: str
    """What it came from."""
    pieces: tuple[str | HoleOption, ...]
    template: tuple[int, ...]
    whole: bool
    """The answer is all of it; else what was put into its one hole."""

    def shape(self, command: Generate, card: ModelCard) -> Generate:
        """Return the command that fills the template behind a prompt; raises `ApiError`."""
        prompt, canvas = len(command.prompt), len(self.template)
        if prompt + canvas > card.max_model_len:
            message = (
                f"prompt and {self.field} are {prompt + canvas} tokens; this model's context is {card.max_model_len}"
            )
            raise ApiError(400, "context_length_exceeded", message, self.field)
        # What the last block of the prompt holds is part of the canvas.
        canvas += prompt % card.block_length
        room = None if card.largest_block is None else card.largest_block // (2 if command.cfg_scale > 0 else 1)
        if room is not None and canvas > room:
            message = f"holes and the text behind them are {canvas} tokens; this model fills {room} at most"
            raise ApiError(400, "context_length_exceeded", message, self.field)
        limits = command.limits.model_copy(update={"max_tokens": self.template.count(HOLE), "stop": ()})
        return command.model_copy(update={"template": self.template, "limits": limits})

    def writer(self, command: Generate, model: ServedModel, stop: Sequence[str]) -> "FillWriter":
        stops = () if command.limits.ignore_eos else (*model.card.stop_token_ids, *command.limits.stop_token_ids)
        return FillWriter(self, model.tokenizer, command.prompt[-_CONTEXT:], frozenset(stops), tuple(stop))


async def fill_of(body: GenerationBody, model: ServedModel) -> Fill | None:
    """Return the template that a body asks for, None if it asks for none; raises `ApiError`."""
    suffix = body.suffix if isinstance(body, CompletionBody) else None
    pieces: Sequence[str | HoleOption] | None = body.diffusion.template if body.diffusion else None
    if pieces is None and not suffix:
        return None
    if pieces is not None and suffix:
        raise invalid("suffix", "suffix and diffusion.template say both what stands behind the prompt; send one")
    name = "suffix" if pieces is None else "diffusion.template"
    if "infill" not in model.card.capabilities:
        raise unsupported(name, "by this model")
    _check_company(body, name)
    if pieces is None:
        hole = HoleOption(hole="middle", max_tokens=body.max_tokens or body.default_max_tokens)
        pieces = [hole, suffix or ""]
    template: list[int] = []
    for piece in pieces:
        if isinstance(piece, HoleOption):
            template += [HOLE] * piece.max_tokens
        else:
            template += await model.encode(piece, add_special=False, field=name)
    return Fill(name, tuple(pieces), tuple(template), whole=name != "suffix")


async def draft_of(body: ChatBody, model: ServedModel) -> tuple[int, ...] | None:
    """Return the draft of an answer that a body predicts, None without; raises `ApiError`."""
    if body.prediction is None or not body.prediction.content:
        return None
    if "infill" not in model.card.capabilities:
        raise unsupported("prediction", "by this model")
    if body.diffusion and body.diffusion.template:
        raise invalid("prediction", "a prediction cannot be combined with diffusion.template")
    ids = await model.encode(body.prediction.content, add_special=False, field="prediction.content")
    if len(ids) > model.card.max_model_len:
        message = f"prediction.content is {len(ids)} tokens; this model's context is {model.card.max_model_len} tokens"
        raise ApiError(400, "context_length_exceeded", message, "prediction.content")
    return tuple(ids)


def writers_of(
    fill: Fill | None, commands: Sequence[Generate], model: ServedModel, stop: Sequence[str]
) -> list["FillWriter"]:
    """Return one for each command; none without a template."""
    return [] if fill is None else [fill.writer(command, model, stop) for command in commands]


def _check_company(body: GenerationBody, name: str) -> None:
    """Refuse what has no meaning beside a template, or would not be delivered."""
    options = body.diffusion
    nested = None if options is None else options.block_length
    asked: Mapping[str, bool] = {
        "logprobs": body.wanted_logprobs is not None,
        "min_tokens": bool(body.min_tokens),
        "max_repetition_run": body.max_repetition_run is not None,
        "block_length": body.block_length is not None,
        "diffusion.block_length": nested is not None,
    }
    for field_, is_asked in asked.items():
        if is_asked:
            raise ApiError(400, "unsupported_parameter", f"{field_} is not supported beside {name}", field_)


@dataclass(slots=True)
class FillWriter:
    """Turns the token ids of a filled template into the text that its caller sees: what was given stays as it was."""

    fill: Fill
    tokenizer: Tokenizer
    prompt: tuple[int, ...]
    stops: frozenset[int]
    stop: tuple[str, ...]
    holes: dict[str, str] = field(default_factory=dict[str, str])
    _tokens: list[int] = field(default_factory=list[int])

    def of_delta(self, event: Delta) -> Delta:
        """Return the event with the text of the template, once that is whole."""
        self._tokens += event.token_ids
        if len(self._tokens) < len(self.fill.template):
            return replace(event, text="")
        texts = [self._text(span) for span in spans(self.fill.template)]
        names = [piece.hole for piece in self.fill.pieces if isinstance(piece, HoleOption)]
        self.holes = dict(zip(names, texts, strict=True))
        if not self.fill.whole:
            return replace(event, text=texts[0])
        parts = [piece if isinstance(piece, str) else self.holes[piece.hole] for piece in self.fill.pieces]
        return replace(event, text="".join(parts))

    def of_end(self, event: Finished) -> Finished:
        """Return the end in OpenAI's sense: text that was cut by `max_tokens` has not come to its own end."""
        cut = not self.fill.whole and event.detail == "filled" and not self._ended(spans(self.fill.template)[0])
        return replace(event, reason="length") if cut else event

    @property
    def told(self) -> dict[str, object]:
        """What a choice tells of it."""
        return {"holes": self.holes} if self.fill.whole else {}

    def _ended(self, span: tuple[int, int]) -> bool:
        ids = filling(self._tokens, span, self.stops)
        return len(ids) < span[1] - span[0] or find_stop(self._decode(span, ids), self.stop) is not None

    def _text(self, span: tuple[int, int]) -> str:
        text = self._decode(span, filling(self._tokens, span, self.stops))
        return text[: find_stop(text, self.stop)]

    def _decode(self, span: tuple[int, int], ids: Sequence[int]) -> str:
        # Within its context, for some vocabularies spell the beginning of a text in another way. Bytes that are no
        # whole character at a hole's end are left out.
        before = (*self.prompt, *self._tokens[: span[0]])[-_CONTEXT:]
        decoder = self.tokenizer.detokenizer()
        decoder.push(before)
        return decoder.push(ids)
