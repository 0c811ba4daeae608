"""Mixes of a YAML: a curriculum of several, their files, and everything that is wrong with them."""

import json

import attrs
import pytest
import yaml

from packplan.adapters.config.run import load_mixes, parse_config
from packplan.app.planning.log_lines import source_draws_text
from packplan.app.wiring.policies import require_mixes
from packplan.app.wiring.runs import require_inputs, resolve_inputs
from packplan.core.config.run import RunConfig
from packplan.core.epochs import EpochRecord
from packplan.core.errors import ConfigError
from packplan.core.samples.tables import DataFile

SIZES = {"a": 8, "b": 5, "c": 3}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Write three sources into the working directory."""
    monkeypatch.chdir(tmp_path)
    for name, size in SIZES.items():
        records = [{"messages": [], "from": name, "number": number} for number in range(size)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


def source(name: str, **more: object) -> dict[str, object]:
    return {"jsonl": f"{name}.jsonl", **(more or {"ratio": 1})}


def written(here, *entries: list[dict[str, object]], **more: object) -> str:
    """Write a curriculum, whose entries all have the keys *more*; return its path."""
    (here / "mix.yaml").write_text(yaml.safe_dump({"curriculum": [{"sources": entry, **more} for entry in entries]}))
    return str(here / "mix.yaml")


def run(path: str, **custom: object) -> RunConfig:
    """Return a run of the mixes in *path*, planned unless other keys say so."""
    sections = {
        "model": {"model": "m"},
        "template": {"max_length": 80},
        "custom": {"fusion_config": path, "fusion_schedule": "planned", **custom},
        "training": {"output_dir": "out"},
    }
    if custom.get("trainer_variant") == "rollout":
        sections["training"] |= {"packing_mode": "dynamic", "max_steps": 1}
    return parse_config(sections, "run.yaml", {})


STREAM = {"fusion_schedule": None, "trainer_variant": "rollout"}


def files_of(config: RunConfig) -> list[DataFile]:
    """Return the files of a run as they are when they are open."""
    return [DataFile(file, file, "messages", SIZES[file[-7]]) for file in config.custom.train_jsonl]


def faults_of_inputs(path: str) -> list[str]:
    """Return the faults of the data of a run of the mixes in *path*."""
    with pytest.raises(ConfigError) as raised:
        require_inputs(resolve_inputs(run(path)))
    return [str(fault) for fault in raised.value.faults if fault.path.startswith("custom")]


def test_a_file_is_one_however_it_is_spelled(here):
    """In several entries it is the same file; twice in one entry it is refused."""
    (here / "link.jsonl").symlink_to(here / "b.jsonl")
    spellings = [source("a")], [{"jsonl": str(here / "a.jsonl"), "ratio": 1}, source("./b")], [source("link")]

    config = resolve_inputs(run(written(here, *spellings)))

    assert ("a.jsonl", "./b.jsonl") == config.custom.train_jsonl == require_mixes(config, files_of(config)).files
    twice = resolve_inputs(run(written(here, [source("a")], [source("a"), source("../" + here.name + "/a")])))
    with pytest.raises(ConfigError, match=r"curriculum\[1\]\.sources\[1\]\.jsonl: is a\.jsonl, as sources\[0\]"):
        require_mixes(twice, files_of(twice))


def test_files_are_looked_at_by_their_keys_before_libraries_are_loaded(here):
    """Each where it is named first; patterns may have a file in common."""
    path = written(here, [source("a")], [source("gone"), source("b")], [source("gone")])
    assert 1 == len(found := faults_of_inputs(path))
    assert found[0].startswith("custom.fusion_config.curriculum[1].sources[0].jsonl: gone.jsonl cannot be read")
    (fault,) = faults_of_inputs(written(here, [source("b")], [source("[bc]")]))
    assert fault.startswith("custom.fusion_config: b.jsonl is named twice, once as b.jsonl: ")


def test_tokens_are_counted_by_static_plans_alone(here):
    """What is drawn before it is measured takes samples."""
    path = written(here, [source("a")], by="tokens")
    stream, planned = resolve_inputs(run(path, **STREAM)), resolve_inputs(run(path))

    with pytest.raises(ConfigError, match=r"curriculum\[0\]\.by: "):
        require_mixes(stream, files_of(stream))
    assert "tokens" == require_mixes(planned, files_of(planned)).mix_of_epoch(0).by


def test_sources_of_a_mix_have_names(here):
    """As it spells them, or as evaluation does; another name is refused by its key."""
    path = written(here, [source("a")])
    names = {"a.jsonl": "chats", "v.jsonl": "held out"}

    assert resolve_inputs(run(path, val_jsonl=["v.jsonl"], source_names=names))
    with pytest.raises(ConfigError, match=r"custom\.source_names\.b\.jsonl: is no entry of custom\.fusion_config"):
        resolve_inputs(run(path, source_names={"b.jsonl": "books"}))
    both = resolve_inputs(run(written(here, [source("a"), source("b")])))
    with pytest.raises(ConfigError, match=r"custom\.source_names: gives several files of the mix one name"):
        require_mixes(both, [attrs.evolve(file, source="chats") for file in files_of(both)])


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("sources: .nan", ["sources: is nan, but has to be a list of sections"]),
        ("sources:", ["sources: is None, but has to be a list of sections"]),
        ("sources: [.nan]", ["sources[0]: is nan, but has to be a section of keys"]),
        ("curriculum: .nan", ["curriculum: is nan, but has to be a list of sections"]),
        ("curriculum: {sources: []}", ["curriculum: is {'sources': []}, but has to be a list of sections"]),
        ("curriculum: []", ["curriculum: is empty: name at least one mix"]),
        ("sources: []", ["sources: is empty: name at least one"]),
        ("curriculum: [3]", ["curriculum[0]: is 3, but has to be a section of keys"]),
        ("curriculum: [{by: words, sources: [{jsonl: a, ratio: .nan}]}]",
         ["curriculum[0].sources[0].ratio: is nan, but has to be a finite number",
          "curriculum[0].by: is 'words', but has to be one of samples, tokens"]),
        ("curriculum: [{sources: [{jsonl: a, ratio: 1, cap: .inf}]}]",
         ["curriculum[0].sources[0].cap: is inf, but has to be a whole number"]),
        ("curriculum: [{sources: []}]\nsamples_per_epoch: 3",
         ["samples_per_epoch: is no key of the top level: write curriculum[].samples_per_epoch"]),
    ],
)  # fmt: skip
def test_what_is_no_mix_is_said(here, text, faults):
    (here / "mix.yaml").write_text(text)

    with pytest.raises(ConfigError) as raised:
        load_mixes(here / "mix.yaml")
    assert faults == list(map(str, raised.value.faults))


@pytest.mark.slow
def test_a_stream_follows_a_curriculum(here):
    """Its order of an epoch has the records of that epoch's entry."""
    from packplan.app.sft.stream import _order

    path = written(here, [source("c", count=2)], [source("a", count=3), source("b", count=5)])
    config = resolve_inputs(run(path, **STREAM))

    order = _order(config, files_of(config))

    assert ("c.jsonl", "a.jsonl", "b.jsonl") == config.custom.train_jsonl
    assert 2 == sum(index < 3 for index in order(0)) == len(order(0))
    for epoch in (1, 2):
        assert [3, 5] == [sum(3 <= index < 11 for index in order(epoch)), sum(index >= 11 for index in order(epoch))]
    assert order(1).tolist() != order(2).tolist()


@pytest.mark.slow
def test_a_stream_reads_the_order_that_is_asked(here):
    """That of the data without a shuffle, else one of each epoch, by `data_seed` if that is set."""
    from packplan.app.sft.stream import _order

    def orders(**trainer: object) -> list[list[int]]:
        config = run("", fusion_config=None, train_jsonl="b.jsonl", **STREAM)
        training = attrs.evolve(config.training, trainer=trainer)
        order = _order(attrs.evolve(config, training=training), files_of(config))
        return [order(epoch).tolist() for epoch in (0, 1)]

    shuffled, seeded = orders(), orders(data_seed=7)

    assert [[*range(5)]] * 2 == orders(train_dataloader_shuffle=False)
    assert shuffled == orders(data_seed=42) != seeded
    assert all(sorted(order) == [*range(5)] for order in (*shuffled, *seeded))


@pytest.mark.parametrize("num", [1, 2, 3])
def test_what_an_epoch_draws_of_each_source_is_logged(num):
    """With its share of the tokens; nothing of one source."""
    files = [DataFile(f"{name}.jsonl", name, "messages", 3) for name in "abc"[:num]]
    of_sources = {"source_samples": [2] * num, "source_tokens": [10] * num} if num > 1 else {}
    sums = {"num_samples": 2 * num, "num_tokens": 10 * num, "planned_samples": 2 * num, "planned_tokens": 10 * num}
    record = EpochRecord(epoch=0, selection="", checksum="", num_packs=1, fill=1.0, **sums, **of_sources)

    drawn = [f"{one.source} 2 ({1 / num:.2%} of the tokens)" for one in files] * (num > 1)
    assert ", ".join(drawn) == source_draws_text(record, files)
