"""From what a config says to a source that a loader reads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kforge_data.best_fit import PackedDocuments
from kforge_data.masks import AnswersOnly, MaskRepetition, mask_documents
from kforge_data.megatron import MegatronTokens
from kforge_data.mixture import Mixture
from kforge_data.raw import TokenFiles
from kforge_data.shards import INDEX, TokenShards

if TYPE_CHECKING:
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
) -> TokenStream:
    """The tokens at a path: a folder of token shards; Megatron's .idx, or a .bin with an .idx beside it; a .npy or raw
    .bin, or a folder of them. ``dtype``, ``eos_id`` and ``vocab_size`` say what such files do not."""
    place = Path(path)
    if place.suffix in (".idx", ".bin") and place.with_suffix(".idx").exists():
        return MegatronTokens(place, vocab_size=vocab_size, eos_id=eos_id, cache=cache or None)
    if place.suffix in (".npy", ".bin") or (place.is_dir() and not (place / INDEX).exists() and _holds_files(place)):
        return TokenFiles(place, dtype=dtype or None, eos_id=eos_id, vocab_size=vocab_size, cache=cache or None)
    return TokenShards(place)


def _holds_files(folder: Path) -> bool:
    return any(file.suffix in (".npy", ".bin") for file in folder.iterdir())


def training_streams(config: DataConfig) -> dict[str, TokenStream]:
    """What a config trains on: the streams of its mixture by name, or the one of ``data.train`` as "train"."""
    paths = {str(table["name"]): table["path"] for table in config.mixture} or {"train": config.train}
    result = {}
    for name, path in paths.items():
        try:
            result[name] = open_tokens(path, dtype=config.dtype, eos_id=config.eos_id, cache=config.cache)
        except (OSError, ValueError) as error:
            raise ValueError(f"data.{'mixture ' + name if config.mixture else 'train'}: {error}") from error
    return result


def training_source(config: DataConfig, streams: dict[str, TokenStream] | None = None) -> MeasuredSource:
    """The source that a config trains on, packed and mixed as it says."""
    streams = training_streams(config) if streams is None else streams
    streams = {
        name: mask_documents(stream, config.mask_short, config.mask_duplicates, config.cache or None)
        for name, stream in streams.items()
    }
    packed: dict[str, MeasuredSource] = {
        name: stream
        if config.packing == "cut"
        else PackedDocuments(
            stream, truncate=config.packing == "truncate", seed=config.seed, cache=config.cache or None
        )
        for name, stream in streams.items()
    }
    if not config.mixture:
        return packed["train"]
    size = config.batch_size()
    return Mixture(
        packed,
        {str(table["name"]): table.get("weight", 1.0) for table in config.mixture},
        temperature=config.mixture_temperature,
        by=config.mixture_by,
        max_epochs={str(table["name"]): table["max_epochs"] for table in config.mixture if "max_epochs" in table},
        phases=[(size.before(table["step"]), table["weights"]) for table in config.phases],
    )


def row_transforms(config: DataConfig, *, training: bool = True) -> list[Transform]:
    """What a config does to raw rows: masks of prompts, and in training those of repetition."""
    transforms: list[Transform] = []
    if training and config.mask_repetition:
        transforms.append(MaskRepetition(config.mask_repetition, config.repetition_period))
    if config.answer_start:
        transforms.append(AnswersOnly(tuple(config.answer_start), tuple(config.answer_end)))
    return transforms
