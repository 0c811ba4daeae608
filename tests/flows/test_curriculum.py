"""Mixes of a YAML: a curriculum of several, their files, and everything that is wrong with them."""

from pathlib import Path

import attrs
import pytest
import yaml

from packplan.adapters.config.run import load_mixes
from packplan.app.opening.policies import require_mixes
from packplan.app.opening.runs import require_inputs, resolve_inputs
from packplan.app.planning.log_lines import source_draws_text
from packplan.core.config.run import RunConfig
from packplan.core.epochs import EpochRecord
from packplan.core.errors import ConfigError
from packplan.core.samples.tables import DataFile
from tests.documents import parsed
from tests.records import write_lines

SIZES = {"a": 8, "b": 5, "c": 3}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Write three sources into the working directory."""
    monkeypatch.chdir(tmp_path)
    for name, size in SIZES.items():
        write_lines(tmp_path / f"{name}.jsonl", ({"messages": [], "from": name, "at": at} for at in range(size)))
    return tmp_path


def source(name: str, **more: object) -> dict[str, object]:
    return {"jsonl": f"{name}.jsonl", **(more or {"ratio": 1})}


def run(*entries: list[dict[str, object]], by: str = "samples", **custom: object) -> RunConfig:
    """Return a run of a curriculum of these entries, planned unless other keys say so."""
    Path("mix.yaml").write_text(yaml.safe_dump({"curriculum": [{"sources": entry, "by": by} for entry in entries]}))
    keys = {"fusion_config": "mix.yaml", "fusion_schedule": "planned", "train_jsonl": None, **custom}
    stream = {"packing_mode": "dynamic", "max_steps": 1} if custom.get("trainer_variant") == "rollout" else {}
    return resolve_inputs(parsed({f"custom.{key}": value for key, value in keys.items()}, **stream))


STREAM = {"fusion_schedule": None, "trainer_variant": "rollout"}


def files_of(config: RunConfig) -> list[DataFile]:
    """Return the files of a run as they are when they are open."""
    return [DataFile(file, file, "messages", SIZES[file[-7]]) for file in config.custom.train_jsonl]


def test_a_file_is_one_however_it_is_spelled(here):
    """In several entries it is the same file; twice in one entry it is refused."""
    (here / "link.jsonl").symlink_to(here / "b.jsonl")

    config = run([source("a")], [{"jsonl": str(here / "a.jsonl"), "ratio": 1}, source("./b")], [source("link")])

    assert ("a.jsonl", "./b.jsonl") == config.custom.train_jsonl == require_mixes(config, files_of(config)).files
    twice = run([source("a")], [source("a"), source("../" + here.name + "/a")])
    with pytest.raises(ConfigError, match=r"curriculum\[1\]\.sources\[1\]\.jsonl is a\.jsonl, and so is sources\[0\]"):
        require_mixes(twice, files_of(twice))


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ((["a"], ["gone", "b"], ["gone"]),
         "custom.fusion_config.curriculum[1].sources[0].jsonl cannot be used, since gone.jsonl cannot be read"),
        ((["b"], ["[bc]"]), "custom.fusion_config cannot be used, since b.jsonl is named twice, once as b.jsonl: "),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("here")
def test_files_are_looked_at_by_their_keys_before_libraries_are_loaded(entries, says):
    """Each where it is named first; patterns may have a file in common."""
    with pytest.raises(ConfigError) as raised:
        require_inputs(run(*([source(name) for name in entry] for entry in entries)))
    (fault,) = [str(one) for one in raised.value.faults if one.path.startswith("custom")]
    assert fault.startswith(says)


@pytest.mark.usefixtures("here")
def test_tokens_are_counted_by_static_plans_alone():
    """What is drawn before it is measured takes samples."""
    stream, planned = (run([source("a")], by="tokens", **keys) for keys in (STREAM, {}))

    with pytest.raises(ConfigError, match=r"curriculum\[0\]\.by is tokens, "):
        require_mixes(stream, files_of(stream))
    assert "tokens" == require_mixes(planned, files_of(planned)).mix_of_epoch(0).by


@pytest.mark.usefixtures("here")
def test_sources_of_a_mix_have_names():
    """As it spells them, or as evaluation does; another name is refused by its key."""
    assert run([source("a")], val_jsonl=["v.jsonl"], source_names={"a.jsonl": "chats", "v.jsonl": "held out"})
    with pytest.raises(ConfigError, match=r"custom\.source_names\.b\.jsonl is not an entry of custom\.fusion_config"):
        run([source("a")], source_names={"b.jsonl": "books"})
    mixed = run([source("a"), source("b"), source("c")])
    for names in (("chats", "chats", "books"), ("chats", "books", "chats")):
        named = [attrs.evolve(file, source=name) for file, name in zip(files_of(mixed), names, strict=True)]
        with pytest.raises(ConfigError, match=r"custom\.source_names gives several files of the mix one name"):
            require_mixes(mixed, named)


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("sources: .nan", ["sources is nan, but has to be a list of sections"]),
        ("sources: [.nan]", ["sources[0] is nan, but has to be a section of keys"]),
        ("curriculum: {sources: []}", ["curriculum is {'sources': []}, but has to be a list of sections"]),
        ("curriculum: []", ["curriculum is empty: name at least one mix"]),
        ("sources: []", ["sources is empty: name at least one source"]),
        ("curriculum: [{by: words, sources: [{jsonl: a, ratio: .nan}]}]",
         ["curriculum[0].sources[0].ratio is nan, but has to be a finite number",
          "curriculum[0].by is 'words', but has to be one of samples, tokens"]),
        ("curriculum: [{sources: []}]\nsamples_per_epoch: 3",
         ["samples_per_epoch is not a key of the top level: write curriculum[].samples_per_epoch"]),
    ],
)  # fmt: skip
def test_what_is_no_mix_is_said(here, text, faults):
    (here / "mix.yaml").write_text(text)

    with pytest.raises(ConfigError) as raised:
        load_mixes(here / "mix.yaml")
    assert faults == list(map(str, raised.value.faults))


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_a_stream_reads_the_order_that_is_asked():
    """A curriculum's entry of each epoch, else all data, in an order of each epoch by its seed."""
    from packplan.app.sft.stream import _make_order

    config = run([source("c", count=2)], [source("a", count=3), source("b", count=5)], **STREAM)
    order = _make_order(config, files_of(config))

    assert ("c.jsonl", "a.jsonl", "b.jsonl") == config.custom.train_jsonl
    assert 2 == sum(index < 3 for index in order(0)) == len(order(0))
    for epoch in (1, 2):
        assert [3, 5] == [sum(3 <= index < 11 for index in order(epoch)), sum(index >= 11 for index in order(epoch))]
    assert order(1).tolist() != order(2).tolist()

    plain = run(fusion_config=None, **STREAM | {"train_jsonl": "b.jsonl"})

    def orders(**trainer: object) -> list[list[int]]:
        config = attrs.evolve(plain, training=attrs.evolve(plain.training, trainer=trainer))
        return [_make_order(config, files_of(config))(epoch).tolist() for epoch in (0, 1)]

    assert [[*range(5)]] * 2 == orders(train_dataloader_shuffle=False)
    assert orders() == orders(data_seed=42) != orders(data_seed=7)
    assert all(sorted(order) == [*range(5)] for order in orders())


@pytest.mark.parametrize("num", [1, 2, 3])
def test_what_an_epoch_draws_of_each_source_is_logged(num):
    """With its share of the tokens; nothing of one source."""
    files = [DataFile(f"{name}.jsonl", name, "messages", 3) for name in "abc"[:num]]
    of_sources = {"source_samples": [2] * num, "source_tokens": [10] * num} if num > 1 else {}
    sums = {"num_samples": 2 * num, "num_tokens": 10 * num, "planned_samples": 2 * num, "planned_tokens": 10 * num}
    record = EpochRecord(epoch=0, selection="", checksum="", num_packs=1, fill=1.0, **sums, **of_sources)

    drawn = [f"{one.source} 2 ({1 / num:.2%} of the tokens)" for one in files] * (num > 1)
    assert ", ".join(drawn) == source_draws_text(record, files)
