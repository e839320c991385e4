import pytest

from kforge_testing import run_ranks
from kforge_train import ConfigError
from kforge_train.agree import check_agreement, digest, on_first_rank


def compare(rank, world, facts_of_ranks):
    try:
        check_agreement(facts_of_ranks[rank])
    except RuntimeError as error:
        return str(error)
    return "agreed"


def test_equal_facts_agree():
    facts = {"config": {"lr": 0.1, "path": "x"}, "versions": ["2.13"]}
    assert run_ranks(compare, 2, [facts, dict(reversed(facts.items()))]) == ["agreed", "agreed"]


@pytest.mark.parametrize("odd", [1, 2])
def test_the_rank_and_the_fact_that_differ_are_named_on_every_rank(odd):
    facts = [{"config": {"lr": 0.1}, "training data": "a"} for _ in range(3)]
    facts[odd] = {"config": {"lr": 0.1}, "training data": "b"}
    for message in run_ranks(compare, 3, facts):
        assert message.startswith(f"ranks [{odd}] have another training data than rank 0")
        assert digest("a") in message and digest("b") in message


def test_one_process_agrees_with_itself():
    check_agreement({"config": object()})


def refused_on_the_first(rank, world):
    called = []

    def act():
        called.append(rank)
        raise ConfigError("the folder is taken")

    with pytest.raises(ConfigError, match="the folder is taken"):
        on_first_rank(act)
    return called


def test_what_the_first_rank_refuses_is_raised_on_all():
    assert run_ranks(refused_on_the_first, 2) == [[0], []]
