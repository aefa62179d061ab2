"""Which positions a request runs in the next step. Pure rules, one for each way in which a family commits blocks."""

from dataclasses import dataclass
from typing import Literal, assert_never

from worker.models.spec import Attention, Commit, ModelSpec

Cache = Literal["none", "prefix", "dual"]


@dataclass(frozen=True, slots=True)
class Block:
    """Where a request stands."""

    start: int
    end: int
    canvas_end: int
    """End of the last block, for families that see it; else the block's own end."""
    cached: int
    known: int
    """End of the contiguous decided prefix."""
    fresh: bool
    """No denoise forward has been spent on the block."""
    first_masked: bool
    """The block's first position is undecided."""
    part: tuple[int, int]
    """The sub-block that is decided now; the whole block where there are none."""
    part_masked: bool
    """The first position of `part` is undecided."""
    part_cached: bool
    """The strategy runs a sub-block alone once the whole block has been run."""


@dataclass(frozen=True, slots=True)
class Window:
    """Query positions [start, end), in places of storage."""

    start: int
    end: int
    denoises: bool
    """The block is decided in it; else it writes what comes before the block."""
    seeds: bool = False
    """Its last position proposes the block's first token."""
    divisible: bool = False
    """May be cut short at a block boundary and go on in the next step."""


def next_window(commit: Commit, block: Block, cache: Cache, prompt_whole: bool) -> Window:
    """Return what the request's next forward runs; see `reads_prompt_whole`."""
    match commit:
        case Commit.FUSED:
            return Window(block.cached, block.end, denoises=True, divisible=not prompt_whole)
        case Commit.SEEDED:
            return _seeded(block, prompt_whole)
        case Commit.REFRESHED:
            return _refreshed(block, cache)
        case Commit.REORDERED:
            if block.known - block.cached > block.end - block.start:
                return Window(block.cached, block.known, denoises=False, divisible=True)
            return Window(block.cached, block.end, denoises=True)
        case Commit.ENCODED:
            if block.cached < block.start:
                return Window(block.cached, block.start, denoises=False, divisible=True)
            return Window(block.cached, block.end, denoises=True)
        case _:
            assert_never(commit)


def cuts_windows(spec: ModelSpec) -> bool:
    """True if some windows of the family are divisible: then its blocks must leave room for others in a step."""
    return spec.commit is not Commit.REFRESHED and not reads_prompt_whole(spec)


def reads_prompt_whole(spec: ModelSpec) -> bool:
    """True if a prompt is one block of its own: it sees all of itself and cannot be cut."""
    context = spec.context or spec.attention
    return spec.blocks_after_prompt and context is Attention.BLOCK_CAUSAL and spec.commit is not Commit.ENCODED


def _seeded(block: Block, prompt_whole: bool) -> Window:
    if block.cached < block.start:
        return Window(block.cached, block.start, denoises=False, seeds=block.first_masked, divisible=not prompt_whole)
    if block.part_cached and not block.fresh and not block.part_masked:
        return Window(*block.part, denoises=True)
    return Window(block.start, block.end, denoises=True)


def _refreshed(block: Block, cache: Cache) -> Window:
    """Fast-dLLM (arXiv 2505.22618) section 3.1: the first forward of a block renews all keys, later ones its own."""
    if block.fresh or cache == "none":
        return Window(0, block.canvas_end, denoises=True)
    if cache == "prefix":
        return Window(block.start, block.canvas_end, denoises=True)
    return Window(block.start, block.end, denoises=True)
