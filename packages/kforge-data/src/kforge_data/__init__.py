"""Text to tokens to rows to batches, in an order that is a function of seed and position.

`tokenize_files` makes token shards of text, `TokenShards` opens them through memory maps, `Loader` hands out the
batches of each optimizer step and resumes from a position on any number of processes. Names are imported when first
used; `kforge_data.config` needs the standard library only.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kforge_data._version import __version__

if TYPE_CHECKING:
    from kforge_data.batch import Batch as Batch
    from kforge_data.best_fit import PackedDocuments as PackedDocuments
    from kforge_data.cached import cached_tokens as cached_tokens
    from kforge_data.config import DataConfig as DataConfig
    from kforge_data.convert import convert_tokens as convert_tokens
    from kforge_data.corpus import CorpusReport as CorpusReport
    from kforge_data.corpus import stdlib_documents as stdlib_documents
    from kforge_data.corpus import write_stdlib_corpus as write_stdlib_corpus
    from kforge_data.documents import ReadCounts as ReadCounts
    from kforge_data.documents import read_documents as read_documents
    from kforge_data.duplicates import duplicate_documents as duplicate_documents
    from kforge_data.duplicates import write_deduplicated as write_deduplicated
    from kforge_data.evaluation import evaluation_batches as evaluation_batches
    from kforge_data.evaluation import evaluation_rows as evaluation_rows
    from kforge_data.hugging_face import DatasetStream as DatasetStream
    from kforge_data.hugging_face import DatasetTexts as DatasetTexts
    from kforge_data.lanes import LaneState as LaneState
    from kforge_data.lanes import StreamedDocuments as StreamedDocuments
    from kforge_data.loader import Loader as Loader
    from kforge_data.loader_state import merge_states as merge_states
    from kforge_data.masks import AnswersOnly as AnswersOnly
    from kforge_data.masks import MaskRepetition as MaskRepetition
    from kforge_data.masks import mask_documents as mask_documents
    from kforge_data.megatron import MegatronTokens as MegatronTokens
    from kforge_data.megatron import write_megatron as write_megatron
    from kforge_data.mixture import Mixture as Mixture
    from kforge_data.ngram import KneserNeyBigram as KneserNeyBigram
    from kforge_data.ngram import NgramBaseline as NgramBaseline
    from kforge_data.ngram import ngram_baseline as ngram_baseline
    from kforge_data.opening import open_configured as open_configured
    from kforge_data.opening import open_tokens as open_tokens
    from kforge_data.opening import row_transforms as row_transforms
    from kforge_data.opening import training_phases as training_phases
    from kforge_data.opening import training_source as training_source
    from kforge_data.opening import training_sources as training_sources
    from kforge_data.opening import training_streams as training_streams
    from kforge_data.order import Permutation as Permutation
    from kforge_data.order import epoch_order as epoch_order
    from kforge_data.packing import PackedRows as PackedRows
    from kforge_data.packing import pack_rows as pack_rows
    from kforge_data.phases import RowPhase as RowPhase
    from kforge_data.raw import TokenFiles as TokenFiles
    from kforge_data.shard_writer import ShardWriter as ShardWriter
    from kforge_data.shards import TokenShards as TokenShards
    from kforge_data.sources import LanedSource as LanedSource
    from kforge_data.sources import MeasuredSource as MeasuredSource
    from kforge_data.sources import RowBlock as RowBlock
    from kforge_data.sources import Source as Source
    from kforge_data.sources import in_order as in_order
    from kforge_data.sources import lanes_of as lanes_of
    from kforge_data.stats import Stats as Stats
    from kforge_data.stats import token_stats as token_stats
    from kforge_data.streams import TokenStream as TokenStream
    from kforge_data.tokenize import TokenizeReport as TokenizeReport
    from kforge_data.tokenize import tokenize_files as tokenize_files
    from kforge_data.tokenizer import Tokenizer as Tokenizer
    from kforge_data.tokenizer import train_tokenizer as train_tokenizer
    from kforge_data.verify import verify_shards as verify_shards
    from kforge_data.verify import verify_tokens as verify_tokens

# Public name -> the module it lives in. Nothing is imported until it is asked for.
_HOME = {
    "AnswersOnly": "masks",
    "Batch": "batch",
    "CorpusReport": "corpus",
    "DataConfig": "config",
    "DatasetStream": "hugging_face",
    "DatasetTexts": "hugging_face",
    "KneserNeyBigram": "ngram",
    "LaneState": "lanes",
    "LanedSource": "sources",
    "Loader": "loader",
    "MaskRepetition": "masks",
    "MeasuredSource": "sources",
    "MegatronTokens": "megatron",
    "Mixture": "mixture",
    "NgramBaseline": "ngram",
    "PackedDocuments": "best_fit",
    "PackedRows": "packing",
    "Permutation": "order",
    "ReadCounts": "documents",
    "RowBlock": "sources",
    "RowPhase": "phases",
    "ShardWriter": "shard_writer",
    "Source": "sources",
    "Stats": "stats",
    "StreamedDocuments": "lanes",
    "TokenFiles": "raw",
    "TokenShards": "shards",
    "TokenStream": "streams",
    "TokenizeReport": "tokenize",
    "Tokenizer": "tokenizer",
    "cached_tokens": "cached",
    "convert_tokens": "convert",
    "duplicate_documents": "duplicates",
    "epoch_order": "order",
    "evaluation_batches": "evaluation",
    "evaluation_rows": "evaluation",
    "in_order": "sources",
    "lanes_of": "sources",
    "mask_documents": "masks",
    "merge_states": "loader_state",
    "ngram_baseline": "ngram",
    "open_configured": "opening",
    "open_tokens": "opening",
    "pack_rows": "packing",
    "read_documents": "documents",
    "row_transforms": "opening",
    "stdlib_documents": "corpus",
    "token_stats": "stats",
    "tokenize_files": "tokenize",
    "train_tokenizer": "tokenizer",
    "training_phases": "opening",
    "training_source": "opening",
    "training_sources": "opening",
    "training_streams": "opening",
    "verify_shards": "verify",
    "verify_tokens": "verify",
    "write_deduplicated": "duplicates",
    "write_megatron": "megatron",
    "write_stdlib_corpus": "corpus",
}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
