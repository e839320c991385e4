"""`ConfigError`: what the user wrote cannot be used. Shown as one text without a traceback, exit code 2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class ConfigError(ValueError):
    """The job, as written, cannot run: an unknown key, a wrong type, sizes that do not fit, a missing file.

    The message says what, why and what to change; the command line prints it alone and exits with code 2.
    """


@contextmanager
def config_errors() -> Iterator[None]:
    """Turn a ValueError, FileNotFoundError or CheckpointError raised inside into a ConfigError.

    Wrapped around the building of a job, where such an error means that the config and the world do not fit. It is
    not wrapped around training, where a ValueError is a fault of the code and its traceback is wanted.
    """
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, FileNotFoundError) as error:
        raise ConfigError(str(error)) from error
    except RuntimeError as error:
        from kforge_ckpt import CheckpointError

        if isinstance(error, CheckpointError):
            raise ConfigError(str(error)) from error
        raise
