"""The state of one request in the engine, and the only code that changes it."""

from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass, field

from shared.commands import Generate
from shared.decoding import Decoding
from shared.events import Delta, FailCode, Failed, FinishDetail, Finished, Snapshot, Usage
from worker.engine.plan import Canvas, Row, visible_ends
from worker.engine.ports import Arrival, TextDecoder
from worker.engine.stopping import Stop, first_of, reason_of, repetition_run
from worker.models.spec import ModelSpec


@dataclass(slots=True)
class Sequence:
    """Facts about one request.

    Positions are absolute: the prompt is [0, prompt_length), what is produced follows. The active block is
    [block_start, block_end); it may begin with prompt tokens. What is undecided is told by `masked`, never by a token
    being the mask id: a prompt may hold that id as text.
    """

    request: Generate
    epoch: int
    order: int
    """Arrival number in this engine: the older one goes first."""
    spec: ModelSpec
    text: TextDecoder
    decoding: Decoding
    block_length: int
    stop_ids: frozenset[int]
    limit: int
    """First position that the request may not produce: prompt + max_tokens, or the model's length."""
    tokens: list[int]
    """Prompt, committed blocks, and the active block's canvas (mask id where undecided)."""
    block_start: int
    masked: list[bool]
    confidence: list[float]
    published: int
    """First position not yet in a delta."""
    settled: int
    """End of the contiguous decided prefix whose tokens the text decoder has seen."""
    seq: int
    block: int
    nfe: int
    step: int = 0
    cached: int = 0
    """Positions whose keys and values in the pages are final."""
    pages: list[int] = field(default_factory=list[int])
    pending_text: str = ""
    closed: int | None = None
    """Position of a stop token accepted in the active block: nothing behind it is wanted."""
    stop: Stop | None = None
    planned_at: int = 0
    """Step number at which the sequence was last in a plan."""

    # --- construction

    @classmethod
    def arrive(cls, arrival: Arrival, order: int, spec: ModelSpec, text: TextDecoder) -> "Sequence":
        """Rebuild the state at the last committed block boundary."""
        request, resume = arrival.request, arrival.resume
        limits = request.limits
        block_length = request.block_length or spec.block_length
        decoding = request.decoding or spec.decoding
        if limits.ignore_eos and decoding.filler_rules:
            # Filler is ordinary output for a request that runs on behind its end.
            decoding = decoding.model_copy(update={"filler_rules": False})
        stop_ids = () if limits.ignore_eos else (*spec.stop_token_ids, *limits.stop_token_ids)
        produced = len(request.prompt) + len(resume.token_ids)
        sequence = cls(
            request=request,
            epoch=arrival.epoch,
            order=order,
            spec=spec,
            text=text,
            decoding=decoding,
            block_length=block_length,
            stop_ids=frozenset(stop_ids),
            limit=min(len(request.prompt) + limits.max_tokens, spec.max_model_len),
            tokens=[*request.prompt, *resume.token_ids],
            block_start=0,
            masked=[],
            confidence=[],
            published=produced,
            settled=produced,
            seq=resume.seq,
            block=resume.block,
            nfe=resume.nfe,
        )
        # Text that the former owner held back (half a character, half a stop string) becomes pending again.
        sequence.pending_text = text.push(resume.token_ids) if resume.token_ids else ""
        sequence._open(produced)
        return sequence

    # --- derived facts

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)

    @property
    def block_end(self) -> int:
        return self.block_start + self.block_length

    @property
    def at_boundary(self) -> bool:
        """No forward has been spent on the active block: the state is just token ids."""
        return self.step == 0

    @property
    def wanted_end(self) -> int:
        """First position of the active block that nobody waits for."""
        end = min(self.block_end, self.limit)
        return end if self.closed is None else min(end, self.closed)

    @property
    def wanted(self) -> tuple[bool, ...]:
        """[block length]: undecided positions that the request needs."""
        end = self.wanted_end - self.block_start
        return tuple(masked and index < end for index, masked in enumerate(self.masked))

    @property
    def complete(self) -> bool:
        """The active block is decided as far as it is needed."""
        if self.stop is not None and self.decoding.filler_rules:
            return True
        return not any(self.wanted)

    @property
    def usage(self) -> Usage:
        return Usage(self.prompt_length, self.published - self.prompt_length, self.nfe, self.block)

    # --- one step

    def row(self, end: int) -> Row:
        """Return the row for query positions [cached, end); `end` is the block's end, or a chunk boundary before it."""
        return Row(
            request_id=self.id,
            start=self.cached,
            token_ids=tuple(self.tokens[self.cached : end]),
            visible_end=visible_ends(self.spec.attention, self.cached, end, self.block_length, end),
            pages=tuple(self.pages),
            canvas=self._canvas() if end == self.block_end else None,
        )

    def _canvas(self) -> Canvas:
        limits = self.request.limits
        # Without a minimum a stop may come at once, also in the block that the prompt's end shares.
        too_early = limits.min_tokens > 0 and self.block_start < self.prompt_length + limits.min_tokens
        return Canvas(
            start=self.block_start,
            masked=self.wanted,
            step=self.step,
            last=limits.max_nfe is not None and self.nfe + 1 >= limits.max_nfe,
            sampling=self.request.sampling,
            decoding=self.decoding,
            stop_token_ids=tuple(sorted(self.stop_ids)),
            forbidden=tuple(sorted(self.stop_ids)) if too_early else (),
        )

    def written(self, end: int) -> None:
        """A forward has written final keys and values up to `end` (a chunk of the prompt)."""
        self.cached = end

    def apply(self, accepted: ReadOnly[bool], tokens: ReadOnly[int], confidence: ReadOnly[float]) -> int:
        """Write one step's decision on the canvas; return how many positions were accepted.

        [block length] each. The forward also made everything before the block final.
        """
        wanted = self.wanted
        self.cached = self.block_start
        self.step += 1
        self.nfe += 1
        count = 0
        for index, take in enumerate(accepted[: self.block_length]):
            if take and wanted[index]:
                self.tokens[self.block_start + index] = tokens[index]
                self.confidence[index] = confidence[index]
                self.masked[index] = False
                count += 1
        if self.decoding.filler_rules:
            self._close()
        self._settle()
        return count

    def _close(self) -> None:
        """Once a stop token is accepted, what stands behind it in the block is filler, without further forwards."""
        stop = first_of(self.tokens, self.stop_ids, self.published, self.wanted_end)
        self.closed = self.closed if stop is None else stop
        if self.closed is None or not self.spec.filler_ids:
            return
        for position in range(self.closed + 1, self.block_end):
            self.tokens[position] = self.spec.filler_ids[0]
            self.masked[position - self.block_start] = False

    def _settle(self) -> None:
        """Move the contiguous decided prefix on, feeding its tokens to the text decoder, until a stop."""
        limits = self.request.limits
        end = min(self.block_end, self.limit)
        while self.stop is None and self.settled < end and not self._is_masked(self.settled):
            position, token = self.settled, self.tokens[self.settled]
            if token in self.stop_ids:
                self.stop = Stop(position, "stop_token")
                return
            self.pending_text += self.text.push((token,))
            self.settled += 1
            if self.text.stopped:
                self.stop = Stop(self.settled, "stop_string")
            elif (run := limits.max_repetition_run) is not None:
                if repetition_run(self.tokens, self.prompt_length, position) >= run:
                    self.stop = Stop(self.settled, "max_repetition_run")

    def _is_masked(self, position: int) -> bool:
        return self.masked[position - self.block_start]

    # --- commits and ends

    def ending(self) -> FinishDetail | None:
        """Return why the request ends with the active block, now complete; None if it goes on."""
        if self.stop is not None:
            return self.stop.detail
        max_nfe = self.request.limits.max_nfe
        if self.limit <= self.block_end:
            cut = self.limit < self.prompt_length + self.request.limits.max_tokens
            return "max_model_len" if cut else "max_tokens"
        if max_nfe is not None and self.nfe >= max_nfe:
            return "max_nfe"
        return None

    def commit(self, ending: FinishDetail | None) -> Delta | None:
        """Publish the complete block; return its delta, or None if it adds neither token nor text (a lone stop)."""
        end = self.stop.position if self.stop is not None else min(self.block_end, self.limit)
        text, self.pending_text = self.pending_text, ""
        if ending is not None:
            text += self.text.flush()
        offset, token_ids = self.published - self.prompt_length, self.tokens[self.published : end]
        self.published = end
        block, self.block = self.block, self.block + 1
        if not token_ids and not text:
            return None
        self.seq += 1
        return Delta(
            id=self.id,
            seq=self.seq,
            epoch=self.epoch,
            block=block,
            offset=offset,
            token_ids=token_ids,
            text=text,
            nfe=self.nfe,
        )

    def enter_next_block(self) -> None:
        """Open the block behind the committed one; its keys become final with the next block's first forward."""
        self._open(self.block_end)

    def _open(self, first_undecided: int) -> None:
        """Make the block that holds `first_undecided` the active one, masked from there on."""
        self.block_start = first_undecided // self.block_length * self.block_length
        decided = first_undecided - self.block_start
        missing = self.block_length - decided
        self.tokens[first_undecided:] = [self.spec.mask_token_id] * missing
        self.masked = [False] * decided + [True] * missing
        self.confidence = [1.0] * decided + [0.0] * missing
        self.step = 0
        self.closed = None

    def evict(self) -> list[int]:
        """Give up the pages at a block boundary and return them; the committed tokens will be prefilled again."""
        if not self.at_boundary:
            raise RuntimeError(f"{self.id} is evicted in mid-block")
        pages, self.pages, self.cached = self.pages, [], 0
        return pages

    def snapshot(self) -> Snapshot:
        """Return the canvas of the active block, produced positions only."""
        start = max(self.block_start, self.prompt_length)
        positions = range(start, min(self.block_end, self.limit))
        return Snapshot(
            id=self.id,
            after=self.seq,
            epoch=self.epoch,
            block=self.block,
            offset=start - self.prompt_length,
            step=self.step,
            nfe=self.nfe,
            token_ids=[None if self._is_masked(position) else self.tokens[position] for position in positions],
            confidence=[round(self.confidence[position - self.block_start], 4) for position in positions],
        )

    def finished(self, detail: FinishDetail) -> Finished:
        self.seq += 1
        return Finished(
            id=self.id,
            seq=self.seq,
            epoch=self.epoch,
            reason=reason_of(detail),
            detail=detail,
            usage=self.usage,
        )

    def failed(self, code: FailCode, message: str, param: str | None = None) -> Failed:
        self.seq += 1
        return Failed(id=self.id, seq=self.seq, epoch=self.epoch, code=code, message=message, param=param)
