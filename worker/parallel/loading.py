"""Load a rank's share of a model: the module with smaller weights, and of each file the slices that it keeps."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from worker.models import LoadedModel, ModelError, build_module
from worker.models.checkpoint import Checkpoint
from worker.models.layers import Decoder, MoeMLP, Peers, Rotary, VocabularyShare, empty_parameter
from worker.models.spec import ModelSpec
from worker.models.weights import check_type, locate, match_names, scale_names
from worker.parallel.shares import (
    Cut,
    NotDivisible,
    Rank,
    check_divisible,
    cuts,
    local_shape,
    pieces,
    vocabulary,
)

Kept = Mapping[nn.Parameter, tuple[nn.Parameter, Cut | None]]
"""For each weight of the whole decoder the rank's own, and what that is of it."""

_META = torch.device("meta")


def load_share(checkpoint: Checkpoint, peers: Peers, *, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """Load what the rank holds of a model. Raises `ModelError`, also for models that cannot be shared."""
    found: list[tuple[Path, Mapping[str, tuple[Tensor, ...]], frozenset[str]]] = []

    def keep(folder: Path, slots: Mapping[str, tuple[Tensor, ...]], ignored: frozenset[str]) -> None:
        found.append((folder, slots, ignored))

    spec, module = build_module(replace(checkpoint, loader=keep), device=_META, dtype=dtype)
    if not isinstance(module, Decoder) or len(found) != 1:
        raise ModelError(f"tensor_parallel: a model of family {spec.family} cannot be shared by several ranks")
    ((folder, slots, ignored),) = found
    rank = Rank(peers.rank, peers.size)
    try:
        kept = share_decoder(module, peers, device)
    except NotDivisible as error:
        raise ModelError(f"tensor_parallel: {error}") from error
    _load(folder, slots, ignored, kept)
    return LoadedModel(share_spec(spec, rank, module), module.eval(), device, dtype)


def share_spec(spec: ModelSpec, rank: Rank, decoder: Decoder) -> ModelSpec:
    """Return the facts with the heads that lie on one rank, which is what its pages hold."""
    shape = next(iter(decoder.layers)).attention.shape
    return replace(spec, num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads)


def share_decoder(decoder: Decoder, peers: Peers, device: torch.device) -> Kept:
    """Give a whole decoder, which may lie on the meta device, the rank's own weights in place, uninitialised.

    Raises `NotDivisible`.
    """
    rank = Rank(peers.rank, peers.size)
    check_divisible(decoder, rank.count)
    parts = cuts(decoder, rank)
    size = decoder.embedding.shape[0]
    own: dict[nn.Parameter, tuple[nn.Parameter, Cut | None]] = {}
    for module in list(decoder.modules()):
        for name, whole in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if whole not in own:
                cut = parts.get(whole)
                shape = list(whole.shape)
                if cut is not None:
                    shape[cut.dim] = cut.size
                own[whole] = empty_parameter(*shape, device=device, dtype=whole.dtype), cut
            setattr(module, name, own[whole][0])
    for layer in decoder.layers:
        attention, mlp = layer.attention, layer.mlp
        if attention.out.bias is not None and rank.number:
            attention.out.bias = None  # it is added once
        attention.shape = local_shape(rank, attention.shape)
        if isinstance(mlp, MoeMLP):
            mlp.first_expert = rank.number * len(mlp.down)
        layer.peers = peers
    rotary = decoder.rotary
    decoder.rotary = Rotary(2 * rotary.inv_freq.shape[0], rotary.rope, device=device, dtype=rotary.dtype)
    decoder.share = VocabularyShare(*vocabulary(rank, size), size, peers)
    return own


def _load(folder: Path, slots: Mapping[str, tuple[Tensor, ...]], ignored: frozenset[str], kept: Kept) -> None:
    if scale_names(locate(folder)):
        raise ModelError(f"{folder}: tensor_parallel: weights stored in 8 bits cannot be shared by several ranks")
    for path, names in match_names(folder, slots, ignored).items():
        try:
            with safe_open(path, framework="pt") as file:
                for name in names:
                    _fill(path, name, slots[name], file.get_slice(name), kept)
        except SafetensorError as error:
            raise ModelError(f"{path}: {error}") from error


def _fill(path: Path, name: str, places: tuple[Tensor, ...], stored: Any, kept: Kept) -> None:
    shape = stored.get_shape()
    for place in places:
        if list(place.shape) != shape:
            raise ModelError(f"{path}: {name} has shape {shape}; config.json asks for {list(place.shape)}")
        whole = place if place._base is None else place._base
        target, cut = kept[cast(nn.Parameter, whole)]
        offset = int(place.storage_offset() - whole.storage_offset())
        view = offset, tuple(place.shape), place.stride()
        for piece in pieces(tuple(whole.shape), view, cut):
            value = stored[tuple(slice(*span) for span in piece.source)]
            check_type(path, name, value.dtype)
            part = target[tuple(slice(*span) for span in piece.target)]
            part.copy_(value.view(part.shape))
