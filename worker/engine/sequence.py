"""The state of one request in the engine, and the only code that changes it."""

from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass, field
from typing import assert_never

from shared.commands import Generate
from shared.decoding import Decoding, JointThreshold, Renoise, SubBlock, Timed
from shared.events import Delta, FailCode, Failed, FinishDetail, Finished, Snapshot, TokenLogprob, Usage
from shared.holes import HOLE, count_filled, spans
from worker.engine.draft import PHASES, count_kept, drafted, on_trial
from worker.engine.infill import origin_of
from worker.engine.penalties import edits_of
from worker.engine.plan import UNDECIDED, Canvas, Edit, Guard, Guarded, Guide, Row, near_view, visible_ends
from worker.engine.ports import Arrival, RowDecision, TextDecoder
from worker.engine.prefix import extend_keys, share_unit
from worker.engine.stopping import Stop, first_of, reason_of, repetition_run
from worker.engine.window import Block, Window, next_window, reads_prompt_whole
from worker.models.spec import Commit, ModelSpec


@dataclass(slots=True, eq=False)
class Sequence:
    """Facts about one request.

    Positions are absolute: the prompt is [0, prompt_length), what is produced follows. The active block is
    [block_start, block_end); it may begin with prompt tokens. What is being decided is [block_start, canvas_end): the
    block, or more where a kind of sequence (`worker.engine.kinds`) works ahead. What is undecided is told by `masked`,
    never by a token being the mask id: a prompt may hold that id as text.
    """

    request: Generate
    epoch: int
    order: int
    """Arrival number in this engine: the older one goes first."""
    spec: ModelSpec
    text: TextDecoder
    decoding: Decoding
    block_length: int
    chosen_length: int | None
    """The block length, if a worker has chosen it: recorded with each block."""
    origin: int
    """Where blocks begin: 0, or the prompt's end."""
    stop_ids: frozenset[int]
    limit: int
    """First position that the request may not produce: prompt + max_tokens, or the model's length."""
    tokens: list[int]
    """Prompt, committed blocks, and the active block's canvas (mask id where undecided)."""
    block_start: int
    masked: list[bool]
    confidence: list[float]
    undecided_at_first: int
    """Wanted positions that were masked when the active block was opened."""
    published: int
    """First position not yet in a delta."""
    settled: int
    """End of the contiguous decided prefix whose tokens the text decoder has seen."""
    seq: int
    block: int
    nfe: int
    guard: Guard | None = None
    step: int = 0
    cached: int = 0
    """Positions whose keys and values in the pages are final."""
    pages: list[int] = field(default_factory=list[int])
    """Pages of positions 0.. in order; a guided request's alternate with those of its guide."""
    keys: list[bytes] = field(default_factory=list[bytes])
    """Keys of its first pages; see `worker.engine.prefix`."""
    shared: int = 0
    """Pages from the first on that others can find."""
    reused: int = 0
    """Prompt tokens that were not prefilled, because their pages were there."""
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict[int, TokenLogprob])
    """Of decided positions that are not published yet, if the request asks for them."""
    drafted: dict[int, int] = field(default_factory=dict[int, int])
    """Position to token: what the request's draft has for the active block."""
    phase: int = PHASES
    """Of the tests of the active block's draft; `PHASES` once they are done."""
    kept: int = 0
    """Published tokens that are what the draft had for them."""
    pending_text: str = ""
    edited: int = 0
    """Decided positions that the last forward revised."""
    edit_steps: int = 0
    """Forwards spent on the active block after its last mask was gone (token editing)."""
    idle_steps: int = 0
    """Forwards in a row that accepted nothing."""
    closed: int | None = None
    """Position of a stop token accepted in the active block: nothing behind it is wanted."""
    stop: Stop | None = None
    hurried: bool = False
    """Its time is up: the next denoise forward fills the block, which is the last."""
    leaving: bool = False
    """It is to be given back at its next block boundary."""
    planned_at: int = 0
    """Step number at which the sequence was last in a plan."""

    # --- construction

    @classmethod
    def arrive(
        cls, arrival: Arrival, order: int, spec: ModelSpec, text: TextDecoder, guard: Guard | None = None
    ) -> "Sequence":
        """Rebuild the state at the last committed block boundary."""
        request, resume = arrival.request, arrival.resume
        limits = request.limits
        limit = min(len(request.prompt) + (len(request.template or ()) or limits.max_tokens), spec.max_model_len)
        if request.template is not None:
            # One block, so that every hole sees what stands behind it.
            origin = origin_of(len(request.prompt), spec)
            block_length = max(1, limit - origin)
        else:
            origin = len(request.prompt) if spec.blocks_after_prompt else 0
            block_length = request.block_length or resume.block_length or spec.block_length or max(1, limit - origin)
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
            chosen_length=resume.block_length,
            origin=origin,
            stop_ids=frozenset(stop_ids),
            limit=limit,
            tokens=[*request.prompt, *resume.token_ids],
            block_start=0,
            masked=[],
            confidence=[],
            undecided_at_first=0,
            published=produced,
            settled=produced,
            seq=resume.seq,
            block=resume.block,
            nfe=resume.nfe,
            guard=guard,
        )
        if guard is not None:
            for token in resume.token_ids:
                guard.push(token)
            if guard.finished:
                sequence.stop = Stop(produced, "stop_token")
        # Text that the former owner held back (half a character, half a stop string) becomes pending again.
        sequence.pending_text = text.push(resume.token_ids) if resume.token_ids else ""
        sequence._recount_draft(resume.token_ids)
        sequence._open(produced)
        return sequence

    # --- derived facts

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def lora(self) -> tuple[tuple[str, float], ...]:
        """(digest, scale) of its adapters."""
        return tuple((use.digest, use.scale) for use in self.request.lora)

    @property
    def template(self) -> tuple[int, ...]:
        """What stands behind the prompt; empty where everything is decided."""
        return self.request.template or ()

    @property
    def context_block(self) -> int:
        """Block length of what stands before the active block: a template is a longer one."""
        return (self.spec.block_length or self.block_length) if self.template else self.block_length

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)

    @property
    def block_end(self) -> int:
        """End of what the next commit publishes; decoding may be under way behind it."""
        return self.canvas_end

    @property
    def canvas_end(self) -> int:
        """End of what is being decided."""
        return self.block_start + len(self.masked)

    @property
    def reach(self) -> int:
        """First position that no forward of the active block touches: what its pages must hold."""
        return len(self.tokens)

    @property
    def last_reach(self) -> int:
        """The furthest `reach` of a request that runs to its limit."""
        return max(self.origin - (self.origin - self.limit) // self.block_length * self.block_length, self.reach)

    @property
    def widest(self) -> int:
        """Positions that a forward which decides has at most, and cannot be cut to less."""
        return self.block_length

    @property
    def copies(self) -> int:
        """How often each position is run: a guided request has a second row, on pages of its own."""
        return 2 if self.request.cfg_scale > 0 else 1

    @property
    def at_boundary(self) -> bool:
        """No forward has been spent on the active block: the state is just token ids."""
        return self.step == 0

    @property
    def evictable(self) -> bool:
        """Nothing is lost with its pages but the time to write them again."""
        return self.at_boundary

    @property
    def wanted_end(self) -> int:
        """First position of the canvas that nobody waits for."""
        end = min(self.canvas_end, self.limit)
        if self.spent:
            # The last forward may have been one that only proposes the block's first token.
            end = min(end, self._known)
        return end if self.closed is None else min(end, self.closed)

    @property
    def wanted(self) -> tuple[bool, ...]:
        """[canvas length]: undecided positions of the sub-block in turn that the request needs."""
        first, end = self.part
        first, end = first - self.block_start, min(end, self.wanted_end) - self.block_start
        return tuple(masked and first <= index < end for index, masked in enumerate(self.masked))

    @property
    def part(self) -> tuple[int, int]:
        """The first sub-block with an undecided wanted position; the whole block where there are none."""
        length = self.decoding.sub_block_length if isinstance(self.decoding, SubBlock) else None
        if length is None or self._last:
            return self.block_start, self.canvas_end
        wanted = self.wanted_end - self.block_start
        first = next((index for index, masked in enumerate(self.masked[:wanted]) if masked), 0) // length * length
        return self.block_start + first, min(self.block_start + first + length, self.canvas_end)

    @property
    def shareable_end(self) -> int:
        """How far its text may be found written: to the active block, less a token whose row proposes the next."""
        seeds = self.spec.commit is Commit.SEEDED and self.masked[0]
        return self.block_start - 1 if seeds else self.block_start

    def page_keys(self, page_size: int, end: int) -> list[bytes]:
        """Return the keys of its pages in [0, end), an end of final tokens; none where they cannot be shared."""
        unit = share_unit(self.spec, self.context_block)
        if unit is None or page_size % unit or not self.request.cache_prompt or self.copies > 1:
            return []
        extend_keys(self.keys, self.tokens, page_size, unit, end, repr(self.lora).encode() if self.lora else b"")
        return self.keys[: max(end, 0) // page_size]

    def hold(self, shared: list[int], pages: list[int], page_size: int) -> None:
        """Begin with pages of which the first are written already."""
        self.pages = [*shared, *pages]
        self.shared, self.cached = len(shared), len(shared) * page_size
        self.reused = max(self.reused, min(self.cached, self.prompt_length))

    @property
    def complete(self) -> bool:
        """The active block is decided as far as it is needed."""
        if self.stop is not None and self.decoding.early_stop:
            return True
        if any(self.wanted[: self.block_end - self.block_start]):
            return False
        if not isinstance(self.decoding, JointThreshold) or self.spent or self.hurried:
            return True
        # Editing goes on until a forward without masks changes nothing, within its budget.
        most = self.decoding.max_post_steps
        return self.edit_steps >= most or (self.edit_steps > 0 and self.edited == 0)

    @property
    def patience(self) -> int:
        """Forwards in a row that may accept nothing: a schedule by time has shares below one position."""
        steps = getattr(self.decoding, "steps", None) or self.undecided_at_first
        if isinstance(self.decoding, Renoise):
            return self.decoding.max_denoising_steps
        return steps if isinstance(self.decoding, Timed) else 0

    @property
    def usage(self) -> Usage:
        prompt, produced = self.prompt_length, self.published - self.prompt_length
        if self.template:
            # Text that was given is no output.
            prompt += sum(token != HOLE for token in self.template)
            produced = count_filled(self.template, self.tokens[self.prompt_length : self.published], self.stop_ids)
        drafted = len(self.request.draft or ())
        kept = min(self.kept, drafted)
        rejected = drafted - kept
        return Usage(prompt, produced, self.nfe, self.block, self.reused, kept, rejected, self.block_length)

    # --- one step

    def window(self) -> Window:
        """Return the query positions of the next forward."""
        if self.template and self.spec.commit is Commit.FUSED and self.cached < self.block_start:
            # What stands before is in blocks of another length, and so in a forward of its own.
            divisible = not self.spec.blocks_after_prompt
            return Window(self.cached, self.block_start, denoises=False, divisible=divisible)
        part = self.part
        block = Block(
            start=self.block_start,
            end=self.canvas_end,
            canvas_end=len(self.tokens),
            cached=self.cached,
            known=self._known,
            fresh=self.step == 0,
            first_masked=self.masked[0],
            part=part,
            part_masked=self._is_masked(part[0]),
            part_cached=isinstance(self.decoding, SubBlock) and self.decoding.block_cache,
        )
        cache = self.request.cache or self.spec.cache
        return next_window(self.spec.commit, block, cache, reads_prompt_whole(self.spec))

    def row(self, window: Window, end: int) -> Row:
        """Return the row of a window that is cut at `end`."""
        spec, cut = self.spec, end < window.end
        positions = None
        tokens = self._seen(range(window.start, end))
        if spec.commit is Commit.REORDERED and window.denoises:
            positions = tuple(sorted(range(window.start, end), key=self._is_open))
            tokens = [self.tokens[position] for position in positions]
        # Whoever sees its whole canvas also sees what this forward does not run.
        canvas_end = len(self.tokens) if spec.commit is Commit.REFRESHED else end
        # What lies before the block may be read in another way than the block.
        ends, near = list[int](), list[tuple[int, int]]()
        middle = min(max(window.start, self.block_start), end)
        context = spec.context or spec.attention
        before = (self.context_block, 0 if self.template and not spec.blocks_after_prompt else self.origin)
        for attention, first, last, (length, origin) in (
            (context, window.start, middle, before),
            (spec.attention, middle, end, (self.block_length, self.origin)),
        ):
            ends += visible_ends(attention, first, last, length, canvas_end, origin)
            if spec.sliding_window:
                reach, begin = spec.sliding_window, self.block_start
                near += [near_view(attention, position, reach, begin, canvas_end) for position in range(first, last)]
        if cut or not (window.denoises or window.seeds):
            canvas = None
        else:
            canvas = self._seed_canvas() if window.seeds else self._canvas()
        return Row(
            request_id=self.id,
            start=window.start,
            token_ids=tuple(tokens),
            visible_end=tuple(ends),
            pages=tuple(self.pages[:: self.copies]),
            canvas=canvas,
            positions=positions,
            near=tuple(near) if spec.sliding_window else None,
            lora=self.lora,
            guide=self._guide(positions or range(window.start, end)) if self.copies > 1 else None,
        )

    def _guide(self, positions: ReadOnly[int]) -> Guide:
        mask = self.spec.mask_token_id
        return Guide(
            token_ids=tuple(
                mask if p < self.prompt_length else token
                for p, token in zip(positions, self._seen(positions), strict=True)
            ),
            pages=tuple(self.pages[1 :: self.copies]),
            scale=self.request.cfg_scale,
        )

    @property
    def _tests(self) -> bool:
        """The next forward puts the draft to the test."""
        return self.phase < PHASES and not self._last

    def _seen(self, positions: ReadOnly[int]) -> list[int]:
        """Return what a forward reads: in a draft's first test, the draft beside what is tested."""
        tokens = self.tokens
        if not (self.phase == 0 and self._tests):
            return [tokens[p] for p in positions]
        shown = {p: token for p, token in self.drafted.items() if p % PHASES != 0 and self._is_open(p)}
        return [shown.get(p, tokens[p]) for p in positions]

    def _canvas(self) -> Canvas:
        wanted, last = self.wanted, self._last
        if self._tests:
            wanted = on_trial(self.drafted, wanted, self.block_start, self.phase)
        elif (
            self.decoding.renewal_decides == "first"
            and not last
            and self.spec.commit is Commit.REFRESHED
            and self.step == 0
        ):
            first = next((index for index, masked in enumerate(wanted) if masked), 0)
            last, wanted = True, tuple(index == first for index in range(len(wanted)))
        editable: tuple[bool, ...] = ()
        if isinstance(self.decoding, JointThreshold) and self.guard is None and not self._tests:
            first = max(self.prompt_length - self.block_start, 0)
            editable = tuple(
                index >= first and not masked and not self._stands(self.block_start + index)
                for index, masked in enumerate(self.masked)
            )
        return Canvas(
            start=self.block_start,
            masked=wanted,
            step=self.step,
            last=last,
            sampling=self.request.sampling,
            decoding=self.decoding,
            stop_token_ids=tuple(sorted(self.stop_ids)),
            shift=self.spec.logit_shift,
            editable=editable,
            undecided_at_first=self.undecided_at_first,
            forbidden=self._forbidden,
            limit=self.limit,
            tests_draft=self._tests,
            before=tuple(self.tokens[max(0, self.block_start - self.block_length) : self.block_start]),
            edits=self._edits,
            logprobs=self.request.logprobs,
            guarded=self._guarded,
        )

    def _seed_canvas(self) -> Canvas:
        return Canvas(
            start=self.block_start,
            masked=(True, *[False] * (len(self.masked) - 1)),
            step=0,
            last=True,
            sampling=self.request.sampling,
            decoding=self.decoding,
            stop_token_ids=tuple(sorted(self.stop_ids)),
            shift=1,
            seed=True,
            undecided_at_first=1,
            forbidden=self._forbidden,
            edits=self._edits,
            logprobs=self.request.logprobs,
            guarded=self._guarded,
        )

    @property
    def _guarded(self) -> Guarded | None:
        if self.guard is None:
            return None
        block = zip(self.tokens[self.block_start : self.canvas_end], self.masked, strict=True)
        return Guarded(
            guard=self.guard,
            frontier=self.settled - self.block_start,
            tokens=tuple(UNDECIDED if masked else token for token, masked in block),
            room=self.limit - self.settled,
            may_stop=not self._forbidden,
        )

    @property
    def _last(self) -> bool:
        max_nfe = self.request.limits.max_nfe
        return self.hurried or (max_nfe is not None and self.nfe + 1 >= max_nfe)

    @property
    def spent(self) -> bool:
        """All forwards that the request may take are taken."""
        max_nfe = self.request.limits.max_nfe
        return max_nfe is not None and self.nfe >= max_nfe

    @property
    def _forbidden(self) -> tuple[int, ...]:
        least = self.request.limits.min_tokens
        # Without a minimum a stop may come at once, also in the block that the prompt's end shares.
        too_early = least > 0 and self.block_start < self.prompt_length + least
        return tuple(sorted(self.stop_ids)) if too_early else ()

    @property
    def _edits(self) -> tuple[Edit, ...]:
        if self.request.edits is None:
            return ()
        decided = (self.tokens[p] for p in range(self.prompt_length, self.canvas_end) if not self._is_open(p))
        return edits_of(self.request.edits, self.request.prompt, decided)

    @property
    def _known(self) -> int:
        """End of the contiguous decided prefix; unlike `settled` it may lie behind a stop."""
        return self.block_start + next((i for i, masked in enumerate(self.masked) if masked), len(self.masked))

    def _stands(self, position: int) -> bool:
        """True for text of the template, which nobody decides."""
        index = position - self.prompt_length
        return 0 <= index < len(self.template) and self.template[index] != HOLE

    def _is_open(self, position: int) -> bool:
        return position >= self.block_start and self._is_masked(position)

    def written(self, end: int) -> None:
        """A forward has written final keys and values up to `end`, deciding nothing."""
        self.cached = end

    def apply(self, canvas: Canvas, decided: RowDecision) -> None:
        """Write one step's decision on the canvas."""
        accepted, tokens, confidence = decided.accepted, decided.tokens, decided.confidence
        self._advance_cache(canvas)
        self.nfe += 1
        if not canvas.seed:
            self.step += 1
            self.edit_steps += not any(canvas.masked)
        if canvas.tests_draft:
            kept = zip(tokens, range(self.block_start, self.block_end), strict=False)
            accepted = [self.drafted.get(position) == token for token, position in kept]
            self._end_phase()
        taken, self.edited = 0, 0
        for index, take in enumerate(accepted[: len(self.masked)]):
            position = self.block_start + index
            if not take:
                if isinstance(self.decoding, Renoise):
                    # Nothing is decided yet: this is what the next forward reads.
                    self.tokens[position], self.confidence[index] = tokens[index], confidence[index]
                continue
            if canvas.masked[index]:
                self.masked[index] = False
                taken += 1
            elif canvas.editable and canvas.editable[index]:
                self.edited += tokens[index] != self.tokens[position]
            else:
                continue
            self.tokens[position], self.confidence[index] = tokens[index], confidence[index]
            if decided.logprobs and (logprob := decided.logprobs[index]) is not None:
                self.logprobs[position] = logprob
        self.idle_steps = 0 if taken or canvas.tests_draft or not any(canvas.masked) else self.idle_steps + 1
        if self.decoding.filler_rules:
            self._close()
        if not isinstance(self.decoding, JointThreshold) or self.complete:
            # A token that may still be revised is nobody's yet.
            self._settle()

    def _advance_cache(self, canvas: Canvas) -> None:
        """Note which keys the forward over `canvas` has made final."""
        match self.spec.commit:
            case Commit.FUSED | Commit.ENCODED:
                self.cached = self.block_start
            case Commit.SEEDED:
                self.cached = canvas.start
            case Commit.REFRESHED:
                self.cached = 0
            case Commit.REORDERED:
                self.cached = self._known
            case _:
                assert_never(self.spec.commit)

    def _close(self) -> None:
        """Once a stop token is accepted, what stands behind it in the block is filler, without further forwards."""
        if self.template:
            self._close_holes()
            return
        stop = first_of(self.tokens, self.stop_ids, self.published, self.wanted_end)
        self.closed = self.closed if stop is None else stop
        if self.closed is None or not self.spec.filler_ids:
            return
        for position in range(self.closed + 1, self.canvas_end):
            self.tokens[position] = self.spec.filler_ids[0]
            self.masked[position - self.block_start] = False

    def _close_holes(self) -> None:
        """The same for each hole of a template."""
        for start, end in spans(self.template):
            first, last = self.prompt_length + start, min(self.prompt_length + end, self.limit)
            stop = first_of(self.tokens, self.stop_ids, first, last)
            if stop is None or not self.spec.filler_ids:
                continue
            for position in range(stop + 1, last):
                self.tokens[position] = self.spec.filler_ids[0]
                self.masked[position - self.block_start] = False

    def _settle(self) -> None:
        """Move the contiguous decided prefix on, feeding its tokens to the text decoder, until a stop."""
        limits = self.request.limits
        end = min(self.block_end, self.limit)
        while self.stop is None and self.settled < end and not self._is_masked(self.settled):
            position, token = self.settled, self.tokens[self.settled]
            if token in self.stop_ids and not self.template:
                self.stop = Stop(position, "stop_token")
                return
            self.pending_text += self.text.push((token,))
            self.settled += 1
            if self.guard is not None:
                self.guard.push(token)
            if self.guard is not None and self.guard.finished:
                self.stop = Stop(self.settled, "stop_token")
            elif self.text.stopped:
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
        if self.wanted_end < min(self.block_end, self.limit) and self.spent:
            return "max_nfe"
        if self.template and not self.spent and not self.hurried:
            return "filled"
        if self.template:
            return "deadline" if self.hurried else "max_nfe"
        if self.limit <= self.block_end:
            cut = self.limit < self.prompt_length + self.request.limits.max_tokens
            return "max_model_len" if cut else "max_tokens"
        if self.block_end < self.canvas_end:
            # What its last forward has filled behind the block follows.
            return None
        if self.hurried:
            return "deadline"
        return "max_nfe" if self.spent else None

    def commit(self, ending: FinishDetail | None) -> Delta | None:
        """Publish the complete block; return its delta, or None if it adds neither token nor text (a lone stop)."""
        end = min(self.block_end, self.limit)
        if self.stop is not None:
            end = self.stop.position
        elif self.spent:
            end = min(end, self._known)
        text, self.pending_text = self.pending_text, ""
        if ending is not None:
            text += self.text.flush()
        offset, token_ids = self.published - self.prompt_length, self.tokens[self.published : end]
        logprobs = None
        if self.request.logprobs is not None:
            logprobs = [self.logprobs.get(position, TokenLogprob(0.0)) for position in range(self.published, end)]
            self.logprobs = {position: found for position, found in self.logprobs.items() if position >= end}
        if self.request.draft is not None:
            first = self.published - self.prompt_length
            self.kept += count_kept(self.request.draft, self._produced(end), first, end - self.prompt_length)
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
            logprobs=logprobs,
            block_length=self.chosen_length,
        )

    def enter_next_block(self) -> None:
        """Open the block behind the committed one."""
        self._open(self.block_end)

    def _open(self, first_undecided: int) -> None:
        """Make the block that holds `first_undecided` the active one, masked from there on."""
        length, spec = self.block_length, self.spec
        start = self.origin + (first_undecided - self.origin) // length * length
        end = start + length
        if spec.commit is Commit.REORDERED:
            end = min(end, max(self.limit, first_undecided))
        # A family that sees its whole canvas has the later blocks before it, all masked.
        reach = self.origin - (self.origin - self.limit) // length * length
        reach = max(end, reach) if spec.commit is Commit.REFRESHED else end
        self.tokens[first_undecided:] = [spec.mask_token_id] * (reach - first_undecided)
        decided = first_undecided - start
        self.block_start = start
        self.masked = [False] * decided + [True] * (end - first_undecided)
        self.confidence = [1.0] * decided + [0.0] * (end - first_undecided)
        self.undecided_at_first = max(0, min(end, self.limit) - first_undecided)
        for position in range(first_undecided, min(end, self.limit)):
            if self._stands(position):
                self.tokens[position] = self.template[position - self.prompt_length]
                self.masked[position - start], self.confidence[position - start] = False, 1.0
                self.undecided_at_first -= 1
        self.step = self.edited = self.edit_steps = self.idle_steps = 0
        self.closed = None
        if self.request.draft is not None:
            count = max(0, min(end, self.limit) - first_undecided)
            told = drafted(self.request.draft, self._produced(first_undecided), count)
            self.drafted = dict(enumerate(told, first_undecided))
            self.phase = -1
            self._end_phase()

    def _end_phase(self) -> None:
        """Go on to the next test that has something to test."""
        self.phase += 1
        while self.phase < PHASES and not any(on_trial(self.drafted, self.wanted, self.block_start, self.phase)):
            self.phase += 1

    def _produced(self, end: int) -> list[int]:
        return self.tokens[self.prompt_length : end]

    def _recount_draft(self, produced: ReadOnly[int]) -> None:
        """Count what former owners have kept of the draft, block by block as they did."""
        if self.request.draft is None:
            return
        first = 0
        while first < len(produced):
            position = self.prompt_length + first
            end = self.origin + ((position - self.origin) // self.block_length + 1) * self.block_length
            last = min(end - self.prompt_length, len(produced))
            self.kept += count_kept(self.request.draft, produced, first, last)
            first = last

    def evict(self) -> list[int]:
        """Give up the pages and return them; the committed tokens will be prefilled again."""
        if not self.evictable:
            raise RuntimeError(f"{self.id} is evicted in mid-block")
        pages, self.pages, self.cached, self.shared = self.pages, [], 0, 0
        return pages

    def snapshot(self) -> Snapshot:
        """Return the canvas, produced positions only."""
        start = max(self.block_start, self.published)
        positions = range(start, min(self.canvas_end, self.limit))
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
