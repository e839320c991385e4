"""What has no public name in torch, with the public thing it stands in for."""

from __future__ import annotations


def default_compile_cache() -> str:
    """Where inductor keeps what it compiles if nobody says otherwise. Stands in for a public name of that place."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return str(default_cache_dir())
