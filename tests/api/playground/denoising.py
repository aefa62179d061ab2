"""A scripted fleet that denoises a known text, so that a browser test knows every step of it."""

import itertools
from collections.abc import Iterator

from shared.commands import Generate
from shared.events import Delta, Finished, Queued, Snapshot, Started, Usage
from tests.api.scripted import Script, Step
from tests.shared.tokenizers_for_tests import byte_level

BLOCK = 8
TEXT = "The quick brown fox jumps over the lazy dog. The fox was quick and brown."


def denoise(text: str = TEXT, hang_after: int | None = None) -> Script:
    """Play blocks of `BLOCK`: two snapshots, of the even and then also of every fourth other position, then the commit.

    `hang_after` is the number of blocks after which nothing comes any more.
    """
    ids = byte_level().encode(text)

    def play(command: Generate) -> Iterator[Step]:
        yield Queued(command.id)
        yield Started(command.id, 1, "w1")
        said = byte_level().detokenizer()
        nfe = 0
        for block, offset in enumerate(range(0, len(ids), BLOCK)):
            if block == hang_after:
                yield 600.0
            tokens = ids[offset : offset + BLOCK]
            for step, shown in enumerate((lambda at: at % 2 == 0, lambda at: at % 2 == 0 or at % 4 == 1), 1):
                nfe += 1
                known = [token if shown(at) else None for at, token in enumerate(tokens)]
                sure = [0.0 if token is None else 0.25 + 0.1 * at for at, token in enumerate(known)]
                yield Snapshot(command.id, block + 1, 1, block, offset, step, nfe, known, sure)
            nfe += 1
            yield Delta(command.id, block + 2, 1, block, offset, tokens, said.push(tokens), nfe)
        blocks = -(-len(ids) // BLOCK)
        usage = Usage(len(command.prompt), len(ids), nfe, blocks)
        yield Finished(command.id, blocks + 2, 1, "stop", "stop_token", usage)

    return play


def hanging_in_the_first_block(command: Generate) -> Iterator[Step]:
    """Play one snapshot, after which nothing comes any more."""
    yield from itertools.islice(denoise()(command), 3)
    yield 600.0


def token_count(text: str = TEXT) -> int:
    return len(byte_level().encode(text))
