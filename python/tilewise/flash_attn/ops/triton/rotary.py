"""flash_attn.ops.triton.rotary: `apply_rotary`, in torch operations."""

from ...layers.rotary import apply_rotary

__all__ = ["apply_rotary"]
