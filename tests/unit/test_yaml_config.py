"""YAML becomes a frozen configuration, or all its faults at once, each with its path and remedy."""

import math
import tempfile
from decimal import Decimal
from pathlib import Path

import attrs
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from packplan.adapters.config.values import structure_document
from packplan.app.opening.runs import read_config
from packplan.app.planning.split import align_options
from packplan.core.config.rl import RlConfig
from packplan.core.config.run import HostCommand, RunConfig, TrainingConfig
from packplan.core.errors import ArgumentError, ConfigError
from tests.documents import document, faults_of, parsed

ROLLOUT = {"custom.trainer_variant": "rollout", "training.packing_mode": "dynamic", "training.max_steps": 1}


def test_defaults_are_the_specifications():
    """A YAML of four sections is enough; null is as if a key were not set."""
    config = parsed()
    assert config == parsed(**dict.fromkeys(["packing_mode", "seed", "learning_rate", "report_to", "bf16"]))

    expected = {
        "packing": True, "packing_mode": "static", "packing_algorithm": "constant_volume",
        "packing_min_fill_ratio": Decimal("0.65"), "packing_drop_last": True, "packing_allow_single_long": True,
        "packing_wait_timeout_s": 7200.0, "packing_length_cache_persist_every": None,
        "packing_length_precompute_workers": 8,
    }  # fmt: skip
    assert expected == {name: getattr(config.training, name) for name in expected}
    custom = config.custom
    assert (True, "sft", ("a.jsonl",)) == (config.eval_packing, custom.trainer_variant, custom.train_jsonl)


def test_a_scaling_of_positions_is_not_named():
    """By its name alone, transformers 5 does not load it from ms-swift."""
    assert "is 'yarn', but has to be JSON" in faults_of({"model.rope_scaling": "yarn"})["model.rope_scaling"]


@pytest.mark.parametrize(
    ("lengths", "packing_length"),
    [((80, 70, 60), 80), ((None, 70, 60), 70), ((None, None, 60), 60), ((None, None, None), None)],
)
def test_the_budget_comes_from_the_nearest_key(lengths, packing_length):
    """template.max_length, else global_max_length for it, else model.max_model_len."""
    keys = dict(zip(("template.max_length", "global_max_length", "model.max_model_len"), lengths, strict=True))

    if packing_length is None:
        assert "is not set: set it to" in faults_of(keys)["template.max_length"]
    else:
        assert packing_length == parsed(keys).packing_length


def test_ranks_that_share_rows_count_as_one():
    """Where they divide all ranks; else the run is refused by its key."""
    assert 3 == parsed(SHARED).plan_world_size(6)
    with pytest.raises(ArgumentError, check=lambda error: error.kind == "ranks"):
        parsed(SHARED).plan_world_size(1)


def test_the_ranks_of_a_command_are_those_that_it_starts():
    """Whatever `--world-size` says; without a command, it says the number."""
    command = HostCommand(
        task="sft", words=(), world_size=4, task_type="causal_lm", sequences_per_row=1, length_inputs={}
    )
    config = parsed({})

    assert (3, None) == (config.count_ranks(3), config.count_ranks())
    assert 4 == attrs.evolve(config, command=command).count_ranks(3)


def test_packs_may_be_shared_by_their_degree():
    """Every rank is one of the plan; the most that share a pack have to divide them."""
    for most, largest in {None: None, 2: 2}.items():
        config = parsed(BY_DEGREE | {"training.max_sequence_parallel_size": most})
        options = align_options(config, "train")
        assert (6, True, largest) == (config.plan_world_size(6), options["shares"], options["most"])
    with pytest.raises(ArgumentError) as raised:
        config.plan_world_size(3)
    assert str(raised.value).endswith(
        "divides the 3 ranks; set training.max_sequence_parallel_size (in Python: degrees) to 1"
    )


def test_half_of_a_surrogate_pair_is_no_text():
    """YAML may write one, which no file and no tokenizer takes; bytes of a name are none."""
    half = {"template.system": "\ud83d", "custom.train_jsonl": ["\ud83d.jsonl"], "custom.media_cache": "\ud83d"}

    found = faults_of(half, output_dir="\ud83d")

    assert {*half, "training.output_dir"} == {*found}
    assert all("remove an unpaired surrogate" in fault for fault in found.values())
    assert "\udce9" == parsed(output_dir="\udce9").training.output_dir


def test_all_faults_are_reported_at_once_with_path_and_remedy():
    """Names, types, bounds and contradictions, in every section; own keys and the trainer's."""
    found = faults_of(
        {"template.max_length": 4096.5, "model.model": None, "custom.object_field_order": "random",
         "custom.colour": 1, "policy.sequence_packing": {}, "extra": 1},
        packing="no", packing_min_fill_ratio=1.5, packing_wait_timeout_s=-1, packing_lenght=3, packing_length=8,
        packing_avg_samples=4, learning_rat=1, bf16="yes", dataloader_num_workers=1.5, seed=True, max_steps=0,
        packing_algorithm="magic",
    )  # fmt: skip

    assert {
        "training.packing", "training.packing_lenght", "training.packing_length", "training.packing_avg_samples",
        "training.learning_rat", "training.bf16", "training.dataloader_num_workers", "training.seed",
        "template.max_length", "model.model", "custom.object_field_order", "custom.colour", "policy", "extra",
        "training.packing_min_fill_ratio", "training.packing_wait_timeout_s", "training.max_steps",
        "training.packing_algorithm",
    } == set(found)  # fmt: skip
    assert "did you mean learning_rate?" in found["training.learning_rat"]
    assert "template.max_length" in found["training.packing_length"]
    assert "4096.5" in found["template.max_length"]
    assert "desc_first, geometry_first" in found["custom.object_field_order"]


REFUSED = {
    "model.attn_impl": ["varlan", ""], "model.quant_bits": [4], "template.fps": [0, math.inf],
    "template.fps_min_frames": [800], "custom.max_video_s": [-1], "custom.max_video_bytes": [0],
    "custom.train_jsonl": [None], "custom.fusion_schedule": ["planned"], "custom.columns": [{"ask": 3}],
    "training.use_dora": [True], "training.freeze_parameters_ratio": [1.0], "training.lora_dropout": [1.0],
    "training.packing_min_fill_ratio": [-1, math.nan], "training.packing_max_dropped_share": [1.1],
    "training.packing_lengths_from": [""], "training.packing_wait_timeout_s": [-1],
    "training.packing_algorithm": ["magic"], "training.packing_mode": ["dynamic"], "training.packing_buffer": [16],
    "training.max_steps": [0], "training.data_seed": [-1], "training.num_train_epochs": [0, -1, 1e6, 1e300],
    # Numbers of 2**64 would leave 64 bits.
    "training.effective_batch_size": [0, 2**64], "training.seed": [-1, 2**64],
    "training.dataloader_num_workers": [2**64],
}  # fmt: skip
"""Key -> values that it does not take, whatever the other keys say."""

ENDLESS = {**ROLLOUT, "training.max_steps": -1, "training.lr_scheduler_type": "constant"}
"""A stream that ends with its epochs."""

SHARES = {
    "training.num_train_epochs": 1.5, "training.lr_scheduler_type": "cosine", "training.warmup_ratio": 0.1,
    "training.save_steps": 0.5,
}  # fmt: skip
"""Key -> value that depends on the number of steps."""

SHARED = {"training.sequence_parallel_size": 2}
BY_DEGREE = {"training.sequence_parallel_size": "auto"}

LORA, MIX = {"training.tuner_type": "lora"}, {"custom.fusion_config": "mix.yaml", "custom.train_jsonl": None}


@pytest.mark.parametrize(
    ("keys", "refused"),
    [
        *(({key: value}, key) for key, values in REFUSED.items() for value in values),
        ({"model.quant_method": "bnb", "model.quant_bits": 4}, "model.quant_method"),
        ({"model.quant_method": "bnb", "model.quant_bits": 3, **LORA}, "model.quant_bits"),
        ({"template.fps_min_frames": 8, "template.fps_max_frames": 6}, "template.fps_min_frames"),
        ({"template.fps_max_frames": 1, "template.fps_min_frames": 1}, "template.fps_max_frames"),
        (MIX, "custom.fusion_config"),
        ({"custom.fusion_config": "mix.yaml", "custom.fusion_schedule": "planned"}, "custom.fusion_config"),
        ({**MIX, "custom.fusion_schedule": "always"}, "custom.fusion_schedule"),
        ({**ROLLOUT, **MIX, "custom.fusion_schedule": "planned"}, "custom.fusion_schedule"),
        ({**ROLLOUT, "custom.max_bad_share": 1.5, "custom.on_bad_record": "skip"},
         "custom.max_bad_share custom.on_bad_record"),
        ({"custom.columns": {"ask": "questoin", "say": "response"}}, "custom.columns.ask"),
        ({"custom.source_names": {"b.jsonl": "chats", "a.jsonl": " "}},
         "custom.source_names.b.jsonl custom.source_names.a.jsonl"),
        ({**LORA, "training.freeze_parameters_ratio": 0.5}, "training.freeze_parameters_ratio"),
        ({**LORA, "training.target_regex": "("}, "training.target_regex"),
        ({**LORA, "training.lorap_lr_ratio": -1}, "training.lorap_lr_ratio"),
        ({**LORA, "training.lorap_lr_ratio": 16, "training.optimizer": "muon"}, "training.lorap_lr_ratio"),
        ({**LORA, "training.lorap_lr_ratio": 16, "training.vit_lr": 1e-5}, "training.lorap_lr_ratio"),
        ({**ROLLOUT, "training.packing_algorithm": "certified"}, "training.packing_algorithm"),
        ({**ROLLOUT, "training.packing": False, "training.packing_mode": "static"},
         "training.packing training.packing_mode"),
        *(({**ENDLESS, key: value}, "training.max_steps") for key, value in SHARES.items()),
        ({**ROLLOUT, "training.packing_lengths_from": "runs/a"}, "training.packing_lengths_from"),
        ({**ROLLOUT, "training.dataloader_persistent_workers": True}, "training.dataloader_persistent_workers"),
        ({**ROLLOUT, **MIX, "training.train_dataloader_shuffle": False}, "training.train_dataloader_shuffle"),
        ({"training.packing_epochs": "replanned", "training.packing": False}, "training.packing_epochs"),
        ({"training.packing_epochs": "replanned", "training.packing_algorithm": "concatenative"},
         "training.packing_epochs"),
        ({**ROLLOUT, "training.packing_epochs": "replanned"}, "training.packing_epochs"),
        ({**SHARED, "training.packing": False}, "training.sequence_parallel_size"),
        ({**BY_DEGREE, "training.packing": False}, "training.sequence_parallel_size"),
        ({**BY_DEGREE, "training.packing_epochs": "replanned"}, "training.sequence_parallel_size"),
        ({**BY_DEGREE, **MIX, "custom.fusion_schedule": "planned"}, "training.sequence_parallel_size"),
        ({**BY_DEGREE, "training.max_sequence_parallel_size": 3}, "training.max_sequence_parallel_size"),
        ({**SHARED, "training.max_sequence_parallel_size": 2}, "training.max_sequence_parallel_size"),
        *(({"training.sequence_parallel_size": size}, "training.sequence_parallel_size") for size in (0, "all")),
        ({"training.eval_on_start": True, "training.eval_strategy": "steps", "training.save_strategy": "best"},
         "training.eval_on_start training.eval_strategy training.save_strategy"),
        # What a default would contradict is said when the key with a fault is corrected.
        ({"custom.trainer_variant": "rollouts", "training.packing_mode": "dynamic"}, "custom.trainer_variant"),
        ({"custom.val_share": 0.1, "custom.val_jsonl": "b.jsonl"}, "custom.val_share"),
        ({"custom.val_share": 1}, "custom.val_share"),
        ({**ROLLOUT, "custom.val_share": 0.1}, "custom.val_share"), ({"custom": 3}, "custom"),
        ({"template.max_length": 80.5}, "template.max_length"),
    ],
)  # fmt: skip
def test_values_that_cannot_be_are_refused_by_their_keys(keys, refused):
    """Before a model or data are read, and nothing else is refused with them."""
    assert set(refused.split()) == set(faults_of(keys))


@pytest.mark.parametrize(
    "keys",
    [
        *({**SHARED, f"training.{name}": value} for name, value in (("deepspeed", "zero3"), ("fsdp", "full_shard"))),
        {"model.attn_impl": "paged|sdpa", "training.packing_buffer": 512},  # kernels' names are left to transformers
        {"template.fps": 0.5, "template.video_min_pixels": 9000, "training.num_train_epochs": 999_999},
        {**ROLLOUT, "training.train_dataloader_shuffle": False, "training.dataloader_drop_last": False},
        {"training.num_train_epochs": 1e6, "training.max_steps": 3, "training.optimizer": "muon"},
        {**ENDLESS, "training.save_steps": 1},
        {"custom.val_share": 0.1, "training.eval_strategy": "epoch"},
        {"training.eval_on_start": False, "training.eval_strategy": "no", "training.load_best_model_at_end": False},
        {"training.eval_on_start": True, "training.load_best_model_at_end": True, "custom.val_jsonl": "b.jsonl"},
        {"training.packing": False, "training.packing_buffer": 16, "training.packing_mode": "dynamic"},
    ],
)
def test_values_that_can_be_are_taken(keys):
    """A limit alone, a default that is written, keys of packing where nothing is packed."""
    assert parsed(keys)


def test_names_of_sources_are_of_entries_of_the_data(monkeypatch):
    """An entry is one however its path is written."""
    monkeypatch.setenv("DATA", "/data")
    names = {"${DATA}/a.jsonl": "chats", "b/*.parquet": "chats", "c.jsonl": "held out"}

    config = parsed({"custom.train_jsonl": ["${DATA}/a.jsonl", "b/*.parquet"], "custom.val_jsonl": "c.jsonl",
                     "custom.source_names": names})  # fmt: skip

    assert ["/data/a.jsonl", *list(names)[1:]] == list(config.custom.source_names)


def test_null_ignores_a_key_of_the_data_wherever_it_is_written():
    """In the YAML, in one that extends it, on the command line; elsewhere null is a default."""
    assert {"label": None} == parsed({"custom.columns": {"label": None}}).custom.columns
    columns = {"a": None, "label": "response"}
    assert {"a": None, "label": None} == parsed({"custom.columns": columns}, "custom.columns.label=null").custom.columns
    assert {} == parsed({"custom.columns": columns}, "custom.columns=null").custom.columns


def test_every_training_key_refuses_a_section():
    """Each key's type is checked, and the fault has its path."""
    keys = {field.name for field in attrs.fields(TrainingConfig)} - {"trainer"}

    assert {f"training.{key}" for key in keys} <= faults_of(**{key: {"a": 1} for key in keys}).keys()


def test_one_yaml_builds_on_another(tmp_path: Path):
    """Sections merge key by key, lists are replaced; the path starts at the file that names it."""
    (tmp_path / "base").mkdir()
    base = document(learning_rate=1e-3, report_to=["none", "tensorboard"])
    (tmp_path / "base" / "base.yaml").write_text(yaml.safe_dump(base))
    (tmp_path / "run.yaml").write_text("extends: base/base.yaml\ntraining: {seed: 7, report_to: [none]}\n")

    config = read_config(tmp_path / "run.yaml")

    assert (7, "out") == (config.training.seed, config.training.output_dir)
    assert {"learning_rate": 1e-3, "report_to": ["none"]} == dict(config.training.trainer)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("extends: run.yaml\n", "extends this one: remove extends"),
        ("extends: gone.yaml\n", r"run\.yaml has 1 fault:\n  extends names .*gone\.yaml, which cannot be read"),
        ("extends: .\n", r"extends names .*, which is a folder: name a YAML, such as .*run\.yaml"),
        ("extends: 3\n", "path of a YAML"),
        ("model: [\n", "not valid YAML"),
        ("seed: 1\nseed: 2\n", r"the key 'seed' is written twice \(first in line 1\)\n.*line 2"),
        ("a:\n  b: 1\n   c: 2\n", r"not valid YAML: mapping values are not allowed here\n.*line 3, column 5"),
        ("", "has to be a mapping of keys to values"),
        ("model: 3\n", "a section of keys"),
        ("custom: {source_names: [a]}\n", "a mapping, such as"),
        ("!!python/object/apply:os.getcwd []\n", "not valid YAML"),
        ("a: \0b", r"is not valid YAML: unacceptable character #x0000"),
        (b"\xff\xfe\0", "is not UTF-8 text, so it is neither YAML"),
        (None, r"run\.yaml cannot be read"),
        ("a: " + "[" * 500 + "]" * 500, "nested too deeply"),
        ("a: " + "{a: " * 100 + "1" + "}" * 100, "nested more than 64 deep"),
        ("a: &a [x]\n" + "".join(f"b{n}: &b{n} [{f'*b{n - 1}, ' * 9 if n else '*a'}]\n" for n in range(9)), "values"),
        ("template: {{ jinja }}\n", 'the key { } is a mapping, not a text: put quotes around it, as "{{ x }}"'),
        ("[a, b]: 3\n", r"the key \[ \] is a list, not a text: put quotes around it"),
        ("1: 3\n", "the key 1 is not a text"),
        (f"template: {{max_length: {'9' * 5000}}}\n", r"the number 9{40} has more than 64 bits.*\n.*line 1, column 24"),
        (f"a: -{'9' * 5000}\n", "has more than 64 bits: write a smaller one"),
        ("seed: 9:" + "9:" * 300 + "9\n", "more than 64 bits"),
        ("seed: 9:" + "9:" * 300 + "9.5\n", "not valid YAML"),
        ('extends: "a\\0b"\n', "has a NUL, or a name of over 255 bytes"),
        (f"extends: {'n' * 300}\n", "has a NUL, or a name of over 255 bytes"),
        ("extends: /dev/zero\n", r"run\.yaml has 1 fault:\n  extends names /dev/zero, which is a folder, a pipe"),
        pytest.param("x" * 2**23, "has more than 4,194,304 bytes", id="large"),
    ],
)
def test_files_that_are_no_configuration_say_why(tmp_path: Path, text, says):
    """Where it breaks; never a traceback, never code that runs."""
    if text is not None:
        (tmp_path / "run.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())

    with pytest.raises(ConfigError, match=says):
        read_config(tmp_path / "run.yaml")


@pytest.mark.untraced
def test_a_chain_of_files_may_be_long(tmp_path: Path):
    """Each file is read once, and none waits for those below it; a loop of links is refused."""
    (tmp_path / "0.yaml").write_text(yaml.safe_dump(document(seed=1)))
    for number in range(1, 1200):
        (tmp_path / f"{number}.yaml").write_text(f"extends: {number - 1}.yaml\ntraining: {{seed: {number}}}\n")
    (tmp_path / "loop.yaml").symlink_to(tmp_path / "loop.yaml")

    assert 1199 == read_config(tmp_path / "1199.yaml").training.seed
    with pytest.raises(ConfigError, match="symbolic links"):
        read_config(tmp_path / "loop.yaml")
    with pytest.raises(ConfigError, match=r"is a folder: name the run's YAML$"):
        read_config(tmp_path)


_WORDS = ["model", "training", "seed", "extends", "<<", "{{x}}", "1", "~", "9:9:9", "\x00", "*a", "&a", "!!set"]

_VALUES = st.recursive(
    st.sampled_from(_WORDS),
    lambda below: (
        st.lists(below, max_size=3).map(lambda items: f"[{', '.join(items)}]")
        | st.tuples(below, below).map(lambda pair: f"{{{pair[0]}: {pair[1]}}}")
    ),
)


@given(_VALUES, st.sampled_from(_WORDS))
def test_no_text_is_a_traceback(value, key):
    """Whatever a YAML holds, it is a configuration, or its faults are named."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.yaml")
        path.write_text(f"{key}: {value}\n")
        with pytest.raises(ConfigError):
            read_config(path)


def test_runs_of_every_class_refuse_a_list_for_pairs():
    """The converter keeps its check of mappings, whichever class it has seen first."""
    for kind in (RunConfig, RlConfig, RunConfig):
        _, faults = structure_document({"custom": {"columns": ["a"]}}, kind, lambda key, _: key)
        assert any("a mapping, such as" in fault.reason for fault in faults if fault.path == "custom.columns")
