"""Weights that DeepSpeed's ranks share: what they train is what ranks with whole weights train."""

import json
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from packplan.adapters.hf.saving import find_damage
from packplan.adapters.models import root_mean_square
from packplan.adapters.ranks.torch_group import OneRank
from packplan.adapters.trainer_state import find_other_parts
from packplan.app import plugin
from packplan.app.opening.runs import read_config
from packplan.app.sft.train import prepare
from packplan.core.errors import ConfigError
from tests.e2e import rank_main
from tests.e2e.plugin_run import LENGTH, PLAIN, Ran, change_a_byte, write_records
from tests.e2e.test_swift_plugin import write_others
from tests.processes import finished

pytestmark = pytest.mark.slow

PACKED = "--gradient_accumulation_steps 2 --packing true --tuner_type full --save_strategy"

RESUMED = "--save_strategy no --resume_from_checkpoint {runs}"

UNPLANNED = "--save_strategy no --tuner_type full --gradient_accumulation_steps 1 --per_device_train_batch_size 2"

OTHERS = {
    "gkd": "--teacher_model {runs}/teacher --teacher_model_type qwen2 --max_completion_length 4",
    "grpo": "--reward_funcs codes --beta 0.04 --num_generations 2 --max_completion_length 4",
}
"""Types of `swift rlhf` that generate answers -> words."""

SWIFT = {
    "text-": ("sft", "qwen2", f"{PACKED} no"), "text-zero3": ("sft", "qwen2", f"{PACKED} steps --save_steps 2"),
    "text-other-zero2": ("sft", "qwen2", f"{PACKED} no {RESUMED}/text-zero3/out/checkpoint-2"),
    "text-damaged-zero3": ("sft", "qwen2", f"{PACKED} no {RESUMED}/text-damaged-zero3/checkpoint-2"),
    **{f"{kind}-{stage}": ("rlhf", "rlhf", f"{UNPLANNED} --rlhf_type {kind} {OTHERS.get(kind, '')}")
       for kind in ("kto", "rm", "simpo", "cpo", "orpo", *OTHERS) for stage in ("", "zero2", "zero3")},
    **{f"texts-{stage}": ("pt", "qwen2", f"{PACKED} no --gradient_accumulation_steps 1")
       for stage in ("", "zero2")},
    "text-again-zero3": ("sft", "qwen2", f"{PACKED} no {RESUMED}/text-zero3/out/checkpoint-2"),
    "text-killed-zero2": ("sft", "qwen2", f"{PACKED} steps --save_steps 2"),
    "text-again-zero2": ("sft", "qwen2", f"{PACKED} no {RESUMED}/text-killed-zero2/out/checkpoint-2"),
    "text-own": ("sft", "qwen2", f"{PACKED} no"), "text-zero2": ("sft", "qwen2", f"{PACKED} no"),
    **{f"images-{stage}": ("sft", "qwen2_5_vl", f"{PACKED} no --tuner_type lora") for stage in ("", "zero3")},
    **{f"rows-{stage}": ("sft", "qwen2_5_vl", f"{PACKED} no --tuner_type lora --sequence_parallel_size 2")
       for stage in ("", "zero2", "zero3")},
    **{f"pairs-{stage}": ("rlhf", "qwen2_pairs", f"{PACKED} no --rlhf_type dpo --packing_length 1024")
       for stage in ("", "zero2", "zero3")},
}  # fmt: skip
"""Run, whose name ends in `--deepspeed` -> command, data, which name the model, and words."""


def settings(stage: int) -> dict:
    """Return settings of DeepSpeed as a user's file has them."""
    gathered = {"stage3_gather_16bit_weights_on_model_save": True} if stage == 3 else {}
    auto = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    return {"zero_optimization": {"stage": stage, **gathered}, **dict.fromkeys(auto, "auto")}


LAST = "{runs}/%s/checkpoint-2"

OURS = {
    "whole": {},
    "adapters": {"tuner_type": "lora"},
    "two": {"deepspeed": settings(2)},
    "three": {"deepspeed": settings(3)},
    "three-again": {"deepspeed": settings(3), "resume_from_checkpoint": LAST % "killed-three"},
    "two-of-three": {"deepspeed": settings(2), "resume_from_checkpoint": LAST % "three"},
    "unlike": {"deepspeed": settings(2) | {"gradient_clipping": 2.0}},
    "ruined": {"deepspeed": settings(3), "learning_rate": 1e30, "max_steps": 1, "save_steps": 1},
    "two-again": {"deepspeed": settings(2), "resume_from_checkpoint": LAST % "killed-two"},
    "adapters-three": {"tuner_type": "lora", "deepspeed": settings(3)},
}
"""Run of `packplan sft` -> keys of `training.`"""

KILLED = {"killed-three": {"deepspeed": settings(3)}, "killed-two": {"deepspeed": settings(2)}}
"""Run that is killed within its third step -> keys of `training.`"""

MOVES = {"sequence_packing": {"enabled": True, "train_mb_tokens": 120, "logprob_mb_tokens": 200}}

RL = {
    "rl": {}, "rl-three": {"deepspeed": settings(3)},
    "rl-two-of-three": {"deepspeed": settings(2), "resume_from_checkpoint": LAST % "rl-three"},
    "rl-three-damaged": {"deepspeed": settings(3), "resume_from_checkpoint": LAST % "rl-three-damaged"},
    "rl-unlike": {"deepspeed": settings(2) | {"gradient_clipping": 2.0}}, "rl-one": {"deepspeed": settings(1)},
    "rl-two": {"deepspeed": settings(2)},
    "rl-three-again": {"deepspeed": settings(3), "resume_from_checkpoint": LAST % "rl-three"},
    **{f"rl_{kind}{name}": keys for kind in ("padded", "plain")
       for name, keys in (("", {}), ("-two", {"deepspeed": settings(2)}), ("-three", {"deepspeed": settings(3)}))},
}  # fmt: skip
"""Run of `packplan rl` -> keys of `grpo.`"""


@pytest.fixture(scope="module")
def ran(demo, server, tmp_path_factory) -> Callable[..., Ran]:
    """Train all runs on two ranks, those with whole weights first."""
    runs = tmp_path_factory.mktemp("runs")
    write_records(runs, demo)
    write_others(runs, demo)
    (runs / "own.json").write_text(json.dumps(settings(1)))
    assert 0 == plugin.main(["swift", "-o", str(runs / "plugin.py")])
    commands = []
    for name, (task, data, more) in sorted(SWIFT.items(), key=lambda one: not one[0].endswith("-")):
        of = "qwen2_5_vl" if "_vl" in data else "qwen2"
        stage = name.rpartition("-")[2].replace("own", f"{runs}/own.json")
        given = f"--model {demo / 'models' / of} --model_type {of} --template {'qwen2_5' if of == 'qwen2' else of} "
        given += f"--max_length {LENGTH[of]} --dataset {runs}/{data}.jsonl {PLAIN} "
        given += f"--external_plugins {runs}/codes.py {runs}/plugin.py "
        given += f"--output_dir {runs / name / 'out'} --num_train_epochs 1 {more} {stage and f'--deepspeed {stage}'}"
        commands.append((name, task, given.format(runs=runs).split()))
    sections = {"model": {"model": str(demo / "models" / "qwen2")}, "template": {"max_length": 256},
                "custom": {"train_jsonl": str(runs / "qwen2.jsonl")}}  # fmt: skip
    shared = {"max_steps": 4, "effective_batch_size": 4, "learning_rate": 1e-3, "save_steps": 2, "use_cpu": True,
              "save_strategy": "steps", "logging_steps": 1, "report_to": [], "dataloader_num_workers": 0,
              "packing_drop_last": False, "gradient_checkpointing": False}  # fmt: skip
    for name, keys in (OURS | KILLED).items():
        training = json.loads(
            json.dumps({**shared, "output_dir": f"{{runs}}/{name}", **keys}).replace("{runs}", str(runs))
        )
        (runs / f"{name}.yaml").write_text(yaml.safe_dump({**sections, "training": training}))
    learnt = {"reward_funcs": "packplan.app.rewards:character_overlap", "max_steps": 3, "save_steps": 2, "beta": 0.1,
              "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 6, "learning_rate": 0.3,
              "optim": "sgd", "logging_steps": 1, "use_cpu": True, "gradient_accumulation_steps": 2,
              "num_iterations": 2, "gradient_checkpointing": False}  # fmt: skip
    for name, keys in RL.items():
        cut = {"rl_padded": {"dynamic_batching": {"enabled": True, "train_mb_tokens": 256}}, "rl_plain": {}}
        held = json.loads(json.dumps({**learnt, "output_dir": f"{{runs}}/{name}", **keys}).replace("{runs}", str(runs)))
        data = {"train_jsonl": str(demo / "data" / "repeat.jsonl")}
        whole = {"model": sections["model"], "custom": data, "policy": cut.get(name.partition("-")[0], MOVES)}
        (runs / f"{name}.yaml").write_text(yaml.safe_dump({**whole, "grpo": held}))
    paths = [(name, str(runs / f"{name}.yaml")) for name in (*OURS, *RL)]
    killed = [([(name, str(runs / f"{name}.yaml"))], str(runs)) for name in KILLED]
    killed += [([], str(runs), [one]) for one in commands if "killed" in one[0]]
    for given in killed:
        assert [-signal.SIGKILL] * 2 == finished(server.ranks(2, rank_main.several, *given, folder=runs))
    commands = [one for one in commands if "killed" not in one[0]]
    (runs / "swift").mkdir()
    for given, folder in ((([], str(runs), commands), runs / "swift"), ((paths, str(runs)), runs)):
        assert [0, 0] == finished(server.ranks(2, rank_main.several, *given, folder=folder))
    return lambda name: Ran(runs / name)


def steps(history: list[dict]) -> list[tuple[float, float]]:
    """Return the loss and gradient norm of each step."""
    return [(entry["loss"], entry["grad_norm"]) for entry in history if "loss" in entry]


def assert_same(due: list[dict], found: list[dict]) -> None:
    """
    Compare steps; norms are up to 1.95e-6 apart, those of `packplan rl` 1.3e-6.

    For ranks with whole weights torch sums the squares of gradients in float32, which rounds.
    """
    assert len(steps(due)) > 1
    near = [(pytest.approx(loss, rel=1e-6, abs=1e-7), pytest.approx(norm, rel=2e-6)) for loss, norm in steps(due)]
    assert near == steps(found)


@pytest.mark.parametrize("name", [name for name in SWIFT if not re.search("-$|again|other|damaged|killed", name)])
def test_commands_of_ms_swift_train_the_same(name, ran):
    """Every loss and gradient norm of a plan is that of ranks with whole weights."""
    whole, shared = ran(f"{name.partition('-')[0]}-"), ran(name)

    assert_same(whole.history, shared.history)
    if "--packing true" in SWIFT[name][2]:
        assert whole.trained() == shared.trained(), "the same packs in the same steps"
        wrappers = [(one.folder / "wrapper").read_text() == "DeepSpeedEngine" for one in (whole, shared)]
        assert [False, True] == wrappers
        assert ("packplan_rows" if "rows" in name else "packplan") == (shared.folder / "attention").read_text()
    else:
        assert "will compute no padding" in shared.said


def test_a_command_of_ms_swift_resumes_bit_for_bit_or_says_why_not(ran):
    """From the parts that each rank has of the optimizer, with the same ZeRO alone."""
    assert ["ArgumentError", "host"] == json.loads((ran("text-other-zero2").folder / "error1.json").read_text())
    for stage in ("zero2", "zero3"):  # under ZeRO 2, of a run that was killed
        whole, again = ran(f"text-{stage}"), ran(f"text-again-{stage}")
        assert steps(whole.history) == steps(again.history)
        assert whole.trained()[-len(again.trained()) :] == again.trained()


def of_ours(ran, name: str) -> list[dict]:
    """Return the log of a run of `packplan sft`, which both ranks have."""
    first, second = rank_main.seen(ran(name).folder, 2)
    assert [first["steps"], steps(first["history"])] == [second["steps"], steps(second["history"])]
    return first["history"]


@pytest.mark.parametrize(("due", "name"), [("whole", "two"), ("whole", "three"), ("adapters", "adapters-three")])
def test_runs_train_the_same(due, name, ran):
    """Every loss and gradient norm of a run, in each way to share its weights."""
    assert_same(of_ours(ran, due), of_ours(ran, name))


def of_rl(ran, name: str) -> list[dict]:
    """Return the log of a run of `packplan rl`."""
    assert ["0", "0"] == [(ran(name).folder / f"status{rank}").read_text() for rank in range(2)]
    assert ("deepspeed" in RL[name]) == any(ran(name).folder.glob("checkpoint-*/global_step*"))
    return json.loads((ran(name).folder / "trainer_state.json").read_text())["log_history"]


@pytest.mark.parametrize("name", [name for name in RL if re.search("-(one|two|three)$", name) and "-of-" not in name])
def test_reinforcement_learning_trains_the_same(name, ran):
    """Losses and gradient norms of each step; rows move between ranks."""
    assert 3 == len(steps(of_rl(ran, name)))
    assert_same(of_rl(ran, name.partition("-")[0]), of_rl(ran, name))


def test_reinforcement_learning_resumes_with_its_own_parts_alone(ran):
    """Bit for bit; other parts, and settings of DeepSpeed that contradict others, are refused."""
    log = (ran("").folder / "rank0.log").read_text()
    for name, says in {
        "rl-two-of-three": "grpo.resume_from_checkpoint is .*, but its optimizer is stored in 2 parts by ZeRO 3, but",
        "rl-unlike": "grpo is refused by TRL: ds gradient_clipping=2.0 vs hf max_grad_norm=1.0",
    }.items():
        assert ["2", "2"] == [(ran(name).folder / f"status{rank}").read_text() for rank in range(2)]
        assert re.search(says, log)
    assert steps(of_rl(ran, "rl-three")) == steps(of_rl(ran, "rl-three-again"))


@pytest.mark.parametrize("name", ["two", "three"])
def test_a_resume_of_a_killed_run_ends_bit_for_bit_as_one_run_does(name, ran):
    """Also its weights."""
    assert steps(of_ours(ran, name)) == steps(of_ours(ran, f"{name}-again"))
    whole, again = (
        load_file(ran(one).folder / "checkpoint-4" / "model.safetensors") for one in (name, f"{name}-again")
    )
    assert whole.keys() == again.keys()
    assert all(torch.equal(whole[key], again[key]) for key in whole)


def test_settings_that_contradict_those_of_deepspeed_are_refused(ran):
    """Before anything is loaded; transformers would raise a ValueError when it begins to train."""
    assert ["2", "2"] == [(ran("unlike").folder / f"status{rank}").read_text() for rank in range(2)]
    says = "training.deepspeed cannot be used: ds gradient_clipping=2.0 vs hf max_grad_norm=1.0: write auto"
    assert says in (ran("").folder / "rank0.log").read_text()


def test_other_parts_of_an_optimizer_are_refused_before_anything_is_loaded(ran):
    """Another ZeRO, other ranks, and a run without DeepSpeed."""
    log = (ran("").folder / "rank0.log").read_text()
    asked = yaml.safe_load((ran("").folder / "two-of-three.yaml").read_text())

    assert ["2", "2"] == [(ran("two-of-three").folder / f"status{rank}").read_text() for rank in range(2)]
    assert re.search(
        r"checkpoint-2, but its optimizer is stored in 2 parts by ZeRO 3, but .* parts by ZeRO 1 or 2: ", log
    )
    for stage, says in (
        (3, "2 parts by ZeRO 3, but this run stores it in 1 part by ZeRO 3"),
        (None, "it as a whole: "),
    ):
        keys = asked["training"] | {"deepspeed": stage and settings(stage)}
        (path := Path(ran("").folder, "refused.yaml")).write_text(yaml.safe_dump(asked | {"training": keys}))
        with pytest.raises(ConfigError, match=says):
            prepare(read_config(path), OneRank())


@pytest.mark.parametrize("name", ["two", "three", "rl-two", "rl-three"])
def test_a_file_of_deepspeed_that_is_missing_or_changed_is_found(name, ran, tmp_path, monkeypatch):
    """By its name, by one of the ranks; one byte is enough."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    folder = shutil.copytree(ran(name).folder / "checkpoint-2", tmp_path / "checkpoint-2")
    given = {"stage": 3 if "three" in name else 2, "num_ranks": 2}

    def damaged() -> list[str]:
        return [*filter(None, (find_damage(folder, share=rank, num_shares=2) for rank in range(2)))]

    assert find_other_parts(folder, **given) is None
    assert damaged() == []
    files = [folder / "latest", *folder.glob("global_step*/*.pt")]
    assert len(files) == (5 if "three" in name else 4)
    for path in files:
        held = path.read_bytes()
        path.unlink()
        assert re.match(rf"its (file )?{path.name} is missing|its optimizer is stored in 1 part by ZeRO 1 or 2",
                        find_other_parts(folder, **given))  # fmt: skip
        for change in (lambda path: path.write_bytes(held[: len(held) // 2]), change_a_byte):  # noqa: B023
            path.write_bytes(held)
            change(path)
            if path.name == "latest":
                assert "names none of its folders" in find_other_parts(folder, **given)
            (fact,) = damaged()
            assert f"{path.name} is damaged, since its digest differs from the saved digest: " in fact
        path.write_bytes(held)


def test_a_changed_byte_of_deepspeed_ends_a_resume(ran):
    """On all ranks, by the name of the file of the last rank, before anything is loaded."""
    fact = (
        "checkpoint-2{}its global_step2/zero_pp_rank_1_mp_rank_00_optim_states.pt is damaged, since its digest differs"
    )
    swift = ran("text-damaged-zero3")
    for rank in range(2):
        assert ["ArgumentError", "host"] == json.loads((swift.folder / f"error{rank}.json").read_text())
        assert "2" == (ran("rl-three-damaged").folder / f"status{rank}").read_text()
    assert fact.format(" cannot be resumed from: ") in " ".join(swift.said.split())
    assert fact.format(", but ") in " ".join((ran("").folder / "rank0.log").read_text().split())


def test_ruined_weights_end_a_run_before_a_save(ran, demo):
    """Their size is that of all parts together, each counted once."""
    weights = load_file(demo / "models" / "qwen2" / "model.safetensors").values()
    before = root_mean_square([one.float().requires_grad_() for one in weights])

    log = (ran("").folder / "rank0.log").read_text()
    assert f"the trained weights after optimizer step 1 ({before:.3g} before the first) is " in log
    assert ["2", "2"] == [(ran("ruined").folder / f"status{rank}").read_text() for rank in range(2)]
    assert not [*ran("ruined").folder.glob("checkpoint-*")]
