"""Which pages of a request may be shared with others, and under which keys. Pure rules.

A page can be shared where its keys and values depend on nothing but the tokens before its end: with causal attention
always, with block-causal attention if the page ends with a block. A page's key is a hash over its tokens and the key of
the page before it, so equal keys stand for equal texts from the first token on.
"""

from collections.abc import Sequence as ReadOnly
from hashlib import blake2b

from worker.models.spec import Attention, Commit, ModelSpec

_KEY_BYTES = 16


def share_unit(spec: ModelSpec, block_length: int) -> int | None:
    """Return the number of tokens whose keys and values become final together; None if they never do.

    None too for canvases of noise: a last bit that comes from another row's forward grows tenfold from step to step.
    """
    if spec.commit not in (Commit.FUSED, Commit.SEEDED, Commit.REORDERED):
        return None
    match spec.context or spec.attention:
        case Attention.CAUSAL:
            return 1
        case Attention.BLOCK_CAUSAL:
            # A prompt that is one block of its own depends on its own end.
            return None if spec.blocks_after_prompt else block_length
        case Attention.BIDIRECTIONAL:
            return None


def extend_keys(
    keys: list[bytes], tokens: ReadOnly[int], page_size: int, unit: int, end: int, salt: bytes = b""
) -> None:
    """Append the keys of the pages that lie in tokens [0, end) and have none yet.

    `salt` tells texts apart that the model reads in different ways: under other adapters.
    """
    for page in range(len(keys), end // page_size):
        before = keys[-1] if keys else unit.to_bytes(8, "little") + salt
        content = b"".join(
            token.to_bytes(8, "little", signed=True) for token in tokens[page * page_size : (page + 1) * page_size]
        )
        keys.append(blake2b(before + content, digest_size=_KEY_BYTES).digest())
