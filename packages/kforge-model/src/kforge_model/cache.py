"""What attention keeps of the tokens already seen while generating: buffers of fixed size, filled in place.

A row of the cache is a sequence of *columns*, one a token that was fed to the model, padding included. Everything that
changes from token to token (which slots are written, who sees what) is a tensor of fixed shape, so that a compiled
block is traced once for the prompt's shape and once for a single token's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kforge_model.config import ModelConfig
from kforge_model.inputs import INDEX_DTYPES, at_hand
from kforge_model.rows import Rows


@dataclass(frozen=True)
class CachedRows(Rows):
    """The rows of one forward pass over a cache: plain rows, whose tokens follow those in the cache.

    ``slots`` and ``masks`` have one entry for each kind of layer that the model has, by its window (None: full).
    """

    slots: dict[int | None, Tensor] = field(default_factory=dict)
    """[S] int64: where in a layer's buffer each new token goes."""
    masks: dict[int | None, Tensor] = field(default_factory=dict)
    """[B or 1,1,S,C], added to the scores: 0 where a query sees a slot of the buffer, -inf elsewhere. Every query sees
    at least itself, padding too, so that no softmax is over nothing."""


class LayerCache:
    """One block's buffers of ``columns`` slots; allocated at the first append, zeros, and never any longer or shorter.

    gqa keeps keys after RoPE and values, heads not repeated; mla its normalised latent and the rotated key that all
    heads share, each as one head. Nothing flows back through what is kept: a cache is for inference.
    """

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, k: Tensor, v: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Store k [B,KV,S,Dk] and v [B,KV,S,Dv] at ``slots`` [S] (`CachedRows.slots`), in place.

        Returns the whole buffers, [B,KV,C,Dk] and [B,KV,C,Dv]: `CachedRows.masks` says what of them is to be seen.
        Raises ValueError when dtype or device are others than before.
        """
        if self._keys is None or self._values is None:
            # Zeros, not whatever lay there: a slot that is masked has weight 0, and 0 times NaN is NaN.
            self._keys = k.new_zeros((*k.shape[:2], self.columns, k.shape[3]))
            self._values = v.new_zeros((*v.shape[:2], self.columns, v.shape[3]))
        if (k.dtype, k.device) != (self._keys.dtype, self._keys.device):
            raise ValueError(
                f"the cache holds {self._keys.dtype} on {self._keys.device}, and is given {k.dtype} on {k.device}; "
                "make a new one after the model was cast or moved"
            )
        self._keys.index_copy_(2, slots, k.detach())
        self._values.index_copy_(2, slots, v.detach())
        return self._keys, self._values

    @property
    def bytes(self) -> int:
        """Bytes allocated."""
        return sum(x.numel() * x.element_size() for x in (self._keys, self._values) if x is not None)


class KVCache:
    """The caches of all blocks of a model for one batch of at most ``capacity`` columns a row.

    Pass it to ``Transformer.forward`` again and again: each call's tokens follow those of the calls before. Rows of
    different lengths are padded on the left: ``padding`` [B] int64 says how many columns at the left of each row are
    no tokens (None: none). ``chunk`` is the most tokens that one call appends (None: capacity).

    Memory, in elements of the compute dtype: B * columns * (2 * KV * Dh) a layer under gqa and
    B * columns * (kv_lora_rank + rope_dim) under mla, with columns = capacity in a full layer and
    min(capacity, window - 1 + chunk) in a windowed one, which overwrites what none of its queries can see any more.
    A call of S tokens also makes one mask of [B or 1, S, columns] for each kind of layer.
    """

    def __init__(
        self, config: ModelConfig, capacity: int, *, padding: Tensor | None = None, chunk: int | None = None
    ) -> None:
        if capacity < 1:
            raise ValueError(f"capacity = {capacity} must be at least 1 token")
        if chunk is not None and chunk < 1:
            raise ValueError(f"chunk = {chunk} must be at least 1 token")
        if padding is not None:
            if padding.ndim != 1:
                raise ValueError(f"padding of shape {tuple(padding.shape)} must be [rows]: one count a row")
            if padding.dtype not in INDEX_DTYPES:
                raise ValueError(f"padding came as {padding.dtype}, and must be int64 (or int32): columns are counted")
            if at_hand(padding) and not 0 <= int(padding.min()) <= int(padding.max()) < capacity:
                raise ValueError(f"padding = {padding.tolist()} must lie in 0 .. {capacity - 1}, below the capacity")
        self.config = config
        self.capacity = capacity
        self.chunk = capacity if chunk is None else min(chunk, capacity)
        self.length = 0
        """Columns so far, padding included."""
        self._padding = padding
        self._batch = None if padding is None else padding.shape[0]
        self._windows = {config.window_of(layer) for layer in range(config.n_layers)}
        self._layers: dict[str, LayerCache] = {}

    @property
    def bytes(self) -> int:
        """Bytes allocated; all of it after the first call."""
        return sum(layer.bytes for layer in self._layers.values())

    def columns(self, window: int | None) -> int:
        """Slots a row in the buffer of a layer with this window."""
        return self.capacity if window is None else min(self.capacity, window - 1 + self.chunk)

    def layer(self, name: str) -> LayerCache:
        """The cache of the block of that name, made when first asked for."""
        if name not in self._layers:
            self._layers[name] = LayerCache(self.columns(self.config.window_of(int(name))))
        return self._layers[name]

    def begin(self, batch: int, seq: int, device: torch.device | str, dtype: torch.dtype) -> CachedRows:
        """Make room for ``seq`` more columns of ``batch`` rows and say where they go and what they see.

        The model calls it once a forward pass, before its blocks. dtype is that of the masks. Raises ValueError when
        there are none, they do not fit, or the number of rows is another than before. Does not wait for the device.
        """
        if batch < 1 or seq < 1:
            raise ValueError(f"{batch} rows of {seq} tokens leave nothing to continue; feed at least one token")
        start, end = self.length, self.length + seq
        if end > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} tokens, {end} were asked of it; make it longer")
        if seq > self.chunk:
            raise ValueError(
                f"{seq} tokens in one call, but the cache was made for chunk = {self.chunk}; feed fewer at a time, or "
                "make it with a larger chunk"
            )
        if self._batch not in (None, batch):
            raise ValueError(f"{batch} rows do not fit a cache of {self._batch} rows; make a new one")
        self.length, self._batch = end, batch

        queries = torch.arange(start, end, device=device)
        padding = None if self._padding is None else self._padding.to(device, non_blocking=True)[:, None]
        positions = queries.expand(batch, seq) if padding is None else (queries - padding).clamp(min=0)
        slots: dict[int | None, Tensor] = {}
        masks: dict[int | None, Tensor] = {}
        for window in self._windows:
            columns = self.columns(window)
            slots[window] = queries % columns
            # The column that each slot holds once the new ones are in: the last that falls on it; below 0: none yet.
            held = (end - 1) - (end - 1 - torch.arange(columns, device=device)) % columns
            back = queries[:, None] - held  # [S,C]: by how many columns a query follows what the slot holds
            seen = (back >= 0) & (held >= 0)
            if window is not None:
                seen &= back < window
            seen = seen[None]
            if padding is not None:
                seen = (seen & (held >= padding[..., None])) | (back == 0)
            masks[window] = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, -torch.inf)[:, None]
        return CachedRows(position_ids=positions, max_seqlen=seq, slots=slots, masks=masks)
