"""Products of some hundred tokens on Hopper: clusters of blocks share what they read (`clusters.cu`).

With so many tokens a product is bound by memory and arithmetic at once, and by what a multiprocessor takes in from the
second-level cache. A tile is as large as registers allow, one for each multiprocessor where that goes. Blocks of a
cluster send each other the parts of tiles that they have in common; those that share a tile, each a stretch of the
inputs, add up their sums through shared memory in the order of the stretches, so a result never depends on who was
first.
"""

import ctypes
import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.gpu import driver
from kernels.gpu.driver import Element, Grid, Swizzle

_SHARED_BYTES = 227 * 1024
_ALIGNMENT = 1024
_BARRIERS = 256
_LARGEST_CLUSTER = 8
_MOST_SUMS = 768
"""Groups times the side along an instruction: three fourths of the registers."""
_MOST_OF_FOUR = 136
"""Sides of four groups, whose registers are fewer by what the copying warp has."""
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
    narrow: int = 0
    """If not 0, the sides change places: warp groups have 64 tokens each, and this many rows of the weights. Then a
    tile's rows can be as many as make the tiles of one turn, not only multiples of 64."""

    def __post_init__(self) -> None:
        if not 1 <= self.groups <= 4 or not 1 <= self.cluster <= _LARGEST_CLUSTER:
            raise ValueError(f"{self}: up to 4 warp groups and {_LARGEST_CLUSTER} blocks in a cluster are possible")
        # Eight rows are a unit of the swizzle; an output's tokens leave by sixteens.
        if self.rows % 8 or self.rows < 8 * self.tokens_in_cluster or self.tokens % (8 * self.rows_in_cluster):
            raise ValueError(f"{self}: a cluster has to share its tiles by whole eights of rows")
        if not 0 < self.tokens <= 256 or self.tokens % (16 * self.splits) or self.rows > 256:
            raise ValueError(f"{self}: tokens must be a multiple of 16 for each split, at most 256")
        if self.narrow and (self.tokens != 64 * self.groups or self.splits > 2):
            raise ValueError(f"{self}: each warp group has 64 tokens, and there are two splits at most")
        if self.registers and self.side % 16:
            raise ValueError(f"{self}: an instruction takes half of so long a side")
        if self.groups * self.side > _MOST_SUMS or (self.groups == 4 and self.side > _MOST_OF_FOUR):
            raise ValueError(f"{self}: the sums do not fit the registers")

    @property
    def rows(self) -> int:
        return self.narrow or 64 * self.groups

    @property
    def side(self) -> int:
        """Of the tile, the one that lies along an instruction: a thread has a sum for each two of it."""
        return self.narrow or self.tokens

    @property
    def gates(self) -> bool:
        """Whether pairs of a gate and what it lets through end in the same thread, 32 tokens at a time."""
        return not (self.narrow or self.tokens % (32 * self.splits) or self.rows % (16 * self.tokens_in_cluster))

    @property
    def cluster(self) -> int:
        return self.tokens_in_cluster * self.rows_in_cluster * self.splits

    @property
    def registers(self) -> int:
        """Of a thread that multiplies, where its sums need more than an equal share; else 0."""
        return 160 if self.groups == 3 and self.side > 200 else 0

    @property
    def width(self) -> int:
        """Of one instruction, whose sums have to fit what a thread starts with."""
        return self.side // 2 if self.registers else self.side

    @property
    def threads(self) -> int:
        return self.groups * 128 + (128 if self.registers else 32)

    @property
    def stage_bytes(self) -> int:
        return (self.rows + self.tokens) * _INPUTS * 2

    @property
    def stages(self) -> int:
        return (_SHARED_BYTES - _ALIGNMENT - _BARRIERS - 4 * self.tokens) // self.stage_bytes

    @property
    def shared_bytes(self) -> int:
        return self.stages * self.stage_bytes + _ALIGNMENT

    def token_clusters(self, tokens: int) -> int:
        return -(-tokens // (self.tokens * self.tokens_in_cluster))

    def grid(self, rows: int, tokens: int) -> Grid:
        blocks = self.token_clusters(tokens) * -(-rows // (self.rows * self.rows_in_cluster)) * self.cluster
        return Grid(blocks, self.threads, self.shared_bytes, self.cluster)


@dataclass(frozen=True, slots=True)
class Room:
    """How many blocks, clusters of two and clusters of four of a device run at once.

    A cluster lies within one of the parts that a device is made of, and how many multiprocessors work in each part
    differs between devices of one kind.
    """

    singles: int
    pairs: int
    fours: int

    def blocks(self, cluster: int) -> int:
        return {1: self.singles, 2: 2 * self.pairs, 4: 4 * self.fours}[cluster]


@functools.cache
def room_of(device: torch.device) -> Room:
    return Room(*(driver.clusters_at_once(device, size) for size in (1, 2, 4)))


# What an H100 does in a us, fitted to the times of 223 products by some hundred tilings (docs/benchmarks): operations,
# bytes from memory, of weights and of tokens from the second-level cache, by all its multiprocessors, and bytes into
# one. Tokens that all read at a time cost the cache little. Less than some 0.6 of the multiprocessors do not draw all
# that memory gives. Each turn of tiles begins and ends anew.
_OPERATIONS, _FROM_MEMORY, _WEIGHTS_FROM_CACHE, _TOKENS_FROM_CACHE, _INTO_ONE = 827e6, 3.165e6, 6.24e6, 27.7e6, 0.267e6
_ENOUGH, _TURN_US, _EXCHANGE_US = 0.6, 2.4, 1.2
_SHARPNESS = 3.6


def turns_of(tiling: Tiling, rows: int, tokens: int, room: Room) -> int:
    """Return how many times a multiprocessor begins with a tile."""
    return -(-tiling.grid(rows, tokens).blocks // room.blocks(tiling.cluster))


def share_of_turns(tiling: Tiling, rows: int, tokens: int, room: Room) -> float:
    """Return what part of the turns' multiprocessors has a tile."""
    turns = turns_of(tiling, rows, tokens, room)
    return tiling.grid(rows, tokens).blocks / (turns * room.blocks(tiling.cluster))


def expected_us(tiling: Tiling, rows: int, inputs: int, tokens: int, room: Room) -> float:
    """Return how long a product should take: near the largest of its bounds, more where several are as large."""
    blocks = tiling.grid(rows, tokens).blocks
    at_once = room.blocks(tiling.cluster)
    turns = turns_of(tiling, rows, tokens, room)
    running = min(blocks, at_once)
    stretch = -(-inputs // (_INPUTS * tiling.splits)) * _INPUTS
    weights, others = tiling.rows / tiling.tokens_in_cluster, tiling.tokens / tiling.rows_in_cluster
    bounds = (
        2 * tiling.rows * tiling.tokens * stretch * room.singles / _OPERATIONS,
        2 * stretch * running * (weights / _WEIGHTS_FROM_CACHE + others / _TOKENS_FROM_CACHE),
        2 * (tiling.rows + tiling.tokens) * stretch / _INTO_ONE,
        2 * (rows + tokens) * inputs / turns / (_FROM_MEMORY * min(1, running / (_ENOUGH * room.singles))),
    )
    turn = sum(bound**_SHARPNESS for bound in bounds) ** (1 / _SHARPNESS) + _TURN_US
    return turns * turn + (tiling.splits > 1) * _EXCHANGE_US


# Only tilings that have been checked and timed on a card: groups, tokens, cluster.
GATED = (
    *(Tiling(3, tokens, 1, 2) for tokens in (32, 64, 128, 160, 192, 224, 256)),
    *(Tiling(3, tokens, 2) for tokens in (128, 160, 192, 256)),
    *(Tiling(3, tokens) for tokens in (32, 64, 128, 160, 192, 256)),
    Tiling(2, 128, 1, 2),
    Tiling(2, 256, 1, 2),
    Tiling(2, 192, 2),
    Tiling(2, 256, 2),
)
PLAIN = (
    *(Tiling(1, tokens) for tokens in (32, 64, 128)),
    *(Tiling(1, tokens, 1, 2) for tokens in (32, 64, 96, 128, 192)),
    *(Tiling(1, tokens, 2) for tokens in (32, 64, 80, 96, 112, 144, 160, 176, 192, 256)),
    *(Tiling(2, tokens, 2) for tokens in (64, 80, 96, 128, 192, 256)),
    *(Tiling(3, tokens, 2) for tokens in (96, 128, 144, 160, 256)),
    *(Tiling(1, tokens, 1, 1, 2) for tokens in (32, 128)),
    *(Tiling(2, tokens, 1, 1, 2) for tokens in (128, 256)),
    *(Tiling(3, tokens, 1, 1, 2) for tokens in (96, 128, 160)),
)

LEAST_TOKENS = 32
"""Of a tile: fewer tokens are as fast."""
WIDE = 10240
"""Outputs from which up a product without a gate takes the tilings of one with it."""


@functools.cache
def choose(rows: int, inputs: int, tokens: int, room: Room, *, gated: bool) -> Tiling:
    """Return the tiling that should be fastest."""
    tilings = GATED if gated or rows >= WIDE else (*PLAIN, *_narrow(rows, tokens, room))
    # A cluster's second tile of tokens would be empty.
    full = (tiling for tiling in tilings if tiling.tokens_in_cluster == 1 or tokens > tiling.tokens)
    return min(full, key=lambda tiling: expected_us(tiling, rows, inputs, tokens, room))


_LEAST_NARROW = 96


def _narrow(rows: int, tokens: int, room: Room) -> Iterator[Tiling]:
    """Yield tilings of twice 128 tokens, whole and by halves of the inputs, whose tiles make one turn."""
    for splits in (1, 2):
        cluster = 2 * splits
        tiles = room.blocks(cluster) // cluster // -(-tokens // 256)
        narrow = -(-rows // (8 * tiles)) * 8 if tiles else 0
        if _LEAST_NARROW <= narrow <= 256:
            yield Tiling(2, 128, 2, 1, splits, narrow)


@functools.cache
def able(device: torch.device) -> bool:
    """Tell whether a device has clusters, and what compiles for them is there."""
    return (
        device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0) and driver.compiler() is not None
    )


def fits(x: Tensor, weight: Tensor, *, gated: bool) -> bool:
    """Tell whether the copy engine can address these: 16 bytes at a time."""
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and x.stride(-1) == 1
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and addresses(weight, gated=gated)
    )


def addresses(weight: Tensor, *, gated: bool) -> bool:
    """Tell whether the copy engine can address a weight and what comes out of it."""
    columns = weight.shape[0] // 2 if gated else weight.shape[0]
    return weight.is_contiguous() and weight.data_ptr() % 16 == 0 and weight.shape[1] % 8 == 0 and columns % 8 == 0


class _Norm(ctypes.Structure):
    """`Norm` of `clusters.cu`."""

    _fields_ = (
        ("residual", ctypes.c_uint64),
        ("weights", ctypes.c_uint64),
        ("weighted", ctypes.c_uint64),
        ("squares", ctypes.c_uint64),
        ("stretches", ctypes.c_int),
        ("pitch", ctypes.c_int),
        ("share", ctypes.c_float),
        ("eps", ctypes.c_float),
    )


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tiling: Tiling,
    *,
    gated: bool,
    squares: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Multiply as `linear` and, without bias, `gated_linear` of `kernels.linear` do; x and weight have to fit.

    With squares, which `add` has returned, as `scaled_linear` and `scaled_gated_linear` of `kernels.unscaled`.
    """
    if gated and not (tiling.gates and bias is None):
        raise ValueError(f"{tiling} is not for a gate, or the gate has a bias")
    columns = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty((x.shape[0], columns), dtype=x.dtype, device=x.device)
    norm = _Norm()
    if squares is not None:
        readable = squares.dtype == torch.float32 and squares.data_ptr() % 16 == 0 and squares.stride(1) == 1
        if squares.shape[0] != x.shape[0] or squares.stride(0) % _TOGETHER or not readable:
            raise ValueError(f"squares {list(squares.shape)} do not go with x {list(x.shape)}")
        norm = _Norm(0, 0, 0, squares.data_ptr(), squares.shape[1], squares.stride(0), 1 / x.shape[1], eps)
    shape = _Shape(gated, x.dtype == torch.float16, scales=squares is not None)
    _launch(x, weight, bias, out, norm, tiling, shape)
    return out


_TOGETHER = 4
"""Stretches that one access takes."""


def add(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm_weight: Tensor, tiling: Tiling
) -> tuple[Tensor, Tensor, Tensor]:
    """Return values and squares of `unscaled_linear` of `kernels.unscaled`, and the sum; x and weight have to fit.

    A stretch of columns is what one block has of them, or one warp group.
    """
    tokens, columns = x.shape[0], weight.shape[0]
    if residual.shape != (tokens, columns) or norm_weight.shape != (columns,):
        raise ValueError(f"residual {list(residual.shape)} does not go with weight {list(weight.shape)}")
    residual, norm_weight = residual.contiguous(), norm_weight.contiguous()
    if residual.dtype != x.dtype or norm_weight.dtype != x.dtype or norm_weight.data_ptr() % 16:
        raise ValueError(f"residual or norm do not go with x of {x.dtype}")
    if residual.data_ptr() % 16:
        residual = residual.clone()
    stretches = -(-columns // (tiling.narrow or 64))
    pitch = -(-stretches // _TOGETHER) * _TOGETHER
    total = torch.empty((tokens, columns), dtype=x.dtype, device=x.device)
    weighted = torch.empty_like(total)
    squares = torch.empty((tokens, pitch), dtype=torch.float32, device=x.device)
    pointers = (tensor.data_ptr() for tensor in (residual, norm_weight, weighted, squares))
    norm = _Norm(*pointers, stretches, pitch)
    _launch(x, weight, bias, total, norm, tiling, _Shape(False, x.dtype == torch.float16, adds=True))
    return weighted, squares[:, :stretches], total


@dataclass(frozen=True, slots=True)
class _Shape:
    """What a kernel does beside multiplying; see `clusters.cu`."""

    gated: bool
    half: bool
    scales: bool = False
    adds: bool = False


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, norm: _Norm, tiling: Tiling, shape: _Shape
) -> None:
    tokens, inputs = x.shape
    rows, weight_inputs = weight.shape
    gated = shape.gated
    if weight_inputs != inputs or not fits(x, weight, gated=gated):
        raise ValueError(f"x {list(x.shape)} does not go with weight {list(weight.shape)}")
    columns = rows // 2 if gated else rows
    element = Element.HALF if shape.half else Element.BFLOAT16
    part = -(-tiling.rows // (8 * tiling.tokens_in_cluster)) * 8
    last = tiling.rows - part * (tiling.tokens_in_cluster - 1)
    if gated:
        # Eight rows of the gate and eight of what it lets through in turn: both of a pair end in the same thread.
        sizes, boxes = (inputs, 8, 2, columns // 8), [(_INPUTS, 8, 2, count // 16) for count in (part, last)]
        strides = (inputs * 2, columns * inputs * 2, 8 * inputs * 2)
    else:
        sizes, strides, boxes = (inputs, rows), (inputs * 2,), [(_INPUTS, count) for count in (part, last)]
    wide = Swizzle.BYTES_128
    arguments = (
        *(driver.describe(weight.data_ptr(), sizes, strides, box, wide, element) for box in boxes),
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
        ctypes.c_uint64(out.data_ptr()),
        ctypes.c_uint64(0 if bias is None else bias.data_ptr()),
        ctypes.c_int(tokens),
        ctypes.c_int(columns),
        ctypes.c_int(tiling.token_clusters(tokens)),
        ctypes.c_int(-(-inputs // _INPUTS)),
        norm,
    )
    grid = tiling.grid(rows, tokens)
    if shape.scales and not tiling.registers:
        # The tokens' factors are found by a warp of its own; where registers are moved, by warps that idle.
        grid = replace(grid, threads=grid.threads + 32)
    driver.launch(_function(tiling, shape, x.device), grid, x.device, arguments)


@functools.cache
def _function(tiling: Tiling, shape: _Shape, device: torch.device) -> ctypes.c_void_p:
    text = source(tiling, gated=shape.gated, half=shape.half, scales=shape.scales, adds=shape.adds)
    return driver.load(text, "product", tiling.shared_bytes, device)


def source(tiling: Tiling, *, gated: bool, half: bool, scales: bool = False, adds: bool = False) -> str:
    """Return the kernel's text for a tiling."""
    names = {
        "WG": tiling.groups,
        "SWAPPED": int(tiling.narrow > 0),
        "ROWS": tiling.rows,
        "TOKENS": tiling.tokens,
        "TOKENS_IN_CLUSTER": tiling.tokens_in_cluster,
        "ROWS_IN_CLUSTER": tiling.rows_in_cluster,
        "SPLITS": tiling.splits,
        "STAGES": tiling.stages,
        "WIDTH": tiling.width,
        "REGISTERS": tiling.registers,
        "GATED": int(gated),
        "HALF": int(half),
        "SCALES": int(scales),
        "ADDS": int(adds),
    }
    defines = "".join(f"#define {name} {value}\n" for name, value in names.items())
    return defines + _instruction(tiling.width, "f16" if half else "bf16") + driver.read("clusters.cu")


def _instruction(width: int, kind: str) -> str:
    """Return `multiply` of `clusters.cu`: the instruction names each of its registers."""
    count = width // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return (
        "__device__ __forceinline__ void multiply(float* d, unsigned long long w, unsigned long long x) {\n"
        '  asm volatile("{\\n.reg .pred add;\\nsetp.ne.b32 add, 1, 0;\\n"\n'
        f'      "wgmma.mma_async.sync.aligned.m64n{width}k16.f32.{kind}.{kind} {{{registers}}},"\n'
        f'      " %{count}, %{count + 1}, add, 1, 1, 0, 0;\\n}}\\n" : {operands} : "l"(w), "l"(x));\n'
        "}\n"
    )
