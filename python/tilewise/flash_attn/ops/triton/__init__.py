"""flash_attn.ops.triton. The name is upstream's: nothing here needs Triton."""
