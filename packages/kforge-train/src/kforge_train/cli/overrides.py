"""`--section.key value` out of a command line, and what is left for argparse."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kforge_train.config import JobConfig
from kforge_train.errors import ConfigError
from kforge_train.resolve import MODEL_PRESET
from kforge_train.schema import BOOLS, leaves


def split_overrides(
    argv: Sequence[str], options: Collection[str] = ("--help",)
) -> tuple[list[tuple[str, str]], list[str]]:
    """`(overrides, rest)`: path and text of every `--path value` or `--path=value`, in order.

    `options` stay in the rest. A flag of true/false may stand alone, which means true; any other field without a
    value is a ConfigError. A path that is no field is let through: that error is told with all the others.
    """
    flags = {leaf.path for leaf in leaves(JobConfig) if leaf.kind is bool}
    known = {leaf.path for leaf in leaves(JobConfig)} | {MODEL_PRESET}
    overrides: list[tuple[str, str]] = []
    rest: list[str] = []
    tokens = list(argv)
    while tokens:
        token = tokens.pop(0)
        if not token.startswith("--") or token.partition("=")[0] in options:
            rest.append(token)
            continue
        path, equals, value = token[2:].partition("=")
        path = path.replace("-", "_")
        if equals:
            overrides.append((path, value))
        elif path in flags:
            # A word behind a flag is its value when it can be one, or when nothing else can be meant by it.
            named = len(rest) > 1
            takes = bool(tokens) and not tokens[0].startswith("--") and (named or tokens[0].lower() in BOOLS)
            overrides.append((path, tokens.pop(0) if takes else "true"))
        elif tokens and not tokens[0].startswith("--"):
            overrides.append((path, tokens.pop(0)))
        elif path not in known:
            overrides.append((path, ""))
        else:
            raise ConfigError(f"--{path} needs a value, as --{path} VALUE")
    return overrides, rest
