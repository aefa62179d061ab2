"""The scores of one canvas, read from logits on the device as they are asked for."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kernels.attention import upload
from kernels.noise import gumbel
from kernels.token_stats import Filters, cut
from worker.engine.plan import Canvas

_NOISE_AT_ONCE = 2**14
"""Numbers: four positions of a small vocabulary, about as many as a walk draws at."""


class CanvasScores:
    """Implements `worker.engine.plan.Scores` for the wanted positions of one canvas.

    The allowed tokens are what a distribution is left with before it is cut (top-k, top-p) and drawn from, by the same
    seeds as without a constraint.
    """

    def __init__(
        self,
        canvas: Canvas,
        places: Mapping[int, int],
        parts: Sequence[Tensor],
        proposals: Sequence[int],
        barred: Tensor,
        greedy: bool,
    ) -> None:
        """`parts` are logits [wanted, vocab] in parts of [n, vocab]; `places` leads from an index of the canvas to its
        row of them; `proposals` [wanted] are the tokens that the model proposes by itself."""
        self._canvas = canvas
        self._places = places
        self._logits = [row for part in parts for row in part]
        self._proposals = proposals
        self._barred = barred
        self._greedy = greedy
        self._noise: dict[int, Tensor] = {}
        self._totals: list[float] = [total for part in parts for total in part.float().logsumexp(-1).tolist()]

    def best(self, index: int) -> int:
        return self._proposals[self._places[index]]

    def best_of(self, index: int, allowed: bytes) -> tuple[int, float] | None:
        z = self._left(index, allowed)
        value, token = z.max(-1)
        if value.item() == float("-inf"):
            return None
        chosen = int(token.item()) if self._greedy else self._draw(index, z)
        return chosen, float((z[chosen] - z.logsumexp(-1)).exp())

    def share(self, index: int, token_id: int, allowed: bytes) -> float:
        z = self._left(index, allowed)
        return float((z[token_id] - z.logsumexp(-1)).exp())

    def probability(self, index: int, token_id: int) -> float:
        place = self._places[index]
        return float((self._logits[place][token_id].float() - self._totals[place]).exp())

    def _left(self, index: int, allowed: bytes) -> Tensor:
        """Return [vocab]: the logits of one position, -inf where not allowed."""
        z = self._logits[self._places[index]].float()
        known = upload(torch.frombuffer(bytearray(allowed), dtype=torch.uint8)[: z.shape[0]], z.device)
        return z.masked_fill((known == 0) | self._barred, float("-inf"))

    def _draw(self, index: int, z: Tensor) -> int:
        sampling, noise = self._canvas.sampling, self._noise_of(index)
        if sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0:
            z = cut(z[None] / sampling.temperature, self._filters(z))[0]
        else:
            z = z / sampling.temperature
        return int((z + noise).max(-1).indices)

    def _filters(self, z: Tensor) -> Filters:
        def one(value: float | bool, dtype: torch.dtype) -> Tensor:
            return upload(torch.tensor([value], dtype=dtype), z.device)

        sampling = self._canvas.sampling
        return Filters(
            rows=one(0, torch.int64),
            top_k=one(sampling.top_k, torch.int64),
            top_p=one(sampling.top_p, torch.float32),
            min_p=one(sampling.min_p, torch.float32),
            ranks=one(False, torch.bool),
        )

    def _noise_of(self, index: int) -> Tensor:
        """Return [vocab]: the noise that draws at a position, made for some positions at once."""
        if index not in self._noise:
            size, device = self._logits[0].shape[0], self._logits[0].device
            indexes = [place for place in self._places if place >= index][: max(1, _NOISE_AT_ONCE // size)]
            many = torch.ones(len(indexes), dtype=torch.int64, device=device)
            positions = upload(torch.tensor(indexes), device) + self._canvas.start
            made = gumbel(many * self._canvas.sampling.seed, positions, many * self._canvas.step, size)
            self._noise.update(zip(indexes, made, strict=True))
        return self._noise[index]
