"""Compile what the fused operations launch for Hopper, where there is none: `python -m tests.kernels.hopper`.

Triton's interpreter runs kernels as Python, and so takes what its compiler refuses: a variable whose type changes in a
loop, a tile that does not fit shared memory. Here an operation's launches are compiled instead of run, over tensors of
the CPU; what they would have written is left as it was allocated. Prints each kernel with its size.
"""

import importlib
import os
import pkgutil
import sys
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

import kernels.gpu
from kernels.gpu import overlap
from kernels.lora import Factors
from kernels.moe import Router
from kernels.token_stats import Filters, Noise

TARGET = GPUTarget("cuda", 90, 32)
SHARED_BYTES = 227 * 1024
_TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.bool: "i1",
}


def type_of(value: Any) -> str:
    """Return how a kernel's signature names an argument."""
    match value:
        case Tensor():
            return f"*{_TYPES[value.dtype]}"
        case TensorDescriptor():
            return f"tensordesc<{_TYPES[value.base.dtype]}{list(value.block_shape)}>"
        case bool():
            return "i1"
        case int():
            return "i32" if -(2**31) <= value < 2**31 else "i64"
        case float():
            return "fp32"
        case _:
            raise TypeError(f"{value!r} is no argument of a kernel")


def compiled(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
    """Stand for the launch of a kernel."""
    names = [parameter.name for parameter in self.params]
    given = dict(zip(names, args, strict=False)) | {name: kwargs.pop(name) for name in names if name in kwargs}
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(self.params):
        value = given[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[place,] = "constexpr", value
            continue
        signature[parameter.name] = type_of(value)
        whole = isinstance(value, int) and not parameter.do_not_specialize and value % 16 == 0
        if whole or isinstance(value, Tensor):
            attributes[place,] = [["tt.divisibility", 16]]
    source = ASTSource(self, signature, constants, attributes)
    options = {name: value for name, value in kwargs.items() if value is not None}
    kernel = compile(source, target=TARGET, options=options)
    shared = kernel.metadata.shared
    if shared > SHARED_BYTES:
        raise ValueError(f"{self.fn.__name__} {constants}: {shared} bytes of shared memory")
    print(self.fn.__module__, self.fn.__name__, len(kernel.asm["cubin"]), shared, flush=True)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape).to(dtype)


def mixtures() -> None:
    """LLaDA2-mini's mixture for few and for many tokens, one with uneven sides, and one with a capacity."""
    from kernels.gpu import moe, router
    from kernels.moe import Experts

    rule, bias = Router(8, "sigmoid", 8, 4, True, 2.5), torch.zeros(256)
    gate_up, down = torch.empty(257, 256, 256, dtype=torch.bfloat16), torch.empty(257, 256, 128, dtype=torch.bfloat16)
    for tokens in (32, 256, 1024, 2304):
        x = random(tokens, 256)
        logits = router.router_logits(x, random(256, 256, dtype=torch.float32))
        moe.mix(x, logits, rule, Experts(gate_up, down, shared=True), bias)
    for dtype in (torch.float32, torch.bfloat16):
        wide, narrow = random(4, 140, 100, dtype=dtype), random(4, 100, 70, dtype=dtype)
        ids = torch.zeros(40, 2, dtype=torch.int64)
        moe.experts(random(40, 100, dtype=dtype), ids, torch.ones(40, 2), Experts(wide, narrow))
    bound = Router(8, "softmax", capacity=24)
    router.route(random(9, 256, dtype=torch.float32), bound, None, torch.zeros(9, dtype=torch.int64))


def small_experts() -> None:
    """Experts of 8 bits with scales for outputs and for blocks, by the tiles of few and many tokens, and unevenly."""
    from kernels.gpu import moe
    from kernels.moe import Experts

    small = torch.float8_e4m3fn
    for sizes, numbers in (((256, 256, 128), (32, 256, 1024)), ((4, 100, 70), (40,))):
        count, hidden, inner = sizes
        gate_up, down = (
            torch.zeros(count, 2 * inner, hidden, dtype=small),
            torch.zeros(count, hidden, inner, dtype=small),
        )
        up, across, low = -(-2 * inner // 128), -(-hidden // 128), -(-inner // 128)
        for scales in (
            (torch.ones(count, 2 * inner), torch.ones(count, hidden)),
            (torch.ones(count, up, across), torch.ones(count, across, low)),
        ):
            stack = Experts(gate_up, down, *scales)
            for tokens in numbers:
                ids = torch.zeros(tokens, 8, dtype=torch.int64)
                moe.experts(random(tokens, hidden), ids, torch.ones(tokens, 8), stack)


def statistics() -> None:
    """Greedy ones, and all that can be asked for, of whole rows and of shares."""
    from kernels.gpu import token_share, token_stats

    rows, number = 4, torch.arange(4)
    logits, ones = random(rows, 5000), torch.ones(rows)
    filters = Filters(number, number, ones, ones, torch.ones(rows, dtype=torch.bool))
    noise = Noise(None, number, number, number, torch.ones(rows, dtype=torch.bool))
    barred = torch.zeros(5000, dtype=torch.bool)
    token_stats.token_stats(logits)
    token_stats.token_stats(logits, ones, barred, None, filters, noise, ones, entropy=True, margin=True)
    parts = token_share.token_share(logits, 0, ones, barred, None, noise, ones, entropy=True, margin=True)
    token_share.merge_shares(torch.stack((parts, parts)), entropy=True, margin=True)


def attentions() -> None:
    """SDAR-8B's rows of 4 and of 32, one and many of them, a prompt, and pages of 8 bits."""
    from kernels.gpu import attention, kv_write, rope
    from tests.kernels.gpu_cases import AttentionCase, attention_inputs

    for rows in (((1024, 4),), ((32, 4),) * 80, ((1024, 32),), ((32, 32),) * 40, ((0, 512),)):
        case = AttentionCase("", 32, 8, 128, 32, rows, "block32")
        q, k, v, plan = attention_inputs(case, torch.bfloat16, 1)
        attention.attention(q, k, v, plan, 0.1)
    small = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
    attention.attention(q, *small, plan, 0.1, torch.ones(2, *k.shape[:3]))
    tables = random(512, 1, 128), random(512, 1, 128)
    for pages, scales in (((k, v), None), (small, torch.ones(2, *k.shape[:3]))):
        rope.rope_write(random(512, 48, 128), *tables, random(40, 128), 1e-6, *pages, plan.slots, scales)
    kv_write.kv_write(random(512, 8, 128), random(512, 8, 128), k, v, plan.slots)


def products() -> None:
    """Norms, gates, streamed products, what quantizes, and adapters."""
    from kernels.gpu import fp8, linear, lora, rms_norm, swiglu

    x = random(32, 4096)
    rms_norm.rms_norm(x, random(4096), 1e-6, x)
    swiglu.swiglu(random(1024, 8192))
    linear.linear(x, random(4096, 4096))
    linear.gated_linear(x, random(8192, 4096))
    fp8.quantize_rows(x)
    fp8.rms_norm_fp8(x, random(4096), 1e-6, x, 128)
    fp8.swiglu_fp8(x)
    for tokens in (4, 1024):
        factors = Factors(random(3, 32, 64), random(3, 256, 16), (128, 256))
        y, low = random(tokens, 256), random(tokens, 96)
        how = lora.assign(torch.zeros(tokens, dtype=torch.int64), torch.ones(tokens), torch.full((3,), 16).int())
        lora.lora(y, low, factors, how)
        lora.lora_swiglu(y, low, factors, how)


def canvases() -> None:
    """A step of 8 rows of 32 with two slots."""
    from kernels.canvas import Layout
    from kernels.gpu import canvas

    layout = Layout(block=32, pages=5, page_size=32, scratch=99)
    state = torch.zeros(8, layout.width, dtype=torch.int64)
    asked = canvas.canvas_query(state, layout, 2)
    wanted = canvas.canvas_wanted(state, layout, asked.decides, 128)
    sure = torch.ones(128)
    token = torch.zeros(128, dtype=torch.int64)
    canvas.canvas_advance(state, layout, wanted.decides, wanted.places, token, sure, sure > 0, token[:1], 9)


def launched() -> set[str]:
    """Return the names of all kernels: they say how they overlap, or are those that stand alone."""
    found = {"kernels.gpu.token_stats _find_limits"}
    for module in pkgutil.iter_modules(kernels.gpu.__path__, "kernels.gpu."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, JITFunction) and value.__module__ == module.name and "OVERLAP" in value.arg_names:
                found.add(f"{module.name} {name}")
    return found - {"kernels.gpu.overlap wait_for_inputs", "kernels.gpu.overlap release_and_wait"}


GROUPS = {each.__name__: each for each in (mixtures, small_experts, statistics, attentions, products, canvases)}


def main() -> None:
    # Before any module that takes it by name.
    overlap.overlap_options = lambda device: {"OVERLAP": True, "launch_pdl": True}
    JITFunction.run = compiled  # pyright: ignore[reportAttributeAccessIssue]
    if sys.argv[1:] == ["launched"]:
        print("\n".join(sorted(launched())))
    for name in sys.argv[1:]:
        if name in GROUPS:
            GROUPS[name]()


if __name__ == "__main__":
    main()
