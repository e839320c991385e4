import os
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # jobs.py, under importlib import mode
from jobs import write_tokens

# For `datasets`, here and in what is started: no network, and no files in the user's folders.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_DATASETS_DISABLE_PROGRESS_BARS="1")
os.environ.setdefault("HF_HOME", tempfile.mkdtemp(prefix="kforge-hf-"))


@pytest.fixture(scope="session")
def tokens(tmp_path_factory):
    """Folder with token shards `train` and `heldout`: documents of 1 to 60 tokens with a pattern to learn."""
    folder = tmp_path_factory.mktemp("tokens")
    write_tokens(folder / "train", documents=300, seed=1)
    write_tokens(folder / "heldout", documents=20, seed=2)
    return folder
