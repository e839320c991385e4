"""The package used alone, through its public names only: text, tokenizer, shards, batches, resume."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import kforge_data

TEXTS = ["to be or not to be", "that is the question", "whether 'tis nobler in the mind to suffer"] * 40


def test_from_text_to_a_resumed_run(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("\n".join(f"{text} {i}" for i, text in enumerate(TEXTS)))
    tokenizer = kforge_data.train_tokenizer(TEXTS, vocab_size=300)
    tokenizer.save(tmp_path / "tokenizer.json")
    report = kforge_data.tokenize_files(
        [tmp_path / "corpus.txt"], tmp_path / "shards", tokenizer=tokenizer, heldout=0.2, txt_documents="line"
    )
    train, heldout = kforge_data.TokenShards(tmp_path / "shards" / "train"), report.heldout
    assert heldout is not None and train.documents + heldout.documents == len(TEXTS)
    train.check_tokenizer(kforge_data.Tokenizer.load(tmp_path / "tokenizer.json"))
    assert kforge_data.verify_shards(train.path) == []

    options = {"row_tokens": 32, "global_rows": 8, "seed": 3}
    with kforge_data.Loader(train, **options, microbatch_rows=2) as loader:
        windows = [loader.next() for _ in range(6)]
        state = json.dumps(loader.state_dict())
        rest = [loader.next() for _ in range(4)]
        assert loader.position == 80
    assert all(len(window) == 4 for window in windows)

    # The text of a row is what the documents say.
    batch = windows[0][0]
    assert batch["input_ids"].shape == (2, 32) and batch["input_ids"].dtype == torch.int64
    stream = tokenizer.decode(train.read(0, train.tokens).tolist())
    assert tokenizer.decode(batch["input_ids"][0].tolist()) in stream
    shifted = batch["labels"][:, :-1] == batch["input_ids"][:, 1:]
    same_document = batch["doc_ids"][:, :-1] == batch["doc_ids"][:, 1:]
    assert torch.equal(shifted, same_document)
    assert torch.equal(batch["labels"][:, :-1] == -100, ~same_document)
    ends = batch["cu_seqlens"].unique().tolist()
    assert ends[0] == 0 and ends[-1] == 64
    for start, stop in itertools.pairwise(ends):
        assert batch["position_ids"].reshape(-1)[start:stop].tolist() == list(range(stop - start))

    # Resumed on two processes with other microbatches: the same rows, step by step.
    loaders = [kforge_data.Loader(train, **options, rank=rank, world=2, workers=2) for rank in range(2)]
    for resumed in loaders:
        resumed.load_state_dict(json.loads(state))
        assert resumed.position == 48
    for window in rest:
        expected = torch.cat([batch["input_ids"] for batch in window])
        got = torch.cat([batch["input_ids"] for resumed in loaders for batch in resumed.next()])
        assert torch.equal(got, expected)
    for resumed in loaders:
        resumed.close()

    scored = sum(
        int((batch["labels"] != -100).sum())
        for batch in kforge_data.evaluation_batches(heldout, row_tokens=32, microbatch_rows=4)
    )
    floor = kforge_data.ngram_baseline(train, heldout, row_tokens=32)
    assert scored == floor.tokens == heldout.tokens - heldout.documents
    assert 0 < floor.bigram_nats < floor.unigram_nats < np.log(300)


def test_public_names_exist_and_are_documented() -> None:
    assert set(kforge_data.__all__) == set(dir(kforge_data))
    for name in kforge_data.__all__:
        value = getattr(kforge_data, name)
        assert name == "__version__" or value.__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = kforge_data.nonsense


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, kforge_data, kforge_data.config; assert not {'torch', 'numpy', 'tokenizers'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
