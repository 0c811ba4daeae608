"""Images of URLs are fetched once, whole and checked, whatever a server does."""

import hashlib
import io
import json
import time

import pytest
from PIL import Image

from packplan.adapters.samples.downloads import MAX_BYTES, MediaCache
from packplan.adapters.samples.remote_files import Timeouts
from packplan.core.errors import OutputError
from tests.object_server import Reply, serving


def png(color: str) -> bytes:
    sink = io.BytesIO()
    Image.new("RGB", (40, 30), color).save(sink, "png")
    return sink.getvalue()


RED = png("red")

QUICK = Timeouts(total_s=0.5, read_s=0.3, retry_waits_s=(0.0, 0.0))

FAULTS = {
    "/missing": Reply(404),
    "/private": Reply(403),
    "/cut": Reply(200, RED[:-20], {"Content-Length": str(len(RED))}),
    "/chunks": Reply(200, b"50\r\n" + RED[:20], {"Transfer-Encoding": "chunked"}),
    "/text": Reply(200, b"<html>please log in</html>"),
    "/damaged": Reply(200, RED[:60]),
    "/large": Reply(200, b"", {"Content-Length": "1001"}),
    "/endless": Reply(200, RED * 800, {}),
    "/silent": Reply(200, RED, pause_s=1),
    "/drip": Reply(200, RED, pause_s=0.05),
    "/loop": Reply(302, headers={"Location": "/loop"}),
    "/to-file": Reply(302, headers={"Location": "file:///etc/passwd"}),
    "/to-ftp": Reply(302, headers={"Location": "ftp://127.0.0.1/a.png?hidden"}),
}
"""Path -> what a server answers there."""


@pytest.fixture(scope="module")
def serving_all():
    with serving() as objects:
        yield objects


@pytest.fixture
def server(serving_all):
    """Return a server of one red image and all faults."""
    serving_all.asked.clear()
    serving_all.held = {"/red.png": RED}
    serving_all.faults = {path: [reply] for path, reply in FAULTS.items()}
    return serving_all


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Return a function that opens the cache, as another process would."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return lambda: MediaCache(tmp_path / "media", timeouts=QUICK)


def left(cache):
    """Return the names of all files of the cache that are no locks."""
    return sorted(path.name for path in cache.folder.rglob("*") if path.is_file() and path.name != "lock")


def test_an_image_is_fetched_once(cache, server):
    """By whoever asks, under the digest of its content; a server that is busy is asked again."""
    server.faults["/to"] = [Reply(302, headers={"Location": "/red.png"})]
    server.faults["/busy"] = [Reply(503), Reply(503), Reply(200, RED)]
    first = cache().path(f"{server.url}/red.png")

    assert hashlib.sha256(RED).hexdigest() == first.rsplit("/", 1)[1]
    assert first == cache().path(f"{server.url}/red.png") == cache().path(f"{server.url}/to")
    assert 3 == len(left(cache()))
    assert first == cache().path(f"{server.url}/busy")
    assert 2 * len(RED) == server.sent["/red.png"]


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/cut", "Not enough data.* in 3 attempts"),
        ("/chunks", "Not enough data.* in 3 attempts"),
        ("/text", "what came, 26 bytes, cannot be read, it is damaged or no image"),
        ("/damaged", "what came, 60 bytes, cannot be read"),
        ("/missing", "there is no such file"),
        ("/private", "answers 403"),
        ("/large", "has more than 1,000 bytes"),
        ("/endless", "has more than 1,000 bytes"),
        ("/silent", "in 3 attempts|took more than"),
        ("/drip", r"took more than 0\.5 s"),
        ("/loop", "TooManyRedirects"),
        ("/to-file", "Redirect.*: file:///etc/passwd"),
        ("/to-ftp", "Redirect.*: ftp://127.0.0.1/a.png"),
    ],
)
def test_what_is_no_whole_image_is_refused_and_not_kept(cache, server, path, says, monkeypatch):
    """Within the time and the bytes that it may take, and asked for once."""
    monkeypatch.setitem(MAX_BYTES, "image", 1000)
    held, started = cache(), time.monotonic()

    for _ in range(2):
        with pytest.raises(ValueError, match=f"cannot be fetched: .*({says})"):
            held.path(f"{server.url}{path}")

    assert time.monotonic() - started < 3
    assert [] == left(held)
    assert server.asked[path] <= 6 + 6 * (path == "/loop")


@pytest.mark.parametrize("url", ["http://", "http://127.0.0.1:1/a.png", "http://[/a.png", "http://127.0.0.1:x/a.png"])
def test_servers_that_are_none_are_refused(cache, url):
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
    server.held["/red.png"] = png("black")
    with pytest.raises(ValueError, match="the server has another one now"):
        cache().path(url)
    (note,) = cache().folder.rglob("*.json")
    note.write_text("{}")
    assert first != cache().path(url)


def test_what_may_be_a_credential_is_in_no_message_and_no_note(cache, server):
    """Neither a query, which may be a signature, nor a password, with which no server is asked."""
    held = cache()
    with pytest.raises(ValueError, match=r"/private\?… cannot be fetched"):
        held.path(f"{server.url}/private?signature=hidden#hidden")
    with pytest.raises(ValueError, match="it holds a name or a password") as raised:
        held.path(f"{server.url.replace('//', '//me:hidden@')}/red.png")
    assert "hidden" not in str(raised.value)
    assert [] == [path for path in server.asked if "red" in path]

    held.path(f"{server.url}/red.png?signature=hidden")

    (note,) = held.folder.rglob("*.json")
    assert f"{server.url}/red.png?…" == json.loads(note.read_text())["url"]
    with pytest.raises(ValueError, match=r"ftp://127.0.0.1/a.png\?…"):
        held.path(f"{server.url}/to-ftp")


def test_a_folder_that_cannot_be_written_is_no_fault_of_a_record(cache, server, tmp_path):
    """It stops the run, and names the folder."""
    (tmp_path / "media").write_text("")
    with pytest.raises(OutputError, match="media"):
        cache().path(f"{server.url}/red.png")
