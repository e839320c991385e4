"""How fast rows are made, read ahead, resumed and tokenized on one CPU, each beside what it could be at best.

Documents have log-normal lengths with a mean of about 1,000 tokens; rows have 4,096, and what is timed is the whole
batch as a model gets it. All ratios are of one run, whose parts take turns.

    python benchmarks/data.py [--tokens 40000000] [--turns 5]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _results

ROW, BATCH = 4096, 16


def alternate(
    parts: dict[str, Callable[[], Any]], turns: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, tuple[float, float]]:
    """Median and spread of the seconds of each part, by ``clock``; the parts take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(turns):
        for name, part in parts.items():
            start = clock()
            part()
            seconds[name].append(clock() - start)
    return {name: _results.median_and_spread(values) for name, values in seconds.items()}


def write_shards(folder: Path, tokens: int) -> Any:
    import numpy as np

    from kforge_data import ShardWriter, TokenShards

    rng = np.random.default_rng(0)
    with ShardWriter(folder, vocab_size=50_000, eos_id=0) as writer:
        while tokens > 0:
            lengths = np.maximum(1, rng.lognormal(6.2, 1.2, 1000)).astype(np.int64)
            writer.add_batch(rng.integers(0, 50_000, lengths.sum()), lengths, lengths)
            tokens -= int(lengths.sum())
    return TokenShards(folder)


def token_loop(block: Any) -> list[Any]:
    """What a batch holds, made token by token."""
    starts = set(zip(block.start_rows.tolist(), block.start_columns.tolist(), strict=True))
    batch: list[Any] = []
    for row, tokens in enumerate(block.tokens.tolist()):
        position, document = 0, 0
        for column in range(ROW):
            if (row, column) in starts:
                position, document = 0, document + 1
            label = -100 if (row, column + 1) in starts else tokens[column + 1]
            batch.append((tokens[column], label, position, document))
            position += 1
    return batch


def resident_bytes() -> int:
    import os

    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def rows_of(folder: Path, tokens: int, turns: int) -> list[dict[str, Any]]:
    import numpy as np
    import torch

    from kforge_data import Loader, PackedDocuments
    from kforge_data.batch import cu_seqlens_length
    from kforge_data.workers import RowReader, Rows

    torch.set_num_threads(1)

    shards = write_shards(folder / "shards", tokens)
    start = time.perf_counter()
    packed = PackedDocuments(shards, cache=folder / "cache")
    plan = packed.plan(ROW)
    planning = time.perf_counter() - start
    rows = []
    for name, source, target in (("cut rows", shards, 150e6), ("best-fit rows", packed, 100e6)):
        length = cu_seqlens_length(source, row_tokens=ROW, microbatch_rows=BATCH)
        batches = min(40, source.row_count(ROW) // BATCH)
        positions = np.arange(batches * BATCH).reshape(batches, BATCH)
        ids = [source.rows_at(p, row_tokens=ROW, seed=1, shuffle=True) for p in positions]

        reader = RowReader([(source, ROW)], True, [{BATCH: length}], keep=4)  # what a loader reads with

        def make(reader: Any = reader, ids: Any = ids) -> Any:
            for row_ids in ids:
                batch = reader.read(Rows(0, row_ids))
            return batch

        same = [value for value in make().values() if isinstance(value, torch.Tensor)]
        there = [[torch.empty_like(tensor) for tensor in same] for _ in range(2)]  # in turns, as batches are kept

        def copy(same: Any = same, there: Any = there, ids: Any = ids) -> None:
            for step in range(len(ids)):
                for to, tensor in zip(there[step % 2], same, strict=True):
                    to.copy_(tensor)

        def loop(source: Any = source, ids: Any = ids) -> None:
            token_loop(source.read_rows(ids[0][:2], ROW))

        # Seconds of this thread, so that what else the machine does counts as little as can be.
        seconds = alternate({"make": make, "copy": copy, "loop": loop}, turns, time.thread_time)
        count = len(ids) * BATCH * ROW
        rate, slow = count / seconds["make"][0], 2 * ROW / seconds["loop"][0]
        spread = rate * seconds["make"][1] / seconds["make"][0]
        rows.append(_results.row(name, rate, "tokens/s", target=target, spread=spread))
        ratio = seconds["copy"][0] / seconds["make"][0]
        rows.append(_results.row(f"{name} / copy of the same bytes", ratio, "ratio", target=0.4))
        rows.append(_results.row(f"{name} / loop over tokens", rate / slow, "ratio", target=20.0))
    rows.append(_results.row("best fit: fill", plan.fill, "share", target=0.97))
    rows.append(_results.row("best fit: planning", shards.documents / planning, "documents/s"))

    options: dict[str, Any] = {"row_tokens": ROW, "global_rows": BATCH, "seed": 1}
    steps = 40
    with (
        Loader(shards, workers=0, **options) as bare,
        Loader(shards, workers=2, **options) as threads,
        Loader(shards, workers=2, worker_kind="fork", **options) as forks,
    ):
        parts = {"bare": bare, "threads": threads, "processes": forks}
        for loader in parts.values():
            loader.next()
        timed = alternate({n: lambda one=one: [one.next() for _ in range(steps)] for n, one in parts.items()}, turns)
    for name in ("threads", "processes"):
        value = timed["bare"][0] / timed[name][0]
        rows.append(_results.row(f"loader with 2 {name} / bare", value, "ratio", target=0.8))

    rows += usual_way(folder, shards, turns)

    def first(position: int) -> None:
        with Loader(shards, workers=0, **options) as loader:
            loader.load_state_dict({**loader.state_dict(), "position": position})
            loader.next()

    timed = alternate({"fresh": lambda: first(0), "late": lambda: first(10**9)}, turns)
    late, fresh = timed["late"], timed["fresh"][0]
    rows.append(
        _results.row(
            "first batch at row 10^9",
            late[0],
            "s",
            better="lower",
            target=fresh + 0.1,
            reference=fresh,
            spread=late[1],
        )
    )
    with Loader(shards, workers=0, **{**options, "row_tokens": 64, "global_rows": 1000}) as loader:
        rows.append(memory_row("memory after 1,000,000 rows more", loader, steps=1000))
    return rows + tokenize_rows(folder, turns) + streaming_rows(folder, tokens, turns)


def memory_row(name: str, loader: Any, steps: int) -> dict[str, Any]:
    """Resident memory of this process before and after some steps, when each kind of row has been seen."""
    for _ in range(20):
        loader.next()
    before = resident_bytes() / 1e6
    for _ in range(steps):
        loader.next()
    after = resident_bytes() / 1e6
    return _results.row(name, after, "MB", better="lower", target=before + 50, reference=before)


def usual_way(folder: Path, shards: Any, turns: int) -> list[dict[str, Any]]:
    """The same work by `datasets` and torch's DataLoader: rows of ids in an Arrow file, visited in a shuffled order by
    two processes; what else a batch holds is made of them, vectorised, when it is put together."""
    try:
        import datasets
    except ImportError:
        return []
    import numpy as np
    import torch

    from kforge_data import Loader

    count = min(64, (shards.tokens - 1) // ROW // BATCH) * BATCH
    ids = np.stack([shards.read(i * ROW, (i + 1) * ROW + 1) for i in range(count)])
    datasets.Dataset.from_dict({"ids": ids}).save_to_disk(folder / "arrow")
    table = datasets.load_from_disk(folder / "arrow").with_format("numpy")
    end = shards.eos_id

    def together(rows: list[dict[str, Any]]) -> dict[str, Any]:
        tokens = torch.from_numpy(np.stack([row["ids"] for row in rows]).astype(np.int64))
        inputs, ends = tokens[:, :-1].contiguous(), tokens[:, :-1] == end
        labels = torch.where(ends, -100, tokens[:, 1:])
        begins = torch.nn.functional.pad(ends[:, :-1], (1, 0))
        columns = torch.arange(ROW).expand_as(inputs)
        positions = columns - torch.where(begins, columns, 0).cummax(1).values
        starts = torch.nonzero((begins | (columns == 0)).flatten()).flatten().int()
        return {
            "input_ids": inputs,
            "labels": labels,
            "position_ids": positions,
            "doc_ids": begins.cumsum(1),
            "cu_seqlens": torch.cat([starts, torch.tensor([inputs.numel()], dtype=torch.int32)]),
        }

    theirs = torch.utils.data.DataLoader(table, BATCH, shuffle=True, num_workers=2, collate_fn=together)
    ours = Loader(shards, row_tokens=ROW, global_rows=BATCH, workers=2)
    steps = count // BATCH

    def usual() -> None:
        assert len([batch["input_ids"].shape for batch in theirs]) == steps

    with ours:
        seconds = alternate({"ours": lambda: [ours.next() for _ in range(steps)], "usual": usual}, turns)
    value = seconds["usual"][0] / seconds["ours"][0]
    return [_results.row("loader with 2 threads / datasets and DataLoader", value, "ratio", target=1.0)]


def tokenize_rows(folder: Path, turns: int) -> list[dict[str, Any]]:
    """`tokenize` of a corpus, whole, beside the library's encode_batch of the same texts alone."""
    import json

    from kforge_data import stdlib_documents, tokenize_files, train_tokenizer

    texts: list[str] = []
    for _, text in stdlib_documents():
        if text and sum(map(len, texts)) < 4e6:
            texts.append(text)
    (folder / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = train_tokenizer(texts[:200], vocab_size=4096)
    library = tokenizer._library(False)

    def ours() -> None:
        tokenize_files([folder / "t.jsonl"], folder / "tokens", tokenizer=tokenizer, overwrite=True)

    def alone() -> None:
        library.encode_batch_fast(texts, add_special_tokens=False)

    seconds = alternate({"ours": ours, "alone": alone}, turns)
    value = seconds["alone"][0] / seconds["ours"][0]
    return [_results.row("tokenize / encode_batch alone", value, "ratio", target=0.9)]


def streaming_rows(folder: Path, tokens: int, turns: int) -> list[dict[str, Any]]:
    """Text that is tokenized while it is read: in lanes, and by `datasets` and a DataLoader, each by two processes,
    shuffled among 256 documents and laid into rows. And whether memory grows as it goes on."""
    try:
        import datasets
    except ImportError:
        return []
    import json
    import os

    import torch

    from kforge_data import DatasetStream, Loader, StreamedDocuments, stdlib_documents, train_tokenizer

    texts: list[str] = []
    for _, text in stdlib_documents():
        if text and sum(map(len, texts)) < min(8e6, tokens):
            texts += [text[at : at + 2000] for at in range(0, len(text), 2000)]
    (folder / "stream").mkdir()
    for file in range(4):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts[file::4])
        (folder / "stream" / f"{file}.jsonl").write_text(lines)
    tokenizer = train_tokenizer(texts[:200], vocab_size=4096)
    library, end = tokenizer._library(False), tokenizer.eos_id
    options: dict[str, Any] = {"row_tokens": ROW, "global_rows": BATCH, "seed": 1}

    def tokenized(batch: dict[str, Any]) -> dict[str, Any]:
        encodings = library.encode_batch_fast(batch["text"], add_special_tokens=False)
        flat = [token for one in encodings for token in [*one.ids, end]]
        return {"ids": [flat[at : at + ROW + 1] for at in range(0, len(flat) - ROW, ROW)]}

    def together(rows: list[dict[str, Any]]) -> Any:
        return torch.tensor([row["ids"] for row in rows])

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # for both: the processes are the parallelism
    data = datasets.load_dataset(str(folder / "stream"), split="train", streaming=True)
    data = data.shuffle(seed=1, buffer_size=256).map(tokenized, batched=True, batch_size=64, remove_columns="text")
    usual = iter(torch.utils.data.DataLoader(data.repeat(None), BATCH, num_workers=2, collate_fn=together))
    source = StreamedDocuments(DatasetStream(f"datasets://{folder}/stream"), tokenizer, lanes=4, block_documents=64)
    steps = max(1, min(16, tokens // 2_000_000))
    with Loader(source, workers=2, worker_kind="fork", **options) as loader:
        parts = {
            "usual": lambda: [next(usual) for _ in range(steps)],
            "ours": lambda: [loader.next() for _ in range(steps)],
        }
        for part in parts.values():
            part()
        seconds = alternate(parts, turns)
    value = seconds["usual"][0] / seconds["ours"][0]
    rows = [_results.row("stream with 2 processes / datasets and DataLoader", value, "ratio", target=1.0)]
    with Loader(source, workers=0, row_tokens=16, global_rows=1000, seed=1) as loader:
        rows.append(memory_row("stream: memory after 100,000 rows more", loader, steps=100))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=40_000_000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, default=_results.RESULTS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = rows_of(Path(folder), arguments.tokens, arguments.turns)
    _results.write("data", rows, _results.environment(), arguments.out)


if __name__ == "__main__":
    main()
