"""A local S3: moto's server in a thread, on a port that the system picks, with a place to plant faults."""

from __future__ import annotations

import itertools
import logging
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

Wsgi = Callable[[dict[str, Any], Any], Iterable[bytes]]
Fault = Callable[["Request"], "Wsgi | None"]
_numbers = itertools.count()


class Request:
    """One that came: ``method``, ``path`` with its query, and ``range`` as it asks for (or "")."""

    def __init__(self, environ: dict[str, Any]) -> None:
        self.method = str(environ["REQUEST_METHOD"])
        query = environ.get("QUERY_STRING")
        self.path = str(environ["PATH_INFO"]) + (f"?{query}" if query else "")
        self.range = str(environ.get("HTTP_RANGE", ""))

    def __repr__(self) -> str:
        return f"{self.method} {self.path} {self.range}".rstrip()


class S3:
    """``requests``: those that came since the last `clear`. ``fault``, asked of each, may answer in moto's place."""

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Handler(WSGIRequestHandler):
            def log_request(self, *_: object) -> None:
                """Nothing."""

        self._moto: Wsgi = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.environment = {
            "AWS_ACCESS_KEY_ID": "AKIAWITNESS00000",
            "AWS_SECRET_ACCESS_KEY": "witness-of-a-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.url,
        }
        """For processes that were forked before it was there, too: they take it as an argument."""
        self.bucket = ""
        self.clear()
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def clear(self) -> None:
        self.requests: list[Request] = []
        self.fault: Fault = lambda request: None

    def _answer(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        request = Request(environ)
        self.requests.append(request)
        planted = self.fault(request)
        return self._moto(environ, start) if planted is None else planted(environ, start)

    def moto(self, change: Callable[[list[tuple[str, str]], bytes], Iterable[bytes]]) -> Wsgi:
        """Moto's answer, its body changed; its headers go out as they are, and the connection is closed."""

        def answer(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
            kept: list[Any] = []
            body = b"".join(self._moto(environ, lambda status, headers, *_: kept.extend((status, headers))))
            start(kept[0], [*kept[1], ("Connection", "close")])
            return change(kept[1], body)

        return answer

    def pass_on(self, environ: dict[str, Any]) -> Iterable[bytes]:
        """Moto's answer, which nobody gets."""
        environ["passed_on"] = True
        return self._moto(environ, lambda *_: None)

    @staticmethod
    def hang_up(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        """No answer: the connection is closed. (Not to a request with a body: aiohttp would repeat that without it.)"""
        assert environ["REQUEST_METHOD"] in ("GET", "HEAD", "DELETE")
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        raise ConnectionAbortedError

    @staticmethod
    def error(status: int, code: str, message: str = "planted") -> Wsgi:
        """An error as S3 has them."""

        def answer(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
            if not environ.get("passed_on"):
                whole = environ.get("wsgi.input_terminated")
                environ["wsgi.input"].read(*([] if whole else [int(environ.get("CONTENT_LENGTH") or 0)]))
            body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
            headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))]
            start(f"{status} {code}", headers)
            return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

        return answer

    def backend(self) -> Any:
        """Moto's store itself."""
        from moto.core import DEFAULT_ACCOUNT_ID
        from moto.s3.models import s3_backends

        return s3_backends[DEFAULT_ACCOUNT_ID]["aws"]

    def new_bucket(self) -> str:
        """Make an empty bucket, which ``bucket`` then names, and forget requests and faults."""
        self.bucket = f"bucket{next(_numbers)}"
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/{self.bucket}", method="PUT")).close()
        self.clear()
        return self.bucket

    def names(self) -> list[str]:
        """The keys in the bucket."""
        return sorted(self.backend().buckets[self.bucket].keys.keys())

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextmanager
def served() -> Iterator[S3]:
    """One for a fixture: it says nothing of its own, and is closed at the end."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = S3()
    try:
        yield server
    finally:
        server.close()
