"""The models that can be asked for, known from Redis alone."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from api.errors import ApiError, invalid
from api.ports import Fleet
from api.schemas import AdapterChoice
from api.structure.tools import plain_messages
from shared.card import InvalidCard, ModelCard
from shared.client import NoDefaultModel, UnknownModel
from shared.commands import LoraUse
from shared.decoding import Decoding
from shared.keys import MODEL_NAME
from shared.lora import AdapterRecord
from shared.text import InvalidText, InvalidTokenizer, TemplateError, Tokenizer

logger = logging.getLogger("diffleet.api")

_DECODING: TypeAdapter[Decoding] = TypeAdapter(Decoding)
_MOST_NAMES = 20
"""Of a model's adapters in a complaint."""
_LONG_TEXT = 2_048
"""Characters from which encoding (0.1 to 0.3 microseconds each) leaves the event loop to the others. A burst of long
prompts would else all be encoded before the first of them is queued."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    card: ModelCard
    tokenizer: Tokenizer
    decoding: Decoding
    adapters: tuple[LoraUse, ...] = ()
    """Those that requests run under."""
    asked: str | None = None
    """The name by which a request has asked for it, which may hold an adapter's."""

    @property
    def name(self) -> str:
        """What answers call it: as the request did, or the model's own name."""
        return self.card.name if self.asked is None else self.asked

    @property
    def other_name(self) -> str | None:
        """The name that the request had for it, if that is not the model's own."""
        return None if self.name == self.card.name else self.name

    async def encode(self, text: str, add_special: bool = True, field: str = "prompt") -> list[int]:
        """Return the ids of a raw prompt; raises `ApiError` that names `field`."""
        try:
            if len(text) < _LONG_TEXT:
                return self.tokenizer.encode(text, add_special)
            return await asyncio.to_thread(self.tokenizer.encode, text, add_special)
        except InvalidText as error:
            raise invalid(field, f"{field}: {error}") from error

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        field: str = "messages",
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the ids of a chat under the model's template; raises `ApiError` that names `field`."""
        if not self.tokenizer.template_takes_tools:
            messages, tools = plain_messages(messages, tools or ()), None
        try:
            if sum(len(message["content"]) for message in messages) < _LONG_TEXT:
                return self.tokenizer.encode_chat(messages, tools, add_generation_prompt, options)
            return await asyncio.to_thread(self.tokenizer.encode_chat, messages, tools, add_generation_prompt, options)
        except (InvalidText, TemplateError) as error:
            raise invalid(field, f"{field}: {error}") from error


class Catalog:
    """Look models up by name."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def names(self) -> list[str]:
        return sorted(await self._fleet.models())

    async def resolve(self, name: str | None, lora: Sequence[AdapterChoice] | None = None) -> ServedModel:
        """Return the model of that name, or that of `Fleet.default_model` if `name` is None; raises `ApiError`.

        `base:adapter` is the model under that adapter; those of `lora` come on top.
        """
        base, colon, adapter = (name or "").partition(":")
        model = replace(await self._load(await self.card(await self._default() if name is None else base)), asked=name)
        asked = [(adapter, 1.0, "model")] if colon else []
        asked += [(choice.name, choice.scale, f"lora[{index}].name") for index, choice in enumerate(lora or ())]
        if not asked:
            return model
        known = await self._fleet.find_adapters(model.card.name, [wanted for wanted, _, _ in asked])
        for wanted, _, param in asked:
            if wanted not in known:
                names = [record.name for record in await self._fleet.adapters(model.card.name)]
                raise _no_adapter(model.card.name, wanted, names, param)
        uses = (known[wanted].use(scale, "model" if param == "model" else "lora") for wanted, scale, param in asked)
        return replace(model, adapters=tuple(uses))

    async def adapter(self, model: str, name: str) -> AdapterRecord | None:
        """Return an adapter of a model."""
        return (await self._fleet.find_adapters(model, [name])).get(name)

    async def adapters(self, model: str) -> Sequence[AdapterRecord]:
        """Return the adapters that are registered for a model that was found just now."""
        try:
            return await self._fleet.adapters(model)
        except UnknownModel:
            return ()  # forgotten since

    async def card(self, name: str) -> ModelCard:
        """Return the card of that name; raises `ApiError` (404, listing the known ones)."""
        if not MODEL_NAME.fullmatch(name):
            raise _unknown(name, await self.names())
        try:
            return await self._fleet.card(name)
        except UnknownModel:
            raise _unknown(name, await self.names()) from None
        except InvalidCard as error:
            raise _unusable(name, error) from error

    async def _default(self) -> str:
        try:
            return await self._fleet.default_model()
        except NoDefaultModel as error:
            if not error.alive and not error.departed:
                raise ApiError(404, "model_not_found", str(error), "model") from None
            raise invalid("model", str(error), "missing_required_parameter") from None

    async def _load(self, card: ModelCard) -> ServedModel:
        try:
            return ServedModel(card, await self._fleet.tokenizer(card), _DECODING.validate_python(card.decoding))
        except (InvalidTokenizer, ValidationError) as error:
            raise _unusable(card.name, error) from error


def _unknown(name: str, known: Sequence[str]) -> ApiError:
    return ApiError(404, "model_not_found", f"there is no model {name[:120]!r}: {_listed(known)}", "model")


def _no_adapter(model: str, name: str, known: Sequence[str], param: str) -> ApiError:
    first = ", ".join(known[:_MOST_NAMES]) + (f" and {len(known) - _MOST_NAMES} more" if known[_MOST_NAMES:] else "")
    has = f"its adapters are {first}" if known else "it has none"
    message = f"model {model} has no adapter {name[:96]!r}: {has}"
    return ApiError(404, "model_not_found" if param == "model" else "adapter_not_found", message, param)


def _unusable(name: str, error: Exception) -> ApiError:
    logger.error("a model card cannot be used", extra={"model": name, "fault": type(error).__name__})
    return ApiError(500, "invalid_model", f"the card of model {name} cannot be used by this server", "model")


def _listed(names: Sequence[str]) -> str:
    return f"the models are {', '.join(names)}" if names else "no worker has announced one yet"
