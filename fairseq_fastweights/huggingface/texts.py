"""The texts of a call, by its arguments: padding, where texts begin, and the positions in them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fairseq_fastweights.huggingface.cache import FastWeightCache, check_whole
from fairseq_fastweights.invalid_input import InvalidInput
from fairseq_fastweights.mixers.mixer import Mixer, within_documents
from fairseq_fastweights.mixers.registry import MIXERS


@dataclass(frozen=True)
class Texts:
    """The texts of a batch.

    Attributes:
        padding: (rows, time), true at padding; None for none.
        starts: (rows, time), true where a text begins after another one in its row; None for nowhere.
        places: the places of positions in their texts, from 0, (rows, time) or (1, time), undefined at padding.
        read: the place after the last of each row, (rows,).
    """

    padding: Tensor | None
    starts: Tensor | None
    places: Tensor
    read: Tensor


def read_texts(
    shape: tuple[int, int],
    device: torch.device,
    cache: FastWeightCache | None,
    *,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seq_lens: Tensor | None = None,
    skips: bool = True,
) -> Texts:
    """Reads the arguments of `FastWeightModel.forward`.

    Args:
        shape: (rows, time).
        device: of the result.
        cache: the cache before this call.
        attention_mask, position_ids, seq_idx: as there.
        cu_seq_lens: its `cu_seq_lens_q`.
        skips: whether the model's positions follow `position_ids` that skip places within a text.

    Raises:
        ValueError: if an argument is not allowed; the message names it, its value and the allowed ones.
    """
    # `before`: the position of each row's next token, from the cache.
    rows, time = shape
    padding = read_padding(attention_mask, rows, time)
    before = torch.zeros(rows, dtype=torch.long, device=device)
    if cache is not None and cache.read is not None:
        before = cache.read
    starts: Tensor | None = None
    for name, given in (("seq_idx", seq_idx), ("cu_seq_lens_q", cu_seq_lens)):
        if given is None:
            continue
        if cache is not None and cache.has_previous_state():
            raise InvalidInput(
                f"{name} is given with past_key_values, whose texts it does not number; give position_ids"
            )
        found = _read_numbers(given, shape, padding) if name == "seq_idx" else _read_lengths(given, shape)
        starts = found if starts is None else starts | found
    if position_ids is None:
        real = torch.ones(shape, dtype=torch.bool, device=device) if padding is None else ~padding
        if padding is None and starts is None:
            return Texts(None, None, before[:, None] + torch.arange(time, device=device), before + time)
        places, read = within_documents(starts, real.cumsum(dim=1) - 1, real.sum(dim=1), before)
        return Texts(padding, starts, places.clamp(min=0), read)
    places = _whole("position_ids", position_ids, shape)
    if (again := _restarts(places, padding, before, skips)) is not None:
        starts = again if starts is None else starts | again
    if padding is None:
        return Texts(None, starts, places, places[:, -1] + 1)
    # The last real position of each row says where its text goes on; a row of padding stays where it was.
    last = torch.where(padding, -1, torch.arange(time, device=device)).amax(dim=1)
    after = places.gather(1, last.clamp(min=0)[:, None])[:, 0] + 1
    return Texts(padding, starts, places.masked_fill(padding, 0), torch.where(last < 0, before, after))


def check_takes_starts(names: Any, mixers: Iterable[Mixer]) -> None:
    """Raises a `ValueError` if there are mixers, of these names, that cannot keep the texts of a row apart."""
    unable = {name for name, mixer in zip(names, mixers, strict=True) if not mixer.takes_starts}
    if unable:
        able = ", ".join(name for name, kind in MIXERS.items() if kind.takes_starts and name not in unable)
        raise InvalidInput(
            f"a row holds several texts, by position_ids, seq_idx or cu_seq_lens_q, but {', '.join(sorted(unable))} "
            f"cannot keep them apart; each must have a row of its own, or all mixers be of {able}"
        )


def read_padding(attention_mask: Tensor | None, rows: int, time: int) -> Tensor | None:
    """Reads a mask as (rows, time), true at padding; None if there is no padding.

    Raises:
        ValueError: if the mask does not fit the numbers of rows and tokens, or holds something else than 0 and 1.
    """
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, Tensor):
        raise InvalidInput(f"attention_mask is a {type(attention_mask).__name__}; it must be a tensor")
    if attention_mask.dim() != 2 or attention_mask.shape[0] != rows or attention_mask.shape[1] < time:
        raise InvalidInput(
            f"attention_mask has shape {tuple(attention_mask.shape)}; it must be ({rows}, {time}), or longer by the "
            "tokens that were read before"
        )
    mask = attention_mask[:, attention_mask.shape[1] - time :]
    padding = mask == 0
    if torch.compiler.is_compiling() or padding.is_meta:
        return padding
    strange = ~padding & (mask != 1)
    padded, other = torch.stack([padding.any(), strange.any()]).tolist()
    if other:  # numbers of documents, or a mask that is added to scores
        raise InvalidInput(f"attention_mask holds {mask[strange][0].item()}; it must be 0 at padding and 1 elsewhere")
    return padding if padded else None


def _whole(name: str, given: Tensor, shape: tuple[int, int]) -> Tensor:
    """Checks whole numbers for all positions, or for those of one row for all rows."""
    check_whole(name, given, dims=2)
    if given.shape[0] not in (1, shape[0]) or given.shape[1] != shape[1]:
        raise InvalidInput(f"{name} has shape {tuple(given.shape)}; it must be {shape}")
    return given.expand(shape)


def _previous(values: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor]:
    """The value at the position before each in its row, padding left out, and whether there is one."""
    index = torch.arange(values.shape[1], device=values.device).expand(values.shape)
    if padding is not None:
        # The index of the last real position is carried over padding.
        index = torch.where(padding, -1, index).cummax(dim=1)[0]
    index = torch.cat([index.new_full((values.shape[0], 1), -1), index[:, :-1]], dim=1)
    return values.gather(1, index.clamp(min=0)), index >= 0


def _restarts(places: Tensor, padding: Tensor | None, before: Tensor, skips: bool) -> Tensor | None:
    """The positions at which places begin again, as those of several texts in a row do; None for nowhere."""
    if places.is_meta:
        return None
    earlier, has_earlier = _previous(places, padding)
    real = torch.ones_like(has_earlier) if padding is None else ~padding
    starts = real & has_earlier & (places <= earlier)
    # Of the first of a row that was read before, `before` is the place.
    first = real & ~has_earlier & (before > 0)[:, None]
    back = first & (places < before[:, None])
    skipped = (first & (places > before[:, None])) | (real & has_earlier & (places > earlier + 1))
    negative = real & (places < 0)
    # All four in one copy from a GPU.
    begins, forgets, jumps, below = torch.stack([x.any() for x in (starts, back, skipped, negative)]).tolist()
    if below:
        raise InvalidInput(f"position_ids holds {int(places[negative][0])}; places in texts are at least 0")
    if forgets:
        row, time = back.nonzero()[0].tolist()
        raise InvalidInput(
            f"position_ids goes on at {int(places[row, time])} in row {row}, of which past_key_values has read "
            f"{int(before[row])} tokens; it must go on at {int(before[row])}, or past_key_values be None for a new text"
        )
    if jumps and not skips:
        row, time = skipped.nonzero()[0].tolist()
        raise InvalidInput(
            f"position_ids skips places before {int(places[row, time])} in row {row}; without positional embeddings, "
            "or with rotary ones, they must go on by 1 within a text"
        )
    return starts if begins else None


def _read_numbers(seq_idx: Tensor, shape: tuple[int, int], padding: Tensor | None) -> Tensor:
    """The positions at which the number of the text is another one than before."""
    earlier, has_earlier = _previous(seq_idx := _whole("seq_idx", seq_idx, shape), padding)
    starts = has_earlier & (seq_idx != earlier)
    return starts if padding is None else starts & ~padding


def _read_lengths(cu_seq_lens: Tensor, shape: tuple[int, int]) -> Tensor:
    """The beginnings of texts, of the sums of the lengths of texts that fill all rows one after the other."""
    rows, time = shape
    check_whole("cu_seq_lens_q", cu_seq_lens, dims=1)
    ends = cu_seq_lens.tolist()
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != rows * time or ends != sorted(ends):
        raise InvalidInput(
            f"cu_seq_lens_q is {str(ends)[:200]}; it must rise from 0 to {rows * time}, the number of tokens"
        )
    starts = torch.zeros(rows * time, dtype=torch.bool, device=cu_seq_lens.device)
    starts[[end for end in ends[1:-1] if end < rows * time]] = True
    starts = starts.view(shape)
    starts[:, 0] = False  # rows are apart anyway
    return starts
