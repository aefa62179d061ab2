"""From a plan to a decision: runs a model's forward for rows of any kind, and owns the KV pages."""

from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass, field, fields, replace
from itertools import compress, groupby

import torch
from torch import Tensor

from kernels.attention import upload
from kernels.token_stats import Filters, Noise, Proposals
from shared.commands import Sampling
from shared.events import TokenLogprob
from worker.adapters.bank import AdapterBank
from worker.adapters.stack import AdapterStack, Residents
from worker.batch import Batch, run_batch
from worker.constraints.filling import Filling, Shown
from worker.decoding import decide, needs_entropy, needs_margin
from worker.decoding.stops_last import rank_without
from worker.decoding.types import BlockView, Draw, TokenStats, draw_position
from worker.draws import Draws
from worker.engine.plan import Canvas, Plan, Row
from worker.engine.ports import Decision
from worker.logit_edits import edit_logits
from worker.logprobs import report
from worker.models import LoadedModel
from worker.models.layers import LowRank, Pages
from worker.models.spec import NO_MASK, ModelSpec
from worker.parallel.messages import Join, MakePages
from worker.parallel.proposing import propose, propose_by, propose_message

# Logits live in float32 while they are looked at; more positions than this many elements allow go one part after
# another, and nothing is kept of a part but what it proposes. Only a guard that has to see a longer canvas than that
# keeps its logits until the last of them are there.
LOGITS_AT_ONCE = 2**25

_COLDEST = 1e-6


class Runner:
    """Implements `worker.engine.ports.Forward` for one model on one device."""

    def __init__(
        self,
        model: LoadedModel,
        num_pages: int,
        page_size: int,
        device: torch.device | str = "cpu",
        draw: Draw = draw_position,
        adapters: Residents | None = None,
        bank: AdapterBank | None = None,
    ) -> None:
        """`draw` is where random orders come from; tests put a reference's recorded numbers there. `adapters` has those
        that rows run under; `bank` has places for some of them, which somebody else fills.

        There is one page more, number `num_pages`: for writes that nobody reads.
        """
        spec = model.spec
        if model.lead is not None:
            model.lead.tell(
                MakePages(
                    num_pages,
                    page_size,
                    spec.text_vocab_size,
                    spec.mask_token_id,
                    spec.never_sampled,
                    spec.filler_ids,
                    model.kv_dtype is not None,
                )
            )
        self.model = model
        self._module = model.module
        self._spec = spec
        self._device = torch.device(device)
        self.page_size = page_size
        self.num_pages = num_pages
        self._draw = draw
        self._adapters = None if adapters is None else AdapterStack(adapters, self._device)
        self.bank = bank
        shape = (2, spec.num_layers, num_pages + 1, page_size, spec.num_kv_heads, spec.head_dim)
        keys, values = torch.zeros(shape, dtype=model.kv_dtype or model.dtype, device=self._device)
        self.kv: tuple[Pages, ...] = tuple(zip(keys, values, strict=True))
        if model.kv_dtype is not None:
            scales = torch.zeros((spec.num_layers, 2, *shape[2:5]), dtype=torch.float32, device=self._device)
            self.kv = tuple(zip(keys, values, scales, strict=True))
        self.barred = barred_ids(spec, self._device)
        self.filler_ids = torch.tensor(spec.filler_ids, dtype=torch.int64, device=self._device)

    @torch.inference_mode()
    def __call__(self, plan: Plan) -> Decision:
        """Write KV for every row's query range, then decide the rows with a canvas; the others get empty lists."""
        canvases = _Canvases.of(plan)
        pooled = _pooled(plan)
        read = canvases.sources + canvases.guide_sources
        hidden = self._forward(plan, read + [token for tokens in pooled.values() for token in tokens])
        decision = Decision.open(len(plan.rows))
        if canvases.members:
            self._decide(canvases, self._propose(hidden, canvases), decision)
        offset = len(read)
        for row, tokens in pooled.items():
            decision.pooled[row] = hidden[offset : offset + len(tokens)].double().sum(0).tolist()
            offset += len(tokens)
        return decision

    def _forward(self, plan: Plan, sources: list[int]) -> Tensor:
        """Return the hidden states [sources, hidden] that the proposals are read from."""
        batch = Batch.of(plan, sources, has_window=bool(self._spec.sliding_window))
        lora = self._lora([*plan.rows, *(row for row in plan.rows if row.guide is not None)])
        if self.model.lead is not None:
            self.model.lead.tell(batch)
        return run_batch(self.model, batch, self.kv, self.page_size, self._device, lora)

    def _lora(self, rows: ReadOnly[Row]) -> LowRank | None:
        if self._adapters is None:
            if any(row.lora for row in rows):
                raise ValueError("a row asks for adapters, and this runner has none")
            return None
        uses, counts = [row.lora for row in rows], [len(row.token_ids) for row in rows]
        placed = self.bank.of(uses, counts) if self.bank is not None and any(uses) else None
        return placed or self._adapters.of(uses, counts)

    def _propose(self, hidden: Tensor, canvases: "_Canvases") -> Proposals:
        """Return proposals for all wanted positions, in order of `canvases.places`."""
        decodings = [canvas.decoding for canvas in canvases.members]
        entropy, margin = needs_entropy(decodings), needs_margin(decodings)
        parts = [
            self._propose_part(hidden, canvases, part.start, part.stop, entropy, margin)
            for part in canvases.parts(max(1, LOGITS_AT_ONCE // self._spec.vocab_size))
        ]
        return parts[0] if len(parts) == 1 else _join(parts)

    def _propose_part(
        self, hidden: Tensor, canvases: "_Canvases", start: int, end: int, entropy: bool, margin: bool
    ) -> Proposals:
        if self.model.lead is None or not canvases.needs_no_logits(start, end):
            return self._rank(self._logits(hidden, canvases, start, end), canvases, start, entropy, margin)
        draws = canvases.draws(start, end)
        self.model.lead.tell(propose_message(start, end, draws, entropy, margin))
        return propose(self._module, hidden[start:end], draws, self.barred, entropy=entropy, margin=margin)

    def _rank(self, logits: Tensor, canvases: "_Canvases", start: int, entropy: bool, margin: bool) -> Proposals:
        """Return proposals for the wanted positions from `start` on, by their logits [n, vocab]."""
        draws = canvases.draws(start, start + logits.shape[0]).on(self._device)
        owners = canvases.owners[start : start + logits.shape[0]]
        members = [canvases.members[owner] for owner in owners]
        own, logits = logits, edit_logits(logits, members)
        found = propose_by(logits, draws, self.barred, entropy=entropy, margin=margin)
        logprobs = report(own, found.token, members, self.barred)
        canvases.logprobs.update({start + row: logprob for row, logprob in logprobs.items()})
        canvases.show(owners, logits, own, found.token, self.barred)
        rows = [i for i, canvas in enumerate(members) if canvas.decoding.stops_last and canvas.stop_token_ids]
        if not rows:
            return found
        struck = [(place, token) for place, i in enumerate(rows) for token in members[i].stop_token_ids]
        places, ids = zip(*struck, strict=True)
        index = self._integers(rows)
        warm = draws.temperature if draws.ranking is None else draws.ranking
        z = logits[index] if warm is None else logits[index] / warm[index][:, None]
        ranked = rank_without(z, found.token[index], (self._integers(places), self._integers(ids)))
        return replace(found, confidence=found.confidence.index_copy(0, index, ranked))

    def _logits(self, hidden: Tensor, canvases: "_Canvases", start: int, end: int) -> Tensor:
        """Return [end - start, vocab] for the wanted positions [start, end), guided ones moved by their guides."""
        logits = self._join_logits(hidden, range(start, end))
        guided = [(i, source) for i, source in enumerate(canvases.guided[start:end]) if source is not None]
        if not guided:
            return logits
        rows = self._integers([i for i, _ in guided])
        guide = self._join_logits(hidden, [len(canvases.owners) + source for _, source in guided])
        scale = self._floats([canvases.scales[canvases.owners[start + i]] for i, _ in guided])[:, None]
        own = logits[rows]
        return logits.float().index_copy(0, rows, guide + (scale + 1) * (own - guide))

    def _join_logits(self, hidden: Tensor, places: ReadOnly[int]) -> Tensor:
        """Return [places, vocab] of hidden states, from all ranks."""
        if self.model.lead is not None:
            self.model.lead.tell(Join([*places]))
        if isinstance(places, range):
            return self._module.logits(hidden[places.start : places.stop])
        return self._module.logits(hidden[self._integers(places)])

    def _decide(self, canvases: "_Canvases", proposals: Proposals, decision: Decision) -> None:
        """Fill in the rows of `decision` that have a canvas."""
        members = canvases.members
        shape = (len(members), canvases.width)
        places = self._integers(canvases.places)

        def spread(values: Tensor) -> Tensor:
            flat = values.new_zeros(shape[0] * shape[1])
            return flat.index_copy_(0, places, values).view(shape)

        def grid(values: list[tuple[int, ...]]) -> Tensor:
            return self._integers([[*row, *[0] * (canvases.width - len(row))] for row in values])

        looked_at = spread(torch.ones_like(proposals.finite))
        editable, current = torch.zeros_like(looked_at), torch.zeros_like(looked_at, dtype=torch.int64)
        if any(canvas.editable for canvas in members):
            editable = grid([canvas.editable for canvas in members]).bool()
            current = grid(canvases.current)
        view = BlockView(
            masked=looked_at & ~editable,
            step=self._integers([canvas.step for canvas in members]),
            length=self._integers([canvas.block_length or len(canvas.masked) for canvas in members]),
            seed=self._integers([canvas.sampling.seed for canvas in members]),
            start=self._integers([canvas.start for canvas in members]),
            editable=editable,
            current=current,
            undecided_at_first=self._integers([canvas.undecided_at_first for canvas in members]),
        )
        stats = TokenStats(
            token=spread(proposals.token),
            confidence=spread(proposals.confidence),
            entropy=spread(proposals.entropy),
            margin=spread(proposals.margin),
        )
        last = None
        if any(canvas.last for canvas in members):
            last = upload(torch.tensor([canvas.last for canvas in members]), self._device)
        filling = canvases.filling
        filling.replace(stats, view)
        accepted = decide(stats, view, [canvas.decoding for canvas in members], last, self.filler_ids, self._draw)
        broken = (looked_at & ~spread(proposals.finite)).any(-1)
        columns = (accepted.tolist(), stats.token.tolist(), stats.confidence.tolist(), broken.tolist())
        listed = zip(canvases.rows, members, *columns, strict=True)
        for number, (row, canvas, take, token, confidence, is_broken) in enumerate(listed):
            length = len(canvas.masked)
            take = filling.settle(number, take)
            if number in filling.faults:
                decision.dead_ends[row] = filling.faults[number]
            decision.accepted[row] = [False] * length if is_broken else take[:length]
            decision.tokens[row] = token[:length]
            decision.confidence[row] = confidence[:length]
            decision.failed[row] = "the model's logits are not finite" if is_broken else None
        for wanted, logprob in canvases.logprobs.items():
            member, column = divmod(canvases.places[wanted], canvases.width)
            row = canvases.rows[member]
            decision.logprobs.setdefault(row, [None] * len(members[member].masked))[column] = logprob
        decision.logprobs.update({canvases.rows[number]: told for number, told in filling.logprobs.items()})

    def _integers(self, values: ReadOnly[int] | ReadOnly[ReadOnly[int]]) -> Tensor:
        return upload(_integers(values), self._device)

    def _floats(self, values: ReadOnly[float]) -> Tensor:
        return upload(_floats(values), self._device)


@dataclass(frozen=True, slots=True)
class _Canvases:
    """The canvases of a plan, and its wanted positions in order, on the host."""

    rows: list[int]
    """[canvases]: row of the plan."""
    members: list[Canvas]
    width: int
    """Longest block."""
    owners: list[int]
    """[wanted]: canvas of each position."""
    positions: list[int]
    """[wanted]: absolute."""
    places: list[int]
    """[wanted]: index in [canvases, width], flat."""
    sources: list[int]
    """[wanted]: token of the ragged batch whose hidden state proposes for the position."""
    scales: list[float]
    """[canvases]: scale of guidance, 0 without."""
    guided: list[int | None]
    """[wanted]: index in `guide_sources`, None for positions without guidance."""
    guide_sources: list[int]
    """Tokens of the ragged batch behind all rows' own, where the guides follow in order of their rows."""
    current: list[tuple[int, ...]]
    """[canvases][block]: tokens on those canvases that have editable positions; else empty."""
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict[int, TokenLogprob])
    """Of wanted positions, by index, once they are proposed."""
    filling: Filling = field(default_factory=Filling)
    """What the guards propose, once the positions of their canvases are proposed."""

    def parts(self, most: int) -> list[range]:
        """Return the wanted positions in parts of at most `most`, cut inside of a canvas only if it is longer."""
        found: list[range] = []
        for _, members in groupby(range(len(self.owners)), self.owners.__getitem__):
            own = list(members)
            start, stop = own[0], own[-1] + 1
            if found and stop - found[-1].start <= most:
                found[-1] = range(found[-1].start, stop)
            else:
                found.extend(range(first, min(first + most, stop)) for first in range(start, stop, most))
        return found

    def draws(self, start: int, end: int) -> Draws:
        """Return what the wanted positions [start, end) are drawn with, on the host: what departs from plain argmax."""
        owners = self.owners[start:end]
        samplings = [canvas.sampling for canvas in self.members]
        temperature = ranking = forbidden = filters = noise = None
        warmth = [divisor(sampling) for sampling in samplings]
        if any(value != 1.0 for value in warmth):
            temperature = _floats([warmth[owner] for owner in owners])
            ranked = [
                1.0 if canvas.decoding.confidence == "model" else value
                for canvas, value in zip(self.members, warmth, strict=True)
            ]
            if ranked != warmth:
                ranking = _floats([ranked[owner] for owner in owners])
        if any(canvas.forbidden for canvas in self.members):
            struck = [(i, token) for i, owner in enumerate(owners) for token in self.members[owner].forbidden]
            rows, ids = zip(*struck, strict=True) if struck else ((), ())
            forbidden = _integers(rows), _integers(ids)
        cut = [i for i, owner in enumerate(owners) if is_cut(self.members[owner])]
        if cut:
            of = [samplings[owners[i]] for i in cut]
            filters = Filters(
                rows=_integers(cut),
                top_k=_integers([sampling.top_k for sampling in of]),
                top_p=_floats([sampling.top_p for sampling in of]),
                min_p=_floats([sampling.min_p for sampling in of]),
                ranks=torch.tensor([self.members[owners[i]].decoding.confidence == "filtered" for i in cut]),
            )
        drawn = [i for i, owner in enumerate(owners) if not is_greedy(samplings[owner])]
        if drawn:
            members = [self.members[owners[i]] for i in drawn]
            noise = Noise(
                rows=_integers(drawn),
                seed=_integers([canvas.sampling.seed for canvas in members]),
                position=_integers([self.positions[start + i] for i in drawn]),
                step=_integers([canvas.step for canvas in members]),
            )
        return Draws(temperature, forbidden, filters, noise, ranking)

    def needs_no_logits(self, start: int, end: int) -> bool:
        """Tell whether statistics are all that the wanted positions [start, end) need of their logits."""
        members = [self.members[owner] for owner in set(self.owners[start:end])]
        return all(each is None for each in self.guided[start:end]) and not any(
            canvas.edits
            or canvas.logprobs is not None
            or canvas.guarded is not None
            or is_cut(canvas)
            or (canvas.decoding.stops_last and canvas.stop_token_ids)
            for canvas in members
        )

    def show(self, owners: ReadOnly[int], logits: Tensor, own: Tensor, token: Tensor, barred: Tensor) -> None:
        """Show the guards their canvases' positions among n that `owners` [n] own, in order.

        logits [n, vocab] are edited, `own` the model's; token [n] is what it proposes.
        """
        guarded = [number for number in dict.fromkeys(owners) if self.members[number].guarded is not None]
        if not guarded:
            return
        tokens = [int(each) for each in token.tolist()]
        for number in guarded:
            first = owners.index(number)
            end = first + owners.count(number)
            part = Shown(logits[first:end], own[first:end], tokens[first:end])
            self.filling.show(number, self.members[number], part, barred)

    @classmethod
    def of(cls, plan: Plan) -> "_Canvases":
        width = max((len(row.canvas.masked) for row in plan.rows if row.canvas is not None), default=0)
        found = cls([], [], width, [], [], [], [], [], [], [], [])
        offset, guide_offset = 0, sum(len(row.token_ids) for row in plan.rows)
        for number, row in enumerate(plan.rows):
            if row.canvas is not None:
                canvas, masked = row.canvas, row.canvas.masked
                looked_at = [*map(any, zip(masked, canvas.editable, strict=True))] if canvas.editable else masked
                positions = list(compress(range(canvas.start, canvas.start + len(masked)), looked_at))
                first = len(found.members) * width - canvas.start
                found.owners.extend([len(found.members)] * len(positions))
                found.places.extend(first + position for position in positions)
                # The first position of a window has no row before it and reads its own (Dream, Fast-dLLM v2).
                if row.positions is None:
                    places = [max(position - canvas.shift - row.start, 0) for position in positions]
                else:
                    place_of = {position: place for place, position in enumerate(row.positions)}
                    places = [place_of[position] for position in positions]
                found.sources.extend(offset + place for place in places)
                if row.guide is None:
                    found.guided.extend([None] * len(places))
                else:
                    first_guide = len(found.guide_sources)
                    found.guided.extend(range(first_guide, first_guide + len(places)))
                    found.guide_sources.extend(guide_offset + place for place in places)
                found.scales.append(0.0 if row.guide is None else row.guide.scale)
                first_token = canvas.start - row.start
                found.current.append(row.token_ids[first_token : first_token + len(masked)] if canvas.editable else ())
                found.positions.extend(positions)
                found.rows.append(number)
                found.members.append(canvas)
            offset += len(row.token_ids)
            guide_offset += len(row.token_ids) if row.guide is not None else 0
        return found


def barred_ids(spec: ModelSpec, device: torch.device) -> Tensor:
    """Return [vocab] bool: the ids that are never proposed."""
    barred = torch.zeros(spec.vocab_size, dtype=torch.bool, device=device)
    barred[spec.text_vocab_size :] = True
    barred[[token for token in (spec.mask_token_id, *spec.never_sampled) if token != NO_MASK]] = True
    return barred


def divisor(sampling: Sampling) -> float:
    """Return what the logits are divided by before a token is drawn.

    Below the coldest a quotient could leave float32, and nothing but the best token is drawn anyway.
    """
    return max(sampling.temperature, _COLDEST) if sampling.temperature else 1.0


def is_greedy(sampling: Sampling) -> bool:
    return sampling.temperature == 0 or sampling.top_k == 1


def _integers(values: ReadOnly[int] | ReadOnly[ReadOnly[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _floats(values: ReadOnly[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def _pooled(plan: Plan) -> dict[int, range]:
    """Return for each pooled row its tokens in the ragged batch."""
    found: dict[int, range] = {}
    offset = 0
    for number, row in enumerate(plan.rows):
        if row.pooled:
            found[number] = range(offset, offset + len(row.token_ids))
        offset += len(row.token_ids)
    return found


def is_cut(canvas: Canvas) -> bool:
    """Tell whether the filters matter: they never move an argmax, only draws and filtered confidences."""
    sampling = canvas.sampling
    cut = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    return cut and (canvas.decoding.confidence == "filtered" or not is_greedy(sampling))


def _join(parts: list[Proposals]) -> Proposals:
    return Proposals(*(torch.cat([getattr(part, column.name) for part in parts]) for column in fields(Proposals)))
