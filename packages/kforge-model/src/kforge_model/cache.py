"""Keys and values of the tokens already seen, kept while generating."""

from __future__ import annotations

from torch import Tensor


class LayerCache:
    """One block's keys and values: keys after RoPE, heads not repeated. Allocated at the first append."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k [B,KV,S,Dh] and v [B,KV,S,Dh] behind what is there; return all so far, [B,KV,length,Dh] each.

        Raises ValueError when they do not fit.
        """
        end = self.length + k.shape[2]
        if end > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} tokens, {end} were asked of it; make it longer")
        if self._keys is None or self._values is None:
            self._keys = k.new_empty((*k.shape[:2], self.capacity, k.shape[3]))
            self._values = v.new_empty((*v.shape[:2], self.capacity, v.shape[3]))
        self._keys[:, :, self.length : end] = k
        self._values[:, :, self.length : end] = v
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]


class KVCache:
    """The caches of all blocks of a model for one batch, ``capacity`` tokens a row.

    Pass it to ``Transformer.forward`` again and again: each call's tokens are taken to follow those of the calls
    before. Memory: 2 * layers * B * KV * capacity * Dh elements of the compute dtype.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity = {capacity} must be at least 1 token")
        self.capacity = capacity
        self._layers: dict[str, LayerCache] = {}

    @property
    def length(self) -> int:
        """Tokens seen so far, a row."""
        return next((layer.length for layer in self._layers.values()), 0)

    def layer(self, name: str) -> LayerCache:
        """The cache of the block of that name, made when first asked for."""
        return self._layers.setdefault(name, LayerCache(self.capacity))
