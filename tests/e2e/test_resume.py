"""
A resumed run is the run that was not interrupted; on other ranks it trains what the epoch has left.
"""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import re
import shutil
from collections import Counter
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file

from packplan.adapters.ranks.torch_group import OneRank
from packplan.app import sft
from packplan.app.wiring import training
from packplan.core.errors import ConfigError, OutputError, StaleError
from packplan.core.schedule import ORDER_VERSION
from tests.e2e import rank_main
from tests.processes import finished

pytestmark = pytest.mark.slow


def steps(history) -> list[dict]:
    """Return what was logged of each step, but for the clock's."""
    clock = {"tokens_per_second", "useful_tokens_per_second"}
    return [{key: entry[key] for key in entry.keys() - clock} for entry in history if "loss" in entry]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint."""
    (path,) = folder.glob("*model.safetensors")
    return load_file(path)


def assert_equal(found: Path, expected: Path) -> None:
    """Compare the weights of two checkpoints, bit for bit."""
    left, right = weights(found), weights(expected)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


KEYS = {
    "num_train_epochs": 2,
    "effective_batch_size": 2,
    "packing_drop_last": False,
    "save_strategy": "steps",
    "save_steps": 1,
}

EPOCH_END = -1

SHORT = {"weight_decay": 0.1, "lr_scheduler_type": "constant", "learning_rate": "5e-3", "logging_steps": 1,
         "report_to": "none", "gradient_checkpointing": False, "dataloader_num_workers": 0}  # fmt: skip
"""What the run of `trained` says beside `KEYS`."""

LORA = {"tuner_type": "lora", "lora_dropout": 0.2}


@pytest.fixture
def few(few_scenes):
    """Return a function that gives the sections of a run of three steps an epoch, or four."""

    def sections(model: str) -> dict[str, dict]:
        if model.endswith("vl"):
            return {"custom": {"train_jsonl": str(few_scenes)}, "template": {"max_length": 500}}
        return {"template": {"max_length": 256}}

    return sections


@pytest.mark.parametrize(
    ("model", "stops", "saved", "workers", "more"),
    [
        ("qwen2", [1, 5], {}, 0, LORA),
        ("qwen3", [EPOCH_END], {"save_strategy": "epoch"}, 2, {}),
        ("qwen2_5_vl", [EPOCH_END], {"save_strategy": "epoch"}, 0, LORA),
        ("qwen3_vl", [2], {"save_steps": 2}, 2, {}),
    ],
)
def test_a_resume_ends_bit_for_bit_as_one_run_does(  # noqa: PLR0917  # fixtures
    write_run, execute, few, tmp_path, model, stops, saved, workers, more
):
    """
    From the middle of an epoch and from its end: the same losses, telemetry and final weights. A
    checkpoint of adapters holds no whole weights.
    """
    overlay = few(model)
    keys = {**KEYS, **saved, **more, "dataloader_num_workers": workers}
    whole = execute(write_run(model, name="whole", training=keys, **overlay))
    last, per_epoch = whole.num_steps, whole.schedule.steps_per_epoch
    assert per_epoch > 2

    for stop in stops:
        step = per_epoch if stop == EPOCH_END else stop
        checkpoint = str(tmp_path / "whole" / f"checkpoint-{step}")
        shutil.copytree(tmp_path / "whole" / "static_packing", tmp_path / f"from{step}" / "static_packing")
        again = {**keys, "resume_from_checkpoint": checkpoint, "save_strategy": "steps", "save_steps": last}
        resumed = execute(write_run(model, name=f"from{step}", training=again, **overlay))

        assert steps(whole.history) == steps(resumed.history)
        found = tmp_path / f"from{step}" / f"checkpoint-{last}"
        assert_equal(found, tmp_path / "whole" / found.name)
        kept = "adapter_model.safetensors" if more is LORA else "model.safetensors"
        assert [kept] == [path.name for path in found.glob("*.safetensors")]


def test_a_resumed_run_says_which_settings_are_its_checkpoints(trained, write_run, execute, caplog):
    """
    Its optimizer brings learning rate and the like along, whatever the YAML says now: both numbers
    are in the log.
    """
    sections, folder, _ = trained
    keys = {**KEYS, **SHORT, "save_strategy": "no", "max_steps": 2}
    resumed = {**keys, "resume_from_checkpoint": str(folder / "checkpoint-1")}

    def warned(name, **changes):
        caplog.clear()
        result = execute(write_run("qwen2", name=name, training={**resumed, **changes}, **sections))
        lines = [record.getMessage() for record in caplog.records if record.name == "packplan.adapters.trainer.base"]
        return lines, result.history

    assert [] == warned("same")[0]
    lines, history = warned("other", learning_rate="1e-5", adam_epsilon="1e-6")
    assert lines[0].startswith("training.learning_rate is 1e-05, but the run goes on with its checkpoint's 0.005: ")
    assert lines[1].startswith("training.adam_epsilon is 1e-06, but the run goes on with its checkpoint's 1e-08: ")
    assert 2 == len(lines)
    assert 0.005 == next(entry["learning_rate"] for entry in reversed(history) if "loss" in entry)


def test_what_is_skipped_is_not_loaded(trained, write_run, execute, fetched):
    """Only the packs that are left are fetched, each once."""
    sections, folder, first = trained

    keys = {**KEYS, "save_strategy": "no", "resume_from_checkpoint": str(folder / "checkpoint-2")}
    execute(write_run(training=keys, **sections))

    assert len(first.schedule.order(0)) > 2 * 2
    left = [*first.schedule.order(0)[2 * 2 :].tolist(), *first.schedule.order(1).tolist()]
    assert left == fetched


def test_a_checkpoint_names_its_attention_and_the_model_in_it_does_not(trained, write_run, execute, caplog):
    """It resumes under another one, which is logged; plain transformers loads the model."""
    from transformers import AutoModelForCausalLM

    sections, folder, _ = trained
    checkpoint = folder / "checkpoint-1"

    state = json.loads((checkpoint / "trainer_state.json").read_text())
    assert {"attn_impl": "varlen"} == state["stateful_callbacks"]["packplan_attention"]
    assert not re.search("varlen|packplan", (checkpoint / "config.json").read_text())
    assert "sdpa" == AutoModelForCausalLM.from_pretrained(checkpoint).config._attn_implementation

    keys = {**KEYS, "save_strategy": "no", "max_steps": 2, "resume_from_checkpoint": str(checkpoint)}
    sections = {**sections, "model": {**sections["model"], "attn_impl": "sdpa"}}
    with caplog.at_level(logging.INFO):
        resumed = execute(write_run(training=keys, **sections))
    assert 2 == resumed.num_steps
    assert "trained by the attention varlen; the run goes on by sdpa" in caplog.text
    assert "attention: sdpa: attn_impl names it" in caplog.text


def test_a_plan_that_changed_is_refused_with_both_checksums(trained, write_run, execute, tmp_path):
    """And so are other data, another seed and another version of the order; nothing is trained."""
    sections, folder, first = trained
    checkpoint = tmp_path / "checkpoint-1"
    shutil.copytree(folder / "checkpoint-1", checkpoint)
    keys = {**KEYS, "resume_from_checkpoint": str(checkpoint)}

    other = {**sections, "template": {**sections["template"], "max_length": 200}}
    with pytest.raises(StaleError, match=f"plan: stored '{first.planned['train'].raw_checksum}', now '"):
        execute(write_run(training=keys, **other))
    with pytest.raises(StaleError, match="seed: stored 42, now 7"):
        execute(write_run(training={**keys, "data_seed": 7}, **sections))
    with pytest.raises(ConfigError, match="would train packs of the epoch again"):
        execute(write_run(training={**keys, "ignore_data_skip": True}, **sections))
    path = checkpoint / "trainer_state.json"
    state = json.loads(path.read_text())
    assert ORDER_VERSION == state["stateful_callbacks"]["packplan"]["order_version"]
    state["stateful_callbacks"]["packplan"]["order_version"] = ORDER_VERSION + 1
    path.write_text(json.dumps(state))
    with pytest.raises(StaleError, match=f"order_version: stored {ORDER_VERSION + 1}, now {ORDER_VERSION}") as raised:
        execute(write_run(training=keys, **sections))
    assert "changed_order" == raised.value.kind


def tear(folder: Path, part: str) -> None:
    """Damage a checkpoint as a kill, a full disk or another program may."""
    state = folder / "trainer_state.json"
    if part == "state":
        state.write_text(state.read_text()[:40])
    elif part == "resume state":
        content = json.loads(state.read_text())
        del content["stateful_callbacks"]["packplan"]
        state.write_text(json.dumps(content))
    elif part in {"optimizer.pt", "packplan_digests_0.json"}:
        (folder / part).unlink()
    elif part.startswith("64 bytes of "):
        file = folder / part.removeprefix("64 bytes of ")
        content = bytearray(file.read_bytes())
        middle = len(content) // 2
        content[middle : middle + 64] = bytes(255 - byte for byte in content[middle : middle + 64])
        file.write_bytes(content)
    else:
        (folder / part).write_bytes((folder / part).read_bytes()[:-1])


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ("state", "is damaged"),
        ("resume state", "was not written by this program"),
        ("optimizer.pt", "its optimizer.pt is missing: copy it again, or name another checkpoint"),
        ("model.safetensors", r"its model.safetensors has [\d,]+ bytes instead of [\d,]+: copy it again"),
        ("rng_state.pth", r"its rng_state.pth has [\d,]+ bytes instead of"),
        (
            "64 bytes of model.safetensors",
            "its model.safetensors is damaged, .*: copy it again, or name another checkpoint",
        ),
        ("64 bytes of optimizer.pt", "its optimizer.pt is damaged"),
        ("64 bytes of packplan_digests_0.json", "its .* damaged"),
        ("packplan_digests_0.json", "its packplan_digests_0.json is missing"),
    ],
)
def test_a_torn_or_foreign_checkpoint_is_no_checkpoint(  # noqa: PLR0917  # fixtures
    trained, write_run, execute, tmp_path, part, reason
):
    """`last` passes over it; named, it is refused with the reason."""
    sections, folder, _ = trained
    whole, torn = tmp_path / "run" / "checkpoint-2", tmp_path / "run" / "checkpoint-3"
    for copy in (whole, torn):
        shutil.copytree(folder / "checkpoint-2", copy)
    tear(torn, part)

    with pytest.raises(ConfigError, match=reason):
        execute(write_run(training={**KEYS, "resume_from_checkpoint": str(torn)}, **sections))
    last = training.read_config(write_run(training={**KEYS, "resume_from_checkpoint": "last"}, **sections))
    found = training.open_checkpoint(last, OneRank())

    assert (str(whole), 2) == (found.folder, found.resume_state.progress.step)


@pytest.fixture(scope="module")
def trained(demo, tmp_path_factory):
    """The sections of a short run of `qwen2`, its folder with two checkpoints, and its result."""
    folder = tmp_path_factory.mktemp("trained")
    messages = [{"role": "user", "content": "say"}, {"role": "assistant", "content": "blue circle " * 7}]
    (folder / "text.jsonl").write_text(f"{json.dumps({'messages': messages})}\n" * 16)
    sections = {
        "model": {"model": str(demo / "models" / "qwen2")},
        "template": {"max_length": 128, "system": "You look at scenes."},
        "custom": {"train_jsonl": str(folder / "text.jsonl")},
    }
    keys = {**KEYS, **SHORT, "output_dir": str(folder / "run"), "max_steps": 2}
    (folder / "run.yaml").write_text(yaml.safe_dump({**sections, "training": keys}))
    result = sft.run(training.read_config(folder / "run.yaml"), OneRank())
    return sections, folder / "run", result


def test_a_checkpoint_without_digests_is_taken_by_its_sizes(trained, write_run, tmp_path, caplog):
    """As earlier versions wrote them; the log says so."""
    logging.getLogger("packplan").propagate = True
    sections, folder, _ = trained
    old = tmp_path / "checkpoint-2"
    shutil.copytree(folder / "checkpoint-2", old)
    (old / "packplan_digests_0.json").unlink()
    state = json.loads((old / "trainer_state.json").read_text())
    del state["stateful_callbacks"]["packplan_files"]["packplan_digests_0.json"]
    (old / "trainer_state.json").write_text(json.dumps(state))

    config = training.read_config(write_run(training={**KEYS, "resume_from_checkpoint": str(old)}, **sections))
    found = training.open_checkpoint(config, OneRank())

    assert (str(old), 2) == (found.folder, found.resume_state.progress.step)
    assert "checkpoint-2 has no digests" in caplog.text


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"lora_rank": 4}, "whose weights this run cannot take: .* size mismatch .*; restore the settings"),
        ({"target_modules": ["q_proj"]}, "whose optimizer this run cannot take: .* parameter group .*; restore"),
        ({"optim": "adafactor"}, "whose optimizer .*: it has no beta1, .* so another training.optim made it; restore"),
    ],
)
def test_adapters_of_other_settings_are_nothing_to_go_on_from(adapted, write_run, execute, changed, says):
    """The checkpoint is named with the library's reason, in one line."""
    keys = {**KEYS, **LORA, "max_steps": 2, "resume_from_checkpoint": str(adapted)}

    with pytest.raises(ConfigError, match=rf"training\.resume_from_checkpoint: is {adapted}, {says}") as raised:
        execute(write_run("qwen2", training={**keys, **changed}))

    assert len(str(raised.value).splitlines()) == 2


def test_adapters_of_another_base_model_are_told(adapted, write_run, demo, tmp_path, caplog):
    """With both models; those of the same model are not."""
    logging.getLogger("packplan").propagate = True
    keys = {**KEYS, **LORA, "resume_from_checkpoint": str(adapted)}
    assert training.open_checkpoint(training.read_config(write_run("qwen2", training=keys)), OneRank())
    assert "adapters" not in caplog.text

    shutil.copytree(demo / "models" / "qwen2", tmp_path / "other")
    other = write_run("qwen2", model={"model": str(tmp_path / "other")}, training=keys)
    assert training.open_checkpoint(training.read_config(other), OneRank())

    assert f"trained on {demo / 'models' / 'qwen2'}, and goes on with model.model {tmp_path / 'other'}" in caplog.text


@pytest.fixture
def adapted(write_run, execute, tmp_path):
    """Return a checkpoint of a step of adapters."""
    execute(write_run("qwen2", training={**KEYS, **LORA, "max_steps": 1}))
    return tmp_path / "run" / "checkpoint-1"


def test_weights_alone_are_nothing_to_resume_from(write_run, execute, tmp_path):
    """Without the optimizer it would be another run."""
    execute(write_run("qwen2", training={**KEYS, "max_steps": 1, "save_only_model": True}))

    with pytest.raises(ConfigError, match="holds weights alone"):
        keys = {**KEYS, "resume_from_checkpoint": str(tmp_path / "run" / "checkpoint-1")}
        execute(write_run("qwen2", training=keys))


def test_where_what_is_left_fills_no_batch_the_next_epoch_goes_on(write_run, execute, text_jsonl, tmp_path):
    """
    With larger padded batches, and the remainder dropped: neither a step of it nor a crash; at the
    last epoch, no step.
    """
    num, data = 8, tmp_path / "eight.jsonl"
    data.write_text("".join(text_jsonl.read_text().splitlines(keepends=True)[:num]))
    keys = {"packing": False, "dataloader_drop_last": True, "num_train_epochs": 2, "save_strategy": "steps",
            "save_steps": num - 1, "per_device_train_batch_size": 1}  # fmt: skip
    run = {"of": "qwen2", "custom": {"train_jsonl": str(data)}}
    execute(write_run(**run, training={**keys, "max_steps": num - 1}))
    keys |= {
        "per_device_train_batch_size": 2,
        "resume_from_checkpoint": str(tmp_path / "run" / f"checkpoint-{num - 1}"),
    }

    resumed = execute(write_run(**run, training=keys))

    assert (0, num // 2) == (resumed.schedule.num_batches(0), resumed.num_steps - (num - 1))
    assert all(entry["epoch"] > 1 for entry in resumed.history if "loss" in entry and entry["step"] >= num)
    assert num - 1 == execute(write_run(**run, training={**keys, "num_train_epochs": 1})).num_steps


def test_the_settings_of_the_resumed_run_count(trained, write_run, execute, tmp_path):
    """How often it logs and saves, not how often the run before did; another tuner is refused."""
    sections, folder, _ = trained
    keys = {
        **KEYS,
        "resume_from_checkpoint": str(folder / "checkpoint-2"),
        "max_steps": 6,
        "save_steps": 4,
        "logging_steps": 3,
    }

    resumed = execute(write_run(training=keys, **sections))

    assert [3, 6] == [entry["step"] for entry in resumed.history if "loss" in entry and entry["step"] > 2]
    assert {"checkpoint-4", "checkpoint-6"} == {path.name for path in (tmp_path / "run").glob("checkpoint-*")}
    with pytest.raises(StaleError, match="tuner: stored 'full', now 'lora'"):
        execute(write_run(training={**keys, "tuner_type": "lora"}, **sections))


def test_a_finished_run_has_nothing_left(trained, write_run, execute, caplog):
    """Resuming it trains no step, and changes nothing."""
    logging.getLogger("packplan").propagate = True
    sections, folder, whole = trained
    keys = {**KEYS, **SHORT, "output_dir": str(folder), "max_steps": 2, "resume_from_checkpoint": "last"}

    again = execute(write_run(training=keys, **sections))

    assert whole.num_steps == again.num_steps == again.schedule.start.step == 2
    assert steps(whole.history) == steps(again.history)
    assert "nothing is left to train" in caplog.text


def test_other_ranks_finish_the_epoch_with_what_it_has_left(  # noqa: PLR0917  # fixtures
    start_ranks, write_run, execute, fetched, caplog, tmp_path
):
    """
    Each pack that was not consumed is trained once, fillers aside; the next epoch is whole; steps
    are as announced.
    """
    keys = {**KEYS, "per_device_train_batch_size": 1}
    path = write_run("qwen3", training={**keys, "max_steps": 1}, template={"max_length": 128})
    assert [0, 0] == finished(start_ranks(2, path, tmp_path / "first"))
    before = rank_main.seen(tmp_path / "first", 2)
    keys |= {"save_strategy": "no", "resume_from_checkpoint": str(tmp_path / "run" / "checkpoint-1")}

    said, out = "the epoch began on 2 ranks and goes on with ", tmp_path / "on3"
    paths = [
        write_run("qwen3", name=f"again{now}", training={**keys, "effective_batch_size": 2 * now},
                  template={"max_length": 128}) for now in (1, 3)
    ]  # fmt: skip
    three = start_ranks(3, paths[1], out)
    with caplog.at_level(logging.INFO):
        alone = execute(paths[0])
    check_rest(before, [{"fetched": fetched, "steps": alone.num_steps, "planned_steps": alone.schedule.total_steps,
                         "history": alone.history}])  # fmt: skip
    assert f"{said}1" in caplog.text

    assert [0, 0, 0] == finished(three)
    check_rest(before, rank_main.seen(out, 3))
    assert f"{said}3" in (out / "rank0.log").read_text()


def check_rest(before, after):
    """Hold what ranks trained after one step of others against the epoch's packs."""
    now = len(after)
    consumed = [rank["fetched"][0] for rank in before]
    num_packs = before[0]["num_raw"]
    left = set(range(num_packs)) - set(consumed)
    batches = -(-len(left) // now)
    here = Counter(chain.from_iterable(rank["fetched"][:batches] for rank in after))
    assert left == set(here)
    assert batches * now - len(left) == here.total() - len(here) < now
    next_epoch = Counter(chain.from_iterable(rank["fetched"][batches:] for rank in after))
    assert set(range(num_packs)) == set(next_epoch)
    assert -num_packs % now == next_epoch.total() - num_packs
    steps_here, steps_next = math.ceil(batches / 2), math.ceil(math.ceil(num_packs / now) / 2)
    assert 1 + steps_here + steps_next == after[0]["steps"] == after[0]["planned_steps"]
    assert all(rank["steps"] == after[0]["steps"] for rank in after)
    epochs = [entry["epoch"] for entry in after[0]["history"] if "loss" in entry]
    assert sorted(epochs) == epochs
    assert 2 == epochs[-1]
    covered = [entry["epoch_coverage"] for entry in after[0]["history"] if "epoch_coverage" in entry]
    assert [covered[-1]] * 2 == covered[-2:]


def test_a_checkpoint_that_is_written_over_is_whole(trained, write_run, execute, tmp_path, caplog):
    """A second run into the same folder says that it starts anew; what it saves is resumed from."""
    sections, folder, _ = trained
    shutil.copytree(folder, tmp_path / "same")
    keys = {**KEYS, "max_steps": 2}
    execute(write_run(name="same", training=keys, **sections))
    assert "this run starts from the beginning, and writes over the checkpoints that it meets" in caplog.text

    again = {**keys, "resume_from_checkpoint": "last", "max_steps": 3}
    resumed = execute(write_run(name="same", training=again, **sections))

    assert "is passed over" not in caplog.text
    assert resumed.schedule.start.step == 2


def test_ranks_meet_where_rank_zero_cannot_write(write_run):
    """It says why, and the others, which wait for it, that it is rank 0's."""
    config = training.read_config(write_run("qwen2", training={"output_dir": "/dev/null/run"}))
    met = []

    def meet(rank, value):
        met.append((rank, value))
        return True

    for rank, error, says in ((0, OutputError, "/dev/null/run cannot be written"), (1, ConfigError, "rank 0 cannot")):
        group = SimpleNamespace(rank=rank, any=partial(meet, rank))
        with pytest.raises(error, match=says), training.alone_in_output(config, group):
            raise AssertionError
    assert [(0, True), (1, False)] == met


def test_two_runs_do_not_train_into_one_folder(write_run, tmp_path, capsys):
    """The second is refused by key, as long as the first trains."""
    path = write_run("qwen2", training=KEYS)
    with training.alone_in_output(training.read_config(path), OneRank()):
        assert 2 == sft.main([str(path)])
    assert "training.output_dir: is " in (said := capsys.readouterr().err)
    assert "which another run trains into" in said


def test_the_processes_of_loaders_end_with_training(trained, write_run, execute):
    """Those of a resumed epoch too; torch waits 5 s for each that the garbage collector ends."""
    sections, folder, _ = trained
    keys = {**KEYS, "dataloader_num_workers": 2, "save_strategy": "no", "max_steps": 2}
    execute(write_run(name="whole", training=keys, **sections))
    again = {**keys, "resume_from_checkpoint": str(folder / "checkpoint-1")}
    execute(write_run(name="resumed", training=again, **sections))

    assert [] == multiprocessing.active_children()
