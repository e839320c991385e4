"""What is read, and how it is cut into rows and batches, as plain data. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kforge_data.batch_size import BatchSize, read_batch_phases

PACKINGS = ("cut", "best_fit", "truncate")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where tokens are, and the batch made of it at each optimizer step."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    train: str = ""
    """What to train on: a folder of token shards, as `kforge-data tokenize` writes it; a .npy or raw .bin file of ids,
    or a folder of them; the .idx of a Megatron dataset; or text, which is tokenized once into the cache: .jsonl, .txt
    or .parquet files, or a dataset of Hugging Face as datasets://name?split=train; or, with ?stream=1, such a dataset
    that is read while training. Empty: `mixture` says it."""
    mixture: tuple[dict[str, Any], ...] = ()
    """Several sources in the place of `train`, each with `name`, `path`, `weight` (default 1; 0: not before a phase)
    and perhaps `max_epochs`, after which its share goes to the others: [{name = "web", path = "web", weight = 8}]."""
    mixture_by: str = "tokens"
    """What the shares of a mixture are of: "tokens" or "documents"."""
    mixture_temperature: float = 1.0
    """Shares are proportional to weight ** (1 / temperature); above 1 evens them out."""
    phases: tuple[dict[str, Any], ...] = ()
    """Other weights of a mixture, another length of rows, or both, from a step on, as [{step = 9000, weights =
    {web = 1, code = 4}}, {step = 9500, row_tokens = 8192}]; weights left out stay. Steps ascend. Rows of another length
    are a sequence of their own, read from its beginning. What the learning rate does meanwhile is optim's."""
    heldout: str = ""
    """Token shards, or other token files, to evaluate on. Empty: no evaluation."""
    dtype: str = ""
    """Integer type of raw .bin files, as uint16: their bytes do not tell it. Empty: there are none."""
    eos_id: int | None = None
    """The id that ends a document in .npy, .bin and Megatron files. None: each .npy or .bin file is one document."""
    packing: str = "cut"
    """How documents fill rows. "cut": end to end, cut where a row is full. "best_fit": no document that fits into a row
    is cut; rows end in a little padding. "truncate": so, and of a longer document only the first row is kept."""
    cache: str = ""
    """Folder for plans of rows, tokens of text and other things that are computed once. Empty: $KFORGE_DATA_CACHE, else
    under the user's cache folder."""
    cache_wait_s: float = 21600.0
    """Seconds that a process waits for another one of its machine that is filling the cache, as text is tokenized."""
    tokenizer: str = ""
    """The tokenizer that made the shards: a tokenizer.json, a sentencepiece .model, or tiktoken:NAME; used to print
    text, checked by fingerprint, and to tokenize text that is trained on. Empty: not needed."""
    lanes: int = 64
    """Lanes that a dataset of Hugging Face is read in while training (datasets://name?stream=1). The data ranks read
    whole lanes, so their number must divide this one. Another number is another order of rows."""
    stream_block: int = 128
    """Documents of a lane that are shuffled among one another, where a dataset is read while training."""
    text_field: str = "text"
    """The key or column of the text in .jsonl and .parquet files and in datasets that do not name one (?field=…)."""
    row_tokens: int = 512
    """Length of a row, in tokens."""
    global_rows: int = 32
    """Rows of one optimizer step over all processes."""
    batch_phases: tuple[dict[str, Any], ...] = ()
    """Steps of other sizes that come first, one phase after the other, each with `rows` and its length in `steps` or in
    `tokens` (rounded up to whole steps), as [{tokens = 1000000, rows = 8}, {steps = 500, rows = 16}]; then global_rows.
    Rows come in the same order as ever. Empty: all steps have global_rows."""
    microbatch_rows: int | None = None
    """Rows that one process sees in one forward pass; in the last one of a step those that are left. None: all that it
    has in a step (no accumulation)."""
    seed: int = 1
    """Chooses the order of rows. The order is a function of this seed and the position, of nothing else."""
    shuffle: bool = True
    """Visit the rows of each epoch in a pseudo-random order; False: in the order in which they lie."""
    isolate_documents: bool = True
    """Positions restart and attention stops at document boundaries. False: a row is one text to attention. A label
    never crosses a boundary either way."""
    mask_short: int = 0
    """Documents of fewer tokens than this are read and not scored. 0: none is too short."""
    mask_duplicates: bool = False
    """Documents that equal an earlier one of the same source, by a hash of their tokens, are read and not scored."""
    mask_repetition: int = 0
    """Tokens that say so many times or more in a row what was just said are read and not scored, the first time
    excepted. 32 finds what no text has. 0: repetition is scored."""
    repetition_period: int = 13
    """The longest stretch, in tokens, that mask_repetition looks for."""
    answer_start: tuple[int, ...] = ()
    """Ids of the tokens that begin an answer, as those of "<|assistant|>": only answers are scored, in training and in
    evaluation. Empty: all text is."""
    answer_end: tuple[int, ...] = ()
    """Ids of the tokens that end an answer; they are scored. Empty: there are none."""
    accept_changed_data: bool = False
    """Go on from a checkpoint whose sources, weights, seed or rows were others, from the same position; what has been
    read of the changed sources may come again. False: such a resume is refused with what differs."""
    workers: int = 1
    """How many read ahead. 0: rows are read when asked for. The order does not depend on it."""
    worker_kind: str = "thread"
    """What reads ahead: each a "thread" of the training process, or a process of its own, by "fork" or "spawn"."""

    def __post_init__(self) -> None:
        for name in ("row_tokens", "global_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"data.{name} = {getattr(self, name)} must be at least 1")
        if self.microbatch_rows is not None and self.microbatch_rows < 1:
            raise ValueError(f"data.microbatch_rows = {self.microbatch_rows} must be at least 1")
        if self.workers < 0:
            raise ValueError(f"data.workers = {self.workers} must be 0 (no read-ahead) or more")
        read_batch_phases(self.batch_phases, self.row_tokens)
        if self.mask_short < 0:
            raise ValueError(f"data.mask_short = {self.mask_short} must be 0 (none is too short) or more")
        if self.mask_repetition < 0 or self.mask_repetition == 1:
            raise ValueError(f"data.mask_repetition = {self.mask_repetition} must be 0 (off), or 2 or more")
        if self.repetition_period < 1:
            raise ValueError(f"data.repetition_period = {self.repetition_period} must be at least 1 token")
        if bool(self.answer_start) != bool(self.answer_end):
            raise ValueError("data.answer_start and data.answer_end belong together; give both, or neither")
        for name in ("answer_start", "answer_end"):
            if any(token < 0 for token in getattr(self, name)):
                raise ValueError(f"data.{name} = {list(getattr(self, name))} must be ids, from 0")
        for name, choices in (
            ("packing", PACKINGS),
            ("worker_kind", ("thread", "fork", "spawn")),
            ("mixture_by", ("tokens", "documents")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"data.{name} = {getattr(self, name)!r} is not one of {', '.join(choices)}")
        for name in ("lanes", "stream_block"):
            if getattr(self, name) < 1:
                raise ValueError(f"data.{name} = {getattr(self, name)} must be at least 1")
        if not self.cache_wait_s >= 0:
            raise ValueError(f"data.cache_wait_s = {self.cache_wait_s} must be a number of seconds of at least 0")
        if not self.text_field:
            raise ValueError("data.text_field is empty; name the key or column of the text")
        if not self.mixture_temperature > 0:
            raise ValueError(f"data.mixture_temperature = {self.mixture_temperature} must be above 0")
        if self.train and self.mixture:
            raise ValueError("data.train and data.mixture are both set; put the one into the other, or leave it out")
        for i, table in enumerate(self.mixture):
            _check_table(f"data.mixture[{i}]", table, ("name", "path"), ("weight", "max_epochs"))
        names = [str(table["name"]) for table in self.mixture]
        if len(set(names)) < len(names):
            raise ValueError(f"data.mixture names a source twice, of {', '.join(names)}")
        weights = {str(table["name"]): table.get("weight", 1.0) for table in self.mixture}
        for i, table in enumerate(self.phases):
            self._check_phase(i, table, weights)
        if any("row_tokens" in table for table in self.phases) and any(
            "tokens" in table for table in self.batch_phases
        ):
            raise ValueError(
                "data.batch_phases counts tokens, and data.phases has rows of several lengths; give steps in place of "
                "tokens"
            )

    def _check_phase(self, i: int, table: Mapping[str, Any], weights: dict[str, float]) -> None:
        """ValueError for what data.phases[i] cannot be; ``weights`` become those that are in force from it on."""
        name = f"data.phases[{i}]"
        _check_table(name, table, ("step",), (), ("weights", "row_tokens"))
        if not isinstance(table["step"], int) or table["step"] < 1:
            raise ValueError(f"{name}.step = {table['step']!r} must be a step of at least 1")
        if i and table["step"] <= self.phases[i - 1]["step"]:
            raise ValueError(f"{name}.step = {table['step']} does not come after the phase before")
        if "weights" not in table and "row_tokens" not in table:
            raise ValueError(f"{name} changes nothing; give it weights, row_tokens, or both")
        length = table.get("row_tokens", 1)
        if not isinstance(length, int) or isinstance(length, bool) or length < 1:
            raise ValueError(f"{name}.row_tokens = {length!r} must be a whole number of at least 1")
        changed = table.get("weights", {})
        if not isinstance(changed, dict):
            raise ValueError(f"{name}.weights = {changed!r} must be a table of name = weight")
        if "weights" in table and not self.mixture:
            raise ValueError(f"{name} changes weights, and there is no data.mixture that has any")
        if unknown := [one for one in changed if one not in weights]:
            raise ValueError(f"{name} names {', '.join(unknown)}; the sources are {', '.join(weights)}")
        weights.update(changed)
        if self.mixture and not any(weights.values()):
            raise ValueError(f"{name}: from here on all weights are 0, so there is nothing to read")

    def batch_size(self) -> BatchSize:
        """Rows of each step."""
        return BatchSize(self.global_rows, read_batch_phases(self.batch_phases, self.row_tokens))

    def row_lengths(self) -> tuple[tuple[int, int], ...]:
        """(first step, tokens of a row) of each part of the run with rows of one length; the first is from step 0."""
        lengths = [(0, self.row_tokens)]
        for table in self.phases:
            if table.get("row_tokens", lengths[-1][1]) != lengths[-1][1]:
                lengths.append((table["step"], table["row_tokens"]))
        return tuple(lengths)

    def row_tokens_at(self, step: int) -> int:
        """Tokens of a row at a step."""
        return [length for first, length in self.row_lengths() if first <= step][-1]


def _check_table(
    name: str, table: Mapping[str, Any], needed: tuple[str, ...], more: tuple[str, ...], others: tuple[str, ...] = ()
) -> None:
    """ValueError unless a table has the keys ``needed``, perhaps ``more``, which are numbers, and ``others``."""
    for key in table:
        if key not in needed + more + others:
            raise ValueError(f"{name} has no key {key!r}; it has {', '.join(needed + more + others)}")
    for key in needed:
        if key not in table:
            raise ValueError(f"{name}.{key} is missing")
    for key in more:
        number = table.get(key, 1)
        if not isinstance(number, int | float) or isinstance(number, bool) or not number >= 0:
            raise ValueError(f"{name}.{key} = {number!r} must be a number of at least 0")
