"""Records and media of other machines: copied once, known again, and without credentials."""

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
from packplan.adapters.samples.downloads import MediaCache, fetch_data_files
from packplan.app import measure
from packplan.app.plan import __main__ as plan
from packplan.core.errors import DataSetError
from tests.e2e.test_plan_build import artefacts_of
from tests.object_server import KEY, serving
from tests.records import asked, write_lines
from tools.demo.videos import MadeVideo

pytestmark = pytest.mark.slow

SECRET = "neverwritethissecretdown"  # noqa: S105  # it is made for this test

NUM = 64


@pytest.fixture(scope="module")
def serving_all():
    with serving() as objects:
        yield objects


@pytest.fixture
def objects(serving_all, monkeypatch):
    """Return an empty server of objects, which S3's libraries find, and no proxy."""
    for of_last_test in (serving_all.held, serving_all.private, serving_all.asked, serving_all.sent):
        of_last_test.clear()
    serving_all.sends_parts = True
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    settings = {"ENDPOINT_URL": serving_all.url, "ACCESS_KEY_ID": KEY, "SECRET_ACCESS_KEY": SECRET, "REGION": "here"}
    for name, value in {**settings, "EC2_METADATA_DISABLED": "true", "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setattr(remote_files, "_file_systems", {})
    s3fs.S3FileSystem.clear_instance_cache()
    return serving_all


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A folder of records, with images and videos at relative paths."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "images").mkdir()
    sink = io.BytesIO()
    Image.new("RGB", (60, 40), "red").save(sink, "jpeg")
    for number in range(NUM):
        (folder / "images" / f"{number}.jpg").write_bytes(sink.getvalue() + bytes(number))
    MadeVideo(num_frames=50).write(folder / "clip.mp4")
    MadeVideo("webm", "libvpx-vp9", seed=1).write(folder / "small.webm")
    MadeVideo(rate=None, seed=3).write(folder / "vary.mp4")
    records = [asked(f"say {n}", images=[f"images/{n}.jpg"]) for n in range(NUM)]
    records += [asked("what moves?", videos=[name]) for name in ("clip.mp4", "small.webm", "vary.mp4")]
    frames = [f"images/{n}.jpg" for n in range(3)]
    records.append(asked("what moves?", videos=[frames]))
    write_lines(folder / "records.jsonl", records)
    return folder


def uploaded(objects, folder: Path, kind: str, bucket: str = "bucket") -> str:
    """Put a folder to a place, and return that."""
    for file in folder.rglob("*"):
        if file.is_file():
            name = f"/{bucket}/data/{file.relative_to(folder)}"
            objects.held[name] = file.read_bytes()
            fsspec.filesystem("memory").pipe_file(name, file.read_bytes())
    objects.sends_parts = kind != "whole"
    found = {"http": f"{objects.url}/{bucket}/data", "s3": f"s3://{bucket}/data", "memory": f"memory://{bucket}/data"}
    return found.get(kind, found["http"])


@pytest.fixture
def run(capfd, tmp_path, demo):
    """Return a function that measures into a table, and returns what was printed."""

    def main(*words: object, status: int = 0, output: str = "lengths.parquet", model: str = "qwen2_5_vl") -> str:
        capfd.readouterr()
        named = ["--model", str(demo / "models" / model), "-o", str(tmp_path / output)]
        assert status == measure.main([*map(str, words), *named])
        return "".join(capfd.readouterr())

    return main


def lengths_of(path: Path):
    """Return a table without what the records' folder decides."""
    return pq.read_table(path).drop_columns(["sha256"])


@pytest.mark.parametrize("kind", ["http", "s3", "whole"])
def test_a_place_is_measured_as_its_files_are(objects, data, run, tmp_path, kind):
    """Lengths and facts of media; all is fetched once, and nothing of it stays."""
    place = uploaded(objects, data, kind)
    run(data / "records.jsonl", output="files.parquet")

    run(f"{place}/records.jsonl")

    assert lengths_of(tmp_path / "files.parquet").equals(lengths_of(tmp_path / "lengths.parquet"))
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
    named, files = (
        json.loads(pq.read_schema(tmp_path / f"{one}.parquet").metadata[b"packplan_lengths"])["files"]
        for one in ("lengths", "files")
    )
    assert ["*.jsonl"] * 2 == [one["source"] for one in named] == [one["source"] for one in files]
    assert [f"{place}/1.jsonl", f"{place}/2.jsonl"] == [one["file"].replace(":///", "://") for one in named]
    assert pq.read_table(tmp_path / "files.parquet").equals(pq.read_table(tmp_path / "lengths.parquet"))
    assert "no such file" in run(f"{place}/none-*.jsonl", status=2, model="qwen2").replace("matches no", "no such")


def test_a_file_that_changed_is_copied_again(objects, tmp_path, caplog):
    """One that did not is asked for and not sent; one that is gone is read from its copy."""
    logging.getLogger("packplan").propagate = True
    url, sizes = f"{objects.url}/bucket/a.jsonl", []
    for content in (b"first", b"first", b"second"):
        objects.sent.clear()
        objects.held["/bucket/a.jsonl"] = content
        assert content == copied(url, tmp_path)
        sizes.append(objects.sent["/bucket/a.jsonl"])
    assert [5, 0, 6] == sizes
    assert "a.jsonl is another file than before: it was fetched again" in caplog.text

    objects.held.clear()

    assert b"second" == copied(url, tmp_path)
    assert "there is no such file; its copy of before is read" in caplog.text


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
    """And one that is sent whole or in parts comes as it is; an empty one too."""
    held = random.Random(1).randbytes(1234)  # noqa: S311  # as good as any
    for objects.sends_parts in (True, False):
        objects.held |= {"/bucket/a.jsonl": held, "/bucket/empty.jsonl": b""}
        for name, expected in (("a", held), ("empty", b"")):
            (copy,) = fetch_data_files(f"{objects.url}/bucket/{name}.jsonl", tmp_path / str(objects.sends_parts))
            assert expected == copy.read_bytes()
    objects.sends_parts = True
    objects.held["/bucket/b.jsonl"] = held
    plain = remote_files._SizeLimit.relative_update

    def changing(self, size=1):
        objects.held["/bucket/b.jsonl"] = held[:700] + held[600:]
        plain(self, size)

    monkeypatch.setattr(remote_files._SizeLimit, "relative_update", changing)
    with pytest.raises(DataSetError, match=r"b\.jsonl cannot be read: it changed while it was fetched"):
        fetch_data_files(f"{objects.url}/bucket/b.jsonl", tmp_path)
    assert not list(tmp_path.rglob("b.jsonl"))


def written(folder: Path) -> bytes:
    return b"\n".join(file.read_bytes() + str(file).encode() for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize("kind", ["http", "s3"])
def test_credentials_are_in_nothing_that_is_printed_or_written(  # noqa: PLR0917  # fixtures
    objects, data, run, tmp_path, kind, caplog
):
    """Of signed URLs, of user names, of the environment; whether they suffice or not."""
    caplog.set_level(logging.DEBUG)
    place = uploaded(objects, data, kind, "private")
    query = f"?X-Amz-Credential=me&X-Amz-Signature={SECRET}" if kind == "http" else ""
    if kind == "s3":
        objects.private.add("private")
    records = [asked("say", images=[f"{place}/images/{n}.jpg{query}"]) for n in range(4)]
    objects.held["/private/data/signed.jsonl"] = write_lines(tmp_path / "signed.jsonl", records).read_bytes()
    (tmp_path / "signed.jsonl").unlink()
    cache = f"custom.media_cache={tmp_path}/media"

    said = run(f"{place}/signed.jsonl{query}", cache)

    assert f"{place}/signed.jsonl" in said
    objects.held.clear()
    objects.private.add("private")
    for words in ((f"{place}/other.jsonl{query}",), (f"{place.replace('//', f'//me:{SECRET}@', 1)}/a.jsonl",)):
        said += run(*words, status=2)
    assert SECRET not in said
    assert SECRET not in "".join(record.getMessage() for record in caplog.records if record.name.startswith("packplan"))
    assert SECRET.encode() not in written(tmp_path)


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
        copies = {str(copy_of(f"{place}/{name}?X-Amz-Signature={signature}")) for signature in "ab"}
        assert 1 == len(copies)
        assert len(objects.held[f"/bucket/data/{name}"]) == sum(objects.sent.values())


@pytest.mark.parametrize("kind", ["http", "s3"])
def test_a_place_that_asks_for_credentials_is_one_line(objects, data, run, monkeypatch, kind):
    """Of records and of media; asked a few times at most."""
    place = uploaded(objects, data, kind, "private")
    objects.private.add("private")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDANOTHER")
    open_place = uploaded(objects, data, kind)
    image = f"{place}/images/1.jpg"
    objects.held["/bucket/data/one.jsonl"] = json.dumps(asked("say", images=[image])).encode()
    for words, named in ((f"{place}/records.jsonl", "records.jsonl"), (f"{open_place}/one.jsonl", "images/1.jpg")):
        objects.asked.clear()
        said = run(words, status=2)
        (line,) = [line for line in said.splitlines() if "asks for" in line]
        assert f"{place}/{named}" in line
        assert objects.asked[f"/private/data/{named}"] <= 4


def test_what_could_name_files_of_this_machine_is_refused(objects, run, tmp_path, demo):
    """Schemes of local files, chains, playlists; and what no file system reads."""
    (tmp_path / "mine.jsonl").write_text(json.dumps(asked("mine")))
    for place in (f"file://{tmp_path}/mine.jsonl", f"{objects.url}/a::file://{tmp_path}/mine.jsonl"):
        assert "which is not read: name a file, or a URL" in run(place, status=2, model="qwen2")
    assert "gs:// is read by another package: pip install gcsfs" in run("gs://a/b.jsonl", status=2, model="qwen2")
    MadeVideo(num_frames=5).write(tmp_path / "mine.ts.mp4")
    playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXTINF:5,\nfile://{tmp_path}/mine.ts.mp4\n#EXT-X-ENDLIST\n"
    objects.held["/bucket/list.m3u8"] = playlist.encode()
    objects.held["/bucket/a.jsonl"] = json.dumps(asked("mine", videos=[f"{objects.url}/bucket/list.m3u8"])).encode()
    assert "cannot be read, it is truncated, damaged or no video" in run(f"{objects.url}/bucket/a.jsonl", status=2)


def test_a_run_plans_and_trains_a_place_and_then_needs_no_network(  # noqa: PLR0917  # fixtures
    objects, data, run, write_run, execute, tmp_path
):
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
