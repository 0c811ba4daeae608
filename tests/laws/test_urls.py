"""Places are named without credentials, and are the same however they are signed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packplan.core.samples.identity import digest_record
from packplan.core.samples.urls import (
    PACKAGES,
    is_url,
    join_url,
    mask_credentials,
    scheme_of,
    strip_signature,
    url_fault,
    url_folder,
)

names = st.text(alphabet="abcXYZ019._-é", min_size=1, max_size=8)
secrets = st.text(alphabet="qwkjQWKJ", min_size=12, max_size=20)
schemes = st.sampled_from(sorted(PACKAGES))
paths = st.lists(names.map("a{}".format), min_size=1, max_size=3).map("/".join)

SIGNED = ("X-Amz-Signature", "X-Goog-Signature", "Signature", "sig")

ADDED = ("X-Amz-Date", "X-Goog-Expires", "Expires", "AWSAccessKeyId", "se", "X-Amz-Security-Token")


@given(schemes, names, paths, secrets, st.sampled_from(["user", "query", "fragment"]), names)
def test_no_text_has_what_may_be_a_credential(scheme, host, path, secret, where, before):  # noqa: PLR0917
    """Wherever in a place it stands; what names the file stays, and twice is once."""
    place = {
        "user": f"{scheme}://me:{secret}@{host}/{path}",
        "query": f"{scheme}://{host}/{path}?a={secret}",
        "fragment": f"{scheme}://{host}/{path}#{secret}",
    }[where]

    text = mask_credentials(f"{before} {place}: no such file")

    assert secret not in text
    assert f"{before} {scheme}://{host}/{path}" in text
    assert text.endswith("no such file")
    assert text == mask_credentials(text)
    assert secret not in url_folder(place)
    assert is_url(place)


@given(paths, st.sampled_from(SIGNED), st.lists(st.sampled_from(ADDED), unique=True), secrets, secrets, names)
def test_a_place_is_the_same_however_it_is_signed(path, signed, added, first, second, version):  # noqa: PLR0917
    """Its other parameters decide; a record with it has one digest, a text with it has not."""
    url = f"https://host/{path}?version={version}"
    both = [f"{url}&{'&'.join(f'{name}={secret}' for name in (*added, signed))}" for secret in (first, second)]

    assert url == strip_signature(both[0]) == strip_signature(both[1]) == strip_signature(url)
    assert f"https://host/{path}?a=1" == strip_signature(f"https://host/{path}?{signed}={first}&a=1#part")
    shown = [{"messages": [{"content": [{"type": "image_url", "image_url": {"url": one}}]}]} for one in both]
    for key, held in (("images", both), ("Videos", both), ("image", [{"path": one} for one in both])):
        assert digest_record({key: [held[0]]}) == digest_record({key: [held[1]]}) != digest_record({key: [f"{url}1"]})
    assert digest_record(shown[0]) == digest_record(shown[1])
    assert (first == second) == (digest_record({"text": both[0]}) == digest_record({"text": both[1]}))


@given(schemes, names, paths, st.lists(st.one_of(names, st.just("..")), min_size=1, max_size=6).map("/".join))
def test_relative_media_stay_with_their_server(scheme, host, path, relative):
    """Whatever their path; absolute paths and other places stay what they are."""
    folder = url_folder(f"{scheme}://{host}/{path}")

    found = join_url(folder, relative)

    start, server, *parts = found.removeprefix(f"{scheme}:/").split("/")
    assert (start, server) == ("", host)
    assert ".." not in parts
    assert "s3://other/a.png" == join_url(folder, "s3://other/a.png")
    assert "/a.png" == join_url(folder, "/a.png")
    assert f"{folder}/a/b.png" == join_url(folder, "./a//c/d/../../b.png")


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        *((name, None) for name in ("data/a.jsonl", "a::b.jsonl", "S3://bucket/a.jsonl", "https://host/a.jsonl?b=c::d")),
        *((f"{scheme}://a.jsonl", f"is at {scheme}://, which") for scheme in ("file", "local", "sftp")),
        *((name, "is a chain of URLs") for name in (
            "zip://a.jsonl::s3://bucket/a.zip", "zip://a.jsonl::/etc/a.zip", "simplecache::s3://bucket/a.jsonl",
            "s3://bucket/a::file:///b",
        )),
    ],
)  # fmt: skip
def test_only_places_of_known_schemes_are_read(name, fault):
    """And none that leads to another place, as one on this machine."""
    assert (fault is None) == (url_fault(name) is None)
    assert fault is None or url_fault(name).startswith(fault)
    assert is_url(name) == (fault is None and scheme_of(name) is not None)
    assert not is_url(None)
