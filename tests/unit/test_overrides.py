"""Overrides are a layer over the YAML, checked like it; paths expand, never silently."""

import argparse
from decimal import Decimal
from pathlib import Path

import attrs
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from packplan.adapters.config.run import SECTIONS, known_keys, load_mixes
from packplan.app.cli.command import add_config_arguments, add_logging_options, parse_arguments
from packplan.app.opening.runs import read_config
from packplan.core.config.run import RunConfig
from packplan.core.errors import ConfigError
from tests.documents import KEYS, document, parsed

PATHS = {
    "model.model", "custom.train_jsonl", "custom.val_jsonl", "custom.fusion_config", "training.output_dir",
    "training.packing_lengths_from", "training.resume_from_checkpoint", "training.logging_dir", "training.deepspeed",
    "training.fsdp_config", "training.accelerator_config",
}  # fmt: skip
"""Keys that name a file or a folder."""


@given(st.integers(0, 2**32 - 1), st.floats(0, 1), st.booleans(), st.sampled_from(["none", "tensorboard"]))
def test_an_override_is_what_the_yaml_would_be_with_it(seed, rate, packing, report):
    """Values of each type, in the run's own keys and in the trainer's."""
    values = {
        "seed": seed, "learning_rate": rate, "packing": packing, "report_to": [report],
        "lr_scheduler_kwargs": {"a": rate},
    }  # fmt: skip
    written = {key: yaml.safe_dump(value, default_flow_style=True) for key, value in values.items()}

    assert parsed(**values) == parsed({}, *(f"training.{key}={text}" for key, text in written.items()))


def test_an_override_reads_numbers_makes_sections_and_changes_keys_inside_a_setting():
    """YAML reads 1e-4 as a text; what else a setting has stays."""
    written = ("learning_rate=1e-4", "num_train_epochs=2e0", "lora_dropout=0", "lr_scheduler_kwargs.num_cycles=2")
    setting = {"min_lr": 0.5, "num_cycles": 1}
    training = parsed({}, *(f"training.{text}" for text in written), lr_scheduler_kwargs=setting).training

    passed = {"learning_rate": 1e-4, "lora_dropout": 0.0, "lr_scheduler_kwargs": {**setting, "num_cycles": 2}}
    assert passed == dict(training.trainer)
    assert 2.0 == training.num_train_epochs


def test_null_unsets_what_the_yaml_or_its_base_sets(tmp_path: Path):
    """The default holds again; in a YAML that extends another as on the command line."""
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(document(seed=7, packing_buffer=16, learning_rate=0.5)))
    (tmp_path / "run.yaml").write_text("extends: base.yaml\ntraining: {packing_buffer: null}\n")

    unset = ["training.seed=null", "training.learning_rate="]
    training = read_config(tmp_path / "run.yaml", unset).training

    assert (42, 512, {}) == (training.seed, training.packing_buffer, dict(training.trainer))


@pytest.mark.parametrize(
    ("override", "key", "reason"),
    [
        ("training.learning_rate=fast", "training.learning_rate", "is 'fast', but has to be a number of at least 0"),
        ("learning_rate=1", "learning_rate", "is not a key of the top level: write training.learning_rate"),
        ("training.seed.x=1", "training.seed", "is {'x': 1}, but has to be a whole number"),
        ("training={seed: x, output_dir: o}", "training.seed", "is 'x', but has to be a whole number"),
        ("training.seed=[", "training.seed", "is not valid YAML: "),
        ("training.seed=!!python/name:os.getcwd", "training.seed", "is not valid YAML"),
        ("model.model=null", "model.model", "is not set, and has no default: set it"),
        *((text, text, "is not an override: write section.key=value") for text in ("training.seed", "=1", "a..seed=1")),
    ],
)  # fmt: skip
def test_a_fault_of_an_override_is_the_one_that_the_yaml_would_get(override, key, reason):
    """By its key."""
    with pytest.raises(ConfigError) as raised:
        parsed({}, override)

    (fault,) = raised.value.faults
    assert key == fault.path
    assert fault.reason.startswith(reason)


def test_overrides_stand_before_behind_and_between_options(capsys):
    """What is neither an option nor an override is refused."""
    parser = argparse.ArgumentParser(prog="packplan plan time")
    add_config_arguments(parser)
    add_logging_options(parser)

    options = parse_arguments(parser, ["run.yaml", "a=1", "--quiet", "b.c=-2", "--verbose", "d="])

    assert ("run.yaml", ["a=1", "b.c=-2", "d="]) == (options.config, options.overrides)
    assert options.quiet
    assert [] == parse_arguments(parser, ["run.yaml"]).overrides
    with pytest.raises(SystemExit, match="2"):
        parse_arguments(parser, [])
    assert "required: run.yaml\n" in capsys.readouterr().err
    for wrong in ("--quite", "other.yaml", "-x=1", "--nproc-per-node=2", "--nproc_per_node", "--world-size=2"):
        with pytest.raises(SystemExit, match="2"):
            parse_arguments(parser, ["run.yaml", "--quiet", wrong])
        assert wrong in (said := capsys.readouterr().err)
        assert ("torchrun --nproc-per-node N -m packplan.app.plan time run.yaml" in said) == wrong.startswith(
            ("--nproc", "--w")
        )
    with pytest.raises(SystemExit, match="2"):
        parse_arguments(
            parser, ["run.yaml", "--max_length", "512", "--num-train-epochs=2", "--load_best", "--model_id"]
        )
    assert "no dashes: template.max_length=512 training.num_train_epochs=2 model.model=…\n" in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted(PATHS))
def test_paths_expand(path, monkeypatch):
    """`~` at the start, `${NAME}` anywhere; an unset variable or unknown user is a fault."""
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("PACKPLAN_RUNS", "/scratch/runs")
    section, key = path.split(".")
    rollout = {"custom.train_jsonl": None, "custom.trainer_variant": "rollout", "training.packing_mode": "dynamic"}
    beside = {**rollout, "training.max_steps": 1} if key == "fusion_config" else {}

    def value(text: str) -> object:
        values = getattr(parsed(beside, f'{path}="{text}"'), section)
        found = getattr(values, key) if hasattr(values, key) else values.trainer[key]
        return found[0] if isinstance(found, tuple) else found

    assert "/home/me/x" == value("~/x")
    assert "/scratch/runs/a-/home/me" == value("${PACKPLAN_RUNS}/a-${HOME}")
    assert "a~/$HOME" == value("a~/$HOME")
    for text, says in (
        ("${GONE_NAME}/x", "the variable GONE_NAME is not set: export it"),
        ("~nobody_here/x", "there is no user ~nobody_here"),
        ("${}", "the variable  is not set: export it"),
    ):
        with pytest.raises(ConfigError, match=rf"{path} .*{says}"):
            value(text)


def test_which_keys_are_paths_follows_from_their_types(tmp_path: Path, monkeypatch):
    """Every other key keeps what is written; a mix's data file and a YAML's base expand."""
    prompt = "~ costs ${PRICE}"
    config = parsed({}, f'template.system="{prompt}"', f'training.run_name="{prompt}"')

    assert (prompt, prompt) == (config.template.system, config.training.trainer["run_name"])
    assert {*known_keys(RunConfig)} > {path for path in PATHS if not KEYS.get(path[9:])}
    assert PATHS >= {f"training.{key}" for key, takes in KEYS.items() if takes.path}
    monkeypatch.setenv("HERE", str(tmp_path))
    (tmp_path / "base.yaml").write_text("sources: [{jsonl: '${HERE}/a.jsonl', ratio: 1}]\n")
    (mix := tmp_path / "mix.yaml").write_text("extends: ${HERE}/base.yaml\n")
    assert f"{tmp_path}/a.jsonl" == load_mixes(mix).files[0]
    mix.write_text("extends: ${GONE_NAME}/base.yaml\n")
    with pytest.raises(ConfigError, match=r"extends is .*variable GONE_NAME is not set"):
        load_mixes(mix)


NOT_FINITE = (".nan", "-.inf", "1e400", "1e-999999999", f"0x{'f' * 5000}")
"""Texts that YAML or a number's class reads as nothing finite, or not at all."""


@pytest.mark.untraced
@pytest.mark.parametrize("text", NOT_FINITE)
def test_no_key_takes_a_number_that_is_not_finite(text):
    """Each key, ours and the trainer's, is named in a fault, or holds numbers to calculate with."""
    keys = {*known_keys(RunConfig)} - {*SECTIONS} | {f"training.{key}" for key in KEYS}
    with pytest.raises(ConfigError) as raised:
        parsed({}, *(f"{key}={text}" for key in keys))
    refused = {fault.path for fault in raised.value.faults}
    assert len(refused) > len(keys) / 2
    for key in sorted(keys - refused):
        numbers: list[object] = []
        try:
            config = parsed({}, f"{key}={text}")
            attrs.asdict(config, value_serializer=lambda _, __, one, to=numbers: to.append(one) or one)
            numbers += config.training.trainer.values()
            taken = all(1e-300 < abs(one) < 1e300 for one in numbers if one and isinstance(one, (int, float, Decimal)))
        except ConfigError as error:
            taken = key in str(error)
        assert taken, key


@pytest.mark.parametrize("key", ["ratio", "count", "cap", "samples_per_epoch", "tokens_per_epoch"])
@pytest.mark.parametrize("text", [*NOT_FINITE, ".inf", "snan", f"1e-{10**30}", "9" * 5000, "2001-99-99"])
def test_a_mix_takes_finite_numbers_alone(tmp_path, key, text):
    """A ratio, a count or a cap that is none is a fault of its key, or of its text."""
    mix = tmp_path / "mix.yaml"
    value = f"{key}: {text}"
    mix.write_text(f"sources: [{{jsonl: a, ratio: 1}}]\n{value}" if "_" in key else f"sources: [{{jsonl: a, {value}}}]")

    with pytest.raises(ConfigError, match=rf"{key} |is not valid YAML") as raised:
        load_mixes(mix)
    assert len(str(raised.value)) < 2000
