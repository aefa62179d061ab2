"""Programmatic dependent launch: a kernel is set up while the one before it drains, and waits before it reads.

A decode step is some 300 short kernels; the gap between two of them is about as long as the smallest of them runs.
Every kernel calls `release_next` first of all, and `wait_for_inputs` before its first access to memory that another
kernel of the step writes or reads. As each one waits for the whole of its predecessor, several may be set up in
advance; what they may do meanwhile is to bring weights, which nobody writes, into the cache.
"""

import functools

import torch
import triton
import triton.language as tl


@triton.jit
def release_next(OVERLAP: tl.constexpr):
    """Let the next kernel be set up as soon as every program of this one has started."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    """Wait until the kernels before this one have finished and their writes are seen."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch_rows(place):
    """Ask for 1 KiB from each address on to be brought into the second-level cache."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], 1024; mov.u32 $0, 0;",
        "=r,l",
        [place.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@functools.cache
def overlap_options(device: torch.device) -> dict[str, bool]:
    """Return the launch options of a kernel that calls these: on from Hopper up."""
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"OVERLAP": True, "launch_pdl": True} if able else {"OVERLAP": False}
