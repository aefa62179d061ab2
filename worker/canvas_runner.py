"""The runner of models whose canvas is noise (DiffusionGemma): text and canvases of all rows in one forward."""

from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass, field
from typing import Protocol, cast

import torch
from torch import Tensor

import kernels
from kernels.attention import plan_attention, upload
from shared.decoding import Renoise
from worker.adapters.sides import Sides, of_text
from worker.adapters.stack import AdapterStack, Residents, Uses
from worker.decoding.renoise import CanvasNoise, HashedNoise, is_settled, keep, temperature
from worker.engine.plan import Canvas, Plan, Row
from worker.engine.ports import Decision
from worker.logit_edits import edit_logits
from worker.logprobs import report
from worker.models import LoadedModel
from worker.models.layers import ForwardContext, LowRank
from worker.models.spec import kv_shapes
from worker.runner import barred_ids


class CanvasModel(Protocol):
    """What this runner needs of a module beside `Denoiser`."""

    def forward(self, token_ids: Tensor, context: ForwardContext, wanted: Tensor | None = None) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...

    def soft_embedding(self, logits: Tensor) -> Tensor:
        """Return [n, hidden]: what conditions the next step on logits [n, vocab]."""
        ...


@dataclass(slots=True)
class _State:
    """What one canvas hands on from step to step; a canvas begins without it."""

    condition: Tensor
    """[block, hidden]"""
    best: list[Tensor] = field(default_factory=list[Tensor])
    """Argmax of the steps before, oldest first."""


class CanvasRunner:
    """Implements `worker.engine.ports.Forward` for one model on one device."""

    def __init__(
        self,
        model: LoadedModel,
        num_pages: int,
        page_size: int,
        device: torch.device | str = "cpu",
        noise: CanvasNoise | None = None,
        adapters: Residents | None = None,
    ) -> None:
        """`noise` is where random tokens come from; tests put a reference's recorded draws there. `adapters` has those
        that rows run under.
        """
        self._module = cast(CanvasModel, model.module)
        self._spec = model.spec
        self._dtype = model.dtype
        self._device = torch.device(device)
        self._page_size = page_size
        self._noise = noise or HashedNoise()
        self._adapters = None if adapters is None else AdapterStack(Sides(adapters), self._device)
        self._barred = barred_ids(model.spec, self._device)
        self._states: dict[str, _State] = {}
        self._kv = tuple(
            (
                torch.zeros((num_pages, page_size, *shape), dtype=model.dtype, device=self._device),
                torch.zeros((num_pages, page_size, *shape), dtype=model.dtype, device=self._device),
            )
            for shape in kv_shapes(model.spec)
        )

    @torch.inference_mode()
    def __call__(self, plan: Plan) -> Decision:
        """Write KV for every row's query range, then move each canvas on.

        A canvas that is not decided accepts nothing, and its tokens are what its next forward reads.
        """
        self._states = {name: state for name, state in self._states.items() if name in plan.running}
        # Each prediction conditions the next, and a difference in the last bit grows about tenfold a step. Where wide
        # products gain little, a row runs by itself, so that its sums do not depend on its neighbours.
        parts = [[row] for row in plan.rows] if self._device.type == "cpu" else [list(plan.rows)]
        hidden = torch.cat([self._forward(part) for part in parts])
        decision = Decision.open(len(plan.rows))
        offset, after = 0, dict[str, _State | None]()
        for index, row in enumerate(plan.rows):
            if row.canvas is not None:
                length = len(row.canvas.masked)
                after[row.request_id] = self._decide(index, row, row.canvas, hidden[offset : offset + length], decision)
                offset += length
        # Not before, for memory may give out on the way: then all rows come again, as they were.
        for request_id, state in after.items():
            if state is not None:
                self._states[request_id] = state
            else:
                self._states.pop(request_id, None)
        return decision

    def _forward(self, rows: ReadOnly[Row]) -> Tensor:
        """Return the hidden states of the rows' canvases, in order."""
        token_ids, encodes, conditions, wanted = list[Tensor](), list[Tensor](), list[Tensor](), list[int]()
        uses, counts = list[Uses](), list[int]()
        offset = 0
        for row in rows:
            first = row.end if row.canvas is None else row.canvas.start
            ids = self._integers(row.token_ids)
            text = first - row.start
            condition = torch.zeros((len(ids), self._spec.hidden_size), dtype=self._dtype, device=self._device)
            if row.canvas is not None:
                if row.canvas.step == 0:
                    positions = torch.arange(first, row.end, device=self._device)
                    ids[text:] = self._noise.ids(row.canvas.sampling.seed, positions, -1, self._spec.text_vocab_size)
                else:
                    condition[text:] = self._states[row.request_id].condition
                wanted += range(offset + text, offset + len(ids))
            token_ids.append(ids)
            encodes.append(torch.arange(len(ids), device=self._device) < text)
            uses += [of_text(row.lora), row.lora]
            counts += [text, len(ids) - text]
            conditions.append(condition)
            offset += len(ids)
        starts, pages = [row.start for row in rows], [row.pages for row in rows]
        near = [row.near or () for row in rows]
        context = ForwardContext(
            attention=plan_attention(
                starts,
                [row.visible_end for row in rows],
                pages,
                self._page_size,
                device=self._device,
                dtype=self._dtype,
            ),
            positions=self._integers([position for row in rows for position in range(row.start, row.end)]),
            kv=self._kv,
            near=plan_attention(
                starts,
                [[end for _, end in view] for view in near],
                pages,
                self._page_size,
                device=self._device,
                dtype=self._dtype,
                visible_start=[[start for start, _ in view] for view in near],
            ),
            encodes=torch.cat(encodes),
            condition=torch.cat(conditions),
            lora=self._lora(uses, counts),
        )
        return self._module.forward(torch.cat(token_ids), context, self._integers(wanted))

    def _lora(self, uses: ReadOnly[Uses], counts: ReadOnly[int]) -> LowRank | None:
        if self._adapters is not None:
            return self._adapters.of(uses, counts)
        if any(uses):
            raise ValueError("a row asks for adapters, and this runner has none")
        return None

    def _decide(self, index: int, row: Row, canvas: Canvas, hidden: Tensor, decision: Decision) -> _State | None:
        """Fill in a row of `decision`; return what its canvas hands on, None if it is over."""
        decoding, seed, step = canvas.decoding, canvas.sampling.seed, canvas.step
        if not isinstance(decoding, Renoise):
            raise TypeError(f"{row.request_id}: a canvas of noise cannot be decoded by {decoding.strategy}")
        logits = self._module.logits(hidden)
        length = len(canvas.masked)
        own, logits = logits, edit_logits(logits, [canvas] * length)
        if canvas.forbidden:
            logits = logits.clone()
            logits[:, list(canvas.forbidden)] = float("-inf")
        warmth = torch.full((length,), temperature(decoding, step), dtype=torch.float32, device=self._device)
        best = kernels.token_stats(logits, temperature=warmth, barred=self._barred, entropy=True)
        if not bool(best.finite.all()):
            decision.accepted[index], decision.tokens[index] = [False] * length, [0] * length
            decision.confidence[index], decision.failed[index] = [0.0] * length, "the model's logits are not finite"
            return None
        before = self._states[row.request_id].best if step > 0 else []
        after = None
        over = canvas.last or step + 1 >= decoding.max_denoising_steps
        if over or is_settled(decoding, best.token, before, best.entropy):
            decision.accepted[index], tokens = [True] * length, best.token
            if canvas.logprobs is not None:
                logprobs = report(own, best.token, [canvas] * length, self._barred)
                decision.logprobs[index] = [logprobs.get(row) for row in range(length)]
        else:
            positions = torch.arange(canvas.start, canvas.start + length, device=self._device)
            sampled = self._noise.sample(logits, self._barred, warmth, seed, positions, step)
            fresh = self._noise.ids(seed, positions, step, self._spec.text_vocab_size)
            tokens = torch.where(keep(best.entropy, decoding.bound), sampled, fresh)
            decision.accepted[index] = [False] * length
            kept = decoding.stability_threshold
            after = _State(
                condition=self._module.soft_embedding(logits / warmth[:, None]),
                best=[*before, best.token][-kept:] if kept else [],
            )
        decision.tokens[index] = tokens.tolist()
        decision.confidence[index] = best.confidence.tolist()
        return after

    def _integers(self, values: ReadOnly[int]) -> Tensor:
        return upload(torch.tensor(values, dtype=torch.int64), self._device)
