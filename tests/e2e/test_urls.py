"""Images of URLs are fetched once, whole and checked, whatever a server does."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import threading
import time
from collections import Counter
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

import pytest
from PIL import Image

from packplan.adapters.samples import urls as fetching
from packplan.adapters.samples.urls import MediaCache, Patience
from packplan.core.errors import OutputError, RecordError
from tests.records import asked


def png(color: str) -> bytes:
    sink = io.BytesIO()
    Image.new("RGB", (40, 30), color).save(sink, "png")
    return sink.getvalue()


RED = png("red")

QUICK = Patience(image_s=0.5, silence_s=0.3, waits_s=(0.0, 0.0))


class Reply(NamedTuple):
    """An answer to a request."""

    body: bytes = RED
    status: int = 200
    headers: dict[str, str] | None = None
    """None says how long the body is."""

    pause_s: float = 0
    """Seconds before each byte."""


REPLIES = {
    "/loop": Reply(b"", 302, {"Location": "/loop"}),
    "/missing": Reply(b"", 404),
    "/cut": Reply(RED[:-20], headers={"Content-Length": str(len(RED))}),
    "/chunks": Reply(b"50\r\n" + RED[:20], headers={"Transfer-Encoding": "chunked"}),
    "/text": Reply(b"<html>please log in</html>"),
    "/damaged": Reply(RED[:60]),
    "/large": Reply(b"", headers={"Content-Length": "1001"}),
    "/endless": Reply(RED * 800, headers={}),
    "/silent": Reply(pause_s=1),
    "/drip": Reply(pause_s=0.05),
}


class Server(ThreadingHTTPServer):
    """Serves images, and faults, by path."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.asked: Counter[str] = Counter()
        self.images = {"/red.png": RED, "/blue": png("blue"), "/%20é.png": png("green")}
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Answers(BaseHTTPRequestHandler):
    """Answers a request."""

    server: Server

    def log_message(self, *_):
        """Write nothing."""

    def do_GET(self):
        """Answer by path: a redirect, a server that is busy twice, a fault, or an image."""
        self.server.asked[self.path] += 1
        reply = REPLIES.get(self.path, Reply(self.server.images.get(self.path, RED)))
        if self.path.startswith("/to/"):
            reply = Reply(b"", 302, {"Location": self.path.removeprefix("/to/")})
        if self.path == "/busy" and self.server.asked[self.path] < 3:
            reply = Reply(b"", 503)
        self.send_response(reply.status)
        for name, value in (
            {"Content-Length": str(len(reply.body))} if reply.headers is None else reply.headers
        ).items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):  # whoever asked is gone
            for byte in reply.body if reply.pause_s else ():
                time.sleep(reply.pause_s)
                self.wfile.write(bytes([byte]))
            self.wfile.write(b"" if reply.pause_s else reply.body)


@pytest.fixture(scope="module")
def serving():
    """Serve, on this machine alone."""
    server = Server()
    thread = threading.Thread(target=partial(server.serve_forever, poll_interval=0.01))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def server(serving):
    serving.asked.clear()
    serving.images["/red.png"] = RED
    return serving


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Return a function that opens the cache, as another process would."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return lambda: MediaCache(tmp_path / "media", patience=QUICK)


def left(cache):
    """Return the names of all files of the cache that are no locks."""
    return sorted(path.name for path in cache.folder.rglob("*") if path.is_file() and path.name != "lock")


def test_an_image_is_fetched_once(cache, server):
    """By whoever asks, under the digest of its content; equal images of two URLs are one file."""
    first = cache().path(f"{server.url}/red.png")

    assert hashlib.sha256(RED).hexdigest() == first.rsplit("/", 1)[1]
    assert first == cache().path(f"{server.url}/red.png") == cache().path(f"{server.url}/to//red.png")
    assert 1 + 1 == server.asked["/red.png"]
    assert 1 + 2 == len(left(cache()))


def test_many_are_fetched_together_and_each_once(cache, server):
    """Those that fail hold up no other, and say why when they are asked for."""
    urls = [f"{server.url}/{name}" for name in ("red.png", "blue", "missing", "red.png", " é.png")]
    held = cache()

    held.prefetch(urls)

    asked = dict(server.asked)
    assert [1] * 4 == [*asked.values()]
    assert all(held.path(url) for url in urls if not url.endswith("missing"))
    with pytest.raises(ValueError, match=r"the image http://127.0.0.1:\d+/missing cannot be fetched: .* answers 404"):
        held.path(urls[2])
    held.prefetch(urls[:2])
    assert asked == dict(server.asked)


def test_a_busy_server_is_asked_again(cache, server):
    """And only so often."""
    assert cache().path(f"{server.url}/busy")
    assert 3 == server.asked["/busy"]


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/cut", r"[\d,]+ of [\d,]+ bytes came, in 3 attempts"),
        ("/chunks", "IncompleteRead.* in 3 attempts"),
        ("/text", "what came, 26 bytes, cannot be read, it is damaged or no image"),
        ("/damaged", "what came, 60 bytes, cannot be read"),
        ("/large", "has more than 1,000 bytes"),
        ("/endless", "has more than 1,000 bytes"),
        ("/silent", "in 3 attempts|took more than"),
        ("/drip", r"took more than 0\.5 s"),
        ("/loop", "the server answers 302"),
        ("/to/file:///etc/passwd", "Redirection to url 'file:///etc/passwd' is not allowed"),
        ("/to/ftp://127.0.0.1/a.png", "sends on to 'ftp://127.0.0.1/a.png', and only http and https are read"),
    ],
)
def test_what_is_no_whole_image_is_refused_and_not_kept(cache, server, path, says, monkeypatch):
    """Within the time and the bytes that it may take, and asked for once in a process."""
    monkeypatch.setattr(fetching, "_MOST_BYTES", 1000)
    held, started = cache(), time.monotonic()
    for _ in range(2):
        with pytest.raises(ValueError, match=f"cannot be fetched: .*({says})"):
            held.path(f"{server.url}{path}")

    assert time.monotonic() - started < 3
    assert [] == left(held)
    assert server.asked[path] <= 6


@pytest.mark.parametrize("url", ["http://", "http://127.0.0.1:1/a.png", "http://[/a.png", "http://127.0.0.1:x/a.png"])
def test_servers_that_are_none_are_refused(cache, url):
    """With what is wrong."""
    with pytest.raises(ValueError, match="cannot be fetched: "):
        cache().path(url)


def test_another_image_in_place_of_one_that_is_gone_is_refused(cache, server):
    """The same one is fetched again; a note that is damaged counts as none."""
    url = f"{server.url}/red.png"
    first = cache().path(url)
    for path in cache().folder.rglob("*"):
        if path.name == first.rsplit("/", 1)[1]:
            path.unlink()
    assert first == cache().path(url)

    (cache().folder / first.rsplit("/", 2)[1] / first.rsplit("/", 1)[1]).unlink()
    server.images["/red.png"] = png("black")
    with pytest.raises(ValueError, match="the server has another one now"):
        cache().path(url)
    (note,) = cache().folder.rglob("*.json")
    note.write_text("{}")
    assert first != cache().path(url)


def test_a_folder_that_cannot_be_written_is_no_fault_of_a_record(cache, server, tmp_path):
    """It stops the run, and names the folder."""
    (tmp_path / "media").write_text("")
    with pytest.raises(OutputError, match="media"):
        cache().path(f"{server.url}/red.png")


def test_a_run_fetches_its_images_before_it_measures_and_trains_without_a_network(
    serving, write_run, execute, tmp_path, caplog
):
    """As it trains the same images from files; without the key, the record is refused."""
    import attrs

    from packplan.app.wiring import training
    from packplan.app.wiring.gather import gather

    serving.asked.clear()
    path = tmp_path / "urls.jsonl"
    first, *rest = [f"{serving.url}/{name}" for name in ("red.png", "blue", "red.png", "blue")]
    part = [{"type": "image_url", "image_url": {"url": first}}, {"type": "text", "text": "What?"}]
    records = [asked(part), *(asked(f"<image>What is in {number}?", images=[url]) for number, url in enumerate(rest))]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    keys = {"train_jsonl": str(path), "media_cache": str(tmp_path / "media")}
    with pytest.raises(RecordError, match=r"line 1: .*only files are read, .* name a media_cache"):
        gather(training.read_config(write_run(custom={"train_jsonl": str(path)}))).samples["train"].encode(0)

    execute(write_run(custom=keys, training={"max_steps": 1, "packing_drop_last": False}))

    assert {"/red.png": 1, "/blue": 1} == dict(serving.asked)
    run = gather(training.read_config(write_run(custom=keys)))
    (tmp_path / "red.png").write_bytes(RED)
    path.with_name("files.jsonl").write_text(path.read_text().replace(f"{serving.url}/red.png", "red.png"))
    plain = gather(training.read_config(write_run(custom={**keys, "train_jsonl": str(path.with_name("files.jsonl"))})))
    for index in (0, 2):
        found, expected = (of.samples["train"].encode(index) for of in (run, plain))
        assert expected["input_ids"] == found["input_ids"]
        assert expected["pixel_values"].equal(found["pixel_values"])
    assert {1} == {*serving.asked.values()}
    assert attrs.asdict(run.splits["train"].source.media_facts(0)[0])["num_bytes"] == len(RED)
