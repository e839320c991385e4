"""Requests that may be repeated: which failures pass, how often and how long apart; and texts that tell no secrets."""

from __future__ import annotations

import errno
import logging
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from kforge_ckpt.errors import CheckpointError

T = TypeVar("T")
logger = logging.getLogger("kforge_ckpt")


@dataclass(frozen=True)
class Patience:
    """How long a request to an object store is gone on with."""

    attempts: int = 8
    """How often it is made."""
    first_pause: float = 0.5
    """The bound of the pause after the first attempt, in seconds, doubled each time; the pause is drawn evenly below it
    (https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter, "full jitter")."""
    longest_pause: float = 20.0
    """Where the doubling ends, in seconds."""
    timeout: float = 60.0
    """After how many seconds without its whole answer an attempt is given up."""


PATIENCE = Patience()
_STATUS = {408, 409, 425, 429, 500, 502, 503, 504}
_ERRNO = {errno.EBUSY, errno.EIO, errno.EAGAIN, errno.EPIPE, errno.ENETUNREACH, errno.EHOSTUNREACH}
_DENIED = {
    "ExpiredToken",
    "InvalidToken",
    "TokenRefreshRequired",
    "NoCredentialsError",
    "PartialCredentialsError",
    "TokenRetrievalError",
}
_NAMES = {
    *("HTTPClientError", "IncompleteReadError", "ResponseStreamingError", "ResponseParserError"),  # botocore
    *("FlexibleChecksumError", "ConnectionError"),
    *("ClientConnectionError", "ClientPayloadError", "ServerDisconnectedError"),  # aiohttp
    *("IncompleteRead", "RemoteDisconnected", "ProtocolError", "TransportError"),  # http, urllib3, google
    *("ServiceRequestError", "ServiceResponseError"),  # azure
}
"""Classes of the libraries below fsspec, none of which is imported here."""


def pause(seconds: float) -> None:
    """Between two attempts. Tests put a function here that does not wait."""
    time.sleep(seconds)


class CutShort(Exception):
    """An answer has fewer bytes than were asked for."""


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and those it comes from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__  # type: ignore[assignment]


def status_of(error: BaseException) -> int | None:
    """The HTTP status that an error comes from, as far as it can be told."""
    for one in _chain(error):
        response = getattr(one, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            if isinstance(status, int):
                return status
        for name in ("status", "status_code", "code"):
            value = getattr(one, name, None)
            if isinstance(value, int) and 400 <= value < 600:
                return value
    return None


def is_denied(error: BaseException) -> bool:
    """Whether it is a matter of who asks."""
    if status_of(error) in (401, 403):
        return True
    for one in _chain(error):
        response = getattr(one, "response", None)
        code = response.get("Error", {}).get("Code") if isinstance(response, dict) else type(one).__name__
        if isinstance(one, PermissionError) or code in _DENIED:
            return True
    return False


def is_passing(error: BaseException) -> bool:
    """Whether the same request may succeed a little later: overload, a server's fault, a broken or slow connection."""
    if is_denied(error) or isinstance(error, (FileNotFoundError, FileExistsError)):
        return False
    chain = list(_chain(error))
    if any(isinstance(one, (TimeoutError, ConnectionError, CutShort)) for one in chain):
        return True
    if any(kind.__name__ in _NAMES for one in chain for kind in type(one).__mro__):
        return True
    if (status := status_of(error)) is not None:
        return status in _STATUS
    return any(isinstance(one, OSError) and one.errno in _ERRNO for one in chain)


def patiently(what: str, work: Callable[[], T]) -> T:
    """Do ``work``, as often as `PATIENCE` says; ``what`` names it: "reading s3://…".

    FileNotFoundError and FileExistsError are answers, and come through. Anything else that remains is a CheckpointError
    without secrets, and without the error of the library, whose text may have some.
    """
    for attempt in range(1, PATIENCE.attempts + 1):
        try:
            return work()
        except (FileNotFoundError, FileExistsError) as error:
            raise type(error)(error.errno, f"{what}: it is {'' if _exists(error) else 'not '}there") from None
        except CheckpointError:
            raise
        except Exception as error:
            text = f"{what}: {describe(error)}"
            if is_denied(error):
                raise CheckpointError(
                    f"{what} was denied: {describe(error)}. Check that the credentials which this process finds "
                    "(environment, profile, role of the host) are the right ones and have not expired, and that they "
                    "may list, read, write and delete there"
                ) from None
            if not is_passing(error):
                raise CheckpointError(text) from None
            if attempt == PATIENCE.attempts:
                raise CheckpointError(f"{text}; given up after {attempt} attempts") from None
        bound = min(PATIENCE.longest_pause, PATIENCE.first_pause * 2 ** (attempt - 1))
        logger.info("%s; attempt %d of %d", text, attempt, PATIENCE.attempts)
        pause(random.uniform(0, bound))
    raise AssertionError("PATIENCE.attempts is at least 1")


def _exists(error: Exception) -> bool:
    return isinstance(error, FileExistsError)


def describe(error: BaseException) -> str:
    """An error in one line, without secrets."""
    status = status_of(error)
    text = redacted(" ".join(str(error).split()))[:300]
    kind = type(error).__name__ if status is None else f"HTTP {status}"
    return f"{kind}: {text}" if text else kind


_USER = re.compile(r"(?<=://)[^/@\s]*@")
_QUERY = re.compile(r"(?<=\w)\?[^\s'\"]*")
_SECRETS = re.compile(r"\b((?:AWS|AZURE|GOOGLE|GCS|FSSPEC|S3)\w*(?:KEY|SECRET|TOKEN|PASSWORD|CONNECTION_STRING)\w*)\b")


def redacted(text: str) -> str:
    """``text`` without what stands before an @ or behind a ? in a URL, and without the credentials of the
    environment."""
    for name, value in os.environ.items():
        if len(value) >= 8 and _SECRETS.match(name):
            text = text.replace(value, "***")
    return _QUERY.sub("?***", _USER.sub("***@", text)) if "://" in text else text
