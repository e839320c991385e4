"""Fixtures: shards written from lists of documents, and a small tokenizer."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # streamed.py, under importlib import mode
# Before `datasets` is imported, which reads them then: no network, and no files in the user's folders.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_DATASETS_DISABLE_PROGRESS_BARS="1")
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="kforge-hf-")

from kforge_data import ShardWriter, Tokenizer, TokenShards, train_tokenizer

TEXTS = [
    "the quick brown fox jumps over the lazy dog\n",
    "def f(x):\n    return x + 1\n" * 3,
    "grüße aus 東京 🙂\n" * 2,
    "the end of the story is the start of the next\n" * 4,
]


@pytest.fixture
def make_shards(tmp_path: Path) -> Callable[..., TokenShards]:
    """make_shards(documents, name=..., **writer options): token shards that hold these lists of ids."""

    def make(documents: Sequence[Sequence[int]], name: str = "shards", **options: Any) -> TokenShards:
        options.setdefault("vocab_size", 1 << 16)
        with ShardWriter(tmp_path / name, **options) as writer:
            for document in documents:
                writer.add(document, text_bytes=2 * len(document))
        return TokenShards(tmp_path / name)

    return make


@pytest.fixture
def numbered(make_shards: Callable[..., TokenShards]) -> Callable[..., TokenShards]:
    """numbered(n): n documents of 4 tokens, each four times its number, so that a row of 4 shows which one it is."""

    def make(count: int, **options: Any) -> TokenShards:
        return make_shards([[number] * 4 for number in range(count)], **options)

    return make


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return list(TEXTS)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, vocab_size=300)


def pytest_sessionfinish() -> None:
    shutil.rmtree(os.environ["HF_HOME"], ignore_errors=True)
