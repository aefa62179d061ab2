"""CUDA C++ without a toolkit: compiled by the NVRTC that PyTorch brings, launched through the driver.

Triton has no words for clusters of blocks and copies to several of them, so kernels that need them are CUDA C++.
"""

import ctypes
import functools
import hashlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
from triton.runtime.cache import get_cache_manager

# Values of the driver's enumerations, as cuda.h has them.
_DYNAMIC_SHARED_BYTES = 8
_CLUSTER_DIMENSION, _OVERLAP = 4, 6
_PROMOTE_TO_256_BYTES = 3


class Element(IntEnum):
    HALF = 6
    BFLOAT16 = 9


class Swizzle(IntEnum):
    BYTES_64 = 2
    BYTES_128 = 3


@dataclass(frozen=True, slots=True)
class Grid:
    blocks: int
    threads: int
    shared_bytes: int
    cluster: int


@functools.cache
def compiler() -> ctypes.CDLL | None:
    """Return NVRTC as PyTorch's packages or the system have it, or none."""
    name = f"libnvrtc.so.{(torch.version.cuda or '*').split('.')[0]}"
    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    places = [str(path) for folder in folders for path in sorted(Path(folder).glob(f"*/lib/{name}"))]
    for place in [*places, name]:
        try:
            return ctypes.CDLL(place)
        except OSError:
            continue
    return None


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"{what} failed with status {status}")


@functools.cache
def read(name: str) -> str:
    """Return a text that lies beside this module."""
    return (Path(__file__).parent / name).read_text()


@functools.cache
def compile_cubin(text: str) -> bytes:
    """Return the machine code of a CUDA C++ text for sm_90a, kept in Triton's cache of compiled kernels.

    Raises RuntimeError with the compiler's log.
    """
    nvrtc = compiler()
    if nvrtc is None:
        raise RuntimeError("NVRTC was not found")
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    key = hashlib.sha256(f"{major.value}.{minor.value} {text}".encode()).hexdigest()
    cache = get_cache_manager(key)
    kept = cache.get_file("kernel.cubin")
    if kept is not None:
        return Path(kept).read_bytes()
    code = _compile(nvrtc, text)
    cache.put(code, "kernel.cubin", binary=True)
    return code


def _compile(nvrtc: ctypes.CDLL, text: str) -> bytes:
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), None, 0, None, None), "nvrtcCreateProgram")
    try:
        options = (ctypes.c_char_p * 2)(b"--gpu-architecture=sm_90a", b"--std=c++17")
        if nvrtc.nvrtcCompileProgram(program, len(options), options):
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise RuntimeError(f"a kernel did not compile: {log.value.decode()}")
        _check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)), "nvrtcGetCUBINSize")
        code = ctypes.create_string_buffer(size.value)
        _check(nvrtc.nvrtcGetCUBIN(program, code), "nvrtcGetCUBIN")
        return code.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _bind(device: torch.device) -> None:
    """Make a device's context the current one: this thread may have asked PyTorch for nothing yet."""
    driver, context = _driver(), ctypes.c_void_p()
    _check(driver.cuInit(0), "cuInit")
    _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device.index), "cuDevicePrimaryCtxRetain")
    _check(driver.cuCtxSetCurrent(context), "cuCtxSetCurrent")


def load(text: str, name: str, shared_bytes: int, device: torch.device) -> ctypes.c_void_p:
    """Return the kernel `name` of a text on a device, allowed so many bytes of shared memory."""
    driver = _driver()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    with torch.cuda.device(device):
        _bind(device)
        _check(driver.cuModuleLoadData(ctypes.byref(module), compile_cubin(text)), "cuModuleLoadData")
        _check(driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), "cuModuleGetFunction")
        _check(driver.cuFuncSetAttribute(function, _DYNAMIC_SHARED_BYTES, shared_bytes), "cuFuncSetAttribute")
    return function


@functools.lru_cache(maxsize=8192)
def describe(
    address: int,
    sizes: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    swizzle: Swizzle,
    element: Element,
) -> Any:
    """Return the copy engine's description of an array and the box of it that one copy moves.

    Dimensions begin with the contiguous one; strides, in bytes, with the second. What lies outside is read as zero and
    never written. Elements have 2 bytes.
    """
    rank = len(sizes)
    room = ctypes.create_string_buffer(128 + 64)
    aligned = (ctypes.c_char * 128).from_buffer(room, -ctypes.addressof(room) % 64)
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.byref(aligned),
        int(element),
        rank,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*([1] * rank)),
        0,
        int(swizzle),
        _PROMOTE_TO_256_BYTES,
        0,
    )
    _check(status, "cuTensorMapEncodeTiled")
    return aligned


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_uint32 * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


def _configure(grid: Grid, stream: int) -> _Config:
    attributes = (_Attribute * 2)()
    attributes[0].id = _OVERLAP
    attributes[0].value[0] = 1
    attributes[1].id = _CLUSTER_DIMENSION
    attributes[1].value[:3] = [grid.cluster, 1, 1]
    return _Config(
        grid=(grid.blocks, 1, 1),
        block=(grid.threads, 1, 1),
        shared=grid.shared_bytes,
        stream=stream,
        attributes=attributes,
        count=len(attributes),
    )


def launch(function: ctypes.c_void_p, grid: Grid, device: torch.device, arguments: Sequence[Any]) -> None:
    """Launch on the current stream; arguments are ctypes values.

    The kernel waits by itself for those in front of it (`kernels.gpu.overlap`).
    """
    config = _configure(grid, torch.cuda.current_stream(device).cuda_stream)
    pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
    _check(_driver().cuLaunchKernelEx(ctypes.byref(config), function, pointers, None), "cuLaunchKernelEx")


def clusters_at_once(device: torch.device, cluster: int) -> int:
    """Return how many clusters run at once whose blocks each fill a multiprocessor."""
    shared = 200 * 1024
    function = load('extern "C" __global__ void nothing() {}', "nothing", shared, device)
    count, config = ctypes.c_int(), _configure(Grid(cluster, 128, shared, cluster), 0)
    with torch.cuda.device(device):
        status = _driver().cuOccupancyMaxActiveClusters(ctypes.byref(count), function, ctypes.byref(config))
    _check(status, "cuOccupancyMaxActiveClusters")
    return count.value
