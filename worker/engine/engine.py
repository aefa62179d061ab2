"""One step of continuous-batched block diffusion, in order. No clock, no I/O, one thread."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count

from shared.commands import Generate
from shared.decoding import Renoise
from shared.events import Event, FailCode
from worker.engine.embedding import Embedding
from worker.engine.infill import refusal_of
from worker.engine.kinds import decodes_by, kind_of
from worker.engine.load_aware import leaves_choice
from worker.engine.plan import Canvas, DeadEnd, Guard
from worker.engine.ports import Arrival, Decision, DeviceFull, Forward, Inbox, Load, Outbox, Resume, TextDecoder
from worker.engine.scheduler import BatchLimits, CacheShape, Scheduler
from worker.engine.sequence import Sequence
from worker.models.spec import Commit, ModelSpec

MakeText = Callable[[Generate, Resume], TextDecoder]
MakeGuard = Callable[[Generate], Guard | None]
"""Raises `ValueError` for a constraint that cannot be followed; None without a constraint."""
ChooseLength = Callable[[int], int]
"""From how many requests run together to the block length of one that leaves it to the worker."""


def no_guard(request: Generate) -> None:
    """The guard of a worker that follows no constraint."""
    if request.constraint is not None:
        raise ValueError("this worker follows no constraint")


class Engine:
    """Turns commands into events, one forward a step.

    `forward` runs a plan on the device; `make_text` builds the text decoder of a request (stop strings, characters
    already published), `make_guard` what keeps it to its constraint, `choose_length` its block length where that is
    left to the worker (unset: it is the model's own). Every arrival ends in exactly one of: a terminal event, a
    hand-back, a drop.
    """

    def __init__(
        self,
        spec: ModelSpec,
        cache: CacheShape,
        limits: BatchLimits,
        forward: Forward,
        make_text: MakeText,
        make_guard: MakeGuard = no_guard,
        choose_length: ChooseLength | None = None,
    ) -> None:
        self._spec = spec
        self._scheduler = Scheduler(cache, limits)
        self._forward = forward
        self._make_text = make_text
        self._make_guard = make_guard
        self.choose_length = choose_length
        self._order = count()
        self._steps = 0
        self._handing_back = False
        self._some_leave = False

    @property
    def idle(self) -> bool:
        return not self._scheduler.running and not self._scheduler.waiting

    def load(self) -> Load:
        scheduler = self._scheduler
        return Load(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            free_pages=scheduler.pool.free,
            total_pages=scheduler.pool.num_pages,
            steps=self._steps,
            preemptions=scheduler.preemptions,
            cached_tokens=scheduler.cached_tokens,
        )

    def step(self, inbox: Inbox) -> Outbox:
        """Apply the inbox, run one forward over the rows that fit, and return what became certain."""
        outbox = Outbox()
        self._take_in(inbox, outbox)
        if self._handing_back or self._some_leave:
            self._give_back_at_boundaries(outbox)
        self._steps += 1
        plan, sequences = self._scheduler.plan(self._steps)
        if not plan.rows:
            return outbox
        try:
            decision = self._forward(plan)
        except DeviceFull:
            # All state is as it was: the rows come again, fewer in a step. One for which there is none alone ends.
            if not self._scheduler.shortage.halve(plan):
                self._fail(sequences[0], "out_of_memory", "no memory for this request's step", outbox.events)
            return outbox
        self._scheduler.shortage.passed(len(self._scheduler.running))
        for index, (row, sequence) in enumerate(zip(plan.rows, sequences, strict=True)):
            if isinstance(sequence, Embedding):
                self._gather(sequence, row.end, decision.pooled[index], outbox.events)
            elif row.canvas is None:
                sequence.written(row.end)
            elif index in decision.postponed:
                self._postpone(sequence, decision.postponed[index])
            else:
                self._decide(sequence, row.canvas, decision, index, outbox.events)
        return outbox

    # --- arrivals and departures

    def _take_in(self, inbox: Inbox, outbox: Outbox) -> None:
        self._handing_back = self._handing_back or inbox.hand_back
        if inbox.flush:
            self._scheduler.pool.forget_all()
        for request_id in inbox.drops:
            sequence = self._scheduler.find(request_id)
            if sequence is not None:
                self._scheduler.remove(sequence)
        together = len(self._scheduler.running) + len(self._scheduler.waiting) + len(inbox.arrivals)
        for arrival in inbox.arrivals:
            self._arrive(self._with_length(arrival, together), outbox.events)
        for request_id, reason in inbox.aborts:
            sequence = self._scheduler.find(request_id)
            if sequence is None:
                continue
            self._scheduler.remove(sequence)
            if reason == "expired":
                outbox.events.append(sequence.failed("expired", "the request's time is over"))
            else:
                outbox.events.append(sequence.finished("aborted"))

        for request_id in inbox.hurries:
            sequence = self._scheduler.find(request_id)
            if sequence is not None:
                sequence.hurried = True
        for request_id in inbox.returns:
            sequence = self._scheduler.find(request_id)
            if sequence is not None:
                sequence.leaving = self._some_leave = True

    def _with_length(self, arrival: Arrival, together: int) -> Arrival:
        """Choose the block length of a request that nobody has begun, if it is left to the worker."""
        resume, spec = arrival.resume, self._spec
        if self.choose_length is None or resume.block or not leaves_choice(arrival.request, spec):
            return arrival
        length = self.choose_length(min(together, self._scheduler.limits.max_rows))
        # The model's own needs no record: it is what everybody takes where there is none.
        chosen = length if length != spec.block_length else None
        return replace(arrival, resume=replace(resume, block_length=chosen))

    def _arrive(self, arrival: Arrival, events: list[Event]) -> None:
        request = arrival.request
        text = self._make_text(request, arrival.resume)
        kind = Embedding if request.embed else kind_of(self._spec, request)
        order = next(self._order)
        try:
            guard = None if request.embed else self._make_guard(request)
            sequence = kind.arrive(arrival, order, self._spec, text, guard)
            refusal = self._refusal(sequence)
        except (ValueError, DeadEnd) as error:
            free = replace(arrival, request=request.model_copy(update={"constraint": None}))
            sequence = Sequence.arrive(free, order, self._spec, text)
            refusal = "unsupported", str(error), "constraint"
        if refusal is not None:
            events.append(sequence.failed(*refusal))
        elif (sequence.published >= sequence.limit and not request.embed) or sequence.stop is not None:
            # The former owner committed the last block and died before it could say so.
            ending = sequence.ending() or "max_tokens"
            events.append(sequence.finished(ending))
        else:
            self._scheduler.add(sequence)

    def _refusal(self, sequence: Sequence) -> tuple[FailCode, str, str | None] | None:
        """Return why the request can never run, before it takes anything."""
        spec, request = self._spec, sequence.request
        biased = tuple(token for token, _ in request.edits.logit_bias) if request.edits else ()
        for param, token_ids in (
            ("prompt", request.prompt),
            ("stop_token_ids", request.limits.stop_token_ids),
            ("logit_bias", biased),
        ):
            if not all(0 <= token < spec.vocab_size for token in token_ids):
                return "invalid_request", f"token ids must be in [0, {spec.vocab_size})", param
        if request.template is not None or request.draft is not None:
            if type(sequence) not in (Sequence, Embedding):
                return "unsupported", "this strategy is at work on more than one block of an answer", "decoding"
            refusal = refusal_of(request, spec)
            if refusal is not None:
                return refusal
        if request.embed and spec.commit is Commit.ENCODED:
            return "unsupported", "this model has no embeddings", "embed"
        if sequence.prompt_length >= spec.max_model_len:
            message = f"the prompt has {sequence.prompt_length} tokens; this model takes {spec.max_model_len} in all"
            return "too_long", message, "prompt"
        if spec.fixed_block_length and not request.embed and sequence.block_length != spec.block_length:
            return "unsupported", f"this model decodes blocks of {spec.block_length}", "block_length"
        if not decodes_by(spec, sequence.decoding):
            return "unsupported", f"this model does not decode by {sequence.decoding.strategy}", "decoding"
        if sequence.guard is not None and isinstance(spec.decoding, Renoise):
            return "unsupported", "this model decides a whole canvas at once and cannot follow a grammar", "constraint"
        if request.cfg_scale > 0 and spec.commit is Commit.ENCODED:
            return "unsupported", "this model is not guided", "cfg_scale"
        if self._scheduler.block_too_long(sequence):
            if sequence.widest > sequence.block_length:
                message = f"{sequence.widest} tokens in a forward are more than this worker runs at once"
                return "invalid_request", message, "decoding"
            largest = self._scheduler.limits.largest_block // sequence.copies
            if request.template is not None:
                message = f"holes and the text behind them are one block of {sequence.block_length} tokens; this model "
                return "too_long", f"{message}takes {largest} at most", "template"
            message = f"block_length is {sequence.block_length}; this model takes {largest} at most"
            return "invalid_request", message, "block_length"
        if not self._scheduler.can_ever_fit(sequence):
            pool = self._scheduler.pool
            message = (
                f"{sequence.limit} tokens, prompt and output, in blocks of {sequence.block_length} do not fit: "
                f"this model keeps {pool.num_pages * pool.page_size // sequence.copies} tokens, whole blocks"
            )
            return "too_long", message, "max_tokens"
        return None

    def _give_back_at_boundaries(self, outbox: Outbox) -> None:
        scheduler = self._scheduler
        leaving = [s for s in (*scheduler.running, *scheduler.waiting) if self._handing_back or s.leaving]
        self._some_leave = any(s.leaving and not s.at_boundary for s in leaving)
        for sequence in [s for s in leaving if s.at_boundary]:
            scheduler.remove(sequence)
            outbox.handed_back.append(sequence.id)

    # --- decisions

    def _decide(self, sequence: Sequence, canvas: Canvas, decision: Decision, index: int, events: list[Event]) -> None:
        failure = decision.failed[index]
        if failure is not None:
            self._break_off(sequence, failure, events)
            return
        if index in decision.dead_ends:
            self._fail(sequence, "unsupported", decision.dead_ends[index], events)
            return
        try:
            sequence.apply(canvas, decision.of_row(index))
        except DeadEnd as error:
            self._fail(sequence, "unsupported", str(error), events)
            return
        if sequence.idle_steps > sequence.patience:
            # A strategy that accepts nothing would run for ever.
            self._fail(sequence, "internal", "the decoding strategy made no progress", events)
        elif sequence.complete:
            self._commit(sequence, events)
        elif sequence.request.preview is not None:
            events.append(sequence.snapshot())

    def _postpone(self, sequence: Sequence, written: int | None) -> None:
        if written is not None:
            sequence.written(written)
        # It goes first in the next step: what has been prepared for it there would be lost otherwise.
        sequence.planned_at = 0

    def _gather(self, sequence: Embedding, end: int, total: list[float], events: list[Event]) -> None:
        if not sequence.gather(end, total):
            self._break_off(sequence, "the model's hidden states are not finite", events)
        elif sequence.whole:
            self._scheduler.remove(sequence)
            events.append(sequence.embedded())

    def _commit(self, sequence: Sequence, events: list[Event]) -> None:
        ending = None
        while ending is None and sequence.complete:
            ending = sequence.ending()
            if ending == "stop_token" and sequence.guard is not None and not sequence.guard.accepts:
                self._fail(sequence, "internal", "the text has ended before it was whole", events)
                return
            delta = sequence.commit(ending)
            if delta is not None:
                events.append(delta)
            if ending is None:
                # Which may be decided already, where several are under way.
                sequence.enter_next_block()
        if ending is not None:
            self._scheduler.remove(sequence)
            events.append(sequence.finished(ending))

    def _break_off(self, sequence: Sequence, failure: str, events: list[Event]) -> None:
        """Fail a request whose numbers are not finite: by its adapters' fault, if it runs under any."""
        uses = sequence.request.lora
        if uses:
            names = ", ".join(dict.fromkeys(use.name for use in uses))
            message = f"{failure} under this request's adapters: {names}"
            param = "model" if all(use.param == "model" for use in uses) else "lora"
            self._fail(sequence, "unsupported", message, events, param)
        else:
            self._fail(sequence, "nan", failure, events)

    def _fail(
        self, sequence: Sequence, code: FailCode, message: str, events: list[Event], param: str | None = None
    ) -> None:
        # What a faulty step wrote may be what made it fail.
        self._scheduler.remove(sequence, spoiled=True)
        events.append(sequence.failed(code, message, param))
