import os

import pytest
import torch

from kforge_train.deterministic import be_deterministic, check_deterministic
from kforge_train.errors import ConfigError


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"CUBLAS_WORKSPACE_CONFIG": ":16:8"},
        {"NCCL_ALGO": "Ring"},
        {"NCCL_ALGO": "tree,RING"},
        {"NCCL_ALGO": "^NVLS"},
        {"NCCL_ALGO": "^NVLS,NVLSTree"},
        {"NCCL_ALGO": "allreduce:tree;allgather:ring"},
    ],
    ids=str,
)
def test_what_sums_in_one_order_is_taken(env):
    before = dict(env)
    assert check_deterministic(env) is None and env == before


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (
            {"CUBLAS_WORKSPACE_CONFIG": ":0:0"},
            r"CUBLAS_WORKSPACE_CONFIG = :0:0, .* set it to :4096:8 or :16:8, unset it",
        ),
        ({"NCCL_ALGO": "NVLS"}, "NCCL_ALGO = NVLS lets a switch sum gradients"),
        ({"NCCL_ALGO": "Ring,CollnetChain"}, "set it to Ring,Tree"),
        ({"NCCL_ALGO": "^Tree"}, "lets a switch sum"),
        ({"NCCL_ALGO": "allreduce:nvlstree;allgather:ring"}, "lets a switch sum"),
    ],
    ids=str,
)
def test_what_does_not_is_refused(env, words):
    with pytest.raises(ConfigError, match=words):
        check_deterministic(env)


def test_libraries_are_told_and_an_operation_without_such_a_kernel_is_an_error():
    env = {"NCCL_ALGO": "Ring"}
    try:
        be_deterministic(env)
        assert env == {"NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
            torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
        check_deterministic(env)
    finally:
        torch.use_deterministic_algorithms(False)
    assert "NCCL_ALGO" not in os.environ
