"""Muon for the matrices inside the layers, AdamW for the embedding and the norms."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised, matrices of one shape in one batch.

    The update is scaled to AdamW's usual size (0.2 a coordinate), so both optimizers share one learning rate.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.05
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            shapes: defaultdict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                shapes[parameter.shape].append(parameter)
            for shape, parameters in shapes.items():
                gradients = [parameter.grad for parameter in parameters]
                states = [self.state[parameter] for parameter in parameters]
                for state, gradient in zip(states, gradients, strict=True):
                    if "momentum" not in state:
                        state["momentum"] = torch.zeros_like(gradient)
                averages = [state["momentum"] for state in states]
                torch._foreach_lerp_(averages, gradients, 1 - group["momentum"])
                update = torch.stack(torch._foreach_lerp(gradients, averages, group["momentum"]))
                update = orthogonalise(update) * (0.2 * max(shape) ** 0.5)
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["decay"])
                torch._foreach_add_(parameters, list(update.to(parameters[0].dtype)), alpha=-group["lr"])


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Push the singular values of each of [count, rows, columns] towards one by a quintic Newton-Schulz iteration."""
    a, b, c = 3.4445, -4.7750, 2.0315  # steep at zero; lands between 0.7 and 1.2, which is enough
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def build_optimizers(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Split the parameters between the two optimizers."""
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed_tokens" not in name]
    chosen = set(map(id, matrices))
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [Muon(matrices, lr), torch.optim.AdamW(rest, lr, betas=(0.9, 0.98), weight_decay=0.0)]
