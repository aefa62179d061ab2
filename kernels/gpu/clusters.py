"""Products of some hundred tokens on Hopper: clusters of blocks share what they read (`clusters.cu`).

With so many tokens a product is bound by memory and arithmetic at once, and by what a multiprocessor takes in from the
second-level cache. A tile is as large as registers allow, one for each multiprocessor where that goes. Blocks of a
cluster send each other the parts of tiles that they have in common; those that share a tile, each a stretch of the
inputs, add up their sums through shared memory in the order of the stretches, so a result never depends on who was
first.
"""

import ctypes
import functools
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.gpu import driver
from kernels.gpu.driver import Element, Grid, Swizzle

_SHARED_BYTES = 227 * 1024
_ALIGNMENT = 1024
_BARRIERS = 256
_LARGEST_CLUSTER = 8
_MOST_SUMS = 768
"""Groups times tokens: three fourths of the registers."""
_MOST_OF_FOUR = 128
"""Tokens of four groups, whose registers are fewer by what the copying warp has."""
_INPUTS = 64
"""Of a buffer: 128 bytes of each row, the widest swizzle."""


@dataclass(frozen=True, slots=True)
class Tiling:
    groups: int
    """Warp groups, each with 64 rows of the weights."""
    tokens: int
    """Of a tile: a multiple of 16 for each split (32 behind a gate), at most 256."""
    tokens_in_cluster: int = 1
    """Tiles of other tokens and the same weights in a cluster."""
    rows_in_cluster: int = 1
    """Tiles of other weights and the same tokens in a cluster."""
    splits: int = 1
    """Blocks of a cluster that share a tile, each a stretch of the inputs."""

    def __post_init__(self) -> None:
        if not 1 <= self.groups <= 4 or not 1 <= self.cluster <= _LARGEST_CLUSTER:
            raise ValueError(f"{self}: up to 4 warp groups and {_LARGEST_CLUSTER} blocks in a cluster are possible")
        # Eight rows are a unit of the swizzle; an output's tokens leave by sixteens.
        if self.rows % (8 * self.tokens_in_cluster) or self.tokens % (8 * self.rows_in_cluster):
            raise ValueError(f"{self}: a cluster has to share its tiles by whole eights of rows")
        if not 0 < self.tokens <= 256 or self.tokens % (16 * self.splits):
            raise ValueError(f"{self}: tokens must be a multiple of 16 for each split, at most 256")
        if self.groups * self.tokens > _MOST_SUMS or (self.groups == 4 and self.tokens > _MOST_OF_FOUR):
            raise ValueError(f"{self}: the sums do not fit the registers")

    @property
    def rows(self) -> int:
        return 64 * self.groups

    @property
    def gates(self) -> bool:
        """Whether pairs of a gate and what it lets through end in the same thread, 32 tokens at a time."""
        return self.tokens % (32 * self.splits) == 0 and self.rows % (16 * self.tokens_in_cluster) == 0

    @property
    def cluster(self) -> int:
        return self.tokens_in_cluster * self.rows_in_cluster * self.splits

    @property
    def registers(self) -> int:
        """Of a thread that multiplies, where its sums need more than an equal share; else 0."""
        return 160 if self.groups == 3 and self.tokens > 192 else 0

    @property
    def width(self) -> int:
        """Tokens of one instruction, whose sums have to fit what a thread starts with."""
        return self.tokens // 2 if self.registers else self.tokens

    @property
    def threads(self) -> int:
        return self.groups * 128 + (128 if self.registers else 32)

    @property
    def stage_bytes(self) -> int:
        return (self.rows + self.tokens) * _INPUTS * 2

    @property
    def stages(self) -> int:
        return (_SHARED_BYTES - _ALIGNMENT - _BARRIERS) // self.stage_bytes

    @property
    def shared_bytes(self) -> int:
        return self.stages * self.stage_bytes + _ALIGNMENT

    def token_clusters(self, tokens: int) -> int:
        return -(-tokens // (self.tokens * self.tokens_in_cluster))

    def grid(self, rows: int, tokens: int) -> Grid:
        blocks = self.token_clusters(tokens) * -(-rows // (self.rows * self.rows_in_cluster)) * self.cluster
        return Grid(blocks, self.threads, self.shared_bytes, self.cluster)


# What an H100 does in a us, fitted to the times of sixty tilings (docs/benchmarks): operations and bytes from memory
# and from the second-level cache by all its multiprocessors, bytes into one. Less than three fourths of them have not
# been seen to draw all that memory gives. Weights that several clusters read cost a little more than those of one.
_OPERATIONS, _FROM_MEMORY, _FROM_CACHE, _INTO_ONE = 792e6, 2.9e6, 9.5e6, 0.105e6
_ENOUGH, _APART = 3 / 4, 1.05
_LAUNCH_US, _EXCHANGE_US = 1.0, 2.0


def expected_us(tiling: Tiling, rows: int, inputs: int, tokens: int, multiprocessors: int) -> float:
    """Return how long a product should take: near the largest of its bounds, more where several are as large."""
    blocks = tiling.grid(rows, tokens).blocks
    at_once = multiprocessors // tiling.cluster * tiling.cluster
    waves = -(-blocks // at_once)
    running = min(blocks, at_once)
    stretch = -(-inputs // (_INPUTS * tiling.splits)) * _INPUTS
    loaded = tiling.rows / tiling.tokens_in_cluster + tiling.tokens / tiling.rows_in_cluster
    memory = _FROM_MEMORY * min(1, running / (_ENOUGH * multiprocessors))
    bounds = (
        2 * tiling.rows * tiling.tokens * stretch * multiprocessors / _OPERATIONS,
        2 * loaded * stretch * running / _FROM_CACHE,
        2 * (tiling.rows + tiling.tokens) * stretch / _INTO_ONE,
        2 * (rows + tokens) * inputs / waves / memory,
    )
    apart = _APART if tiling.token_clusters(tokens) > 1 and tiling.tokens_in_cluster == 1 else 1
    wave = sum(bound**6 for bound in bounds) ** (1 / 6)
    return waves * wave * apart + _LAUNCH_US + (tiling.splits > 1) * _EXCHANGE_US


# Larger clusters lie within parts of the device whose sizes differ: 32 of four blocks take two turns.
_CLUSTERS = ((1, 1, 1), (1, 2, 1), (2, 1, 1), (1, 1, 2))


@functools.cache
def choose(rows: int, inputs: int, tokens: int, multiprocessors: int, *, gated: bool) -> Tiling:
    """Return the tiling that should be fastest, of those without a cluster and with one of two blocks."""
    tilings = [
        Tiling(groups, height, *cluster)
        for tiles in range(1, 1 + max(2, -(-tokens // 64)))
        if (height := max(64, -(-tokens // (32 * tiles)) * 32)) <= 256
        for groups, cluster in itertools.product((1, 2, 3), _CLUSTERS)
        if tiles % cluster[0] == 0 and not (gated and cluster[2] > 1)
    ]
    return min(tilings, key=lambda tiling: expected_us(tiling, rows, inputs, tokens, multiprocessors))


@functools.cache
def able(device: torch.device) -> bool:
    """Tell whether a device has clusters, and what compiles for them is there."""
    return (
        device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0) and driver.compiler() is not None
    )


def fits(x: Tensor, weight: Tensor, *, gated: bool) -> bool:
    """Tell whether the copy engine can address these: 16 bytes at a time."""
    columns = weight.shape[0] // 2 if gated else weight.shape[0]
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and x.stride(-1) == 1
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and weight.is_contiguous()
        and weight.data_ptr() % 16 == 0
        and weight.shape[1] % 8 == 0
        and columns % 8 == 0
    )


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, tiling: Tiling, *, gated: bool) -> Tensor:
    """Multiply as `linear` and, without bias, `gated_linear` of `kernels.linear` do; x and weight have to fit."""
    tokens, inputs = x.shape
    rows, weight_inputs = weight.shape
    if gated and not (tiling.gates and bias is None):
        raise ValueError(f"{tiling} is not for a gate, or the gate has a bias")
    if weight_inputs != inputs or not fits(x, weight, gated=gated):
        raise ValueError(f"x {list(x.shape)} does not go with weight {list(weight.shape)}")
    columns = rows // 2 if gated else rows
    out = torch.empty((tokens, columns), dtype=x.dtype, device=x.device)
    half = x.dtype == torch.float16
    element = Element.HALF if half else Element.BFLOAT16
    part = tiling.rows // tiling.tokens_in_cluster
    if gated:
        # Eight rows of the gate and eight of what it lets through in turn: both of a pair end in the same thread.
        sizes, box = (inputs, 8, 2, columns // 8), (_INPUTS, 8, 2, part // 16)
        strides = (inputs * 2, columns * inputs * 2, 8 * inputs * 2)
    else:
        sizes, strides, box = (inputs, rows), (inputs * 2,), (_INPUTS, part)
    wide = Swizzle.BYTES_128
    arguments = (
        driver.describe(weight.data_ptr(), sizes, strides, box, wide, element),
        driver.describe(
            x.data_ptr(),
            (inputs, tokens),
            (x.stride(0) * 2,),
            (_INPUTS, tiling.tokens // tiling.rows_in_cluster),
            wide,
            element,
        ),
        driver.describe(
            out.data_ptr(),
            (columns, tokens),
            (columns * 2,),
            (32 if gated else 64, tiling.tokens // tiling.splits),
            Swizzle.BYTES_64 if gated else wide,
            element,
        ),
        ctypes.c_uint64(0 if bias is None else bias.data_ptr()),
        ctypes.c_int(columns),
        ctypes.c_int(tiling.token_clusters(tokens)),
        ctypes.c_int(-(-inputs // _INPUTS)),
    )
    device = x.device
    function = _function(tiling, gated, half, torch.cuda.current_device() if device.index is None else device.index)
    driver.launch(function, tiling.grid(rows, tokens), device, arguments)
    return out


@functools.cache
def _function(tiling: Tiling, gated: bool, half: bool, device: int) -> ctypes.c_void_p:
    return driver.load(source(tiling, gated=gated, half=half), "product", tiling.shared_bytes, device)


def source(tiling: Tiling, *, gated: bool, half: bool) -> str:
    """Return the kernel's text for a tiling."""
    names = {
        "WG": tiling.groups,
        "TOKENS": tiling.tokens,
        "TOKENS_IN_CLUSTER": tiling.tokens_in_cluster,
        "ROWS_IN_CLUSTER": tiling.rows_in_cluster,
        "SPLITS": tiling.splits,
        "STAGES": tiling.stages,
        "WIDTH": tiling.width,
        "REGISTERS": tiling.registers,
        "GATED": int(gated),
        "HALF": int(half),
    }
    defines = "".join(f"#define {name} {value}\n" for name, value in names.items())
    return defines + _instruction(tiling.width, "f16" if half else "bf16") + driver.read("clusters.cu")


def _instruction(tokens: int, kind: str) -> str:
    """Return `multiply` of `clusters.cu`: the instruction names each of its registers."""
    count = tokens // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return (
        "__device__ __forceinline__ void multiply(float* d, unsigned long long w, unsigned long long x) {\n"
        '  asm volatile("{\\n.reg .pred add;\\nsetp.ne.b32 add, 1, 0;\\n"\n'
        f'      "wgmma.mma_async.sync.aligned.m64n{tokens}k16.f32.{kind}.{kind} {{{registers}}},"\n'
        f'      " %{count}, %{count + 1}, add, 1, 1, 0, 0;\\n}}\\n" : {operands} : "l"(w), "l"(x));\n'
        "}\n"
    )
