"""Pair an operation's reference with its fused twin."""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

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


def twin(module: str, name: str) -> Callable[..., Any]:
    """Return `name` of `kernels.gpu.<module>`, imported at its first call: only a device needs Triton."""

    @functools.cache
    def load() -> Callable[..., Any]:
        return getattr(importlib.import_module(f"kernels.gpu.{module}"), name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return load()(*args, **kwargs)

    return call
