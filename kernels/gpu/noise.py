"""Twin of `kernels.noise` for use inside kernels: the same words, bit for bit."""

import triton
import triton.language as tl


@triton.jit
def mix(x):
    """The bijection of 32-bit words of `kernels.noise`."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def hash_key(seed, position, step):
    """Return the uint32 key of int64 (seed, position, step)."""
    key = mix((seed & 0xFFFFFFFF).to(tl.uint32) ^ 0x9E3779B9)
    key = mix(key ^ _spread((seed >> 32) & 0xFFFFFFFF))
    key = mix(key ^ _spread(position & 0xFFFFFFFF))
    return mix(key ^ _spread(step & 0xFFFFFFFF))


@triton.jit
def _spread(word):
    return word.to(tl.uint32) * 0x85EBCA6B + 0xC2B2AE35


@triton.jit
def gumbel(key, lane):
    """Return standard Gumbel noise for uint32 lanes under a key; the uniform number below it is exact."""
    word = mix(mix(lane + key) ^ key)
    uniform = ((word >> 9).to(tl.int32).to(tl.float32) + 0.5) * (1.0 / 8388608.0)
    # A logarithm of full precision: near 1, where the largest draws come from, an approximate one has no digit right.
    return -tl.log(-tl.log(uniform))
