import os
import sys
from pathlib import Path

import pytest

from kforge_testing import ranks, run_ranks

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))  # cases.py, worker.py, jobs.py, under importlib import mode
sys.path.insert(0, str(HERE))

# The fork server imports what every worker needs once, where nothing has started it before.
ranks.PRELOAD += ["kforge_model", "kforge_train.evaluate", "kforge_parallel.testing"]

REPORTS = []


@pytest.fixture(scope="session")
def references(tmp_path_factory):
    """Folder of what one process computes: held-out tokens, and a file for each model, kind of rows and precision."""
    from cases import LIMIT_S, VOCAB
    from jobs import write_tokens
    from worker import write_references

    folder = tmp_path_factory.mktemp("references")
    write_tokens(folder / "heldout", documents=20, seed=2, vocab_size=VOCAB)
    run_ranks(write_references, 1, str(folder), timeout_s=LIMIT_S)
    return folder


def pytest_collection_modifyitems(items):
    # Longer than the limit of any start of processes, so that its message is seen, not pytest's.
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.timeout(300))


def pytest_runtest_logreport(report):
    # Properties of a test travel from pytest-xdist's workers to the process that started them.
    if report.when == "call":
        REPORTS.extend(value for name, value in report.user_properties if name == "parity")


def pytest_sessionfinish(session, exitstatus):
    if os.environ.get("KFORGE_KEEP") and exitstatus == 0 and not hasattr(session.config, "workerinput"):
        from kept import write

        write(REPORTS)
