"""flash_attn.bert_padding: from padded batches to packed sequences and back. Differentiable, on any device."""

from __future__ import annotations

import torch

from .._errors import refuse


def index_first_axis(input: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """input[indices]: [n, ...] and int [m] give [m, ...]."""
    return input.index_select(0, indices)


def index_put_first_axis(values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int) -> torch.Tensor:
    """Zeros [first_axis_dim, ...] with values [m, ...] at indices [m]."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def index_first_axis_residual(input: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(input[indices], input)."""
    return input.index_select(0, indices), input


def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Takes the padding out of a batch.

    Args:
        hidden_states: [batch, seqlen, ...].
        attention_mask: bool or int [batch, seqlen], 1 = a token.
        unused_mask: bool or int [batch, seqlen], 1 = a place that is kept, though no token is there.

    Returns:
        (packed, indices, cu_seqlens, max_seqlen, seqused): the rows where one of the masks is 1, [total, ...]; their places
        in the batch, int64 [total]; the prefix sums of the lengths, int32 [batch + 1]; the longest length, an int (which
        waits for a GPU); the number of tokens of each sequence, int32 [batch].

    Raises:
        tilewise.InvalidArgumentError: the shapes do not fit.
    """
    for name, mask in (("attention_mask", attention_mask), ("unused_mask", unused_mask)):
        if mask is not None and mask.shape != hidden_states.shape[:2]:
            refuse(name, f"shape {list(mask.shape)}", f"{list(hidden_states.shape[:2])}, as hidden_states")
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    packed = index_first_axis(hidden_states.flatten(0, 1), indices)
    return packed, indices, _prefix_sums(lengths), _largest(lengths), attention_mask.sum(-1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(
    hidden_states: torch.Tensor, attention_mask_in_length: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """`unpad_input` where every row of the batch holds several sequences, one after the other, and padding after them.

    Args:
        hidden_states: [batch, seqlen, ...].
        attention_mask_in_length: int [batch, seqlen]: the lengths of a row's sequences, then zeros. [2, 3, 0, 0, 0, 0] is
            one sequence of two tokens, one of three, and one place of padding.

    Returns:
        (packed, indices, cu_seqlens, max_seqlen), cu_seqlens over all sequences of all rows.
    """
    if attention_mask_in_length.shape != hidden_states.shape[:2]:
        seen = f"shape {list(attention_mask_in_length.shape)}"
        refuse("attention_mask_in_length", seen, f"{list(hidden_states.shape[:2])}, as hidden_states")
    lengths = attention_mask_in_length.flatten()
    lengths = lengths[lengths != 0]
    place = torch.arange(attention_mask_in_length.shape[1], device=hidden_states.device)
    indices = (place < attention_mask_in_length.sum(-1, keepdim=True)).flatten().nonzero().flatten()
    packed = index_first_axis(hidden_states.flatten(0, 1), indices)
    return packed, indices, _prefix_sums(lengths), _largest(lengths)


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """The way back from `unpad_input`: [total, ...] and its indices give [batch, seqlen, ...], zero where nothing is."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _prefix_sums(lengths: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _largest(lengths: torch.Tensor) -> int:
    return int(lengths.max()) if lengths.numel() else 0
