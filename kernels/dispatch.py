"""Pair an operation's reference with its fused twin."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, ParamSpec, TypeVar

from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Op(Generic[P, R]):
    """An operation: the reference is the specification, the fused twin has its signature and no extra behaviour.

    The first positional argument is a tensor; its device chooses.
    """

    reference: Callable[P, R]
    fused: Callable[P, R] | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        if self.fused is not None and isinstance(first, Tensor) and first.is_cuda:
            return self.fused(*args, **kwargs)
        return self.reference(*args, **kwargs)
