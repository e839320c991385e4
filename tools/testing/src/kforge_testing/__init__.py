"""Run a test function on several processes of this machine, joined by gloo.

The workers are forked from a server that has torch imported already, so a case costs a tenth of a second where
``torchrun`` costs three. Every case gets fresh processes: DTensor caches outlive process groups, and a kept pool
would hand one case the dead meshes of another.
"""

from kforge_testing.ranks import RankFailure, preload, run_ranks

__all__ = ["RankFailure", "preload", "run_ranks"]
