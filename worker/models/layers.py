"""Building blocks of decoders over `kernels`. A forward's context is an argument; nothing here is global."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kernels
from kernels.attention import AttentionPlan
from kernels.fp8 import BLOCK, Quantized, group_of
from kernels.lora import Assignment, Factors
from kernels.moe import Experts, Router
from kernels.rope import rope_tables
from kernels.unscaled import Unscaled
from worker.models.rope import RopeShape


@dataclass(frozen=True, slots=True)
class MoeShape:
    """A mixture of experts in the place of an MLP."""

    experts: int
    inner: int
    """Intermediate size of one expert."""
    router: Router
    shared_inner: int = 0
    """Intermediate size of the MLP that every token passes beside its experts; 0: there is none."""
    selection_bias: bool = False
    """The choice of experts adds a learned bias to the scores, their weights do not."""
    dense_layers: frozenset[int] = frozenset()
    """Layers that keep a plain MLP."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What differs between layers of the same make."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    eps: float
    qkv_bias: bool = False
    out_bias: bool = False
    head_norm: bool = False
    """Norm each query and key head before the rotation (Qwen3)."""
    rotary_dim: int = 0
    """Leading components of a head that are rotated; 0: all."""
    moe: MoeShape | None = None


class Peers(Protocol):
    """The ranks that hold the other shares of a decoder; see `worker.parallel`. All of them call the same, in order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x, the same bits on each, to be used before the next; x may be overwritten."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """Return [size, *x.shape]: every rank's x, in order."""
        ...


@dataclass(frozen=True, slots=True)
class VocabularyShare:
    """The ids whose embedding and logits a rank has."""

    first: int
    end: int
    whole: int
    """Size of the vocabulary."""
    peers: Peers

    @property
    def width(self) -> int:
        """The most that one rank has."""
        return -(-self.whole // self.peers.size)

    def embed(self, token_ids: Tensor, embedding: Tensor) -> Tensor:
        """Return [tokens, hidden] for all ids, of which the rows of `embedding` are this rank's."""
        place = token_ids - self.first
        inside = (place >= 0) & (place < self.end - self.first)
        # The residual stream begins with it, and so outlives the next sum.
        return self.peers.sum(F.embedding(place * inside, embedding) * inside[:, None]).clone()

    def join(self, logits: Tensor) -> Tensor:
        """Return [n, whole] of the logits [n, share] that each rank has."""
        parts = self.peers.gather(F.pad(logits, (0, self.width - logits.shape[1])))
        return parts.permute(1, 0, 2).flatten(1)[:, : self.whole]


@dataclass(frozen=True, slots=True)
class Adapted:
    """The adapters of a linear, and where they lie."""

    factors: Factors
    weight: Tensor | None = None
    """[outputs + adapters * projections * rank, inputs]: the linear's own weight with the factors a below it, so that
    one product makes both; None: they lie apart."""
    bias: Tensor | None = None
    """The linear's own, zeros behind it."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """Adapters of a forward's tokens, beside the weights (see `kernels.lora`)."""

    stacks: "Mapping[Linear, Adapted]"
    passes: tuple[Assignment, ...]
    """The first adapter of each token, the second, ..."""

    def apply(self, linear: "Linear", x: Tensor) -> Tensor:
        """Return the linear's output for x with what the adapters add."""
        adapted = self.stacks.get(linear)
        if adapted is None:
            return linear.forward(x)
        y, low = self._products(linear, adapted, x)
        for assignment in self.passes:
            y = kernels.lora(y, low, adapted.factors, assignment)
        return y

    def gated(self, linear: "Linear", x: Tensor) -> Tensor:
        """Return the gated unit of `apply`."""
        adapted = self.stacks.get(linear)
        if adapted is None:
            return kernels.swiglu(linear.forward(x))
        y, low = self._products(linear, adapted, x)
        for assignment in self.passes[:-1]:
            y = kernels.lora(y, low, adapted.factors, assignment)
        return kernels.lora_swiglu(y, low, adapted.factors, self.passes[-1])

    def _products(self, linear: "Linear", adapted: Adapted, x: Tensor) -> tuple[Tensor, Tensor]:
        if adapted.weight is None:
            return linear.forward(x), kernels.linear(x, adapted.factors.a.flatten(0, 1))
        both = kernels.linear(x, adapted.weight, adapted.bias)
        outputs = linear.weight.shape[0]
        return both[:, :outputs], both[:, outputs:]


Pages = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]
"""A layer's pages of keys and of values, [pages, page_size, kv_heads, head_dim]; beside pages of 8 bits the scales
[2, pages, page_size, kv_heads] of each head of each slot."""


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What a forward knows beside its hidden states."""

    attention: AttentionPlan
    positions: Tensor
    """[tokens] int64: rotary positions."""
    kv: tuple[Pages, ...]
    near: AttentionPlan | None = None
    """What layers with a sliding window see."""
    encodes: Tensor | None = None
    """[tokens] bool: text that is read; the others are a canvas (DiffusionGemma)."""
    condition: Tensor | None = None
    """[tokens, hidden]: what a canvas's tokens are conditioned on."""
    lora: LowRank | None = None
    """None: no token has an adapter."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines of a forward, shared by its layers; see `kernels.rope`."""

    cos: Tensor
    sin: Tensor
    query: Tensor | None = None
    """[tokens, 1, 1]: factor of the queries."""


def empty_parameter(*shape: int, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    """Return a parameter that weights are loaded into."""
    return nn.Parameter(torch.empty(shape, device=device, dtype=dtype), requires_grad=False)


def block_scales(outputs: int, inputs: int, *, device: torch.device) -> nn.Parameter:
    """Return room for the scales of a weight's blocks."""
    return empty_parameter(-(-outputs // BLOCK), -(-inputs // BLOCK), device=device, dtype=torch.float32)


class Linear(nn.Module):
    """y = x W^T + b; several projections of the same input are stacked by rows."""

    def __init__(self, inputs: int, outputs: int, bias: bool, *, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.weight = empty_parameter(outputs, inputs, device=device, dtype=dtype)
        self.bias = empty_parameter(outputs, device=device, dtype=dtype) if bias else None
        self.scale: nn.Parameter | None = None
        """Beside a weight of 8 bits: [outputs] float32, or one for each block; see `kernels.fp8.fp8_product`."""
        self.pieces: dict[str, tuple[int, int]] = {}
        """Rows [first, end) of each projection, by the checkpoint's name of its module: where adapters go."""
        self.text_pieces: dict[str, tuple[int, int]] = {}
        """The same by the names of modules that share this weight and read the text; a canvas is then read by those of
        `pieces` (DiffusionGemma)."""

    def forward(self, x: Tensor, context: ForwardContext | None = None) -> Tensor:
        if context is not None and context.lora is not None:
            return context.lora.apply(self, x)
        if self.scale is None:
            y = kernels.linear(x, self.weight, self.bias)
        else:
            y = kernels.fp8_linear(x, self.weight, self.scale, self.bias)
        return y

    def takes_quantized(self, context: ForwardContext | None) -> bool:
        """Tell whether the input may be quantized where it is made: nothing else reads it."""
        return self.scale is not None and (context is None or context.lora is None)

    def product(self, x: Quantized, dtype: torch.dtype) -> Tensor:
        """Return what `forward` does for an input that is quantized already as `scale` asks for."""
        assert self.scale is not None
        return kernels.fp8_product(x.values, x.scale, self.weight, self.scale, self.bias, dtype)


class Norm(nn.Module):
    """Add the residual, then norm; returns both (see `kernels.rms_norm`)."""

    def __init__(self, size: int, eps: float, *, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.weight = empty_parameter(size, device=device, dtype=dtype)
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return kernels.rms_norm(x, self.weight, self.eps, residual)

    def behind(self, linear: Linear, x: Tensor, residual: Tensor) -> tuple[Unscaled, Tensor]:
        """Return what `forward` makes of the linear's output, but for a factor of each token, and the sum."""
        return kernels.unscaled_linear(x, linear.weight, linear.bias, residual, self.weight, self.eps)

    def quantized(self, x: Tensor, residual: Tensor | None, reader: Linear) -> tuple[Quantized, Tensor]:
        """Return the normed tokens as a linear with weights of 8 bits reads them, and the sum."""
        assert reader.scale is not None
        return kernels.rms_norm_fp8(x, self.weight, self.eps, residual, group_of(reader.scale))


class Rotary(nn.Module):
    """Angles of the rotary embedding over the first `width` components of each head."""

    inv_freq: Tensor

    def __init__(self, width: int, rope: RopeShape | float, *, device: torch.device, dtype: torch.dtype):
        """A `rope` that is a number is a base without scaling."""
        super().__init__()
        self.dtype = dtype
        rope = rope if isinstance(rope, RopeShape) else RopeShape(rope)
        self.rope = rope
        self.register_buffer("inv_freq", rope.frequencies(width, device), persistent=False)

    def forward(self, positions: Tensor) -> Rotation:
        cos, sin = rope_tables(positions, self.inv_freq, self.dtype)
        if self.rope.amplitude != 1:
            cos, sin = cos * self.rope.amplitude, sin * self.rope.amplitude
        scale = self.rope.query_scale
        return Rotation(cos, sin, None if scale is None else scale.at(positions).to(self.dtype)[:, None, None])


class Attention(nn.Module):
    """Grouped-query attention over paged keys and values."""

    def __init__(self, shape: LayerShape, layer: int, *, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.layer = layer
        self.shape = shape
        heads, kv_heads = shape.num_heads, shape.num_kv_heads
        inner = heads * shape.head_dim
        outputs = inner + 2 * kv_heads * shape.head_dim
        self.qkv = Linear(shape.hidden_size, outputs, shape.qkv_bias, device=device, dtype=dtype)
        self.out = Linear(inner, shape.hidden_size, shape.out_bias, device=device, dtype=dtype)
        self.scale = 1.0 / math.sqrt(shape.head_dim)
        # One row for each head, so that queries and keys are normed together.
        self.head_norm = (
            empty_parameter(heads + kv_heads, shape.head_dim, device=device, dtype=dtype) if shape.head_norm else None
        )

    def forward(self, x: Tensor | Quantized | Unscaled, rotation: Rotation, context: ForwardContext) -> Tensor:
        return self.out.forward(self.gather(x, rotation, context), context)

    def gather(self, x: Tensor | Quantized | Unscaled, rotation: Rotation, context: ForwardContext) -> Tensor:
        """Write keys and values; return what the heads have gathered, [tokens, heads * head_dim]."""
        heads, kv_heads = self.shape.num_heads, self.shape.num_kv_heads
        match x:
            case Tensor():
                projected = self.qkv.forward(x, context)
            case Quantized():
                projected = self.qkv.product(x, rotation.cos.dtype)
            case Unscaled():
                projected = kernels.scaled_linear(x.values, x.squares, x.eps, self.qkv.weight, self.qkv.bias)
        tokens = projected.shape[0]
        qkv = projected.view(tokens, heads + 2 * kv_heads, self.shape.head_dim)
        pages = context.kv[self.layer]
        k_pages, v_pages, scales = pages if len(pages) == 3 else (*pages, None)
        slots, tables = context.attention.slots, (rotation.cos, rotation.sin)
        q = kernels.rope_write(qkv, *tables, self.head_norm, self.shape.eps, k_pages, v_pages, slots, scales)
        if rotation.query is not None:
            q = q * rotation.query
        mixed = kernels.attention(q, k_pages, v_pages, context.attention, self.scale, scales)
        return mixed.reshape(tokens, -1)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, shape: LayerShape, *, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.gate_up = Linear(shape.hidden_size, 2 * shape.intermediate_size, False, device=device, dtype=dtype)
        self.down = Linear(shape.intermediate_size, shape.hidden_size, False, device=device, dtype=dtype)

    def forward(self, x: Tensor, context: ForwardContext | None = None) -> Tensor:
        if context is None or context.lora is None:
            if self.gate_up.scale is None:
                return self.down.forward(kernels.gated_linear(x, self.gate_up.weight))
            return self._down(self.gate_up.forward(x))
        return self.down.forward(context.lora.gated(self.gate_up, x), context)

    def quantized(self, x: Quantized, dtype: torch.dtype) -> Tensor:
        """Return what `forward` does for tokens that are quantized already as `gate_up` reads them."""
        return self._down(self.gate_up.product(x, dtype))

    def _down(self, gate_up: Tensor) -> Tensor:
        if self.down.scale is None:
            return self.down.forward(kernels.swiglu(gate_up))
        return self.down.product(kernels.swiglu_fp8(gate_up, group_of(self.down.scale)), gate_up.dtype)


class MoeMLP(nn.Module):
    """The chosen experts' gated MLPs, weighted, and a shared one where the shape has it.

    The router works in float32 whatever the model's dtype is: a near tie must not be decided by rounding.
    """

    def __init__(self, shape: LayerShape, moe: MoeShape, *, device: torch.device, dtype: torch.dtype):
        super().__init__()
        hidden = shape.hidden_size
        self.rule = moe.router
        self.router = empty_parameter(moe.experts, hidden, device=device, dtype=torch.float32)
        self.selection_bias = (
            empty_parameter(moe.experts, device=device, dtype=torch.float32) if moe.selection_bias else None
        )
        shared = replace(shape, intermediate_size=moe.shared_inner)
        self.shared = GatedMLP(shared, device=device, dtype=dtype) if moe.shared_inner else None
        joined = self.shared is not None and moe.shared_inner == moe.inner
        count = moe.experts + joined
        self.gate_up: nn.Parameter
        self.down: nn.Parameter
        self.gate_up_scale: nn.Parameter | None = None
        """Beside weights of 8 bits; see `kernels.moe.Experts`."""
        self.down_scale: nn.Parameter | None = None
        gate_up = torch.empty(count, 2 * moe.inner, hidden, device=device, dtype=dtype)
        down = torch.empty(count, hidden, moe.inner, device=device, dtype=dtype)
        self.hold(Experts(gate_up, down, shared=joined))
        self.first_expert = 0
        """Of those that lie here; the others' parts are added by the ranks that have them."""
        self.pieces: tuple[tuple[str, str, str], ...] = ()
        """The checkpoint's names of each expert's gate, up and down projection, where it stores them one by one."""

    def hold(self, stack: Experts) -> None:
        """Take the weights of a stack; a shared expert's stay behind the others, so that a product has them all."""
        chosen = slice(stack.count)
        self.gate_up, self.gate_up_scale = _own(stack.gate_up[chosen]), _own_scale(stack.gate_up_scale, chosen)
        self.down, self.down_scale = _own(stack.down[chosen]), _own_scale(stack.down_scale, chosen)
        if stack.shared:
            assert self.shared is not None
            wide, narrow = self.shared.gate_up, self.shared.down
            wide.weight, wide.scale = _own(stack.gate_up[-1]), _own_scale(stack.gate_up_scale, -1)
            narrow.weight, narrow.scale = _own(stack.down[-1]), _own_scale(stack.down_scale, -1)

    def stack(self) -> Experts:
        """Return the weights that lie here, a shared expert's too if they lie behind the others.

        They are put elsewhere where adapters, 8 bits or ranks take them.
        """
        weights = self.gate_up, self.down, self.gate_up_scale, self.down_scale
        if self.shared is None:
            return Experts(*weights)
        wide, narrow = self.shared.gate_up, self.shared.down
        singles = wide.weight, narrow.weight, wide.scale, narrow.scale
        if not all(map(_lies_behind, weights, singles)):
            return Experts(*weights)
        scales = (None if scale is None else _with_next(scale) for scale in weights[2:])
        return Experts(_with_next(self.gate_up), _with_next(self.down), *scales, shared=True)

    def forward(self, x: Tensor, context: ForwardContext | None = None) -> Tensor:
        return self.mix(x, kernels.router_logits(x, self.router), context)

    def mix(self, x: Tensor, logits: Tensor, context: ForwardContext | None = None) -> Tensor:
        """Return what the experts that the router's logits [tokens, experts] choose make of x [tokens, hidden]."""
        stack = self.stack()
        if stack.shared and context is not None and context.lora is not None:
            # Adapters have a say in what a shared expert does.
            stack = Experts(self.gate_up, self.down, self.gate_up_scale, self.down_scale)
        mixed = kernels.mix(x, logits, self.rule, stack, self.selection_bias, first=self.first_expert)
        return mixed if self.shared is None or stack.shared else mixed + self.shared.forward(x, context)


def _own(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=False)


def _own_scale(scale: Tensor | None, of: slice | int) -> nn.Parameter | None:
    return None if scale is None else _own(scale[of])


def _lies_behind(stacked: Tensor | None, single: Tensor | None) -> bool:
    """Tell whether a tensor is what lies behind a stack of its like in the same memory; neither may be there."""
    if stacked is None or single is None:
        return stacked is single
    same = stacked.dtype == single.dtype and stacked.shape[1:] == single.shape and single.is_contiguous()
    begin = stacked.untyped_storage().data_ptr()
    if not same or not begin or begin != single.untyped_storage().data_ptr():
        return False
    return single.storage_offset() == stacked.storage_offset() + stacked.numel()


def _with_next(stacked: Tensor) -> Tensor:
    """Return [n + 1, ...] of a tensor and what lies behind it in the same memory."""
    return stacked.as_strided((stacked.shape[0] + 1, *stacked.shape[1:]), stacked.stride())


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP. The residual stream travels beside the output that is still to be added to it."""

    def __init__(self, shape: LayerShape, layer: int, *, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.attention_norm = Norm(shape.hidden_size, shape.eps, device=device, dtype=dtype)
        self.attention = Attention(shape, layer, device=device, dtype=dtype)
        self.mlp_norm = Norm(shape.hidden_size, shape.eps, device=device, dtype=dtype)
        self.mlp: GatedMLP | MoeMLP
        if shape.moe is None or layer in shape.moe.dense_layers:
            self.mlp = GatedMLP(shape, device=device, dtype=dtype)
        else:
            self.mlp = MoeMLP(shape, shape.moe, device=device, dtype=dtype)
        self.peers: Peers | None = None
        """Ranks with the other heads, columns and experts of this layer."""

    def forward(
        self,
        x: Tensor | Unscaled,
        residual: Tensor | None,
        rotation: Rotation,
        context: ForwardContext,
        following: "DecoderLayer | None" = None,
    ) -> tuple[Tensor | Unscaled, Tensor]:
        return self.mix(*self.gather(x, residual, rotation, context), context, following)

    def gather(
        self, x: Tensor | Unscaled, residual: Tensor | None, rotation: Rotation, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """Return what attention has gathered for each token, and the residual stream: all that the tokens have to do
        with each other. An x that is normed already is in the stream."""
        if isinstance(x, Unscaled):
            assert residual is not None
            return self.attention.gather(x, rotation, context), residual
        qkv = self.attention.qkv
        if qkv.takes_quantized(context):
            normed, residual = self.attention_norm.quantized(x, residual, qkv)
        else:
            normed, residual = self.attention_norm.forward(x, residual)
        return self.attention.gather(normed, rotation, context), residual

    def mix(
        self,
        gathered: Tensor,
        residual: Tensor,
        context: ForwardContext | None,
        following: "DecoderLayer | None" = None,
    ) -> tuple[Tensor | Unscaled, Tensor]:
        """Return the rest of the layer, what a token does by itself, and the residual stream.

        Where it is given the layer that follows, it may do that one's norm too, and add to the stream itself.
        """
        if isinstance(self.mlp, GatedMLP) and self._folds(self.attention.out, gathered, self.mlp.gate_up, context):
            mlp = self.mlp
            x, residual = self.mlp_norm.behind(self.attention.out, gathered, residual)
            inner = kernels.scaled_gated_linear(x.values, x.squares, x.eps, mlp.gate_up.weight)
            if following is not None and self._folds(mlp.down, inner, following.attention.qkv, context, gated=False):
                return following.attention_norm.behind(mlp.down, inner, residual)
            return mlp.down.forward(inner), residual
        attended = self._whole(self.attention.out.forward(gathered, context))
        if isinstance(self.mlp, GatedMLP) and self.mlp.gate_up.takes_quantized(context):
            small, residual = self.mlp_norm.quantized(attended, residual, self.mlp.gate_up)
            return self._whole(self.mlp.quantized(small, attended.dtype)), residual
        normed, residual = self.mlp_norm.forward(attended, residual)
        return self._whole(self.mlp.forward(normed, context)), residual

    def _folds(
        self, linear: Linear, x: Tensor, reader: Linear, context: ForwardContext | None, *, gated: bool = True
    ) -> bool:
        """Tell whether the norm between two linears is better a part of both: nothing else comes between them."""
        alone = self.peers is None and (context is None or context.lora is None)
        stored = linear.scale is None and reader.scale is None
        return alone and stored and kernels.folds(x, linear.weight, reader.weight, gated=gated)

    def _whole(self, part: Tensor) -> Tensor:
        return part if self.peers is None else self.peers.sum(part)


class Decoder(nn.Module):
    """Embedding, layers, final norm and vocabulary head."""

    def __init__(
        self,
        shape: LayerShape,
        num_layers: int,
        vocab_size: int,
        rope: RopeShape | float,
        tied: bool,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ):
        super().__init__()
        self.embedding = empty_parameter(vocab_size, shape.hidden_size, device=device, dtype=dtype)
        self.rotary = Rotary(shape.rotary_dim or shape.head_dim, rope, device=device, dtype=dtype)
        layers = [DecoderLayer(shape, layer, device=device, dtype=dtype) for layer in range(num_layers)]
        self.layers: Iterable[DecoderLayer] = nn.ModuleList(layers)  # pyright: ignore[reportAttributeAccessIssue]
        self.norm = Norm(shape.hidden_size, shape.eps, device=device, dtype=dtype)
        self.head = (
            self.embedding if tied else empty_parameter(vocab_size, shape.hidden_size, device=device, dtype=dtype)
        )
        self.head_scale: nn.Parameter | None = None
        """[vocab_size] float32 beside a head of 8 bits."""
        self.share: VocabularyShare | None = None
        """None: all of the vocabulary is here."""

    def forward(self, token_ids: Tensor, context: ForwardContext, wanted: Tensor | None = None) -> Tensor:
        """Write the keys and values of token_ids [tokens]; return hidden states [wanted or tokens, hidden]."""
        return self.finish(*self.begin(token_ids, context), context, wanted)

    def begin(self, token_ids: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor]:
        """Do all in which token_ids [tokens] have to do with each other; keys and values are written.

        Returns what the last layer's attention has gathered, [tokens, heads * head_dim], and the residual stream,
        [tokens, hidden].
        """
        if self.share is None:
            x = F.embedding(token_ids, self.embedding)
        else:
            x = self.share.embed(token_ids, self.embedding)
        rotation = self.rotary.forward(context.positions)
        residual = None
        layers = tuple(self.layers)
        for layer, following in pairwise(layers):
            x, residual = layer.forward(x, residual, rotation, context, following)
        return layers[-1].gather(x, residual, rotation, context)

    def finish(
        self, gathered: Tensor, residual: Tensor, context: ForwardContext | None, wanted: Tensor | None = None
    ) -> Tensor:
        """Return the hidden states [wanted or tokens, hidden] of what `begin` has returned.

        The rest of the last layer is done for `wanted` only: for a chunk of a prompt, of which nothing is, not at all.
        """
        if wanted is not None and not len(wanted):
            return residual[:0]
        adapted = context is not None and context.lora is not None
        if wanted is not None and not adapted:
            gathered, residual = gathered.index_select(0, wanted), residual.index_select(0, wanted)
        *_, last = self.layers
        x, residual = last.mix(gathered, residual, context)
        # No layer follows, so nothing has normed it.
        assert isinstance(x, Tensor)
        if wanted is not None and adapted:
            # Adapters are assigned to all tokens, in an order of their own.
            x, residual = x.index_select(0, wanted), residual.index_select(0, wanted)
        return self.norm.forward(x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [n, vocab] for the hidden states [n, hidden]."""
        logits = self.own_logits(hidden)
        return logits if self.share is None else self.share.join(logits)

    def own_logits(self, hidden: Tensor) -> Tensor:
        """Return [n, share] of the ids that are here."""
        if self.head_scale is None:
            return kernels.linear(hidden, self.head)
        return kernels.fp8_linear(hidden, self.head, self.head_scale)
