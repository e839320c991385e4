"""Text, and datasets of Hugging Face, tokenized once into a cache: token shards from then on."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kforge_data.cache import build_once, cache_folder
from kforge_data.shards import TokenShards
from kforge_data.text_files import list_files
from kforge_data.tokenize import tokenize_files
from kforge_data.unfinished import CannotGoOn, describe_files

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kforge_data.tokenizer import Tokenizer

logger = logging.getLogger("kforge_data")

_VERSION = 1
WAIT_S = 6 * 3600.0


def cached_tokens(
    inputs: Sequence[str | Path],
    *,
    tokenizer: Tokenizer,
    field: str = "text",
    txt_documents: str = "file",
    begin_of_text: str | None = None,
    max_bad_lines: int = 0,
    cache: str | Path | None = None,
    wait_s: float = WAIT_S,
) -> TokenShards:
    """Token shards of text files or of datasets (``datasets://…``), made by the first who asks for them.

    They lie in ``cache`` (default: `cache_folder`) under a key of the files (names, sizes and times of change, of URLs
    what their store says of versions, of a dataset its fingerprint), the tokenizer and the other arguments, which are
    those of `tokenize_files`. One process of a machine makes them while others wait, up to ``wait_s`` seconds
    (TimeoutError). Killed, it is gone on with. Where the index or the size of a file shows damage, they are told of and
    made anew; `verify` reads more.
    """
    files = list_files(inputs)
    options: dict[str, Any] = {
        "field": field,
        "txt_documents": txt_documents,
        "begin_of_text": begin_of_text,
        "max_bad_lines": max_bad_lines,
    }
    key = [_VERSION, describe_files(files), tokenizer.fingerprint, tokenizer.eos_id, options]
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()

    def build(folder: Path) -> None:
        try:
            tokenize_files(files, folder, tokenizer=tokenizer, overwrite=True, **options)
        except CannotGoOn as error:
            logger.warning("what was begun is made anew: %s", error)
            tokenize_files(files, folder, tokenizer=tokenizer, overwrite=True, resume=False, **options)

    folder = cache_folder(cache) / "tokens" / name
    return TokenShards(build_once(folder, build, timeout_s=wait_s, check=TokenShards))
