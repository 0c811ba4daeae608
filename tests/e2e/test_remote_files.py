"""Records and media of other machines: whole, copied once, known again, and without credentials."""

import hashlib
import io
import json
import logging
import random
from pathlib import Path

import fsspec
import pyarrow.parquet as pq
import pytest
import s3fs
from PIL import Image

from packplan.adapters.processes import open_pool
from packplan.adapters.samples import remote_files
from packplan.adapters.samples.downloads import MAX_BYTES, MediaCache, fetch_data_files
from packplan.adapters.samples.remote_files import Timeouts
from packplan.app import measure
from packplan.app.plan import __main__ as plan
from packplan.core.errors import DataSetError, OutputError
from tests.e2e.ready import artefacts_of
from tests.object_server import KEY, Reply, serving
from tests.records import asked, write_lines
from tools.demo.videos import VideoSpec

pytestmark = pytest.mark.slow

SECRET = "neverwritethissecretdown"  # noqa: S105  # it is made for this test

NUM = 36


def picture(color: str, kind: str = "png") -> bytes:
    sink = io.BytesIO()
    Image.new("RGB", (60, 40), color).save(sink, kind)
    return sink.getvalue()


RED = picture("red")


@pytest.fixture(scope="module")
def serving_all():
    with serving() as objects:
        yield objects


@pytest.fixture
def objects(serving_all, monkeypatch):
    """Return an empty server of objects, which S3's libraries find, and no proxy."""
    for of_last_test in (serving_all.held, serving_all.private, serving_all.asked, serving_all.sent):
        of_last_test.clear()
    serving_all.faults = {}
    settings = {"ENDPOINT_URL": serving_all.url, "ACCESS_KEY_ID": KEY, "SECRET_ACCESS_KEY": SECRET, "REGION": "here",
                "EC2_METADATA_DISABLED": "true", "CONFIG_FILE": "/dev/null"}  # fmt: skip
    variables = {f"AWS_{name}": value for name, value in settings.items()}
    for name, value in {**variables, "no_proxy": "*", "NO_PROXY": "*"}.items():
        monkeypatch.setenv(name, value)
    remote_files._file_systems.clear()
    s3fs.S3FileSystem.clear_instance_cache()
    return serving_all


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A folder of records, with images and videos at relative paths."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "images").mkdir()
    for number in range(NUM):
        (folder / "images" / f"{number}.jpg").write_bytes(picture("red", "jpeg") + bytes(number))
    VideoSpec(num_frames=50).write(folder / "clip.mp4")
    VideoSpec("webm", "libvpx-vp9", seed=1).write(folder / "small.webm")
    VideoSpec(rate=None, seed=3).write(folder / "vary.mp4")
    records = [asked(f"say {n}", images=[f"images/{n}.jpg"]) for n in range(NUM)]
    frames = [f"images/{n}.jpg" for n in range(3)]
    records += [asked("what moves?", videos=[one]) for one in ("clip.mp4", "small.webm", "vary.mp4", frames)]
    write_lines(folder / "records.jsonl", records)
    return folder


def uploaded(objects, folder: Path, kind: str, bucket: str = "bucket") -> str:
    """Put a folder to a place, and return that."""
    for file in folder.rglob("*"):
        if file.is_file():
            name = f"/{bucket}/data/{file.relative_to(folder)}"
            objects.held[name] = file.read_bytes()
            fsspec.filesystem("memory").pipe_file(name, file.read_bytes())
    return f"{ {'s3': 's3:/', 'memory': 'memory:/'}.get(kind, objects.url) }/{bucket}/data"


@pytest.fixture
def run(capfd, tmp_path, demo):
    """Return a function that measures into a table, and returns what was printed."""

    def main(*words: object, status: int = 0, output: str = "lengths.parquet", model: str = "qwen2_5_vl") -> str:
        capfd.readouterr()
        named = ["--model", str(demo / "models" / model), "-o", str(tmp_path / output)]
        assert status == measure.main([*map(str, words), *named])
        return "".join(capfd.readouterr())

    return main


def test_a_place_is_measured_as_its_files_are(objects, data, run, tmp_path):
    """Lengths and facts of media; all is fetched once, and nothing of it stays."""
    run(data / "records.jsonl", output="files.parquet")
    for kind in ("http", "s3"):
        objects.held.clear()
        objects.sent.clear()
        run(f"{uploaded(objects, data, kind)}/records.jsonl", output=f"{kind}.parquet")

        # The digest of a record has its folder.
        files, its = (pq.read_table(tmp_path / f"{one}.parquet").drop_columns(["sha256"]) for one in ("files", kind))
        assert files.equals(its)
        assert not list(tmp_path.glob("*.measuring"))
        assert {name: len(held) for name, held in objects.held.items()} == objects.sent


@pytest.mark.parametrize("kind", ["memory", "s3"])
def test_patterns_of_places_are_listed(objects, run, tmp_path, kind):
    """By name, as those of files; one that matches nothing is named."""
    for number in (2, 1):
        write_lines(tmp_path / f"{number}.jsonl", [asked(f"part {number}")] * number)
    place = uploaded(objects, tmp_path, kind, f"listed-{kind}")

    run(f"{place}/*.jsonl", model="qwen2")

    run(tmp_path / "*.jsonl", model="qwen2", output="files.parquet")
    remote, files = (pq.read_table(tmp_path / f"{one}.parquet") for one in ("lengths", "files"))
    assert files.equals(remote)
    named, its = (json.loads(one.schema.metadata[b"packplan_lengths"])["files"] for one in (remote, files))
    assert ["*.jsonl"] * 2 == [one["source"] for one in named] == [one["source"] for one in its]
    assert [f"{place}/1.jsonl", f"{place}/2.jsonl"] == [one["file"].replace(":///", "://") for one in named]
    assert "no such file" in run(f"{place}/none-*.jsonl", status=2, model="qwen2").replace("matches no", "no such")


def test_a_file_that_changed_is_copied_again(objects, tmp_path, caplog):
    """One that did not is asked for and not sent; one that is gone is read from its copy."""
    logging.getLogger("packplan").propagate = True
    for content, sent in ((b"first", 5), (b"first", 0), (b"second", 6)):
        objects.sent.clear()
        objects.held["/bucket/a.jsonl"] = content
        assert content == copied(f"{objects.url}/bucket/a.jsonl", tmp_path)
        assert sent == objects.sent["/bucket/a.jsonl"]
    assert "a.jsonl has changed on its server, so it was downloaded again" in caplog.text

    objects.held.clear()

    assert b"second" == copied(f"{objects.url}/bucket/a.jsonl", tmp_path)
    assert "there is no such file; the run reads the earlier download" in caplog.text


def copied(place: str, folder: Path) -> bytes:
    """Return the content of a place, fetched into a folder."""
    return fetch_data_files(place, folder)[0].read_bytes()


@pytest.mark.parametrize("kind", ["http", "memory", "s3"])
def test_processes_that_are_forked_read_on(objects, tmp_path, kind, capfd):
    """With connections of their own; those of their parent stay open, and nothing is printed."""
    (tmp_path / "letters").write_bytes(b"abcdef")
    place = f"{uploaded(objects, tmp_path, kind)}/letters"
    assert b"abcdef" == copied(place, tmp_path / "first")

    with open_pool(2, str) as pool:
        folders = [tmp_path / name for name in "abc"]
        found = list(pool.map(copied, [place] * 3, folders, timeout=60))

    assert [b"abcdef"] * 3 == [*found] == [copied(place, folder) for folder in folders]
    assert ("", "") == capfd.readouterr()


def test_a_file_that_changes_while_it_is_fetched_is_refused(objects, tmp_path, monkeypatch):
    """And one that does not comes as it is; an empty one too."""
    held = random.Random(1).randbytes(1234)  # noqa: S311  # as good as any
    objects.held |= {"/bucket/a.jsonl": held, "/bucket/b.jsonl": held, "/bucket/empty.jsonl": b""}
    for name, expected in (("a", held), ("empty", b"")):
        assert expected == copied(f"{objects.url}/bucket/{name}.jsonl", tmp_path / name)
    plain = remote_files._SizeLimit.relative_update

    def changing(self, size=1):
        objects.held["/bucket/b.jsonl"] = held[:700] + held[600:]
        plain(self, size)

    monkeypatch.setattr(remote_files._SizeLimit, "relative_update", changing)
    with pytest.raises(DataSetError, match=r"b\.jsonl cannot be read: it changed while it was downloaded"):
        copied(f"{objects.url}/bucket/b.jsonl", tmp_path)
    assert not list(tmp_path.rglob("b.jsonl"))


@pytest.mark.parametrize("kind", ["http", "s3"])
def test_credentials_are_in_nothing_that_is_printed_or_written(objects, data, run, tmp_path, caplog, kind):  # noqa: PLR0917  # fixtures
    """Of signed URLs, of user names, of the environment; whether they suffice or not."""
    caplog.set_level(logging.DEBUG)
    place = uploaded(objects, data, kind, "private")
    query = f"?X-Amz-Credential=me&X-Amz-Signature={SECRET}" if kind == "http" else ""
    if kind == "s3":
        objects.private.add("private")
    lines = [json.dumps(asked("say", images=[f"{place}/images/{n}.jpg{query}"])) for n in range(4)]
    objects.held["/private/data/signed.jsonl"] = "\n".join(lines).encode()

    said = run(f"{place}/signed.jsonl{query}", f"custom.media_cache={tmp_path}/media")

    assert f"{place}/signed.jsonl" in said
    objects.held.clear()
    objects.private.add("private")
    for words in (f"{place}/other.jsonl{query}", f"{place.replace('//', f'//me:{SECRET}@', 1)}/a.jsonl"):
        said += run(words, status=2)
    said += "".join(record.getMessage() for record in caplog.records if record.name.startswith("packplan"))
    written = (file.read_bytes() + str(file).encode() for file in tmp_path.rglob("*") if file.is_file())
    assert SECRET.encode() not in said.encode() + b"\n".join(written)


def test_errors_of_libraries_lose_what_may_be_credentials(monkeypatch):
    """Those of places in them, and values of the environment's secrets."""
    monkeypatch.setenv("SOME_ACCESS_KEY", "anothersecret")
    place = f"https://me:{SECRET}@host/a.jsonl?X-Amz-Signature={SECRET}"

    text = remote_files.mask_secrets(OSError(f"no answer of {place},\n with anothersecret"))

    assert "no answer of https://host/a.jsonl?… with …" == text


def test_another_signature_of_the_same_url_is_the_same_data(objects, data, tmp_path):
    """Of a file of records, and of an image: fetched once, into one copy."""
    place = uploaded(objects, data, "http")
    for name, copy_of in (
        ("records.jsonl", lambda url: fetch_data_files(url, tmp_path / "records")[0]),
        ("images/1.jpg", MediaCache(tmp_path / "media").path),
    ):
        objects.sent.clear()
        assert 1 == len({str(copy_of(f"{place}/{name}?X-Amz-Signature={signature}")) for signature in "ab"})
        assert len(objects.held[f"/bucket/data/{name}"]) == sum(objects.sent.values())


@pytest.mark.parametrize("kind", ["http", "s3"])
def test_a_place_that_asks_for_credentials_is_one_line(objects, data, run, monkeypatch, kind):
    """Of records and of media; asked a few times at most."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDANOTHER")
    place, open_place = (uploaded(objects, data, kind, bucket) for bucket in ("private", "bucket"))
    objects.private.add("private")
    objects.held["/bucket/data/one.jsonl"] = json.dumps(asked("say", images=[f"{place}/images/1.jpg"])).encode()
    for words, named in ((f"{place}/records.jsonl", "records.jsonl"), (f"{open_place}/one.jsonl", "images/1.jpg")):
        objects.asked.clear()
        (line,) = [line for line in run(words, status=2).splitlines() if "requires credentials" in line]
        assert f"{place}/{named}" in line
        assert objects.asked[f"/private/data/{named}"] <= 4


def test_what_could_name_files_of_this_machine_is_refused(objects, run, tmp_path):
    """Schemes of local files, chains, playlists; and what no file system reads."""
    (tmp_path / "mine.jsonl").write_text(json.dumps(asked("mine")))
    for place in (f"file://{tmp_path}/mine.jsonl", f"{objects.url}/a::file://{tmp_path}/mine.jsonl"):
        assert "which is not read: name a file, or a URL" in run(place, status=2, model="qwen2")
    assert "gs:// needs another package: pip install gcsfs" in run("gs://a/b.jsonl", status=2, model="qwen2")
    VideoSpec(num_frames=5).write(tmp_path / "mine.ts.mp4")
    playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXTINF:5,\nfile://{tmp_path}/mine.ts.mp4\n#EXT-X-ENDLIST\n"
    objects.held["/bucket/list.m3u8"] = playlist.encode()
    objects.held["/bucket/a.jsonl"] = json.dumps(asked("mine", videos=[f"{objects.url}/bucket/list.m3u8"])).encode()
    assert "cannot be read, since it is truncated, damaged or not a video" in run(
        f"{objects.url}/bucket/a.jsonl", status=2
    )


@pytest.mark.usefixtures("encodes_again")  # which fetches all media
def test_a_run_plans_and_trains_a_place_and_then_needs_no_network(objects, data, run, write_run, execute, tmp_path):  # noqa: PLR0917  # fixtures
    """By the packs of the same files; its lengths may come from the table of a measurement."""
    place = uploaded(objects, data, "http")
    run(f"{place}/records.jsonl")
    keys = {"template": {"system": None}, "training": {"packing_drop_last": False, "max_steps": 1}}
    custom = {"train_jsonl": f"{place}/records.jsonl", "lengths": str(tmp_path / "lengths.parquet")}
    path = write_run(custom={**custom, "media_cache": str(tmp_path / "media")}, **keys)
    execute(path)
    objects.held.clear()
    objects.asked.clear()

    execute(path)

    assert {"/bucket/data/records.jsonl"} == {*objects.asked}
    files = write_run(name="files", custom={"train_jsonl": str(data / "records.jsonl")}, **keys)
    assert 0 == plan.main(["build", str(files)])
    packs = [artefacts_of(tmp_path / name)["train/raw_plan.indices.bin"] for name in ("run", "files")]
    assert packs[0] == packs[1]


@pytest.fixture
def cache(tmp_path, objects):
    """Return a function that opens the cache, as another process would; a server has an image."""
    objects.held["/red.png"] = RED
    quick = Timeouts(total_s=0.5, read_s=0.3, retry_waits_s=(0.0, 0.0))
    return lambda: MediaCache(tmp_path / "media", timeouts=quick)


def left(cache):
    """Return all files of the cache that are no locks."""
    return [path for path in cache.folder.rglob("*") if path.is_file() and path.name != "lock"]


def test_an_image_is_fetched_once(cache, objects):
    """By whoever asks, under the digest of its content; a server that is busy is asked again."""
    objects.faults["/to"] = [Reply(302, headers={"Location": "/red.png"})]
    objects.faults["/busy"] = [Reply(503), Reply(503), Reply(200, RED)]
    first = cache().path(f"{objects.url}/red.png")

    assert hashlib.sha256(RED).hexdigest() == first.rsplit("/", 1)[1]
    assert first == cache().path(f"{objects.url}/red.png") == cache().path(f"{objects.url}/to")
    assert 3 == len(left(cache()))
    assert first == cache().path(f"{objects.url}/busy")
    assert 2 * len(RED) == objects.sent["/red.png"]


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (Reply(200, RED[:-20], {"Content-Length": str(len(RED))}), "Not enough data.* in 3 attempts"),
        (Reply(200, b"50\r\n" + RED[:20], {"Transfer-Encoding": "chunked"}), "Not enough data.* in 3 attempts"),
        (
            Reply(200, b"<html>please log in</html>"),
            "the download of 26 bytes cannot be read, since it is damaged or not an image",
        ),
        (Reply(200, RED[:60]), "the download of 60 bytes cannot be read"),
        (Reply(404), "there is no such file"),
        (Reply(403), "answers 403"),
        (Reply(200, b"", {"Content-Length": "1001"}), "has more than 1,000 bytes"),
        (Reply(200, RED * 800, {}), "has more than 1,000 bytes"),
        (Reply(200, RED, pause_s=1), "in 3 attempts|took more than"),
        (Reply(200, RED, pause_s=0.05), r"took more than 0\.5 s"),
        (Reply(302, headers={"Location": "/image"}), "TooManyRedirects"),
        (Reply(302, headers={"Location": "file:///etc/passwd"}), "Redirect.*: file:///etc/passwd"),
        (Reply(302, headers={"Location": "ftp://127.0.0.1/a.png?hidden"}), r"Redirect.*: ftp://127.0.0.1/a.png\?…"),
    ],
)
def test_what_is_no_whole_image_is_refused_and_not_kept(cache, objects, reply, says, monkeypatch):
    """Within the bytes that it may take, and asked for once."""
    objects.faults["/image"] = [reply]
    monkeypatch.setitem(MAX_BYTES, "image", 1000)
    held = cache()

    for _ in range(2):
        asked_before = objects.asked["/image"]
        with pytest.raises(ValueError, match=f"cannot be fetched: .*({says})"):
            held.path(f"{objects.url}/image")

    assert [] == left(held)
    assert objects.asked["/image"] == asked_before <= 3 + 9 * ("TooMany" in says)


@pytest.mark.parametrize("url", ["http://", "http://127.0.0.1:1/a.png", "http://[/a.png", "http://127.0.0.1:x/a.png"])
def test_servers_that_are_none_are_refused(cache, url):
    with pytest.raises(ValueError, match="cannot be fetched: "):
        cache().path(url)


def test_another_image_in_place_of_one_that_is_gone_is_refused(cache, objects):
    """The same one is fetched again; a note that is damaged counts as none."""
    url = f"{objects.url}/red.png"
    first = Path(cache().path(url))
    first.unlink()
    assert str(first) == cache().path(url)

    first.unlink()
    objects.held["/red.png"] = picture("black")
    with pytest.raises(ValueError, match="the server now has a different file"):
        cache().path(url)
    (note,) = cache().folder.rglob("*.json")
    note.write_text("{}")
    assert str(first) != cache().path(url)


def test_no_server_is_asked_with_a_password(cache, objects):
    """Nor is it in the message."""
    with pytest.raises(ValueError, match="it has a user name or a password") as raised:
        cache().path(f"{objects.url.replace('//', '//me:hidden@')}/red.png")
    assert "hidden" not in str(raised.value)
    assert 0 == objects.asked["/red.png"]


def test_a_folder_that_cannot_be_written_is_no_fault_of_a_record(cache, objects, tmp_path):
    """It stops the run, and names the folder."""
    (tmp_path / "media").write_text("")
    with pytest.raises(OutputError, match="media"):
        cache().path(f"{objects.url}/red.png")
