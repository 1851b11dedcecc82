"""The functions of the flash-attn package, 2.8, computed by Tilewise: on every CPU and GPU, in every dtype and head dim.

    from tilewise.flash_attn import flash_attn_func        # instead of: from flash_attn import flash_attn_func

Names, order of arguments, defaults, layouts and conventions are those of flash-attn 2.8; docs/compatibility.md lists what
differs. Code that says `import flash_attn` itself gets these modules after `tilewise.flash_attn.install()`. The functions
of FlashAttention-3 are in `tilewise.flash_attn_interface`.
"""

from ._install import install
from .flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

#: The version of flash-attn whose interface this is; what code that asks for a version looks at.
__version__ = "2.8.4"

__all__ = [
    "__version__",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
]
