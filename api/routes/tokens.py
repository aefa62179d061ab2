"""POST /tokenize and /detokenize: the model's tokenizer, without the model."""

from typing import Annotated

from fastapi import APIRouter, Depends
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError
from starlette.responses import Response

from api.answers import json_response
from api.deps import ServicesDep, json_body
from api.openapi import ERROR_RESPONSES, request_body
from api.requests import check_token_ids
from api.schemas import ChatMessage, Integer, StrictBody

router = APIRouter(tags=["native"])


class TokenizeBody(StrictBody):
    model: str | None = None
    prompt: str | None = Field(default=None, description="A raw prompt; or give messages.")
    messages: list[ChatMessage] | None = Field(default=None, min_length=1, description="A chat, under its template.")
    add_special_tokens: bool | None = Field(default=None, description="Of a raw prompt; unset: true.")
    add_generation_prompt: bool | None = Field(default=None, description="Of a chat; unset: true.")
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_source(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("source", "send either prompt or messages", {"at": ("prompt",)})
        return self


class DetokenizeBody(StrictBody):
    model: str | None = None
    tokens: list[Integer] = Field(max_length=1_000_000)


@router.post("/tokenize", openapi_extra=request_body(TokenizeBody), responses=ERROR_RESPONSES)
async def tokenize(body: Annotated[TokenizeBody, Depends(json_body(TokenizeBody))], services: ServicesDep) -> Response:
    """Return the ids that a prompt, or a chat, has for the model: what `usage.prompt_tokens` counts."""
    model = await services.catalog.resolve(body.model)
    if body.messages is not None:
        messages = [message.for_template() for message in body.messages]
        ids = await model.encode_chat(messages, body.add_generation_prompt is not False)
    else:
        ids = await model.encode(body.prompt or "", body.add_special_tokens is not False)
    content: dict[str, object] = {"count": len(ids), "max_model_len": model.card.max_model_len, "tokens": ids}
    if body.return_token_strs:
        content["token_strs"] = [model.tokenizer.decode([token], skip_special=False) for token in ids]
    return json_response(content)


@router.post("/detokenize", openapi_extra=request_body(DetokenizeBody), responses=ERROR_RESPONSES)
async def detokenize(
    body: Annotated[DetokenizeBody, Depends(json_body(DetokenizeBody))], services: ServicesDep
) -> Response:
    """Return the text of ids, special tokens included."""
    model = await services.catalog.resolve(body.model)
    check_token_ids(body.tokens, model.card, "tokens")
    return json_response({"prompt": model.tokenizer.decode(body.tokens, skip_special=False)})
