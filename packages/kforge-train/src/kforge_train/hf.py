"""Weights of a run as a folder of Hugging Face's libraries, and such a folder as a run: one tensor at a time.

    export_folder(run_dir, "out", dtype="bfloat16")       # kforge export RUN_DIR out --dtype bfloat16
    import_folder("out", run_dir)                         # kforge import out RUN_DIR

Each tensor of a checkpoint is read once, whatever number of ranks wrote it, and let go of when what it makes is
written; memory is that of the largest one, not of the model.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kforge_ckpt import CheckpointError
from kforge_ckpt.export import SafetensorsFolder, dtype_of, write_folder
from kforge_ckpt.safetensors import DTYPES, Spec
from kforge_ckpt.tools import import_tensors, open_checkpoint, read_tensor
from kforge_data import Tokenizer
from kforge_model import ModelConfig, config_from_hf, config_to_hf
from kforge_model.hf import HfTensors, family_of
from kforge_optim import join_float32
from kforge_train.build import checkpoint_dir
from kforge_train.config import JobConfig
from kforge_train.errors import ConfigError, config_errors
from kforge_train.saved import load_run, save_config

_log = logging.getLogger("kforge")

CONFIG = "config.json"
TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""What may lie beside a tokenizer.json, and belongs to it."""


def export_folder(
    run_dir: str | Path,
    folder: str | Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    max_file_bytes: int = 5 * 10**9,
    raw: bool = False,
    tokenizer: str | Path | None = None,
) -> int:
    """Write a run's weights, config.json and tokenizer into ``folder``; returns the step that they are of.

    step: of the checkpoint; None: the newest. dtype: what floating-point parameters are converted to, float32 or
    bfloat16, say; None: as they were trained, at full precision under split storage. Biases of routers stay as they
    are. max_file_bytes: size of one file of weights; a larger tensor has one of its own. raw: the weights that training
    goes on from, also where the run keeps an average of them (a moving one, or Schedule-Free's). tokenizer: as
    `data.tokenizer`; None: the run's own, and where it names none the folder has none, which is told in the log.

    Raises ConfigError for what is no run or has no such checkpoint, or a damaged one, for a model that no family of
    Hugging Face can say, for a tokenizer that is not there or has more tokens than the model, and for a ``folder`` that
    holds weights already.
    """
    with config_errors():
        config = load_run(Path(run_dir))
        wanted = None if dtype is None else dtype_of(dtype)
        named = str(tokenizer or config.data.tokenizer)
        loaded = _tokenizer_of(named, config.model) if named else None
        weights = RunWeights(config, step, raw=raw)
        said, tensors = config_to_hf(config.model), HfTensors(config.model)
        if lost := sorted(tensors.parts.keys() - weights.specs.keys()):
            raise CheckpointError(f"{weights.saved.folder} does not hold model.{lost[0]}")
        specs, read = _made(tensors, weights, wanted)
        write_folder(Path(folder), specs, read, max_file_bytes=max_file_bytes)
        kinds = [spec.dtype for spec in specs if not _is_bias(spec.key)]
        said["torch_dtype"] = str(max(set(kinds), key=kinds.count)).removeprefix("torch.")
        if loaded is not None:
            said["eos_token_id"] = _copy_tokenizer(named, loaded, Path(folder), config.model)
        else:
            _log.warning(
                "%s has no tokenizer, and AutoTokenizer will not read it: the run names none (data.tokenizer). Type "
                "kforge export %s ANOTHER_FOLDER --tokenizer PATH, of the tokenizer.json that made what it read",
                folder,
                run_dir,
            )
        (Path(folder) / CONFIG).write_text(json.dumps(said, indent=2) + "\n", "utf-8")
    return weights.saved.contents.step


def import_folder(folder: str | Path, run_dir: str | Path, *, dtype: str | None = None) -> None:
    """Make a run of a folder of Hugging Face: its config, and its weights as the checkpoint of step 0. It can be
    evaluated and sampled from, and another run can start from it (``ckpt.init_from``).

    dtype: what floating-point tensors are converted to; None: as they are, but vectors (norms, biases) at least in
    float32. Raises ConfigError for a config.json that kforge would compute otherwise, for a ``run_dir`` that is a run
    already, and for files that are missing, damaged or not of this model.
    """
    with config_errors():
        run_dir = Path(run_dir)
        if (run_dir / "config.toml").exists():
            raise ConfigError(f"{run_dir} is a run already; name another folder")
        source = HfFolder(Path(folder), dtype=None if dtype is None else dtype_of(dtype))
        config = JobConfig()
        tokenizer = str(folder) if (Path(folder) / "tokenizer.json").is_file() else ""
        rows = min(config.data.row_tokens, source.config.max_seq_len)
        config = replace(
            config,
            model=source.config,
            data=replace(config.data, tokenizer=tokenizer, row_tokens=rows),
            train=replace(config.train, run_dir=str(run_dir)),
        )
        import_tensors(run_dir / "checkpoints", 0, {"model": source}, {"imported": str(Path(folder).absolute())})
        save_config(config)


def is_folder(path: str | Path) -> bool:
    """Whether a path is a folder with weights as Hugging Face's libraries lay them out, and no run."""
    return (Path(path) / CONFIG).is_file() and any(Path(path).glob("*.safetensors"))


class HfFolder(Mapping[str, Tensor]):
    """Such a folder as tensors of ours by name, made when they are asked for, from files that are each read once.

    like: the config of the model to fill; rows of its vocabulary are padded as there, and what config.json says
    otherwise is told in the log. dtype: of floating-point tensors; None: as they are, but vectors at least float32.
    Raises ConfigError for a config.json that is missing, or that kforge would compute otherwise, and for files that are
    missing, damaged or not of this model.
    """

    def __init__(self, folder: Path, *, like: ModelConfig | None = None, dtype: torch.dtype | None = None) -> None:
        self.folder = folder
        try:
            said = json.loads((folder / CONFIG).read_text("utf-8"))
            self.family = family_of(said)
            self.config = config_from_hf(said)
        except FileNotFoundError:
            raise ConfigError(f"{folder} is no folder of Hugging Face: it has no {CONFIG}") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder / CONFIG}: {error}") from error
        if like is not None:
            self.config = replace(self.config, vocab_multiple=like.vocab_multiple)
            for line in differing(self.config, like, self.family):
                _log.warning("%s has %s", folder, line)
        self.dtype = dtype
        self.specs: dict[str, Spec] = {}
        """Name -> dtype and shape."""
        with config_errors():
            self._files = SafetensorsFolder(folder)
            joined = any(key.endswith(".mlp.experts.gate_up_proj") for key in self._files)
            self._tensors = HfTensors(self.config, self.family, joined_experts=joined)
            self._tensors.check(self._files)
        for name, parts in self._tensors.parts.items():
            kind = self._kind(name, self._files.specs[next(iter(parts))].dtype)
            self.specs[name] = Spec(name, kind, tuple(self._tensors.shapes[name]))

    def _kind(self, name: str, found: torch.dtype) -> torch.dtype:
        if not found.is_floating_point:
            return found
        if self.dtype is not None:
            return self.dtype
        return torch.promote_types(found, torch.float32) if len(self._tensors.shapes[name]) == 1 else found

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors.from_hf(name, _Widened(self._files, self.specs[name].dtype)).to(self.specs[name].dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)


class _Widened(Mapping[str, Tensor]):
    """Tensors of files in a wider dtype, where that is what they become: 1 + w has digits that w's dtype has not."""

    def __init__(self, files: SafetensorsFolder, dtype: torch.dtype) -> None:
        self.files = files
        self.dtype = dtype

    def __getitem__(self, key: str) -> Tensor:
        tensor = self.files[key]
        return tensor.to(self.dtype) if tensor.ndim == 1 and tensor.is_floating_point() else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


class RunWeights:
    """The weights of a checkpoint of a run by name, each read when it is asked for: those that the run evaluates, or
    with ``raw`` those that training goes on from. Under split storage the two halves are joined."""

    def __init__(self, config: JobConfig, step: int | None = None, *, raw: bool = False) -> None:
        place = str(checkpoint_dir(config))
        self.saved = open_checkpoint(place if step is None else f"{place}@{step}")
        self.raw = raw
        self.specs: dict[str, Spec] = {}
        for name in sorted(self.saved.tensors_of("model")):
            name = name.removeprefix("model.")
            stored = self.saved.index[self._at(name)]
            joined = self._low(name) is not None
            self.specs[name] = Spec(name, torch.float32 if joined else DTYPES[stored.dtype], stored.shape)

    def _at(self, name: str) -> str:
        index = self.saved.index
        apart = f"optim.state.{name}.trained" if self.raw else f"ema.weights.{name}"
        return apart if apart in index else f"model.{name}"

    def _low(self, name: str) -> str | None:
        low = f"optim.state.{name}.remainder"
        return low if self._at(name).startswith("model.") and low in self.saved.index else None

    def __getitem__(self, name: str) -> Tensor:
        weight, low = read_tensor(self.saved, self._at(name)), self._low(name)
        return weight if low is None else join_float32(weight, read_tensor(self.saved, low))


def _made(tensors: HfTensors, weights: RunWeights, dtype: torch.dtype | None) -> tuple[list[Spec], Any]:
    """What the files will hold, in order, and a function that gives it out by name. A weight is read when the first
    tensor that it makes is asked for; those that are not yet are kept."""
    specs: list[Spec] = []
    owner: dict[str, str] = {}
    for name, parts in tensors.parts.items():
        kind = weights.specs[name].dtype
        if dtype is not None and kind.is_floating_point and not _is_bias(name):
            kind = dtype
        specs += [Spec(key, kind, tuple(shape)) for key, shape in parts.items()]
        owner |= dict.fromkeys(parts, name)
    waiting: dict[str, Tensor] = {}

    def read(key: str) -> Tensor:
        if key not in waiting:
            waiting.update(tensors.to_hf(owner[key], weights[owner[key]]))
        return waiting.pop(key)

    return specs, read


def _is_bias(name: str) -> bool:
    """Whether a name is of a router's bias, which is counted in and loses its sense where it is rounded."""
    return name.endswith(("router.bias", "e_score_correction_bias"))


def _tokenizer_of(named: str, model: ModelConfig) -> Tokenizer:
    """The tokenizer that is named. Raises ValueError for one that is not of this model."""
    tokenizer = Tokenizer.load(named)
    if tokenizer.vocab_size > model.vocab_size:
        raise ValueError(
            f"the tokenizer {named} has {tokenizer.vocab_size} tokens, more than model.vocab_size = "
            f"{model.vocab_size}; name the one that made what the run has read"
        )
    return tokenizer


def _copy_tokenizer(named: str, tokenizer: Tokenizer, folder: Path, model: ModelConfig) -> int | None:
    """The tokenizer's files, with what Hugging Face's libraries want to know; returns the id that ends a text."""
    source = Path(named) if Path(named).is_dir() else Path(named).parent
    if tokenizer.file_name:
        tokenizer.save(folder / tokenizer.file_name)
    else:
        _log.warning(
            "%s has no tokenizer, and AutoTokenizer will not read it: %s has no file of its own. Use the library that "
            "it comes from, or --tokenizer PATH of a tokenizer.json with the same ids",
            folder,
            named,
        )
    try:
        end = tokenizer.eos_id
    except ValueError:
        end = None
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if tokenizer.file_name == "tokenizer.json" and not (folder / "tokenizer_config.json").exists():
        said: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model.max_seq_len}
        said["clean_up_tokenization_spaces"] = False
        if end is not None:
            said["eos_token"] = tokenizer.decode([end])
        (folder / "tokenizer_config.json").write_text(json.dumps(said, indent=2) + "\n", "utf-8")
    return end


def differing(theirs: ModelConfig, ours: ModelConfig, family: str) -> list[str]:
    """What config.json says of two models that changes what is computed: lines of "key = 1, this model 2"."""
    try:
        one, other = config_to_hf(theirs, family), config_to_hf(ours, family)
    except ValueError as error:
        return [f"a model that is not this one: {error}"]
    keys = sorted((one.keys() | other.keys()) - {"max_position_embeddings", "initializer_range"})
    return [f"{k} = {one.get(k)!r}, this model {other.get(k)!r}" for k in keys if one.get(k) != other.get(k)]
