"""A server of objects on this machine: files over http, the reading part of S3, and faults."""

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

KEY = "AKIDPACKPLANTEST"


class Reply(NamedTuple):
    """An answer in place of an object."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] | None = None
    """Headers beside none; None says how long the body is."""
    pause_s: float = 0
    """Seconds before each byte."""


class ObjectServer(ThreadingHTTPServer):
    """Objects by path, `/bucket/name`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.held: dict[str, bytes] = {}
        self.private: set[str] = set()
        """Buckets that ask for a signature."""
        self.faults: dict[str, list[Reply]] = {}
        """Path -> answers in place of the object, one after the other; the last one stays."""
        self.asked: Counter[str] = Counter()
        """Requests by path."""
        self.sent: Counter[str] = Counter()
        """Bytes by path."""
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Answers(BaseHTTPRequestHandler):
    server: ObjectServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Write nothing."""

    def do_HEAD(self) -> None:
        """Answer as to a GET, without the content."""
        self.do_GET()

    def do_GET(self) -> None:
        """Answer with an object, or a list of objects."""
        asked = urlsplit(self.path)
        path, query = unquote(asked.path), parse_qs(asked.query, keep_blank_values=True)
        self.server.asked[path] += 1
        if faults := self.server.faults.get(path):
            reply = faults.pop(0) if len(faults) > 1 else faults[0]
            self.close_connection = True
            return self._answer(reply.status, reply.body, reply.headers, reply.pause_s)
        bucket = path.split("/")[1]
        if bucket in self.server.private and f"Credential={KEY}/" not in self.headers.get("Authorization", ""):
            return self._answer(403, b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>")
        if "list-type" in query:
            return self._answer(200, self._listed(bucket, query.get("prefix", [""])[0]))
        if path not in self.server.held:
            return self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        return self._send(path, self.server.held[path])

    def _send(self, path: str, held: bytes) -> None:
        if self.command == "GET":
            self.server.sent[path] += len(held)
        tag = hashlib.md5(held, usedforsecurity=False).hexdigest()
        self._answer(200, held, {"ETag": f'"{tag}"', "Content-Length": str(len(held))})

    def _listed(self, bucket: str, prefix: str) -> bytes:
        start = f"/{bucket}/"
        keys = sorted(path.removeprefix(start) for path in self.server.held if path.startswith(start + prefix))
        listed = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(self.server.held[start + key])}</Size>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for key in keys
        )
        about = f"<Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(keys)}</KeyCount>"
        return f"<ListBucketResult>{about}<IsTruncated>false</IsTruncated>{listed}</ListBucketResult>".encode()

    def _answer(self, status: int, held: bytes, headers: dict[str, str] | None = None, pause_s: float = 0) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(held))} if headers is None else headers).items():
            self.send_header(name, value)
        self.end_headers()
        with suppress(OSError):  # whoever asked is gone
            for part in (bytes([byte]) for byte in held) if pause_s else [held]:
                time.sleep(pause_s)
                self.wfile.write(part if self.command == "GET" else b"")


@contextmanager
def serving() -> Iterator[ObjectServer]:
    """Serve objects on this machine alone."""
    server = ObjectServer()
    thread = threading.Thread(target=partial(server.serve_forever, poll_interval=0.01))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
