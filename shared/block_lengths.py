"""What a model's folder says of block lengths (`block_lengths.json`), and which of them may stand for the model's own.

The file is measured, never written by hand; for the bundled models by `python -m worker.demo.block_lengths`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

FILE = "block_lengths.json"
MOST_LOSS = 0.005
"""Share of answers by which a block length may be less often right than the model's own."""


class InvalidBlockLengths(Exception):
    """The file is not what this module describes; the message names the field at fault."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Measured(_Part):
    """How the model answers with blocks of one length."""

    block_length: Annotated[int, Field(ge=1, le=4096)]
    accuracy: Annotated[float, Field(ge=0.0, le=1.0)]
    """Share of the items that were answered right."""
    tokens_per_forward: Annotated[float, Field(gt=0.0, le=4096.0)]
    """Tokens of the answers over the denoising forwards that they took."""


class BlockLengths(_Part):
    """One model's block lengths, all measured on the same items under the same strategy."""

    items: Annotated[int, Field(ge=1)]
    date: str = ""
    decoding: dict[str, Any]
    """The strategy, as the dict of a `shared.decoding` class."""
    lengths: Annotated[tuple[Measured, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        known = [row.block_length for row in self.lengths]
        if len(set(known)) < len(known):
            raise ValueError("a block length is listed twice")
        return self


def read_block_lengths(folder: Path) -> BlockLengths | None:
    """Return what the folder's file says, None if it has none; raises `InvalidBlockLengths`."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        return BlockLengths.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise InvalidBlockLengths(f"{FILE}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def eligible(table: BlockLengths, own: int, decoding: Mapping[str, Any]) -> dict[int, float]:
    """Return the tokens per forward of each block length that may be used for `own`, the model's; itself included.

    Empty where nothing can be compared: `own` is missing, or `decoding`, the model's default, is not what was measured.
    """
    by_length = {row.block_length: row for row in table.lengths}
    if own not in by_length or dict(decoding) != table.decoding:
        return {}
    least = by_length[own].accuracy - MOST_LOSS
    return {length: row.tokens_per_forward for length, row in sorted(by_length.items()) if row.accuracy >= least}
