"""From what a config says to a source that a loader reads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kforge_data.best_fit import PackedDocuments
from kforge_data.cached import WAIT_S, cached_tokens
from kforge_data.hugging_face import open_shards, parse_dataset
from kforge_data.lanes import StreamedDocuments
from kforge_data.masks import AnswersOnly, MaskRepetition, mask_documents
from kforge_data.megatron import MegatronTokens, pair_of
from kforge_data.mixture import Mixture
from kforge_data.phases import RowPhase
from kforge_data.raw import TokenFiles
from kforge_data.shards import INDEX, TokenShards
from kforge_data.text_files import is_dataset, kind_of
from kforge_data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kforge_data.config import DataConfig
    from kforge_data.masks import Transform
    from kforge_data.sources import MeasuredSource
    from kforge_data.streams import TokenStream


def open_tokens(
    path: str | Path,
    *,
    dtype: str = "",
    eos_id: int | None = None,
    vocab_size: int | None = None,
    cache: str | Path = "",
    tokenizer: Tokenizer | None = None,
    field: str = "text",
    wait_s: float = WAIT_S,
) -> TokenStream:
    """The tokens at a path: a folder of token shards; Megatron's .idx, a .bin with an .idx beside it, or the name
    of both; a .npy or raw .bin, or a folder of them. ``dtype``, ``eos_id`` and ``vocab_size`` say what such files do
    not.

    Text (.jsonl, .txt, .parquet, a folder of them, or a dataset as ``datasets://name``) is tokenized once into the
    cache, see `cached_tokens`; that takes the ``tokenizer``.
    """
    if is_dataset(path) or kind_of(path):
        return _tokens_of(path, tokenizer, field, cache, wait_s)
    place = Path(path)
    if (place.suffix in (".idx", ".bin") or not place.exists()) and place.name and pair_of(place)[0].is_file():
        return MegatronTokens(place, vocab_size=vocab_size, eos_id=eos_id, cache=cache or None)
    if place.suffix in (".npy", ".bin") or (place.is_dir() and not (place / INDEX).exists() and _holds_files(place)):
        return TokenFiles(place, dtype=dtype or None, eos_id=eos_id, vocab_size=vocab_size, cache=cache or None)
    if place.is_dir() and not (place / INDEX).exists() and any(map(kind_of, place.iterdir())):
        return _tokens_of(path, tokenizer, field, cache, wait_s)
    return TokenShards(place)


def _tokens_of(
    path: str | Path, tokenizer: Tokenizer | None, field: str, cache: str | Path, wait_s: float
) -> TokenStream:
    if tokenizer is None:
        raise ValueError(f"{path} is text, which takes a tokenizer; name its tokenizer.json (data.tokenizer)")
    if is_dataset(path) and parse_dataset(str(path)).stream:
        raise ValueError(f"{path} is read while training, and is wanted here as a set of tokens; leave out stream=1")
    return cached_tokens([path], tokenizer=tokenizer, field=field, cache=cache or None, wait_s=wait_s)


def _holds_files(folder: Path) -> bool:
    return any(file.suffix in (".npy", ".bin") for file in folder.iterdir())


def training_streams(config: DataConfig) -> dict[str, TokenStream | StreamedDocuments]:
    """What a config trains on: the streams of its mixture by name, or the one of ``data.train`` as "train"."""
    if not config.mixture and not config.train:
        raise ValueError("data.train is empty, and there is no data.mixture; name tokens or text to train on")
    paths = {str(table["name"]): table["path"] for table in config.mixture} or {"train": config.train}
    result: dict[str, TokenStream | StreamedDocuments] = {}
    for name, path in paths.items():
        try:
            if is_dataset(path) and parse_dataset(path).stream:
                result[name] = _open_lanes(path, config)
            else:
                result[name] = open_configured(path, config)
        except (OSError, ValueError) as error:
            raise ValueError(f"data.{'mixture ' + name if config.mixture else 'train'}: {error}") from error
    known = [stream for stream in result.values() if stream.tokenizer]
    for stream in known:
        known[0].check_alike(stream)
    return result


def _open_lanes(path: str, config: DataConfig) -> StreamedDocuments:
    """A dataset that is read while training. ValueError for what takes all of it before."""
    if not config.tokenizer:
        raise ValueError(f"{path} is text, which takes a tokenizer; name its tokenizer.json (data.tokenizer)")
    for name, off in (("packing", "cut"), ("mask_short", 0), ("mask_duplicates", False)):
        if getattr(config, name) != off:
            raise ValueError(
                f"data.{name} = {getattr(config, name)} looks at all documents before the first row, and {path} is "
                "read while training; leave out stream=1, which tokenizes it into the cache"
            )
    return StreamedDocuments(
        open_shards(path, field=config.text_field),
        Tokenizer.load(config.tokenizer),
        lanes=config.lanes,
        block_documents=config.stream_block,
    )


def open_configured(path: str, config: DataConfig) -> TokenStream:
    """The tokens at a path, with what a config says of such."""
    return open_tokens(
        path,
        dtype=config.dtype,
        eos_id=config.eos_id,
        cache=config.cache,
        tokenizer=Tokenizer.load(config.tokenizer) if config.tokenizer else None,
        field=config.text_field,
        wait_s=config.cache_wait_s,
    )


def training_source(
    config: DataConfig, streams: Mapping[str, TokenStream | StreamedDocuments] | None = None
) -> MeasuredSource:
    """The source that a config trains on, packed and mixed as it says; until a phase of rows of another length."""
    return training_sources(config, streams)[0]


def training_phases(config: DataConfig, sources: Sequence[MeasuredSource]) -> list[RowPhase]:
    """The phases of rows of other lengths that a config has, for the `Loader`; ``sources`` of `training_sources`."""
    pairs = zip(config.row_lengths(), sources, strict=True)
    return [RowPhase(step, row_tokens, source) for (step, row_tokens), source in pairs if step]


def training_sources(
    config: DataConfig, streams: Mapping[str, TokenStream | StreamedDocuments] | None = None
) -> list[MeasuredSource]:
    """The sources of a config, one for each of its `row_lengths`.

    Each reads its mixture from the beginning, with the weights that are in force then, and what is left of max_epochs.
    """
    streams = training_streams(config) if streams is None else streams
    packed: dict[str, MeasuredSource] = {}
    for name, stream in streams.items():
        if isinstance(stream, StreamedDocuments):
            packed[name] = stream
            continue
        masked = mask_documents(stream, config.mask_short, config.mask_duplicates, config.cache or None)
        packed[name] = masked
        if config.packing != "cut":
            packed[name] = PackedDocuments(
                masked, truncate=config.packing == "truncate", seed=config.seed, cache=config.cache or None
            )
    lengths, size = config.row_lengths(), config.batch_size()
    if not config.mixture:
        return [packed["train"]] * len(lengths)
    weights: dict[str, float] = {str(table["name"]): table.get("weight", 1.0) for table in config.mixture}
    epochs = {str(table["name"]): table["max_epochs"] for table in config.mixture if "max_epochs" in table}
    changes = [(table["step"], table["weights"]) for table in config.phases if "weights" in table]
    ever = {name for table in (weights, *(change for _, change in changes)) for name in table if table[name]}
    if never := [name for name in weights if name not in ever]:
        raise ValueError(f"{never[0]} has weight 0 in every phase and would never be read; leave it out")
    sources: list[MeasuredSource] = []
    for number, (first, row_tokens) in enumerate(lengths):
        last = lengths[number + 1][0] if number + 1 < len(lengths) else None
        for step, change in changes:
            weights |= change if step <= first else {}
        open_ = {name: weight if epochs.get(name, 1.0) > 0 else 0.0 for name, weight in weights.items()}
        if not any(open_.values()):
            raise ValueError(f"data.phases: at step {first} every source that has a weight has given its max_epochs")
        mixture = Mixture(
            packed,
            open_,
            temperature=config.mixture_temperature,
            by=config.mixture_by,
            max_epochs={name: left for name, left in epochs.items() if left > 0},
            phases=[
                (size.before(step) - size.before(first), {n: w for n, w in change.items() if epochs.get(n, 1.0) > 0})
                for step, change in changes
                if first < step and (last is None or step < last)
            ],
            allow_unread=True,
        )
        sources.append(mixture)
        if last is not None and epochs:
            rows, limit = size.before(last) - size.before(first), mixture.position_limit(row_tokens)
            given, whole = (
                mixture.counts(rows if limit is None else min(rows, limit), row_tokens),
                mixture.row_sizes(row_tokens),
            )
            epochs = {name: left - given[name] / whole[name][0] for name, left in epochs.items()}
    return sources


def row_transforms(config: DataConfig, *, training: bool = True) -> list[Transform]:
    """What a config does to raw rows: masks of prompts, and in training those of repetition."""
    transforms: list[Transform] = []
    if training and config.mask_repetition:
        transforms.append(MaskRepetition(config.mask_repetition, config.repetition_period))
    if config.answer_start:
        transforms.append(AnswersOnly(tuple(config.answer_start), tuple(config.answer_end)))
    return transforms
