"""A card that is not there: tensors that say they lie on another device, hold their numbers on the host, and refuse to
meet those that lie there.

What an accelerator refuses is refused here, on a machine that has none: an operation over tensors of two devices. The
values are real, so that whole requests run. Operations have their references: twins are for CUDA alone.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from kernels.attention import upload as upload_by_itself

CARD = torch.device("meta")
"""The only other device of which every build of torch knows how to be asked for tensors."""

_TO_HOST = {"_local_scalar_dense", "equal", "is_nonzero"}
_UNKNOWN_SIZE = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"}
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}


class HostMetDevice(Exception):
    """An operation over tensors of both."""


@contextmanager
def pretended_card() -> Iterator[None]:
    """Let `CARD` be a device with memory of its own."""
    with _Asked(), _Dispatched():
        yield


_waits: list[str] = []
_uploading = False


@contextmanager
def counted_waits() -> Iterator[list[str]]:
    """Within `pretended_card`, tell by name of all that the host would wait with for what runs on a card: results that
    it reads, sizes that it has to know, and copies from memory of its own that may be swapped out; `upload` pins it."""

    def uploading(values: Tensor, device: torch.device) -> Tensor:
        global _uploading
        _uploading = True
        try:
            return upload_by_itself(values, device)
        finally:
            _uploading = False

    with ExitStack() as patches:
        for module in [*sys.modules.values()]:
            if vars(module).get("upload") is upload_by_itself:
                patches.enter_context(patch.object(module, "upload", uploading))
        _waits.clear()
        yield _waits


def _waits_with(name: str, args: Any, tensors: Sequence[Tensor], away: Sequence[Tensor], stays: bool) -> bool:
    if name in _TO_HOST or name in _UNKNOWN_SIZE:
        return bool(away)
    if name in _INDEXED:
        indexes = [each for each in args[1] if each is not None]
        return bool(away) and any(each.dtype == torch.bool or not isinstance(each, _OnCard) for each in indexes)
    if name == "repeat_interleave":
        return bool(away)
    if name == "copy_":
        return len({isinstance(each, _OnCard) for each in tensors}) > 1 and all(each.dim() for each in tensors)
    return bool(tensors) and stays != bool(away)


class _OnCard(Tensor):
    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "_OnCard":
        # Views of weights may be taken in any mode.
        with torch.inference_mode(False):
            return Tensor._make_wrapper_subclass(  # pyright: ignore
                cls,
                held.shape,
                strides=held.stride(),
                storage_offset=held.storage_offset(),
                dtype=held.dtype,
                device=CARD,
            )

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def __repr__(self) -> str:  # type: ignore[override]
        return f"on the card: {self.held!r}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Dispatched(TorchDispatchMode):
    """Sees to tensors that are made on the card."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Asked(TorchFunctionMode):
    """Does what torch does by itself before anything is dispatched."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        on_card = bool(args) and isinstance(args[0], _OnCard)
        if func is torch.tensor:
            device = kwargs.pop("device", None)
            made = func(*args, **kwargs)
            return made if device is None else made.to(device)
        if on_card and func is Tensor.new_tensor:
            return args[0].held.new_tensor(*args[1:], **kwargs).to(kwargs.get("device", CARD))
        if on_card and func is Tensor.tolist:
            _waits.append("tolist")
            return args[0].held.tolist()
        if on_card and func in (Tensor.__getitem__, Tensor.__setitem__):
            tensor, index, *values = args
            index = tuple(map(_as_tensor, index)) if isinstance(index, tuple) else _as_tensor(index)
            return func(tensor, index, *(_as_number(value, tensor.dtype) for value in values))
        return func(*args, **kwargs)


def _as_tensor(index: Any) -> Any:
    return torch.tensor(index, dtype=None if index else torch.int64) if isinstance(index, list) else index


def _as_number(value: Any, dtype: torch.dtype) -> Any:
    return torch.tensor(value, dtype=dtype) if isinstance(value, bool | int | float) else value


def _may_meet(name: str, args: Any) -> bool:
    """Tell whether a device takes this from the host: what is copied, single numbers, and indices of what it holds."""
    if name in _INDEXED:
        indexed, values = args[0], args[2:3]
        return all(isinstance(tensor, _OnCard) or not tensor.dim() for tensor in (indexed, *values))
    return name == "copy_"


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the numbers themselves; its result lies where the operation ran."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    away = [tensor for tensor in tensors if isinstance(tensor, _OnCard)]
    here = [tensor for tensor in tensors if not isinstance(tensor, _OnCard)]
    name = func.overloadpacket.__name__
    assert all(tensor.device.type == "cpu" for tensor in here), f"{func}: a tensor was made behind our back"
    if away and any(tensor.dim() for tensor in here) and not _may_meet(name, args):
        told = ", ".join(f"{list(t.shape)} {'there' if isinstance(t, _OnCard) else 'here'}" for t in tensors)
        raise HostMetDevice(f"{func}: {told}")
    stays = isinstance(args[0], _OnCard) if name == "copy_" else bool(away) and name not in _TO_HOST
    if (device := kwargs.get("device")) is not None:
        stays = torch.device(device).type == CARD.type
        kwargs = kwargs | {"device": torch.device("cpu") if stays else device}
    if not _uploading and _waits_with(name, args, tensors, away, stays):
        _waits.append(name)
    own_args, own_kwargs = tree_map(lambda leaf: leaf.held if isinstance(leaf, _OnCard) else leaf, (args, kwargs))
    found = func(*own_args, **own_kwargs)
    if func._schema.is_mutable and found is own_args[0]:
        return args[0]
    if isinstance(found, Tensor) and tensors and stays != bool(away):
        # Memory of two devices is never the same.
        found = found.clone()
    return tree_map(lambda leaf: _OnCard(leaf) if stays and isinstance(leaf, Tensor) else leaf, found)
