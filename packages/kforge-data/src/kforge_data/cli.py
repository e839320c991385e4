"""The command `kforge-data`. Heavy imports happen inside the commands, so that --help is quick."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from kforge_data._version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FAULTS_FOUND = 1
USER_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns 0, 1 when `verify` finds faults, or 2 with one line on stderr for a user's mistake."""
    arguments = parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except (ValueError, OSError) as error:
        print(f"kforge-data {arguments.command}: error: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print(f"kforge-data {arguments.command}: interrupted", file=sys.stderr)
        return 130


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="kforge-data", description="Text to token shards, and a look at what they hold.", allow_abbrev=False
    )
    top.add_argument("--version", action="version", version=f"kforge-data {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="command")

    corpus = _command(commands, "corpus", _corpus, "gather text that is on this machine, as JSONL documents")
    corpus.add_argument("which", choices=["stdlib"], help="stdlib: the sources of the running Python's library")
    corpus.add_argument("--out", required=True, metavar="FILE", help="the .jsonl file to write")

    train = _command(commands, "train-tokenizer", _train_tokenizer, "train a byte-level BPE tokenizer on text")
    _add_inputs(train)
    train.add_argument("--out", required=True, metavar="FILE", help="the tokenizer.json to write")
    train.add_argument("--vocab-size", type=int, required=True, metavar="N", help="tokens, special ones included")
    train.add_argument(
        "--vocab-multiple", type=int, default=1, metavar="N", help="round that up to a multiple of N (default 1)"
    )
    train.add_argument(
        "--special-token",
        action="append",
        metavar="TOKEN",
        help="one more token that no text makes, after <|endoftext|>; may be given several times",
    )

    tokenize = _command(commands, "tokenize", _tokenize, "turn files of text into token shards")
    _add_inputs(tokenize)
    tokenize.add_argument(
        "--tokenizer", required=True, metavar="FILE", help="tokenizer.json, sentencepiece .model, or tiktoken:NAME"
    )
    tokenize.add_argument("--out", required=True, metavar="FOLDER", help="folder to write")
    tokenize.add_argument(
        "--heldout",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="put this share of documents, chosen by a hash of the text, into FOLDER/heldout and the others into "
        "FOLDER/train (default 0: all into FOLDER)",
    )
    tokenize.add_argument("--dtype", default="auto", help="auto (by vocabulary), uint16 or uint32")
    tokenize.add_argument("--shard-tokens", type=int, default=1 << 28, metavar="N", help="tokens of one file")
    tokenize.add_argument("--workers", type=int, default=0, metavar="N", help="processes (0: threads of this one)")
    tokenize.add_argument("--end-of-text", metavar="TOKEN", help="token that ends a document (default: by usual names)")
    tokenize.add_argument("--parse-special", action="store_true", help="special-token strings in text become their ids")
    tokenize.add_argument("--begin-of-text", metavar="TOKEN", help="token that begins a document (default: none does)")
    tokenize.add_argument(
        "--resume",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="go on where a run with the same arguments was stopped (the default)",
    )
    tokenize.add_argument("--quiet", action="store_true", help="do not tell on stderr how far it is")
    tokenize.add_argument("--overwrite", action="store_true", help="replace shards that are there")

    inspect = _command(commands, "inspect", _inspect, "show what a folder of token shards holds")
    inspect.add_argument("shards", metavar="FOLDER")
    inspect.add_argument("--tokenizer", metavar="FILE", help="show documents as text")
    inspect.add_argument("--documents", type=int, default=0, metavar="N", help="show the first N documents")
    inspect.add_argument("--characters", type=int, default=300, metavar="N", help="so much of each (default 300)")
    inspect.add_argument("--json", action="store_true", help="machine-readable")

    verify = _command(commands, "verify", _verify, "read sets of tokens whole and say what is wrong with them")
    verify.add_argument("sets", nargs="+", metavar="SET", help="folders of token shards, or other token files")
    _add_raw(verify)
    verify.add_argument("--vocab-size", type=int, metavar="N", help="ids from N on are faults, where files do not say")

    stats = _command(commands, "stats", _stats, "how long documents are, and how many tokens a byte takes")
    stats.add_argument("set", metavar="SET", help="a folder of token shards, or other token files")
    _add_raw(stats)
    stats.add_argument("--tokenizer", metavar="FILE", help="counts bytes of text where the set does not know them")
    stats.add_argument("--out", metavar="PNG", help="draw the histogram of lengths")
    stats.add_argument("--json", action="store_true", help="machine-readable")

    mix = _command(commands, "mix", _mix, "what a job's mixture will have given after so many steps")
    mix.add_argument("job", metavar="TOML", help="a job's file, of which the table [data] is read")
    mix.add_argument("--steps", type=int, required=True, metavar="N", help="optimizer steps to look at")
    mix.add_argument("--windows", type=int, default=10, metavar="N", help="parts of them to tell apart (default 10)")
    mix.add_argument("--out", metavar="PNG", help="draw the shares")
    mix.add_argument("--json", action="store_true", help="machine-readable")

    dedup = _command(commands, "dedup", _dedup, "write the documents of sets of tokens once each, by exact hash")
    dedup.add_argument("sets", nargs="+", metavar="SET", help="folders of token shards, or other token files")
    _add_raw(dedup)
    _add_out(dedup, "FOLDER", "folder of token shards to write")
    dedup.add_argument("--tokenizer", metavar="FILE", help="counts the bytes of text that stay")

    convert = _command(commands, "convert", _convert, "write a set of tokens in another format")
    convert.add_argument("set", metavar="SET", help="a folder of token shards, .npy or .bin files, or Megatron's .idx")
    _add_raw(convert)
    convert.add_argument("--vocab-size", type=int, metavar="N", help="vocabulary of files that do not say it")
    convert.add_argument("--to", required=True, metavar="FORMAT", help="shards, npy, bin, megatron, jsonl or txt")
    _add_out(convert, "PATH", "folder or file to write")
    convert.add_argument("--tokenizer", metavar="FILE", help="needed for jsonl and txt")

    ngram = _command(commands, "ngram", _ngram, "losses that counting reaches: unigram and Kneser-Ney bigram")
    ngram.add_argument("--train", required=True, metavar="FOLDER", help="shards to count")
    ngram.add_argument("--heldout", required=True, metavar="FOLDER", help="shards to score")
    ngram.add_argument("--row-tokens", type=int, required=True, metavar="N", help="row length of the model")
    ngram.add_argument("--max-rows", type=int, default=0, metavar="N", help="score so many rows (default 0: all)")
    ngram.add_argument("--json", action="store_true", help="machine-readable")
    return top


def _command(commands: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False
    )
    command.set_defaults(run=run)
    return command


def _add_inputs(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help=".jsonl, .txt or .parquet files (.gz, .zst), local or URLs, or folders of them",
    )
    command.add_argument("--field", default="text", metavar="KEY", help="key of the text in a record (default text)")
    command.add_argument(
        "--txt-documents",
        default="file",
        metavar="UNIT",
        help="a document of a .txt: file (default), line or paragraph",
    )
    command.add_argument("--strict", action="store_true", help="a document without text is an error")
    command.add_argument("--max-bad-lines", type=int, default=0, metavar="N", help="skip so many broken lines")


def _add_raw(command: argparse.ArgumentParser) -> None:
    command.add_argument("--dtype", default="", help="integer type of .bin files, which do not say it")
    command.add_argument("--eos-id", type=int, metavar="ID", help="what ends a document in files that do not say it")


def _add_out(command: argparse.ArgumentParser, metavar: str, text: str) -> None:
    command.add_argument("--out", required=True, metavar=metavar, help=text)
    command.add_argument("--shard-tokens", type=int, default=1 << 28, metavar="N", help="tokens of one shard")
    command.add_argument("--overwrite", action="store_true", help="replace what is there")


def _open(arguments: argparse.Namespace, path: str) -> Any:
    from kforge_data.opening import open_tokens

    given = {name: getattr(arguments, name) for name in ("dtype", "eos_id", "vocab_size") if hasattr(arguments, name)}
    return open_tokens(path, **given)


def _tokenizer(arguments: argparse.Namespace) -> Any:
    from kforge_data.tokenizer import Tokenizer

    return Tokenizer.load(arguments.tokenizer) if arguments.tokenizer else None


def _reading(arguments: argparse.Namespace) -> dict[str, Any]:
    names = ("field", "txt_documents", "strict", "max_bad_lines")
    return {name: getattr(arguments, name) for name in names}


def _corpus(arguments: argparse.Namespace) -> int:
    from kforge_data.corpus import write_stdlib_corpus

    report = write_stdlib_corpus(arguments.out)
    print(
        f"{arguments.out}: {report.documents:,} documents, {report.text_bytes / 1e6:.1f} MB of text "
        f"({report.skipped} files empty or not UTF-8 left out)"
    )
    return 0


def _train_tokenizer(arguments: argparse.Namespace) -> int:
    from kforge_data.documents import read_documents
    from kforge_data.tokenizer import END_OF_TEXT, train_tokenizer

    tokenizer = train_tokenizer(
        read_documents(arguments.inputs, **_reading(arguments)),
        vocab_size=arguments.vocab_size,
        special_tokens=(END_OF_TEXT, *(arguments.special_token or ())),
        multiple=arguments.vocab_multiple,
    )
    tokenizer.save(arguments.out)
    short = "" if tokenizer.vocab_size >= arguments.vocab_size else " (the text gave no more than that)"
    print(f"{arguments.out}: {tokenizer.vocab_size:,} tokens{short}, {tokenizer.fingerprint[:19]}")
    return 0


def _tokenize(arguments: argparse.Namespace) -> int:
    from kforge_data.tokenize import tokenize_files
    from kforge_data.tokenizer import Tokenizer

    report = tokenize_files(
        arguments.inputs,
        arguments.out,
        tokenizer=Tokenizer.load(arguments.tokenizer, end_of_text=arguments.end_of_text),
        heldout=arguments.heldout,
        dtype=arguments.dtype,
        shard_tokens=arguments.shard_tokens,
        workers=arguments.workers,
        parse_special=arguments.parse_special,
        begin_of_text=arguments.begin_of_text,
        overwrite=arguments.overwrite,
        resume=arguments.resume,
        progress=None if arguments.quiet else sys.stderr,
        **_reading(arguments),
    )
    for shards in (report.train, report.heldout):
        if shards is not None:
            print(_summary(shards))
    if report.empty or report.bad_lines:
        print(f"left out: {report.empty:,} documents without text, {report.bad_lines:,} broken lines")
    return 0


def _summary(shards: Any) -> str:
    ratio = f", {shards.text_bytes / shards.tokens:.2f} bytes a token" if shards.text_bytes else ""
    files = len(shards.index.shards)
    return (
        f"{shards.path}: {shards.documents:,} documents, {shards.tokens:,} tokens of {shards.dtype.name} in "
        f"{files} shard{'' if files == 1 else 's'}{ratio}"
    )


def _inspect(arguments: argparse.Namespace) -> int:
    from kforge_data.shards import TokenShards

    shards = TokenShards(arguments.shards)
    colour = _colours()
    tokenizer = _tokenizer(arguments)
    if tokenizer:
        shards.check_tokenizer(tokenizer)
    if arguments.documents:
        shards.check_documents()
    documents: list[dict[str, Any]] = []
    for number in range(min(arguments.documents, shards.documents)):
        ids = shards.document(number)
        shown = ids[: arguments.characters]  # a token is at least a character, but for special ones
        text = tokenizer.decode(shown)[: arguments.characters] if tokenizer else " ".join(map(str, shown))
        documents.append({"document": number, "tokens": len(ids), "text" if tokenizer else "ids": text})
    if arguments.json:
        answer = json.loads(shards.index.to_json())
        answer["fingerprint"] = shards.fingerprint
        answer["shown"] = documents
        print(json.dumps(answer, indent=1, ensure_ascii=False))
        return 0
    index = shards.index
    print(_summary(shards))
    print(f"vocabulary {index.vocab_size:,}, end of text {index.eos_id}, {index.text_bytes:,} bytes of text")
    print(f"{index.skipped_documents:,} documents without text were skipped")
    print(f"tokenizer   {index.tokenizer or '(none recorded)'}")
    print(f"fingerprint {shards.fingerprint}")
    for entry in documents:
        print(colour("1;36", f"--- document {entry['document']}, {entry['tokens']:,} tokens"))
        print(_marked(entry, index, tokenizer, colour))
    return 0


def _colours() -> Callable[[str, str], str]:
    """Text in a colour of a terminal; as it is where none looks on, or where NO_COLOR is set (no-color.org)."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return lambda code, text: text
    return lambda code, text: f"\x1b[{code}m{text}\x1b[0m"


def _marked(entry: dict[str, Any], index: Any, tokenizer: Any, colour: Callable[[str, str], str]) -> str:
    """The text or ids of a document, with what begins and ends it in colour."""
    content: str = entry.get("text", entry.get("ids", ""))
    for name, cut in ((index.bos_id, str.removeprefix), (index.eos_id, str.removesuffix)):
        if name is None:
            continue
        word = tokenizer.decode([name]) if tokenizer else str(name)
        rest = cut(content, word)
        if rest != content:
            shown = colour("1;35", word)
            content = shown + rest if cut is str.removeprefix else rest + shown
    return content


def _verify(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from kforge_data.megatron import pair_of
    from kforge_data.shards import INDEX
    from kforge_data.verify import verify_shards, verify_tokens

    found = 0
    for place in arguments.sets:
        has_index = (Path(place) / INDEX).exists()
        if Path(place).suffix == ".bin" and not pair_of(place)[0].exists() and not arguments.dtype:
            raise ValueError(f"{place}: the integer type of a .bin cannot be told from its bytes; give --dtype")
        try:
            faults = verify_shards(place) if has_index else verify_tokens(_open(arguments, place))
        except ValueError as error:
            if not has_index and not Path(place).is_file():
                raise
            faults = [str(error)]  # what cannot be opened is damaged
        found += len(faults)
        for fault in faults:
            print(fault, file=sys.stderr)
        print(f"{place}: {'damaged' if faults else 'whole'}")
    return FAULTS_FOUND if found else 0


def _stats(arguments: argparse.Namespace) -> int:
    from kforge_data.stats import draw_lengths, token_stats

    stream = _open(arguments, arguments.set)
    stats = token_stats(stream, _tokenizer(arguments))
    if arguments.out:
        draw_lengths(stats, arguments.out, arguments.set)
    if arguments.json:
        from dataclasses import asdict

        print(json.dumps(asdict(stats), indent=1))
        return 0
    print(f"{stats.documents:,} documents, {stats.tokens:,} tokens")
    print(f"tokens of a document: {stats.shortest:,} to {stats.longest:,}, mean {stats.mean:,.1f}")
    print("shorter are         " + ", ".join(f"{share} of {value:,.0f}" for share, value in stats.quantiles.items()))
    if stats.tokens_per_byte is None:
        print("bytes of text are not known; --tokenizer counts them")
    else:
        part = "" if stats.tokens_per_byte_of == stats.documents else f" (of {stats.tokens_per_byte_of:,} documents)"
        print(f"{stats.tokens_per_byte:.4f} tokens a byte, {1 / stats.tokens_per_byte:.3f} bytes a token{part}")
    if arguments.out:
        print(f"{arguments.out}: the histogram of lengths")
    return 0


def _mix(arguments: argparse.Namespace) -> int:
    from kforge_data.mixture import Mixture
    from kforge_data.opening import training_sources
    from kforge_data.preview import draw_shares, preview, read_data_config

    config = read_data_config(arguments.job)
    if not config.mixture:
        raise ValueError(f"{arguments.job} has no data.mixture, so there are no shares to look at")
    mixtures = [source for source in training_sources(config) if isinstance(source, Mixture)]
    names = mixtures[0].names
    windows = preview(mixtures, config, arguments.steps, arguments.windows)
    if arguments.out:
        draw_shares(windows, arguments.out)
    if arguments.json:
        print(json.dumps([window._asdict() for window in windows], indent=1))
        return 0
    width = max(len("source"), *(len(name) for name in names))
    print(f"shares of {config.mixture_by}")
    print(f"{'steps':>17}  {'source':<{width}} {'asked':>9} {'realised':>9} {'rows':>13} {'epochs':>8}")
    for window in windows:
        steps = f"{window.first:,}-{window.last - 1:,}" if window.name == names[0] else ""
        shares = f"{window.asked:>9.4%} {window.realised:>9.4%}"
        print(f"{steps:>17}  {window.name:<{width}} {shares} {window.rows:>13,} {window.epochs:>8.2f}")
    if arguments.out:
        print(f"{arguments.out}: the shares over the steps")
    return 0


def _dedup(arguments: argparse.Namespace) -> int:
    from kforge_data.duplicates import write_deduplicated

    streams = [_open(arguments, place) for place in arguments.sets]
    tokenizer = _tokenizer(arguments)
    for stream in streams if tokenizer else []:
        stream.check_tokenizer(tokenizer)
    shards = write_deduplicated(
        streams,
        arguments.out,
        tokenizer=tokenizer,
        shard_tokens=arguments.shard_tokens,
        overwrite=arguments.overwrite,
    )
    documents, tokens = sum(stream.documents for stream in streams), sum(stream.tokens for stream in streams)
    print(_summary(shards))
    print(f"left out: {documents - shards.documents:,} documents of {tokens - shards.tokens:,} tokens that came before")
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    from kforge_data.convert import convert_tokens

    stream = _open(arguments, arguments.set)
    what = convert_tokens(
        stream,
        arguments.out,
        arguments.to,
        tokenizer=_tokenizer(arguments),
        shard_tokens=arguments.shard_tokens,
        overwrite=arguments.overwrite,
    )
    print(f"{arguments.out}: {stream.documents:,} documents, {stream.tokens:,} tokens; {what}")
    return 0


def _ngram(arguments: argparse.Namespace) -> int:
    from kforge_data.ngram import ngram_baseline
    from kforge_data.shards import TokenShards

    result = ngram_baseline(
        TokenShards(arguments.train),
        TokenShards(arguments.heldout),
        row_tokens=arguments.row_tokens,
        max_rows=arguments.max_rows,
    )
    if arguments.json:
        print(json.dumps(result._asdict(), indent=1))
        return 0
    print(f"{result.tokens:,} scored tokens, discount {result.discount:.3f}")
    print(f"unigram            {result.unigram_nats:.4f} nats a token, {result.unigram_bits_per_byte:.4f} bits a byte")
    print(f"Kneser-Ney bigram  {result.bigram_nats:.4f} nats a token, {result.bigram_bits_per_byte:.4f} bits a byte")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
