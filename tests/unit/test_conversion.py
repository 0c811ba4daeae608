"""
A command of ms-swift becomes a run: what its shell says, what its arguments are, what they become.
"""

from __future__ import annotations

import re
import shlex

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packplan.adapters.config.run import parse_config
from packplan.adapters.config.trainer_keys import stored_keys
from packplan.adapters.conversion.table import stored_arguments
from packplan.core.config import REFUSED_TRAINING_KEYS
from packplan.core.conversion import (
    Given,
    ModelFacts,
    World,
    convert,
    find_launch,
    packs_of_step,
    read_keys,
    read_resolved,
    read_script,
    read_words,
    with_packs,
    without_packs,
)
from packplan.core.errors import ConfigError

TABLE = stored_arguments()

KEYS = stored_keys()

TEXT = ModelFacts(is_multimodal=False, max_length=4096, torch_dtype="bfloat16")


def launched(script, environment=()):
    """Return the launch of a script."""
    return find_launch(read_script(script, dict(environment), source="train.sh"), source="train.sh")


def world(model=TEXT, **others):
    """Return what is known beside the arguments."""
    passed = frozenset(KEYS) - set(REFUSED_TRAINING_KEYS)
    sections = {"zero2": {"zero_optimization": {"stage": 2}}, "fsdp2": {"fsdp": "full_shard", "fsdp_config": {"a": 1}}}
    return World(passed, model, lambda _: False, sections, **others)


def converted(arguments, *, model=TEXT, **others):
    """Return the run of a command's arguments."""
    words = launched(f"swift sft {arguments}").arguments
    given = read_words(words, TABLE, source="train.sh")
    return convert(given, TABLE, world(model, **others), source="train.sh")


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
        ("swift pt --a 1", "line 1: swift pt trains on all tokens"),
        ("swift infer --a 1\nswift export --b 1", "line 2: swift export trains nothing"),
        ("megatron sft --a 1", "megatron sft trains with Megatron-LM"),
        ("accelerate launch --config_file x.yaml swift/cli/sft.py --a 1", "accelerate starts ranks by a configuration"),
        ("swift sft --a 1\nswift sft --a 2", "2 commands of swift sft, in the lines 1, 2"),
    ],
)
def test_what_cannot_be_read_says_so_once(script, says):
    """
    Quotes that do not close, scripts that decide or compute, other tasks: the line, and what to do.
    """
    with pytest.raises(ConfigError) as error:
        launched(script)

    assert says in str(error.value)


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
    [
        "$(expr 16 / $gone)",
        "$(expr 2 * 3)",
        "$(expr 4 / 2 | wc -c)",
        "$(expr 1; date)",
        "$(expr 1\ndate)",
        "$(expr ( 1 ))",
        "$(expr 16/2)",
        "$(expr length abc)",
        "$(date +%s)",
        "$((2 ** 3))",
        "$((n++))",
        "$((n > 2))",
        '$((2" "3))',
        "$((010))",
        "$((gone))",
        "$((1 +))",
        "$(((1 + 2) * (3))",
        "$(( (1 2) ))",
        "$(( $((2 * 3)) + 1 ))",
        "$((--n))",
        "${n-1}",
        "${n:+1}",
        "$?",
        "$((5 % 0))",
        "$((9223372036854775807 * 2))",
        "$((99999999999999999999))",
    ],
)
def test_what_else_a_shell_would_compute_is_refused_by_its_line(written):
    """Nothing is run, and nothing is guessed."""
    with pytest.raises(ConfigError) as error:
        read_words(launched(f"n=3\n\nswift sft --seed {written}").arguments, TABLE, source="train.sh")

    assert re.search(r"line 3(:|\))", str(error.value))


def test_ranks_and_variables_are_those_of_the_command():
    """Of the environment and of torchrun; other commands of the script are named."""
    script = "MAX_PIXELS=9\nexport MAX_PIXELS NONE\nNPROC_PER_NODE=4 MASTER_PORT=29 swift sft --a 1\nswift infer"
    launch = launched(script)

    assert ("4", ["MAX_PIXELS"]) == (launch.ranks_per_node.text, list(launch.environment))
    assert ["--master-port", "29"] == [word.text for word in launch.torchrun]
    assert ("line 4: swift infer",) == launch.left


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--lerning_rate 1", "--lerning_rate: is no argument of ms-swift: did you mean --learning_rate?"),
        ("--zigzag 1", "--zigzag: is no argument of ms-swift: remove it"),
        ("x --seed 1", "x: stands before any argument"),
        ("--seed 1 --seed 2", "--seed: is given 2 times, as 1 and 2, of which ms-swift would take the last"),
        ("--seed x", "--seed: is x, but has to be a whole number"),
        ("--seed", "--seed: has no value"),
        ("--seed 1 2", "--seed: takes one value, but has 2 (1 2): put quotes around it"),
        ("--packing maybe", "--packing: is maybe, but has to be true or false"),
        ("--seed $(date)", "--seed: is computed by the script ($(date) in line 1)"),
        ("--seed `date`", "is computed by the script (`date` in line 1)"),
        (
            "--seed $1 --learning_rate $((1 + 2)) --model ${A%b}",
            "--model: is computed by the script (${A%b} in line 1)",
        ),
        ("\\\n--seed $((1 / 0))", "--seed: is computed by the script ($((1 / 0)) in line 2: only whole numbers"),
        ("--rlhf_type dpo --beta 1", "rlhf_type: is of swift rlhf, which trains on preferences or rewards"),
    ],
)
def test_arguments_that_are_none_are_refused_together(arguments, says):
    """Unknown, contradictory, without a value, computed: one message each."""
    with pytest.raises(ConfigError) as error:
        read_words(launched(f"swift sft {arguments}").arguments, TABLE, source="train.sh")

    assert says in str(error.value)


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


def test_every_argument_of_ms_swift_becomes_something():
    """
    Taken over, not needed or not supported, with a reason, or refused with another; what is wrong
    with the run's keys is wrong with arguments that are given.
    """
    refused: list[tuple] = []
    counts = dict.fromkeys(["taken over", "not needed here", "not supported", "refused"], 0)
    for tuner in ("lora", "full"):
        for name, argument in TABLE.items():
            values = {
                "bool": [True], "int": [3], "float": [0.5], "dict": [{"a": 1}], "list": [["x"]], "str": ["x"],
            }  # fmt: skip
            kinds = [kind for kind in argument.types if kind != "null"]
            for value in values[kinds[0]]:
                needed = {"model": "m", "dataset": ["a.jsonl"], "tuner_type": tuner, "max_length": 8, "output_dir": "o"}
                given = [Given(key, held, "x", key) for key, held in {**needed, name: value}.items()]
                try:
                    conversion = convert(given, TABLE, world(), source="")
                except ConfigError as error:
                    refused.append(error.faults)
                    continue
                assert faults_of(conversion) <= set(conversion.written)
                line = next(line for line in conversion.lines if line.argument == f"--{name} x")
                counts[line.verdict] += 1
                assert line.reason
                assert not line.reason.endswith(".")
    assert min(counts[verdict] for verdict in counts if verdict != "refused") > 50
    assert 2 == counts["refused"]  # three ranks to a learner, with both tuners
    assert all(refused)


def faults_of(conversion):
    """Return the keys that the run's YAML would be refused for."""
    try:
        parse_config(conversion.document, "run.yaml", KEYS)
    except ConfigError as error:
        return {fault.path for fault in error.faults}
    return set()


@pytest.mark.parametrize(
    ("arguments", "line", "says"),
    [
        ("--dataset a.jsonl --quant_method hqq --quant_bits 4 --hqq_axis 1", "quant_bits 4", "not supported"),
        ("--dataset a.jsonl --quant_bits 4", "quant_bits 4", "not needed here"),
        ("--dataset a.jsonl --cached_dataset c", "cached_dataset c", "not supported"),
        ("--dataset a.jsonl --cached_dataset", "cached_dataset", "not needed here"),
        ("--cached_dataset c", "cached_dataset c", "refused"),
    ],
)
def test_no_fault_is_of_a_key_that_nobody_wrote(arguments, line, says):
    """It is the line of the argument that says it; where data are missing, there is no run."""
    conversion = converted(f"--model m {arguments}")

    assert says == verdicts(conversion)[f"--{line}"][0]
    assert (set() if says != "refused" else {"custom.train_jsonl"}) == faults_of(conversion)


UNREAD = """accelerator_config batch_eval_metrics bf16_full_eval bnb_4bit_compute_dtype bnb_4bit_quant_type
bnb_4bit_use_double_quant dataloader_in_order dataset_shuffle do_eval do_predict do_train ds3_gather_for_generation
early_stop_interval eval_accumulation_steps eval_dataset eval_dataset_args eval_delay eval_do_concat_batches
eval_generation_config eval_limit eval_metric eval_on_start eval_use_gather_object extra_eval_args fp16_full_eval
fsdp_config greater_is_better hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy
include_for_metrics label_names length_column_name liger_kernel_config lisa_step_interval load_best_model_at_end
local_rank max_model_len max_pixels metric_for_best_model model_author model_name mrl_dims packing_length
packing_strategy per_device_eval_batch_size prediction_loss_only project quant_bits sortish_sampler
trackio_bucket_id trackio_space_id trackio_static_space_id train_sampling_strategy vit_gradient_checkpointing""".split()  # noqa: SIM905


@pytest.mark.parametrize("name", UNREAD)
def test_nothing_is_taken_over_that_nothing_reads(name):
    """Without evaluation data, images, and the argument that another one is a part of."""
    values = {"bool": True, "int": 3, "float": 0.5, "dict": {"a": 1}, "list": ["x"], "str": "x"}
    value = values[next(kind for kind in TABLE[name].types if kind != "null")]
    given = [Given(key, held, "x", key) for key, held in {"model": "m", "dataset": ["a.jsonl"], name: value}.items()]

    assert verdicts(convert(given, TABLE, world(), source=""))[f"--{name} x"][0] in {"not needed here", "not supported"}


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
    assert (
        "an evaluation always" in verdicts(converted("--model m --dataset a --eval_metric acc"))["--eval_metric acc"][1]
    )


def test_settings_that_nothing_reads_stay_those_of_ms_swift():
    """They are written, though no line says that they are taken over."""
    training = converted(
        "--model m --dataset a.jsonl --per_device_eval_batch_size 4 --metric_for_best_model acc "
        "--vit_gradient_checkpointing false"
    ).document["training"]

    assert (4, "acc", False) == (
        training["per_device_eval_batch_size"], training["metric_for_best_model"],
        training["vit_gradient_checkpointing"],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "packing", "may_pack"),
    [("", False, True), ("--packing true", True, False), ("--packing false", False, False)],
)
def test_samples_share_packs_where_the_command_says_so(arguments, packing, may_pack):
    """Else a step keeps the samples that it has, and nothing is changed."""
    conversion = converted(f"--model m --dataset a.jsonl --gradient_accumulation_steps 3 {arguments}")

    assert (packing, 3) == tuple(
        conversion.document["training"][key] for key in ("packing", "gradient_accumulation_steps")
    )
    assert (may_pack, ()) == (conversion.may_pack, conversion.different)


def test_a_model_that_does_not_pack_is_said_to():
    """By its family; a command that packs it asks for what is not done."""
    model = attrs.evolve(TEXT, unpacked="llama4")
    asked, unasked = (converted(f"--model m --dataset a {more}", model=model) for more in ("--packing true", ""))

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
    given = converted(
        "--model m --dataset a.jsonl --per_device_train_batch_size 8 --gradient_accumulation_steps 4", world_size=2
    )
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
    ("arguments", "batch", "lines"),
    [
        ("--gradient_accumulation_steps 16", (None, 4), 2),
        ("--gradient_accumulation_steps 1 --per_device_train_batch_size 4", (1, 1), 3),
        ("--gradient_accumulation_steps 4 --per_device_train_batch_size 2", (2, 1), 2),
        ("--per_device_train_batch_size 2", (1, 1), 3),
    ],
)
def test_ranks_that_are_one_learner_are_as_many_samples(arguments, batch, lines):
    """ms-swift divides the ranks by the sequence's; here each rank trains its own."""
    conversion = converted(f"--model m --dataset a.jsonl --sequence_parallel_size 4 {arguments}", world_size=4)
    training = conversion.document["training"]

    assert batch == (training.get("per_device_train_batch_size"), training["gradient_accumulation_steps"])
    assert "changed" == verdicts(conversion)["--sequence_parallel_size 4"][0]
    assert lines == len(conversion.different)


@pytest.mark.parametrize(("steps", "ranks"), [(1, 8), (8, 6), (8, 1)])
def test_ranks_that_are_one_learner_of_too_few_samples_are_refused(steps, ranks):
    """By the argument, for no batch of these ranks is as large."""
    conversion = converted(
        f"--model m --dataset a --sequence_parallel_size 8 --gradient_accumulation_steps {steps}", world_size=ranks
    )

    assert ["--sequence_parallel_size 8"] == [line.argument for line in conversion.different]
    assert "refused" == conversion.different[0].verdict


def test_defaults_are_those_of_ms_swift():
    """Adapters, their learning rate, 16 samples a step, the model's length, frozen towers."""
    conversion = converted(
        "--model m --dataset a.jsonl", model=ModelFacts(is_multimodal=True, max_length=99), world_size=2
    )
    training = conversion.document["training"]

    assert ("lora", 1e-4, 8, True, True) == (
        training["tuner_type"], training["learning_rate"], training["gradient_accumulation_steps"],
        training["freeze_vit"], training["freeze_aligner"],
    )  # fmt: skip
    assert 99 == conversion.document["template"]["max_length"]
    assert 1e-5 == converted("--model m --dataset a --tuner_type full").document["training"]["learning_rate"]
    unknown = verdicts(converted("--model m --dataset a", model=ModelFacts()))
    for default in ("max_length", "bf16, fp16", "freeze_vit and freeze_aligner"):
        assert "not supported" == unknown[f"(default) {default}"][0]
    longer = converted("--model m --dataset a --max_model_len 7", model=ModelFacts()).document
    assert 7 == longer["template"]["max_length"]
    scaled = converted("--model m --dataset a", model=ModelFacts(loss_scale="default+ignore_empty_think")).document
    assert "default+ignore_empty_think" == scaled["template"]["loss_scale"]
    mixed = converted("--model m --dataset a --bf16 true --fp16 false --learning_rate 1 --output_dir o --ddp_timeout 1 "
                      "--metric_for_best_model acc --greater_is_better true").document["training"]  # fmt: skip
    assert (True, "acc", True) == (mixed["bf16"], mixed["metric_for_best_model"], mixed["greater_is_better"])


def test_half_precision_that_ms_swift_takes_by_default_says_where_it_cannot_be():
    """ms-swift trains weights of float32 in float16; a CPU does not."""
    line = "(default) mixed precision of float32 weights"
    facts = attrs.evolve(TEXT, torch_dtype="float32")

    said = verdicts(converted("--model m --dataset a", model=facts))[line]
    assert ("taken over", True) == (said[0], said[1].endswith("remove it to train without a GPU"))
    assert "CPU" not in verdicts(converted("--model m --dataset a"))["(default) mixed precision of bfloat16 weights"][1]
    given = verdicts(converted("--model m --dataset a --fp16 false", model=facts))[line]
    assert ("taken over", "training.bf16: false") == given


@pytest.mark.parametrize(
    ("arguments", "line", "verdict", "says"),
    [
        ("--attn_impl flash_attn", "attn_impl flash_attn", "not needed here", "no flash attention"),
        ("--attn_impl sdpa", "attn_impl sdpa", "taken over", "model.attn_impl: sdpa"),
        ("--attn_impl flash_attention_3", "attn_impl flash_attention_3", "not supported", "model.attn_impl takes"),
        ("--streaming true", "streaming true", "not needed here", "planned once"),
        ("--streaming false", "streaming false", "not needed here", "planned once"),
        ("--use_galore true", "use_galore true", "not supported", "gradients"),
        ("--use_galore false", "use_galore false", "not needed here", "ms-swift's default"),
        ("--sequence_parallel_size 1", "sequence_parallel_size 1", "not needed here", "default"),
        ("--auto_find_batch_size true", "auto_find_batch_size true", "not supported", "change the batch"),
        ("--temperature 1", "temperature 1", "not needed here", "of answers"),
        ("--swanlab_project x", "swanlab_project x", "not supported", "SwanLab"),
        ("--packing true", "packing true", "taken over", "training.packing: true"),
        ("--packing false", "packing false", "taken over", "training.packing: false"),
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
        ("--eval_strategy epoch --val_dataset b.jsonl", "eval_strategy epoch", "taken over", "epoch"),
        ("--lora_rank 4 --tuner_type full", "lora_rank 4", "not needed here", "no adapters"),
        ("--freeze_parameters_ratio 0.5", "freeze_parameters_ratio 0.5", "not needed here", "only adapters"),
        ("--freeze_vit false", "freeze_vit false", "taken over", "training.freeze_vit: false"),
        ("--freeze_vit true", "freeze_vit true", "not needed here", "no such part"),
        ("--freeze_llm true", "freeze_llm true", "not needed here", "no such part"),
        ("--freeze_aligner true", "freeze_aligner true", "not needed here", "no such part"),
        ("--loss_scale last_round", "loss_scale last_round", "taken over", "template.loss_scale"),
        ("--disable_ignore_empty_think true", "disable_ignore_empty_think true", "not needed here", "loss_scale"),
        ("--warmup_ratio 0", "warmup_ratio 0", "not needed here", "0 warms"),
        ("--warmup_ratio 0.1", "warmup_ratio 0.1", "taken over", "training.warmup_ratio"),
        ("--quant_method bnb --quant_bits 4", "quant_method bnb", "taken over", "on a GPU alone"),
        ("--quant_method hqq --quant_bits 4", "quant_method hqq", "not supported", "takes bnb"),
        ("--resume_from_checkpoint x", "resume_from_checkpoint x", "not supported", "how far a plan was trained"),
        ("--report_to none", "report_to none", "taken over", "training.report_to: none"),
        ("--data_seed 1", "data_seed 1", "taken over", "custom.data_seed: 1"),
        ("--task_type causal_lm", "task_type causal_lm", "not needed here", "trained here"),
        ("--deepspeed '{\"a\": 1}'", 'deepspeed {"a": 1}', "taken over", "{…}"),
    ],
)  # fmt: skip
def test_each_argument_says_what_becomes_of_it(arguments, line, verdict, says):
    """The key that it is, or why it is none."""
    found = verdicts(converted(f"--model m --dataset a.jsonl {arguments}"))[f"--{line}"]

    assert verdict == found[0]
    assert says in found[1]


def test_counts_and_splits_go_with_the_names_of_data():
    """Plain files stay files; under streaming, the first records are drawn."""
    assert ["a.jsonl"] == converted("--model m --dataset a.jsonl").document["custom"]["train_jsonl"]
    for data in ("a.jsonl#3", "org/name", "a.jsonl --split_dataset_ratio 0.5"):
        custom = converted(f"--model m --dataset {data}").document["custom"]
        assert [data.split()[0]] == custom["dataset"]
        assert "train_jsonl" not in custom
    assert not converted("--model m --dataset a.jsonl").different
    drawn = converted("--model m --dataset a.jsonl#3 --streaming true --max_steps 1").document["custom"]
    assert drawn["dataset_shuffle"] is False


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--dataset a", "--model: is not given"),
        ("--model m", "--dataset: is not given"),
        ("--model m --dataset a --task_type embedding", "--task_type: is embedding"),
        ("--model m --dataset a --tuner_type vera", "--tuner_type: is vera, but has to be full or lora"),
        ("--model m --dataset a --bf16 true --fp16 true", "--bf16: and --fp16 are both true"),
        ("--model m --dataset a --packing true --lazy_tokenize true", "--packing: and --lazy_tokenize exclude"),
        ("--model m --dataset a --tuner_type full --quant_method bnb --quant_bits 4", "--quant_method: quantises"),
        ("--model m --dataset a --quant_method bnb", "--quant_method: needs --quant_bits"),
        ("--model m --dataset a --tuner_type full --use_dora true", "--tuner_type: is full, but --use_dora"),
    ],
)
def test_contradictions_are_refused(arguments, says):
    """Before anything is looked up or written."""
    with pytest.raises(ConfigError) as error:
        converted(arguments)

    assert says in str(error.value)


def test_what_is_taken_over_is_a_run():
    """With everything that tuners and data take, the document is a good YAML."""
    document = converted(
        "--model m --dataset a#3 --max_length 8 --lorap_lr_ratio 16 --use_dora true --use_rslora true "
        "--target_regex x.* "
        "--modules_to_save embed_tokens --target_parameters w --quant_method bnb --quant_bits 4 "
        "--agent_template hermes "
        "--model_name a b --columns '{\"q\": \"query\"}' --system 'a\\nb' --save_steps 5 --split_dataset_ratio 0.5"
    ).document
    config = parse_config(document, "run.yaml", KEYS)

    assert (16, True, "x.*") == (config.training.lorap_lr_ratio, config.training.use_dora, config.training.target_regex)
    assert "a\nb" == config.template.system
    assert ("lora", "bnb", 5) == (
        config.training.tuner_type, config.model.quant_method, config.training.trainer["eval_steps"]
    )  # fmt: skip
