"""
A command of ms-swift becomes a run: what its shell says, what its arguments are, what they become.
"""

from __future__ import annotations

import re
import shlex
from itertools import product

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packplan.adapters.config.run import parse_config
from packplan.adapters.config.trainer_keys import stored_keys
from packplan.adapters.conversion.table import stored_arguments
from packplan.core.config import TUNERS
from packplan.core.conversion import (
    Given,
    ModelFacts,
    World,
    as_torchrun,
    convert,
    find_launch,
    packs_of_step,
    ranks_and_nodes,
    ranks_of_devices,
    read_keys,
    read_resolved,
    read_script,
    read_words,
    require_consistent,
    with_exported_data,
    with_packs,
    without_packs,
)
from packplan.core.errors import ConfigError

TABLE = stored_arguments()

KEYS = stored_keys()

TEXT = ModelFacts(is_multimodal=False, max_length=4096, torch_dtype="bfloat16")


FLOAT32 = attrs.evolve(TEXT, torch_dtype="float32")

UNKNOWN = ModelFacts()


def launched(script, environment=()):
    """Return the launch of a script."""
    return find_launch(read_script(script, dict(environment), source="train.sh"), source="train.sh")


def arguments_of(script):
    """Return the arguments of a script, if they go together."""
    given = read_words(launched(script).arguments, TABLE, source="train.sh")
    require_consistent(given, source="train.sh")
    return given


def world(model=TEXT, **others):
    """Return what is known beside the arguments."""
    sections = {"zero2": {"zero_optimization": {"stage": 2}}, "fsdp2": {"fsdp": "full_shard", "fsdp_config": {"a": 1}}}
    return World(model, lambda _: False, sections, **others)


def converted(arguments, *, model=TEXT, **others):
    """Return the run of a command's arguments, beside those that every command needs."""
    for needed in ("--dataset a.jsonl", "--model m"):
        if needed.split()[0] not in arguments.split():
            arguments = f"{needed} {arguments}"
    return convert(arguments_of(f"swift sft {arguments}"), TABLE, world(model, **others))


def verdicts(conversion):
    """Return argument -> verdict and reason."""
    return {line.argument: (line.verdict, line.reason) for line in conversion.lines}


@given(st.lists(st.text(st.characters(exclude_characters="\0"), max_size=12), min_size=1, max_size=6))
def test_quoted_words_come_back_as_they_were(words):
    """Whatever they hold, as `shlex` quotes them for a shell."""
    script = " ".join(["swift", "sft", "--dataset", *map(shlex.quote, words)])

    assert words == [word.text for word in launched(script.replace("\r", "")).arguments[1:]] or "\r" in script


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("swift sft --a 1 # --b 2", "--a 1"),
        ("swift sft \\\n  --a 1 \\\n  --b 2\necho --c 3", "--a 1 --b 2"),
        ("A='1 2'\nswift sft --a $A --b \"$A\"", "--a 1 2 --b '1 2'"),
        ('ARGS="--a 1"\nARGS+=" --b 2"\nswift sft $ARGS', "--a 1 --b 2"),
        ("export A=1 B\nswift sft --a ${A} --b ${C:-2} --c ${A:-3}x", "--a 1 --b 2 --c 1x"),
        ("swift sft --a 1 2>&1 | tee log.txt", "--a 1"),
        ("swift sft --a 1 > log 2>&1 &", "--a 1"),
        ("nohup env A=1 swift sft --a 1 &> log", "--a 1"),
        ("cd x && swift sft --a 1; echo done || exit 1", "--a 1"),
        ("swift sft --a 1 2 < file", "--a 1 2"),
        ('swift sft --a a\\ b \'c\'"d\\"\\$"', "--a 'a b' 'cd\"$'"),
        ('swift sft --a $ --b "x\\\ny"', "--a '$' --b xy"),
        ("A=x=1\nexport C=$A\nC=2\nswift sft --a $C", "--a 2"),
        ("torchrun --nnodes\nswift sft --a 1", "--a 1"),
        ("time\nnohup swift sft --a 1", "--a 1"),
        ("python -m torch.distributed.run --standalone --nnodes -m swift.cli.sft --a 1\nswift sft --a 1", "--a 1"),
        ("swift sft --a \\", "--a"),
        ("swift sft --a 1 || swift infer", "--a 1"),
        ('A=\nswift sft --a ${A:-2} --b "${A}" --c $A', "--a 2 --b '' --c"),
        ("A=1\n$B A=2;$A swift sft --a $A", "--a 1"),
        ("swift sft --a 1 2> log 3>>log", "--a 1"),
        ("swift sft --a 'b;c' \"(d)\" e\\;f '$g' \"h\ni\"", "--a 'b;c' '(d)' 'e;f' '$g' 'h\ni'"),
        ("A='1  2'\"'\"\nswift sft --a $A", "--a 1 '2'\"'\"''"),
        ("swift sft --a b#c | grep #d\n", "--a 'b#c'"),
        ('swift sft --a "\\x"', "--a '\\x'"),
        ("torchrun --nproc_per_node=2 --standalone swift/cli/sft.py --a 1", "--a 1"),
        ("python -m torch.distributed.run --nproc-per-node 2 /x/swift/cli/sft.py --a 1", "--a 1"),
        ("python -u -m swift.cli.sft --a 1", "--a 1"),
        ("python train.py --x\nswift sft --a 1", "--a 1"),
        ("swift sft --a 1\r\n", "--a 1"),
    ],
)
def test_a_shell_would_hand_over_the_same_words(script, words):
    """Continuations, variables, quotes, redirections, launchers; nothing is run."""
    assert words == shlex.join(word.text for word in launched(script, {"HOME": "/root"}).arguments)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("swift sft --a 'x", "line 1: a quote of it does not close"),
        ('echo\nswift sft --a "x', "line 2: a quote of it does not close"),
        ("swift sft --a $(expr 1", "line 1: '$(expr 1' does not close"),
        ("swift sft --a `x", "line 1: '`x' does not close"),
        ("swift sft --a ${x", "line 1: '${x' does not close"),
        ("if true; then\nswift sft --a 1\nfi", "line 1: if decides which commands run"),
        ("A=(1 2)\nswift sft --a 1", "line 1: ( is a function, a list"),
        ("swift sft --a 1 << END", "line 1: << is a function"),
        ("swift sft \\\n # no\n --a 1", "line 3: --a stands alone"),
        ("A=1\nunset A\nswift sft --a 1", "line 2: unset decides"),
        ("echo hello", "holds no command of ms-swift"),
        ("torchrun $(which swift) sft --a 1", "$(which swift) in line 1 is not computed here"),
        ("swift", "line 1: swift  is no command of ms-swift"),
        ("swift rlhf --a 1", "line 1: swift rlhf trains on preferences or rewards"),
        ("swift infer --a 1\nswift export --b 1", "line 2: swift export trains nothing"),
        ("megatron sft --a 1", "megatron sft trains with Megatron-LM"),
        ("swift sft --a 1\nswift sft --a 2", "2 commands of swift sft, in the lines 1, 2"),
        ("swift sft --lerning_rate 1", "--lerning_rate: is no argument of ms-swift: did you mean --learning_rate?"),
        ("swift sft --zigzag 1", "--zigzag: is no argument of ms-swift: remove it"),
        ("swift sft x --seed 1", "x: stands before any argument"),
        ("swift sft --seed 1 --seed 2", "--seed: is given 2 times, as 1 and 2, of which ms-swift would take the last"),
        ("swift sft --seed x", "--seed: is x, but has to be a whole number"),
        ("swift sft --seed", "--seed: has no value"),
        ("swift sft --seed 1 2", "--seed: takes one value, but has 2 (1 2): put quotes around it"),
        ("swift sft --packing maybe", "--packing: is maybe, but has to be true or false"),
        ("swift sft --seed $(date)", "--seed: is computed by the script ($(date) in line 1)"),
        ("swift sft --seed `date`", "is computed by the script (`date` in line 1)"),
        ("swift sft --seed $1 --model ${A%b}", "--model: is computed by the script (${A%b} in line 1)"),
        ("swift sft \\\n--seed $((1 / 0))", "--seed: is computed by the script ($((1 / 0)) in line 2: only whole"),
        ("swift sft --rlhf_type dpo --beta 1", "rlhf_type: is of swift rlhf, which trains on preferences or rewards"),
        ("swift sft --dataset a", "--model: is not given"),
        ("swift sft --model m", "--dataset: is not given"),
        ("swift sft --model m --dataset a --task_type embedding", "packplan plugin swift -o plugin.py"),
        ("swift sft --model m --dataset a --task_type decision", "is decision, but only causal_lm is trained here"),
        ("swift sft --model m --dataset a --tuner_type reft", "--tuner_type: is reft, but has to be one of full, lora"),
        ("swift sft --bf16 true --fp16 true", "--bf16: and --fp16 are both true"),
        ("swift sft --packing true --lazy_tokenize true", "--packing: and --lazy_tokenize exclude"),
        ("swift sft --tuner_type full --quant_method bnb", "--quant_method: quantises"),
        ("swift sft --quant_method bnb", "--quant_method: needs --quant_bits"),
        ("swift sft --tuner_type full --use_dora true", "--tuner_type: is full, but --use_dora"),
    ],
)
def test_what_is_no_command_of_ms_swift_says_so(script, says):
    """
    Scripts that decide or compute, other tasks, arguments that are none, or contradict each other:
    the line or the argument, and what to do.
    """
    with pytest.raises(ConfigError, match=re.escape(says)):
        arguments_of(script)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("$(expr 16 / $n)", "5"),
        ("`expr 16 / $n`", "5"),
        ("$(expr \\( 1 + $n \\) \\* ${m:-4} '%' 7)", "2"),
        ("$((16 / n))", "5"),
        ("$((16/$n))", "5"),
        ("$(( (1 + ${n}) * 2 - 20 % n ))", "6"),
        ("$(( -n * (-2) ))", "6"),
        ("$((-n))", "-3"),
        ("$((low / 2))", "-3"),
        ("$((low % 2))", "-1"),
        ("$((0 - 7 / 2))", "-3"),
        ("$((n - low - 1))", "9"),
    ],
)
def test_whole_numbers_of_the_script_are_computed(written, value):
    """As the shell does: truncated towards zero, a product before a sum."""
    assert value == launched(f"n=3\nlow=-7\nswift sft --seed {written}").arguments[1].text
    assert (value, ()) == attrs.astuple(launched(f'n=3 low=-7\nGPUS="{written}" swift sft').environment["GPUS"])[:2]


@pytest.mark.parametrize(
    "written",
    ["$(expr 16 / $gone)", "$(expr 2 * 3)", "$(expr 4 / 2 | wc -c)", "$(expr 1; date)", "$(expr 1\ndate)",
     "$(expr ( 1 ))", "$(expr 16/2)", "$(expr length abc)", "$(date +%s)", "$((2 ** 3))", "$((n++))", "$((n > 2))",
     '$((2" "3))', "$((010))", "$((gone))", "$((1 +))", "$(((1 + 2) * (3))", "$(( (1 2) ))", "$(( $((2 * 3)) + 1 ))",
     "$((--n))", "${n-1}", "${n:+1}", "$?", "$((5 % 0))", "$((9223372036854775807 * 2))", "$((99999999999999999999))",
     "$(())", "$(expr )"],
)  # fmt: skip
def test_what_else_a_shell_would_compute_is_refused_by_its_line(written):
    """Nothing is run, and nothing is guessed."""
    with pytest.raises(ConfigError, match=r"line 3(:|\))"):
        arguments_of(f"n=3\n\nswift sft --seed {written}")


@pytest.mark.parametrize(
    ("start", "found"),
    [
        ("", (1, 1)),
        ("NPROC_PER_NODE=4 ", (4, 1)),
        ("NPROC_PER_NODE= NNODES=2 ", (1, 2)),
        ("NPROC_PER_NODE=$(nproc) ", "NPROC_PER_NODE: is computed by the script"),
        ("NNODES=0 ", "NNODES: is 0, but has to be a number of ranks"),
        ("NPROC_PER_NODE=gpu ", "NPROC_PER_NODE: is gpu, but has to be a number of ranks"),
    ],
)
def test_ranks_and_machines_are_numbers(start, found):
    """One of each where a command says nothing."""
    launch = launched(f"{start}swift sft --model m")
    if isinstance(found, str):
        with pytest.raises(ConfigError, match=re.escape(found)):
            ranks_and_nodes(launch, source="train.sh")
    else:
        assert found == ranks_and_nodes(launch, source="train.sh")


def test_ranks_and_variables_are_those_of_the_command():
    """Of the environment and of torchrun; other commands of the script are named."""
    script = "MAX_PIXELS=9\nexport MAX_PIXELS NONE\nNPROC_PER_NODE=4 MASTER_PORT=29 swift sft --a 1\nswift infer"
    launch = launched(script)

    assert ("4", ["MAX_PIXELS"]) == (launch.ranks_per_node.text, list(launch.environment))
    assert ["--master-port", "29"] == [word.text for word in launch.torchrun]
    assert ("line 4: swift infer",) == launch.left


RANKS = {"num_machines": 2, "num_processes": 8, "main_process_ip": "10.0.0.1", "main_process_port": 29500}


@pytest.mark.parametrize(
    ("command", "document", "ranks", "meeting", "given"),
    [
        ("accelerate launch --num_processes 4", {}, ("4", None), "", {}),
        ("accelerate launch --config_file a.json", {"num_processes": 2, "machine_rank": 0}, ("2", None), "", {}),
        (
            "accelerate launch --config_file a.json --machine_rank 1", RANKS, ("4", "2"),
            "--master-addr 10.0.0.1 --master-port 29500 --node-rank 1", {},
        ),
        ("D_VISIBLE_DEVICES=4,7 accelerate launch --multi_gpu", {}, ("2", None), "", {}),
        (
            "accelerate launch --config_file a.json",
            {"num_processes": 2, "distributed_type": "DEEPSPEED", "mixed_precision": "bf16",
             "deepspeed_config": {"zero_stage": 3, "gradient_clipping": "0.5"}},
            ("2", None), "", {"deepspeed": "zero3", "max_grad_norm": 0.5},
        ),
        (
            "accelerate launch --config_file a.json",
            {"num_processes": 2, "distributed_type": "DEEPSPEED",
             "deepspeed_config": {"zero_stage": 2, "offload_optimizer_device": "cpu"}},
            ("2", None), "", {"deepspeed": "zero2_offload"},
        ),
        (
            "accelerate launch --config_file a.json",
            {"num_processes": 2, "distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "z"}},
            ("2", None), "", {"deepspeed": "z"},
        ),
        (
            "accelerate launch --config_file a.json",
            {"num_processes": 2, "distributed_type": "FSDP",
             "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": False, "fsdp_offload_params": True}},
            ("2", None), "",
            {"fsdp": {"fsdp": "shard_grad_op auto_wrap offload",
                      "fsdp_config": {"fsdp_version": 2, "reshard_after_forward": False}}},
        ),
        (
            "accelerate launch --config_file a.json",
            {"num_processes": 2, "distributed_type": "FSDP",
             "fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_use_orig_params": True, "x": 1}},
            ("2", None), "",
            {"fsdp": {"fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_version": 1, "use_orig_params": True}}},
        ),
        ("deepspeed --num_gpus=4 --master_port 2", {}, ("4", None), "", {}),
        ("deepspeed --hostfile h", {"a": 2, "b": 2}, ("2", "2"), "--master-addr a", {}),
        ("deepspeed --hostfile h --num_gpus 1 --node_rank 1 --master_addr c", {"a": 2, "b": 4}, ("1", "2"),
         "--master-addr c --node-rank 1", {}),
    ],
)  # fmt: skip
def test_other_launchers_become_ranks_of_torchrun(command, document, ranks, meeting, given):
    """As many on as many machines, which meet where they met; sharding becomes an argument."""
    started = launched(f"{command} swift/cli/sft.py --a 1")
    launch, implied = as_torchrun(started, document, source="train.sh")

    assert ("_file" in command or "--hostfile" in command) == (started.launcher.file is not None)
    assert ranks == (launch.ranks_per_node.text, launch.nodes and launch.nodes.text)
    assert meeting == " ".join(word.text for word in launch.torchrun)
    assert given == {one.name: one.value for one in implied}
    assert ["--a", "1"] == [word.text for word in launch.arguments]


@pytest.mark.parametrize(
    ("command", "document", "says"),
    [
        ("accelerate launch", {}, "accelerate: does not say how many ranks each machine starts: add --num_processes"),
        ("accelerate launch", {"num_machines": 2, "num_processes": 3}, "does not say how many ranks"),
        ("deepspeed", {}, "deepspeed: does not say how many ranks each machine starts: add --num_gpus"),
        ("deepspeed --hostfile h", {"a": 1, "b": 2}, "does not say how many ranks"),
        ("deepspeed --include a:0,1", {"a": 2}, "deepspeed --include: sets training up by itself"),
        ("accelerate launch --use_fsdp", {"num_processes": 2}, "accelerate --use_fsdp: sets training up by itself"),
        ("accelerate launch", {"num_processes": 2, "distributed_type": "TPU"}, "distributed_type: is TPU"),
        (
            "accelerate launch",
            {"num_processes": 2, "distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "NO_SHARD"}},
            "fsdp_sharding_strategy: is NO_SHARD",
        ),
        (
            "accelerate launch",
            {"num_processes": 2, "distributed_type": "DEEPSPEED",
             "deepspeed_config": {"zero_stage": 1, "offload_optimizer_device": "cpu", "offload_param_device": "cpu"}},
            "deepspeed_config: asks for a stage or an offloading",
        ),
    ],
)  # fmt: skip
def test_launchers_that_set_training_up_themselves_are_refused(command, document, says):
    """By the option or the key."""
    with pytest.raises(ConfigError, match=re.escape(says)):
        as_torchrun(launched(f"{command} swift/cli/sft.py --a 1"), document, source="train.sh")


EXPORT = 'swift export --model m --dataset a b --columns \'{"q": "query"}\' --split_dataset_ratio 0.1 --quant_n 4 '


def of_export(export, train):
    """Return the arguments of a script that exports data and trains on them."""
    launch = launched(f"{EXPORT} {export}\nswift sft --model m {train}")
    return with_exported_data(read_words(launch.arguments, TABLE, source=""), launch.exports, TABLE, source="train.sh")


@pytest.mark.parametrize("folder", ["c", "./c", "c/", "/x/c"])
def test_cached_data_are_those_that_the_script_exports(folder):
    """With the columns and the split of the export; other arguments are those of training."""
    given = of_export(
        f"--to_cached_dataset true --output_dir {folder}",
        "--cached_dataset {0}/train --cached_val_dataset {0}/val --output_dir o".format(folder.rstrip("/")),
    )

    assert {"model": "m", "dataset": ["a", "b"], "columns": {"q": "query"}, "split_dataset_ratio": 0.1} == {
        one.name: one.value for one in given if one.name not in {"output_dir", "cached_dataset", "cached_val_dataset"}
    }
    assert ["o"] == [one.value for one in given if one.name == "output_dir"]
    lines = verdicts(convert(given, TABLE, world(exports=True)))
    assert {"not needed here"} == {verdict for line, (verdict, _) in lines.items() if line.startswith("--cached")}


@pytest.mark.parametrize(
    ("export", "train"),
    [
        ("--to_cached_dataset true --output_dir c", "--dataset b"),
        ("--to_cached_dataset true --output_dir d", "--cached_dataset c/train"),
        ("--to_cached_dataset false --output_dir c", "--cached_dataset c/train"),
        ("--to_cached_dataset true --output_dir c", "--cached_dataset c/train d/train"),
    ],
)
def test_other_exports_say_nothing_of_the_data(export, train):
    """Of another folder, or for another purpose."""
    launch = launched(f"swift sft --model m {train}")

    assert read_words(launch.arguments, TABLE, source="") == of_export(export, train)


def test_an_export_that_encodes_otherwise_than_training_is_refused():
    """By the argument that has two values."""
    with pytest.raises(ConfigError, match="--max_length: is 8 for swift export, and 9 for training: keep one"):
        of_export("--to_cached_dataset true --output_dir c --max_length 8", "--cached_dataset c/train --max_length 9")


@given(st.integers(1, 9), st.integers(1, 64), st.integers(1, 8))
def test_ranks_in_place_of_devices_share_the_samples_of_a_step(size, steps, devices):
    """A step of one process that spreads a model holds as many on the ranks that divide them."""
    words = f"--per_device_train_batch_size {size} --gradient_accumulation_steps {steps}"
    ranks = ranks_of_devices(arguments_of(f"swift sft --model m --dataset a.jsonl {words}"), devices)
    conversion = converted(words, world_size=ranks, spread="D=0,1")
    training = conversion.document["training"]

    assert 1 <= ranks <= devices
    assert size * steps == ranks * training["per_device_train_batch_size"] * training["gradient_accumulation_steps"]
    assert all(size * steps % more for more in range(ranks + 1, devices + 1))
    assert "changed" == verdicts(conversion)["D=0,1"][0]


def test_a_step_of_devices_has_ms_swift_s_default():
    """16 samples, whatever the ranks."""
    for ranks in (1, 2, 8):
        training = converted("", world_size=ranks, spread="D=0,1").document["training"]
        assert 16 == ranks * training["gradient_accumulation_steps"]


@pytest.mark.parametrize("tuner", TUNERS)
def test_arguments_of_one_tuner_count_under_it_alone(tuner):
    """Under another one they are not needed, and their keys are refused."""
    given = [
        "--lora_rank 3", "--target_modules q", "--modules_to_save n", "--freeze_parameters f", "--boft_block_size 2",
        "--vera_rank 2", "--fourier_scaling 2", "--adapter_length 2", "--llamapro_num_new_blocks 2", "--lora_bias all",
        "--init_weights pissa",
    ]  # fmt: skip
    read = {
        "full": {"freeze_parameters"}, "adapter": {"adapter_length"}, "llamapro": {"llamapro_num_new_blocks"},
        "lora": {"lora_rank", "lora_bias", "init_weights", "target_modules", "modules_to_save"},
        "boft": {"boft_block_size", "target_modules", "modules_to_save"},
        "vera": {"vera_rank", "target_modules", "modules_to_save"},
        "fourierft": {"fourier_scaling", "target_modules", "modules_to_save"},
    }.get(tuner, set())  # fmt: skip
    conversion = converted(f"--tuner_type {tuner} {' '.join(given)} --max_length 8 --output_dir o")
    said = verdicts(conversion)

    names = {line: line[2:].split()[0] for line in given}
    assert read == {names[line] for line in given if said[line][0] == "taken over"}
    assert set(names.values()) - read == {names[line] for line in given if said[line][0] == "not needed here"}
    assert {} == faults_of(conversion)
    trained = {**conversion.document["training"], "boft_block_size": 2, "use_dora": True, "freeze_parameters": ["f"]}
    faults = faults_of(attrs.evolve(conversion, document={**conversion.document, "training": trained}))
    wrong = {"boft_block_size": "boft", "use_dora": "lora", "freeze_parameters": "full"}
    assert {f"training.{key}" for key, of in wrong.items() if of != tuner} == set(faults)


def test_values_have_the_types_of_their_arguments():
    """Flags, numbers, lists, sections and texts; the names of earlier versions are known."""
    words = launched(
        "swift sft --packing --no_logging_first_step --seed=7 --learning_rate 1e-4 --num_train_epochs 2 "
        "--dataset a 'b c' "
        "--train_type full --lr_scheduler_kwargs '{\"min_lr\": 1}' --columns '[1]' --seed 7 "
        "--freeze-vit yes --max_length None"
    ).arguments
    given = {one.name: one.value for one in read_words(words, TABLE, source="")}

    assert {
        "packing": True, "logging_first_step": False, "seed": 7, "learning_rate": 1e-4, "num_train_epochs": 2,
        "dataset": ["a", "b c"], "tuner_type": "full", "lr_scheduler_kwargs": {"min_lr": 1}, "columns": "[1]",
        "freeze_vit": True, "max_length": None,
    } == given  # fmt: skip


def test_a_yaml_and_an_args_json_hold_the_same_arguments():
    """Of an args.json, those that are no default; what ms-swift found out is counted."""
    document = {"model": "m", "dataset": ["a"], "deepspeed": {"x": 1}, "seed": 42, "system": None}
    from_yaml = read_keys(document, TABLE, source="a.yaml")
    from_json, others = read_resolved({**document, "model_dir": "x", "rank": 0, "columns": {}}, TABLE)

    assert {"model": "m", "dataset": ["a"], "deepspeed": {"x": 1}, "seed": 42} == {
        one.name: one.value for one in from_yaml
    }
    assert {"model": "m", "dataset": ["a"], "deepspeed": {"x": 1}} == {one.name: one.value for one in from_json}
    assert 2 == others
    with pytest.raises(ConfigError, match="zigzag: is no argument of ms-swift"):
        read_keys({"zigzag": 1}, TABLE, source="a.yaml")
    with pytest.raises(ConfigError) as error:
        read_keys({"zigzag": 1, "rlhf_type": "dpo"}, TABLE, source="a.yaml")
    assert ["rlhf_type"] == [fault.path for fault in error.value.faults]


VALUES = {"bool": True, "int": 3, "float": 0.5, "dict": {"a": 1}, "list": ["x"], "str": "x"}
"""Kind of a value -> one of that kind."""


def given_with(name, **others):
    """Return the arguments of a command that gives an argument beside others."""
    value = VALUES[next(kind for kind in TABLE[name].types if kind != "null")]
    values = {"model": "m", "dataset": ["a.jsonl"], **others, name: value}
    return [Given(key, held, "x", key) for key, held in values.items()]


def test_every_argument_of_ms_swift_becomes_something():
    """
    Taken over, not needed or not supported, with a reason, or refused with another; what is wrong
    with the run's keys is wrong with arguments that are given.
    """
    refused: list[tuple] = []
    counts = dict.fromkeys(["taken over", "not needed here", "not supported", "refused"], 0)
    for tuner, name in product(("lora", "full"), TABLE):
        given = given_with(name, tuner_type=tuner, max_length=8, output_dir="o")
        try:
            require_consistent(given, source="")
        except ConfigError as error:
            refused.append(error.faults)
            continue
        conversion = convert(given, TABLE, world())
        faults = faults_of(conversion)
        assert set(faults) <= set(conversion.written)
        assert not any("no known key" in reason for reason in faults.values())
        verdict, reason = verdicts(conversion)[f"--{name} x"]
        counts[verdict] += 1
        assert reason
        assert not reason.endswith(".")
    assert 2 == counts.pop("refused")  # three ranks to a learner, with both tuners
    assert min(counts.values()) > 50
    assert all(refused)


def faults_of(conversion):
    """Return the keys that the run's YAML would be refused for, and why."""
    try:
        parse_config(conversion.document, "run.yaml", KEYS)
    except ConfigError as error:
        return {fault.path: fault.reason for fault in error.faults}
    return {}


@pytest.mark.parametrize(
    ("arguments", "line", "says"),
    [
        ("--quant_method hqq --quant_bits 4 --hqq_axis 1", "quant_bits 4", "not supported"),
        ("--quant_bits 4", "quant_bits 4", "not needed here"),
        ("--cached_dataset c", "cached_dataset c", "not supported"),
        ("--cached_dataset", "cached_dataset", "not needed here"),
        ("--dataset --cached_dataset c", "cached_dataset c", "refused"),
    ],
)
def test_no_fault_is_of_a_key_that_nobody_wrote(arguments, line, says):
    """It is the line of the argument that says it; where data are missing, there is no run."""
    conversion = converted(arguments)

    assert says == verdicts(conversion)[f"--{line}"][0]
    assert (set() if says != "refused" else {"custom.train_jsonl"}) == set(faults_of(conversion))


UNREAD = """accelerator_config batch_eval_metrics bf16_full_eval bnb_4bit_compute_dtype bnb_4bit_quant_type
bnb_4bit_use_double_quant dataloader_in_order dataset_shuffle disable_ignore_empty_think do_eval do_predict do_train
ds3_gather_for_generation early_stop_interval eval_accumulation_steps eval_dataset eval_dataset_args eval_delay
eval_do_concat_batches eval_generation_config eval_limit eval_metric eval_on_start eval_use_gather_object
extra_eval_args fp16_full_eval freeze_aligner freeze_llm fsdp_config greater_is_better hub_always_push hub_model_id
hub_private_repo hub_revision hub_strategy include_for_metrics label_names length_column_name liger_kernel_config
lisa_step_interval load_best_model_at_end local_rank max_model_len max_pixels metric_for_best_model model_author
model_name mrl_dims packing_length packing_strategy per_device_eval_batch_size prediction_loss_only project
quant_bits sortish_sampler task_type temperature trackio_bucket_id trackio_space_id trackio_static_space_id
train_sampling_strategy vit_gradient_checkpointing""".split()  # noqa: SIM905


@pytest.mark.parametrize("name", UNREAD)
def test_nothing_is_taken_over_that_nothing_reads(name):
    """Without evaluation data, images, and the argument that another one is a part of."""
    assert verdicts(convert(given_with(name), TABLE, world()))[f"--{name} x"][0] in {"not needed here", "not supported"}


def test_what_something_reads_is_taken_over():
    """With evaluation data, images, and the argument that another one is a part of."""
    lines = converted(
        "--dataset swift/self-cognition#5 --val_dataset b.jsonl --model m --model_name a --model_author b "
        "--dataset_shuffle false --per_device_eval_batch_size 2 --eval_on_start true --metric_for_best_model loss "
        "--push_to_hub true --hub_model_id x --fsdp full_shard --fsdp_config {} --report_to trackio --project x "
        "--quant_method bnb --quant_bits 4 --bnb_4bit_quant_type fp4 --packing true --packing_strategy sequential "
        "--max_pixels 4 --vit_gradient_checkpointing false",
        model=attrs.evolve(TEXT, is_multimodal=True),
    ).lines
    given = [line for line in lines if line.argument.startswith("--")]

    assert ["taken over"] * len(given) == [line.verdict for line in given]


@pytest.mark.parametrize(
    ("arguments", "others", "keys"),
    [
        ("--tuner_type full", {}, {"training.learning_rate": 1e-5, "training.packing_drop_last": False}),
        ("", {"model": ModelFacts(is_multimodal=True, max_length=99), "world_size": 2},
         {"training.tuner_type": "lora", "training.learning_rate": 1e-4, "training.gradient_accumulation_steps": 8,
          "training.freeze_vit": True, "training.freeze_aligner": True, "template.max_length": 99}),
        ("--max_model_len 7", {"model": ModelFacts()}, {"template.max_length": 7}),
        ("--max_length None --max_model_len None", {}, {"template.max_length": 4096}),
        ("", {"model": ModelFacts(loss_scale="default+ignore_empty_think")},
         {"template.loss_scale": "default+ignore_empty_think"}),
        ("--bf16 true --fp16 false --metric_for_best_model acc --greater_is_better true", {},
         {"training.bf16": True, "training.fp16": False, "training.metric_for_best_model": "acc",
          "training.greater_is_better": True}),
        ("--val_dataset b --eval_strategy epoch", {}, {"training.eval_strategy": "epoch", "training.eval_steps": None}),
        # Nothing reads these, but they stay ms-swift's.
        ("--per_device_eval_batch_size 4 --metric_for_best_model acc --vit_gradient_checkpointing false", {},
         {"training.per_device_eval_batch_size": 4, "training.metric_for_best_model": "acc",
          "training.vit_gradient_checkpointing": False}),
        # Counts and splits go with the names of data; under streaming, the first records are drawn.
        ("", {}, {"custom.train_jsonl": ["a.jsonl"], "custom.dataset": None}),
        ("--dataset a.jsonl#3", {}, {"custom.dataset": ["a.jsonl#3"], "custom.train_jsonl": None}),
        ("--dataset a.jsonl#0", {}, {"custom.dataset": ["a.jsonl#0"]}),
        ("--dataset org/name", {}, {"custom.dataset": ["org/name"]}),
        ("--split_dataset_ratio 0.5", {}, {"custom.dataset": ["a.jsonl"], "custom.train_jsonl": None}),
        ("--dataset a.jsonl#3 --streaming true", {}, {"custom.dataset_shuffle": False}),
        # ms-swift divides the ranks by the sequence's; here each rank trains its own.
        ("--sequence_parallel_size 4 --gradient_accumulation_steps 16", {"world_size": 4},
         {"training.per_device_train_batch_size": None, "training.gradient_accumulation_steps": 4}),
        ("--sequence_parallel_size 4 --gradient_accumulation_steps 1 --per_device_train_batch_size 4",
         {"world_size": 4}, {"training.per_device_train_batch_size": 1, "training.gradient_accumulation_steps": 1}),
        ("--sequence_parallel_size 4 --gradient_accumulation_steps 4 --per_device_train_batch_size 2",
         {"world_size": 4}, {"training.per_device_train_batch_size": 2, "training.gradient_accumulation_steps": 1}),
        ("--sequence_parallel_size 4 --per_device_train_batch_size 2", {"world_size": 4},
         {"training.per_device_train_batch_size": 1, "training.gradient_accumulation_steps": 1}),
    ],
)  # fmt: skip
def test_a_run_has_the_keys_that_ms_swift_would_resolve(arguments, others, keys):
    """Defaults, data, batches of ranks that are one learner; None is a key that is not written."""
    document = converted(arguments, **others).document

    assert keys == {key: document[key.partition(".")[0]].get(key.partition(".")[2]) for key in keys}


@pytest.mark.parametrize(
    ("arguments", "packing", "may_pack"),
    [("", False, True), ("--packing true", True, False), ("--packing false", False, False)],
)
def test_samples_share_packs_where_the_command_says_so(arguments, packing, may_pack):
    """Else a step keeps the samples that it has, and nothing is changed."""
    conversion = converted(f"--gradient_accumulation_steps 3 {arguments}")
    training = conversion.document["training"]

    assert (packing, 3) == (training["packing"], training["gradient_accumulation_steps"])
    assert (may_pack, ()) == (conversion.may_pack, conversion.different)


def test_a_model_that_does_not_pack_is_said_to():
    """By its family; a command that packs it asks for what is not done."""
    model = attrs.evolve(TEXT, unpacked="llama4")
    asked, unasked = (converted(more, model=model) for more in ("--packing true", ""))

    for conversion in (asked, unasked):
        assert "llama4 does not pack (docs/models.md)" in verdicts(conversion)["(this project) packing"][1]
        assert (False, False) == (conversion.document["training"]["packing"], conversion.may_pack)
    assert ["--packing true"] == [line.argument for line in asked.different]
    assert () == unasked.different


@given(st.integers(1, 4096), st.floats(1, 500))
def test_a_step_of_packs_holds_the_samples_that_it_had(samples, samples_per_pack):
    """By the nearest number of packs, within a third; where no number does so, there is none."""
    packs = packs_of_step(samples, samples_per_pack=samples_per_pack)

    def off(number):
        return abs(number * samples_per_pack / samples - 1)

    if packs is None:
        assert all(off(number) > 1 / 3 for number in range(1, 5))
        return
    assert off(packs) <= 1 / 3 + 1e-9
    assert off(packs) <= min(off(packs + 1), off(max(1, packs - 1))) + 1e-9


def test_packs_in_place_of_samples_are_a_change():
    """Both numbers of steps are told, with each argument whose key has another value then."""
    given = converted("--per_device_train_batch_size 8 --gradient_accumulation_steps 4", world_size=2)
    conversion = with_packs(given, 3, samples_per_pack=9.5, steps=(94, 105), world_size=2)
    said = verdicts(conversion)
    training = conversion.document["training"]

    assert (True, 1, 3) == (
        training["packing"], training["per_device_train_batch_size"], training["gradient_accumulation_steps"]
    )  # fmt: skip
    assert {"--per_device_train_batch_size 8", "--gradient_accumulation_steps 4", "(this project) packing"} == {
        line.argument for line in conversion.different
    }
    assert "a step 57.0 where ms-swift's holds 64: 94 steps become 105" in said["(this project) packing"][1]
    assert len(given.lines) == len(conversion.lines)
    assert given.document["training"]["packing"] is False
    why = verdicts(without_packs(given, "no data"))["(this project) packing"]
    assert ("taken over", True) == (why[0], why[1].endswith("; no data"))


@pytest.mark.parametrize(
    ("steps", "ranks", "verdict"), [(1, 8, "refused"), (8, 6, "refused"), (8, 1, "refused"), (8, 8, "changed")]
)
def test_ranks_that_are_one_learner_are_as_many_samples_or_refused(steps, ranks, verdict):
    """By the argument, where no batch of these ranks is as large."""
    conversion = converted(f"--sequence_parallel_size 8 --gradient_accumulation_steps {steps}", world_size=ranks)

    changed = {f"--gradient_accumulation_steps {steps}": "changed"} if verdict == "changed" else {}
    assert {"--sequence_parallel_size 8": verdict, **changed} == {
        line.argument: line.verdict for line in conversion.different
    }


@pytest.mark.parametrize(
    ("arguments", "line", "verdict", "says"),
    [
        ("--attn_impl flash_attn", "attn_impl flash_attn", "not needed here", "no flash attention"),
        ("--attn_impl sdpa", "attn_impl sdpa", "taken over", "model.attn_impl: sdpa"),
        ("--attn_impl flash_attention_3", "attn_impl flash_attention_3", "not needed here", "no flash attention"),
        ("--attn_impl paged", "attn_impl paged", "not supported", "model.attn_impl takes"),
        ("--streaming true", "streaming true", "not needed here", "planned once"),
        ("--use_galore true", "use_galore true", "not supported", "gradients"),
        ("--eval_metric acc", "eval_metric acc", "not needed here", "an evaluation always"),
        ("--sequence_parallel_size 1", "sequence_parallel_size 1", "not needed here", "default"),
        ("--auto_find_batch_size true", "auto_find_batch_size true", "not supported", "change the batch"),
        ("--swanlab_project x", "swanlab_project x", "not supported", "SwanLab"),
        ("--packing true --packing_strategy sequential", "packing_strategy sequential", "taken over", "concatenative"),
        ("--packing true --packing_strategy binpack", "packing_strategy binpack", "not needed here", "best_fit"),
        ("--packing_strategy sequential", "packing_strategy sequential", "not needed here", "of packing"),
        ("--packing true --packing_length 8 --max_length 8", "packing_length 8", "not needed here", "max_length"),
        ("--packing true --packing_length 9 --max_length 8", "packing_length 9", "not supported", "max_length"),
        ("--truncation_strategy right", "truncation_strategy right", "taken over", "right"),
        ("--truncation_strategy delete", "truncation_strategy delete", "not needed here", "leaves long samples out"),
        ("--truncation_strategy split", "truncation_strategy split", "not supported", "swift pt"),
        ("--deepspeed zero2", "deepspeed zero2", "taken over", "what ms-swift's zero2 holds"),
        ("--deepspeed zero2 --zero_hpz_partition_size 4", "zero_hpz_partition_size 4", "not needed here", "holds it"),
        ("--deepspeed x.json --zero_hpz_partition_size 4", "zero_hpz_partition_size 4", "not supported", "the file"),
        ("--zero_hpz_partition_size 4", "zero_hpz_partition_size 4", "not needed here", "is not given"),
        ("--deepspeed x.json", "deepspeed x.json", "taken over", "training.deepspeed: x.json"),
        ("--fsdp fsdp2", "fsdp fsdp2", "taken over", "training.fsdp: full_shard"),
        ("--fsdp full_shard", "fsdp full_shard", "taken over", "training.fsdp: full_shard"),
        ("--output_dir o/v0-20260101-010203", "output_dir o/v0-20260101-010203", "taken over", "output_dir: o;"),
        ("--fsdp x", "fsdp x", "not supported", "name fsdp2"),
        ("--split_dataset_ratio 0.1", "split_dataset_ratio 0.1", "taken over", "custom.split_dataset_ratio"),
        ("--split_dataset_ratio 0", "split_dataset_ratio 0", "not needed here", "0 splits nothing"),
        ("--split_dataset_ratio 0.1 --val_dataset b", "split_dataset_ratio 0.1", "not needed here", "val_dataset"),
        ("--split_dataset_ratio 0.1 --streaming true", "split_dataset_ratio 0.1", "not needed here", "streaming"),
        ("--split_dataset_ratio 0.1 --eval_strategy no", "split_dataset_ratio 0.1", "not needed here", "eval_strat"),
        ("--val_dataset b.jsonl", "val_dataset b.jsonl", "taken over", "custom.val_jsonl: b.jsonl"),
        ("--val_dataset b#3", "val_dataset b#3", "taken over", "custom.val_dataset: b#3"),
        ("--val_dataset b#3 --eval_strategy no", "val_dataset b#3", "not needed here", "eval_strategy is no"),
        ("--val_dataset", "val_dataset", "not needed here", "names no data"),
        ("--eval_steps 5", "eval_steps 5", "not needed here", "no evaluation data"),
        ("--eval_steps 5 --val_dataset b.jsonl", "eval_steps 5", "taken over", "training.eval_steps: 5"),
        ("--router_aux_loss_coef 1e-3", "router_aux_loss_coef 1e-3", "taken over", "training.router_aux_loss_coef"),
        ("--router_aux_loss_coef 0", "router_aux_loss_coef 0", "taken over", "training.router_aux_loss_coef: 0"),
        ("--enable_dft_loss true", "enable_dft_loss true", "taken over", "measures the cross entropy"),
        ("--experts_impl grouped_mm", "experts_impl grouped_mm", "taken over", "model.experts_impl: grouped_mm"),
        ("--init_weights True", "init_weights True", "not needed here", "no effect"),
        ("--init_weights pissa_niter_4", "init_weights pissa_niter_4", "taken over", "training.init_weights: pissa"),
        ("--init_weights lora-ga", "init_weights lora-ga", "not supported", "needs gradients"),
        ("--use_chat_template false", "use_chat_template false", "taken over", "template.use_chat_template: false"),
        ("--use_chat_template true", "use_chat_template true", "not needed here", "records are chats"),
        ("--save_total_limit -1", "save_total_limit -1", "not needed here", "all checkpoints are kept"),
        ("--save_total_limit 2", "save_total_limit 2", "taken over", "training.save_total_limit: 2"),
        ("--cached_val_dataset c", "cached_val_dataset c", "not supported", "val_dataset"),
        ("--fsdp '{\"fsdp\": \"full_shard\"}'", 'fsdp {"fsdp": "full_shard"}', "taken over", "full_shard"),
        ("--external_plugins a.py", "external_plugins a.py", "not supported", "packplan plugin swift"),
        ("--lora_rank 4 --tuner_type full", "lora_rank 4", "not needed here", "lora, which is full"),
        ("--freeze_parameters_ratio 0.5", "freeze_parameters_ratio 0.5", "not needed here", "full, which is lora"),
        ("--freeze_vit false", "freeze_vit false", "taken over", "training.freeze_vit: false"),
        ("--freeze_vit true", "freeze_vit true", "not needed here", "no such part"),
        ("--loss_scale last_round", "loss_scale last_round", "taken over", "template.loss_scale"),
        ("--warmup_ratio 0", "warmup_ratio 0", "not needed here", "0 warms"),
        ("--quant_method bnb --quant_bits 4", "quant_method bnb", "taken over", "on a GPU alone"),
        ("--quant_method hqq --quant_bits 4", "quant_method hqq", "not supported", "takes bnb"),
        ("--resume_from_checkpoint x", "resume_from_checkpoint x", "not supported", "how far a plan was trained"),
        ("--data_seed 1", "data_seed 1", "taken over", "custom.data_seed: 1"),
        ("--deepspeed '{\"a\": 1}'", 'deepspeed {"a": 1}', "taken over", "{…}"),
    ],
)  # fmt: skip
def test_each_argument_says_what_becomes_of_it(arguments, line, verdict, says):
    """The key that it is, or why it is none."""
    found = verdicts(converted(arguments))[f"--{line}"]

    assert verdict == found[0]
    assert says in found[1]


@pytest.mark.parametrize(
    ("arguments", "model", "default", "verdict", "says"),
    [
        ("", UNKNOWN, "max_length", "not supported", "set template.max_length"),
        ("", UNKNOWN, "bf16, fp16", "not supported", "set training.bf16"),
        ("", UNKNOWN, "freeze_vit and freeze_aligner", "not supported", "set them to true if it does"),
        ("", FLOAT32, "mixed precision of float32 weights", "taken over", "remove it to train without a GPU"),
        ("", TEXT, "mixed precision of bfloat16 weights", "taken over", "training.fp16: false"),
        ("--fp16 false", FLOAT32, "mixed precision of float32 weights", "taken over", "training.bf16: false"),
    ],
)
def test_each_default_says_what_is_taken(arguments, model, default, verdict, says):
    """Or what to set, where ms-swift would ask the model; no CPU trains in float16."""
    found = verdicts(converted(arguments, model=model))[f"(default) {default}"]

    assert verdict == found[0]
    assert found[1].endswith(says)


def test_what_is_taken_over_is_a_run():
    """With everything that tuners and data take, the document is a good YAML."""
    document = converted(
        "--dataset a#3 --max_length 8 --lorap_lr_ratio 16 --use_dora true --use_rslora true "
        "--target_regex x.* --modules_to_save embed_tokens --target_parameters w --quant_method bnb --quant_bits 4 "
        "--agent_template hermes "
        "--model_name a b --columns '{\"q\": \"query\"}' --system 'a\\nb' --save_steps 5 --split_dataset_ratio 0.5"
    ).document
    config = parse_config(document, "run.yaml", KEYS)

    assert (16, True, "x.*") == (config.training.lorap_lr_ratio, config.training.use_dora, config.training.target_regex)
    assert "a\nb" == config.template.system
    assert ("lora", "bnb", 5) == (
        config.training.tuner_type, config.model.quant_method, config.training.trainer["eval_steps"]
    )  # fmt: skip
