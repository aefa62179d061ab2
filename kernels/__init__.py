"""The operations of a forward. Each module's function is the reference; `OPS` pairs it with its fused twin."""

from kernels.attention import attention as _attention
from kernels.dispatch import Op
from kernels.kv_write import kv_write as _kv_write
from kernels.rms_norm import rms_norm as _rms_norm
from kernels.rope import rope as _rope
from kernels.swiglu import swiglu as _swiglu
from kernels.token_stats import token_stats as _token_stats

attention = Op(_attention)
kv_write = Op(_kv_write)
rms_norm = Op(_rms_norm)
rope = Op(_rope)
swiglu = Op(_swiglu)
token_stats = Op(_token_stats)

OPS = {
    "attention": attention,
    "kv_write": kv_write,
    "rms_norm": rms_norm,
    "rope": rope,
    "swiglu": swiglu,
    "token_stats": token_stats,
}
