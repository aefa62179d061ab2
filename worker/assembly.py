"""From settings to an engine on a device: what the service and the in-process loop have in common."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from redis import Redis
from torch import nn

from shared.adapters import TARGETS_FILE, pack_targets
from shared.card import CARD_FILES, ModelCard
from shared.commands import Generate
from shared.text import InvalidTokenizer, TextStream, Tokenizer
from worker.adapters.bank import AdapterBank
from worker.adapters.store import AdapterStore
from worker.adapters.targets import Target, find_targets, shapes_of
from worker.adapters.variant import with_adapter
from worker.adapters.weights import Adapter, load_adapter
from worker.block_choice import choose_length, lengths_to_choose_from
from worker.constraints import Guards
from worker.device import Placement, free_memory, guarded, place
from worker.engine.engine import Engine
from worker.engine.infill import can_fill
from worker.engine.load_aware import Steady
from worker.engine.ports import Resume
from worker.engine.scheduler import BUDGET_OF_BLOCKS, BatchLimits, CacheShape
from worker.engine.window import cuts_windows
from worker.memory import measure_needs
from worker.metered import Metered
from worker.models import LoadedModel, ModelError, load_model
from worker.models.eight_bits import keep
from worker.models.fp8 import quantize_as_asked, runs_on_stored, with_small_pages
from worker.models.spec import Commit, ModelSpec, kv_shapes
from worker.parallel.leader import Leader, Lost, end_process
from worker.parallel.opening import open_group
from worker.price_book import PriceBook, alone, kind_of
from worker.runners import make_runner, runs_ahead
from worker.settings import WorkerSettings
from worker.step_prices import clock_for

log = logging.getLogger(__name__)

_MIB = 2**20
_CPU_CACHE_MIB = 256
_GPU_CACHE_SHARE = 0.95
"""Of what is free beside the weights and what the largest step needs; the rest is for the allocator's gaps."""
_PAGE_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Assembly:
    engine: Engine
    spec: ModelSpec
    tokenizer: Tokenizer
    card: ModelCard
    placement: Placement
    forward: Metered
    adapters: AdapterStore | None
    """None: without a model store there are none."""
    group: Leader | None = None
    """The other ranks of the model; None: there are none."""


def assemble(settings: WorkerSettings, lost: Lost = end_process, redis: Redis | None = None) -> Assembly:
    """Load the model and build its engine; raises `ModelError`, `DeviceError`.

    `lost` is called when a rank that shares the model has ended. In `redis` workers agree on what steps take.
    """
    placement = place(settings.device, settings.dtype, settings.threads)
    if settings.tensor_parallel == 1:
        torch.set_num_threads(placement.threads)
        model = load_model(settings.folder, device=placement.device, dtype=placement.dtype, need_tokenizer=True)
        return _assemble(settings, placement, model, None, redis)
    placement, group = open_group(settings, placement, lost)
    try:
        torch.set_num_threads(placement.threads)
        model = group.load(settings.folder, placement, need_tokenizer=True)
        return _assemble(settings, placement, model, group, redis)
    except BaseException:
        group.close()
        raise


def _check_budget(limits: BatchLimits, spec: ModelSpec) -> None:
    """Raise `ModelError` if the engine would refuse the model's own blocks: each request that names no length."""
    if cuts_windows(spec) and limits.largest_block < spec.block_length:
        raise ModelError(
            f"token_budget: {limits.token_budget} is too little for this model's blocks of {spec.block_length}, "
            f"{BUDGET_OF_BLOCKS * spec.block_length} is the least"
        )


def _tell_of_turns(limits: BatchLimits, block: int) -> None:
    """Say so if beside a prompt not all rows fit into a step."""
    if 4 * limits.max_rows * block > 3 * limits.token_budget:
        log.info(
            "token_budget %d: beside a prompt, steps hold %d of up to %d rows of %d positions, which then take turns",
            *(limits.token_budget, limits.token_budget * 3 // 4 // block, limits.max_rows, block),
        )


def _assemble(
    settings: WorkerSettings, placement: Placement, model: LoadedModel, group: Leader | None, redis: Redis | None
) -> Assembly:
    if settings.adapter is not None:
        model = with_adapter(model, settings.adapter, settings.adapter_block_length)
    as_stored = group is None and settings.weights == "stored" and settings.adapter is None
    if as_stored and isinstance(model.module, nn.Module):
        keep(model.module, settings.folder, runs_on_stored)
    quantize_as_asked(model.module, settings.weights, settings.head, settings.folder)
    if settings.kv_dtype == "fp8":
        model = with_small_pages(model, settings.folder)
    try:
        tokenizer = Tokenizer.from_folder(settings.folder)
    except InvalidTokenizer as error:
        raise ModelError(f"{settings.folder}: {error}") from error
    limits = BatchLimits(
        settings.max_rows,
        settings.token_budget,
        pages_ahead=runs_ahead(model.spec, placement.device, settings.step_ahead),
    )
    _check_budget(limits, model.spec)
    _tell_of_turns(limits, model.spec.block_length)
    lengths = lengths_to_choose_from(settings, model.spec, page_size_of(settings, model.spec), limits)
    targets = find_targets(model) if settings.model_store is not None else {}
    adapters = _adapter_store(settings, targets, placement)
    bank = _adapter_bank(settings, targets, adapters, model) if limits.pages_ahead else None
    # Adapters lie there once as they were loaded, and once side by side for the batch.
    kept = 2 * settings.lora_memory_mb * _MIB if adapters is not None else 0
    cache = cache_shape(
        settings,
        model.spec,
        placement,
        lambda page_size: kept + measure_needs(model, limits, page_size, bank, tuple(lengths)).total,
        lambda: free_memory(placement.device) if group is None else group.free_memory(placement.device),
    )
    # A longer request could never run here, so nobody should be told that it may.
    capacity = cache.page_size * cache.num_pages
    spec = replace(model.spec, max_model_len=min(model.spec.max_model_len, capacity))
    runner = make_runner(
        model,
        cache.num_pages,
        cache.page_size,
        placement.device,
        max_rows=settings.max_rows,
        max_model_len=spec.max_model_len,
        ahead=limits.pages_ahead,
        lengths=tuple(lengths),
        adapters=adapters,
        bank=bank,
    )

    def make_text(request: Generate, resume: Resume) -> TextStream:
        return TextStream(tokenizer, request.limits.stop, resume.text_length)

    # Where ranks share a step, one that has no memory for it leaves the others waiting: that is the end of them all.
    forward = Metered(guarded(runner) if group is None else runner)
    book = None if redis is None else PriceBook(redis, settings.served_name, kind_of(settings, placement))
    agree = alone if book is None else book.agree
    choose = choose_length(lengths, settings, spec, cache, limits, runner, clock_for(placement), agree)
    # Where steps are captured, rows of another length take steps of their own.
    by_load = Steady(choose) if choose is not None and limits.pages_ahead else choose
    engine = Engine(spec, cache, limits, forward, make_text, Guards(tokenizer, spec), by_load)
    card = card_of(
        settings.served_name,
        settings.folder,
        spec,
        tokenizer,
        settings.partitions,
        min(capacity, limits.largest_block) if cuts_windows(spec) else capacity,
        targets,
        tuple(lengths),
    )
    return Assembly(engine, spec, tokenizer, card, placement, forward, adapters, group)


def _adapter_store(
    settings: WorkerSettings, targets: Mapping[str, Target], placement: Placement
) -> AdapterStore | None:
    if settings.model_store is None or not targets:
        return None
    if not settings.model_store.is_dir():
        raise ModelError(f"model_store: {settings.model_store}: no such folder")

    def load(folder: Path) -> Adapter:
        return load_adapter(folder, targets, placement.device, placement.dtype)

    return AdapterStore(settings.model_store, load, settings.lora_memory_mb * _MIB)


def _adapter_bank(
    settings: WorkerSettings, targets: Mapping[str, Target], adapters: AdapterStore | None, model: LoadedModel
) -> AdapterBank | None:
    if adapters is None or not settings.lora_slots:
        return None
    linears = [target.linear for target in targets.values()]
    try:
        return AdapterBank(linears, settings.lora_slots, settings.lora_rank, adapters, model.device, model.dtype)
    except torch.OutOfMemoryError as error:
        raise ModelError("lora_slots, lora_rank: the device has no memory for so many") from error


def cache_shape(
    settings: WorkerSettings,
    spec: ModelSpec,
    placement: Placement,
    needs: Callable[[int], int] = lambda _: 0,
    free: Callable[[], int | None] = lambda: None,
) -> CacheShape:
    """Return the pages of the KV cache: as many as asked for, or as the memory holds beside the weights and what the
    work needs, whose bytes `needs` finds out for pages of a size; and never more than all rows could fill.

    `free` tells the bytes of the device beside the weights; None: it is the host's memory, which is not planned.
    """
    page_size = page_size_of(settings, spec)
    useful = settings.max_rows * -(-spec.max_model_len // page_size)
    if settings.num_pages is not None:
        return CacheShape(page_size, min(settings.num_pages, useful))
    if settings.kv_cache_mb is not None:
        memory = settings.kv_cache_mb * _MIB
    elif free() is not None:
        # Finding out what is needed loads compiled kernels and libraries, which stay.
        needed = needs(page_size)
        memory = max(0, int(((free() or 0) - needed) * _GPU_CACHE_SHARE))
    else:
        memory = _CPU_CACHE_MIB * _MIB
    token_bytes = 2 * sum(heads * _head_bytes(settings, dim, placement) for heads, dim in kv_shapes(spec))
    num_pages = min(memory // (token_bytes * page_size), useful)
    if num_pages < 1:
        raise ModelError(f"kv_cache_mb: {memory / _MIB:.1f} MiB do not hold one page of {page_size} tokens")
    return CacheShape(page_size, num_pages)


def page_size_of(settings: WorkerSettings, spec: ModelSpec) -> int:
    """Return the tokens of a KV page."""
    return settings.page_size or spec.block_length * max(1, _PAGE_TOKENS // spec.block_length)


def _head_bytes(settings: WorkerSettings, dim: int, placement: Placement) -> int:
    """Return the bytes of a head's key, or value."""
    return dim + torch.float32.itemsize if settings.kv_dtype == "fp8" else dim * placement.dtype.itemsize


def card_of(
    name: str,
    folder: Path,
    spec: ModelSpec,
    tokenizer: Tokenizer,
    partitions: int = 1,
    largest_block: int | None = None,
    targets: Mapping[str, Target] | None = None,
    block_lengths: tuple[int, ...] = (),
) -> ModelCard:
    """Return what fronts must know of the model; `targets` are the layers that may have adapters, `block_lengths` those
    that are chosen from by load."""
    files = {name: (folder / name).read_bytes() for name in CARD_FILES if (folder / name).is_file()}
    if targets:
        files[TARGETS_FILE] = pack_targets(shapes_of(targets))
    return ModelCard(
        name=name,
        family=spec.family,
        max_model_len=spec.max_model_len,
        block_length=spec.block_length,
        fixed_block_length=spec.fixed_block_length,
        decoding=spec.decoding.model_dump(mode="json"),
        temperature=spec.temperature,
        capabilities=_capabilities(spec, tokenizer),
        stop_token_ids=spec.stop_token_ids,
        mask_token_id=spec.mask_token_id,
        vocab_size=spec.vocab_size,
        partitions=partitions,
        largest_block=largest_block,
        embedding_size=0 if spec.commit is Commit.ENCODED else spec.hidden_size,
        block_lengths=block_lengths,
        files=files,
    )


def _capabilities(spec: ModelSpec, tokenizer: Tokenizer) -> tuple[str, ...]:
    told = {
        "generate": True,
        "chat": tokenizer.has_template,
        "constraints": spec.commit is not Commit.ENCODED,
        "infill": can_fill(spec),
        "guidance": spec.commit is not Commit.ENCODED,
    }
    return tuple(name for name, has in told.items() if has)
