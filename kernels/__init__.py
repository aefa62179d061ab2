"""The operations of a forward. Each module's function is the reference; each `Op` pairs it with its fused twin."""

from kernels.attention import attention as _attention
from kernels.canvas import canvas_advance as _canvas_advance
from kernels.canvas import canvas_query as _canvas_query
from kernels.canvas import canvas_wanted as _canvas_wanted
from kernels.dispatch import Op, twin
from kernels.fp8 import fp8_linear as _fp8_linear
from kernels.fp8 import fp8_product as _fp8_product
from kernels.fp8 import rms_norm_fp8 as _rms_norm_fp8
from kernels.fp8 import swiglu_fp8 as _swiglu_fp8
from kernels.kv_write import kv_write as _kv_write
from kernels.linear import gated_linear as _gated_linear
from kernels.linear import linear as _linear
from kernels.lora import assign as _assign
from kernels.lora import lora as _lora
from kernels.lora import lora_swiglu as _lora_swiglu
from kernels.moe import experts as _experts
from kernels.moe import mix as _mix
from kernels.moe import route as _route
from kernels.moe import router_logits as _router_logits
from kernels.rms_norm import rms_norm as _rms_norm
from kernels.rope import rope as _rope
from kernels.rope_write import rope_write as _rope_write
from kernels.swiglu import swiglu as _swiglu
from kernels.token_share import merge_shares as _merge_shares
from kernels.token_share import token_share as _token_share
from kernels.token_stats import token_stats as _token_stats
from kernels.unscaled import folds as _folds
from kernels.unscaled import scaled_gated_linear as _scaled_gated_linear
from kernels.unscaled import scaled_linear as _scaled_linear
from kernels.unscaled import unscaled_linear as _unscaled_linear

assign = Op(_assign, twin("lora", "assign"))
attention = Op(_attention, twin("attention", "attention"))
canvas_advance = Op(_canvas_advance, twin("canvas", "canvas_advance"))
canvas_query = Op(_canvas_query, twin("canvas", "canvas_query"))
canvas_wanted = Op(_canvas_wanted, twin("canvas", "canvas_wanted"))
experts = Op(_experts, twin("moe", "experts"))
folds = Op(_folds, twin("linear", "folds"))
fp8_linear = Op(_fp8_linear, twin("fp8", "fp8_linear"))
fp8_product = Op(_fp8_product, twin("fp8", "fp8_product"))
gated_linear = Op(_gated_linear, twin("linear", "gated_linear"))
kv_write = Op(_kv_write, twin("kv_write", "kv_write"))
linear = Op(_linear, twin("linear", "linear"))
lora = Op(_lora, twin("lora", "lora"))
lora_swiglu = Op(_lora_swiglu, twin("lora", "lora_swiglu"))
merge_shares = Op(_merge_shares, twin("token_share", "merge_shares"))
mix = Op(_mix, twin("moe", "mix"))
rms_norm = Op(_rms_norm, twin("rms_norm", "rms_norm"))
rms_norm_fp8 = Op(_rms_norm_fp8, twin("fp8", "rms_norm_fp8"))
rope = Op(_rope, twin("rope", "rope"))
rope_write = Op(_rope_write, twin("rope", "rope_write"))
route = Op(_route, twin("router", "route"))
router_logits = Op(_router_logits, twin("router", "router_logits"))
scaled_gated_linear = Op(_scaled_gated_linear, twin("linear", "scaled_gated_linear"))
scaled_linear = Op(_scaled_linear, twin("linear", "scaled_linear"))
swiglu = Op(_swiglu, twin("swiglu", "swiglu"))
swiglu_fp8 = Op(_swiglu_fp8, twin("fp8", "swiglu_fp8"))
token_share = Op(_token_share, twin("token_share", "token_share"))
token_stats = Op(_token_stats, twin("token_stats", "token_stats"))
unscaled_linear = Op(_unscaled_linear, twin("linear", "unscaled_linear"))
