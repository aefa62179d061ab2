"""The adapters that a worker holds: loaded when a request needs them, let go of when others need their room."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shared.adapters import InvalidAdapter, UnreadableAdapter, digest_of, find_folder
from shared.commands import LoraUse
from worker.adapters.ports import AdapterFaulty, AdaptersFull, AdapterUnavailable, AdapterWatch
from worker.adapters.weights import Adapter, stacked_size
from worker.models.layers import Linear

_PATIENCE_S = 2.0
"""For so long an adapter without room waits for those in use to go out of use by themselves."""
_GONE_S = 5.0
"""Whoever has not asked again for so long has been served elsewhere, or has given up."""


@dataclass(slots=True)
class _Wait:
    """An adapter that has no room."""

    since: float
    seen: float
    yielding: frozenset[str] = frozenset()
    """Digests of those in use that will make room for it, once it has waited long enough."""
    outline: Adapter | None = None
    """Its shapes; None before its room was looked for."""


@dataclass(slots=True)
class _Resident:
    name: str
    adapter: Adapter
    holds: int = 0
    """Requests that run under it."""


class AdapterStore:
    """Resident adapters by digest, least recently used first, within `capacity` bytes.

    Thread-safe. Loading happens in the thread that asks, one adapter at a time; the engine's thread only looks up.

    Adapters that are always in use would keep others out for good. So the one that has waited longest gets its turn:
    as many of those in use as stand in its way, the least recently asked for, take no more requests meanwhile, and
    others leave the room that it needs.
    """

    def __init__(
        self,
        root: Path,
        load: Callable[[Path], Adapter],
        capacity: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`root` is the model store; `load` raises `InvalidAdapter`.

        As much as `capacity` again is there for the adapters of a batch side by side (`stacked_size`).
        """
        self._root = root
        self._load = load
        self._capacity = capacity
        self._residents: OrderedDict[str, _Resident] = OrderedDict()
        self._clock = clock
        self._waits: dict[str, _Wait] = {}
        self._crowded_out: set[str] = set()
        """Digests of those that had no room since an adapter went out of use: they need not be read again."""
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._watch: AdapterWatch | None = None
        self.loads = 0
        self.evictions = 0

    def tell(self, watch: AdapterWatch) -> None:
        """Tell from now on what becomes of adapters."""
        self._watch = watch

    def hold(self, uses: Sequence[LoraUse]) -> None:
        """Make all of them resident, and keep them so until `release`; raises `AdapterUnavailable`, holding none."""
        held, own = list[LoraUse](), frozenset(use.digest for use in uses)
        try:
            for use in uses:
                self._hold(use, held, own)
                held.append(use)
        except AdapterUnavailable:
            self.release(held)
            raise

    def release(self, uses: Sequence[LoraUse]) -> None:
        with self._lock:
            for use in uses:
                resident = self._residents[use.digest]
                resident.holds -= 1
                if not resident.holds:
                    self._crowded_out.clear()

    def get(self, digest: str) -> Adapter | None:
        """Return a resident adapter."""
        resident = self._residents.get(digest)  # one look-up under the interpreter's lock
        return None if resident is None else resident.adapter

    def held(self) -> set[str]:
        """Return the digests of the adapters that requests run under."""
        with self._lock:
            return {digest for digest, resident in self._residents.items() if resident.holds}

    def names(self) -> list[str]:
        """Return the names of the resident adapters, sorted."""
        with self._lock:
            return sorted({resident.name for resident in self._residents.values()})

    def digests(self) -> list[str]:
        """Return the digests of the resident adapters, sorted."""
        with self._lock:
            return sorted(self._residents)

    @property
    def size(self) -> int:
        """Bytes of all resident adapters."""
        with self._lock:
            return self._size()

    def _hold(self, use: LoraUse, beside: Sequence[LoraUse], own: frozenset[str]) -> None:
        """Hold an adapter of a request for all of `own` that holds those of `beside` already."""
        if self._take(use, beside, own):
            return
        with self._loading:
            if self._take(use, beside, own):
                return  # somebody else has loaded it meanwhile
            with self._lock:
                if use.digest in self._crowded_out:
                    raise self._turn_away(use)
            began = time.perf_counter()
            try:
                adapter = self._read(use)
                with self._lock:
                    self._check_room(use, adapter, beside, own)
                    self._make_room(adapter.size)
                    self._residents[use.digest] = _Resident(use.name, adapter, holds=1)
                    self._waits.pop(use.digest, None)
                    self.loads += 1
                    count, size = len(self._residents), self._size()
            except AdaptersFull:
                raise
            except Exception:
                if self._watch is not None:
                    self._watch.count_adapter_failure()
                raise
            if self._watch is not None:
                self._watch.count_adapter_load(time.perf_counter() - began)
                self._watch.show_adapters(count, size)

    def _take(self, use: LoraUse, beside: Sequence[LoraUse], own: frozenset[str]) -> bool:
        with self._lock:
            resident = self._residents.get(use.digest)
            first = self._first_wait(own)
            if first is not None and use.digest in first.yielding:
                raise self._turn_away(use)
            if resident is None:
                return False
            if not resident.holds:
                self._check_room(use, resident.adapter, beside, own)
            resident.holds += 1
            self._waits.pop(use.digest, None)
            self._residents.move_to_end(use.digest)
            return True

    def _read(self, use: LoraUse) -> Adapter:
        try:
            folder = find_folder(self._root, use.path)
            if digest_of(folder) != use.digest:
                # Another worker may still see, or see already, the right ones.
                raise AdapterUnavailable.of(use, "its files are not those that it was registered with")
            return self._load(folder)
        except UnreadableAdapter as error:
            raise AdapterUnavailable.of(use, error) from error
        except InvalidAdapter as error:
            raise AdapterFaulty.of(use, error) from error
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise AdapterUnavailable.of(use, "the device has no memory for it") from error

    def _first_wait(self, own: frozenset[str]) -> _Wait | None:
        """Return the adapter whose turn it is, having waited for long; None if it is among a request's `own`."""
        now = self._clock()
        waits = {key: wait for key, wait in self._waits.items() if now - wait.seen < _GONE_S}
        if len(waits) < len(self._waits):
            self._waits = waits
            self._crowded_out.clear()  # what was kept for it is free
        first = min(waits, key=lambda key: waits[key].since, default=None)
        if first is None or first in own or now - waits[first].since < _PATIENCE_S:
            return None
        return waits[first]

    def _turn_away(self, use: LoraUse) -> AdaptersFull:
        """Note that an adapter waits; return what to raise."""
        now = self._clock()
        self._waits.setdefault(use.digest, _Wait(now, now)).seen = now
        return AdaptersFull.of(use, "no room beside the adapters in use (lora_memory_mb)")

    def _check_room(self, use: LoraUse, adapter: Adapter, beside: Sequence[LoraUse], own: frozenset[str]) -> None:
        """Raise `AdapterUnavailable` if an adapter has no room beside those in use, or with its request's own."""
        used = {digest: resident.adapter for digest, resident in self._residents.items() if resident.holds}
        used[use.digest] = adapter
        if stacked_size(used.values()) <= self._capacity:
            first = self._first_wait(own)
            if first is None or first.outline is None:
                return
            others = [each for digest, each in used.items() if digest not in first.yielding]
            if stacked_size([*others, first.outline]) <= self._capacity:
                return
            self._crowded_out.add(use.digest)
            raise self._turn_away(use)
        together = {each.digest: each.name for each in (*beside, use)}
        if stacked_size([used[digest] for digest in together]) > self._capacity:
            raise self._too_much(use, together, used)
        error = self._turn_away(use)
        self._crowded_out.add(use.digest)
        yielding = list[str]()
        for digest in [digest for digest in self._residents if digest in used and digest not in own]:
            yielding.append(digest)
            del used[digest]
            if stacked_size(used.values()) <= self._capacity:
                break
        wait = self._waits[use.digest]
        wait.yielding, wait.outline = frozenset(yielding), _outline(adapter)
        raise error

    def _too_much(self, use: LoraUse, together: Mapping[str, str], used: Mapping[str, Adapter]) -> AdapterUnavailable:
        """Say that an adapter has no room even alone, or else not with its request's others (digest to name)."""
        mib = 2**20
        has = f"and this worker has {self._capacity / mib:.1f} (lora_memory_mb)"
        if (alone := stacked_size([used[use.digest]])) > self._capacity:
            return AdapterUnavailable.of(use, f"{alone / mib:.1f} MiB are needed, {has}")
        needed = stacked_size([used[digest] for digest in together])
        names = ", ".join(together.values())
        # The model's name holds one at most: what is too much beside it, `lora` has added.
        message = f"the adapters {names} of this request: {needed / mib:.1f} MiB are needed for them together, {has}"
        return AdapterUnavailable(message, "lora")

    def _make_room(self, size: int) -> None:
        """Let go of unused adapters until one of `size` bytes fits, for which there is room beside those in use."""
        idle = [digest for digest, resident in self._residents.items() if not resident.holds]
        free = self._capacity - self._size()
        while free < size:
            free += self._residents.pop(idle.pop(0)).adapter.size
            self.evictions += 1
            if self._watch is not None:
                self._watch.count_adapter_eviction()

    def _size(self) -> int:
        return sum(resident.adapter.size for resident in self._residents.values())


def _outline(adapter: Adapter) -> Adapter:
    """Return an adapter of the same shapes without any memory."""

    def bare(factors: Mapping[Linear, tuple[Tensor, Tensor]]) -> dict[Linear, tuple[Tensor, Tensor]]:
        return {linear: (a.to("meta"), b.to("meta")) for linear, (a, b) in factors.items()}

    return Adapter(adapter.rank, adapter.factor, bare(adapter.factors), bare(adapter.of_text))
