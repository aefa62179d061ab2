"""Programmatic dependent launch: a kernel is set up while the one before it drains, and waits before it reads.

A decode step is some 300 short kernels; the gap between two of them is about as long as the smallest of them runs.
Every kernel calls `wait_for_inputs` or `release_and_wait` before its first access to memory that a kernel not long
before it writes or reads. What is older may be read before: a step's plan, who runs under which adapter.
"""

import functools

import torch
import triton
import triton.language as tl


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    """Wait until the kernels before this one have finished, then let the next one be set up.

    Releasing the next one first, so that it could bring weights into the cache meanwhile, made steps slower: its
    programs take the room of those that still work (docs/benchmarks).
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def release_and_wait(OVERLAP: tl.constexpr):
    """Let the next kernel be set up, then wait until those before this one have finished.

    For kernels that take little room and stand before a product: its blocks ask for weights as soon as a multiprocessor
    is free, while this one still waits. A kernel that reads something before its wait relies on one in between that
    waited before it released: the embedding of a step's tokens, which is PyTorch's, or a product.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@functools.cache
def overlap_options(device: torch.device) -> dict[str, bool]:
    """Return the launch options of a kernel that calls one of these: on from Hopper up."""
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"OVERLAP": True, "launch_pdl": True} if able else {"OVERLAP": False}
