"""Other families that see are counted, measured, packed, checked and trained alike."""

import importlib.util
import json
import re
import shutil
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from swift.model import MODEL_MAPPING
from swift.model.models.qwen import Qwen2_5OmniLoader
from swift.template.templates.glm import GLM4VTemplate
from torch.utils._pytree import tree_map
from transformers import AutoModelForMultimodalLM

from packplan.adapters.loaders.packs import PackOfRows
from packplan.adapters.samples.measurer import SwiftMeasurer
from packplan.adapters.trainer import vision
from packplan.adapters.trainer.model import _refuse_unmatched
from packplan.adapters.trainer.vision import dummy_image
from packplan.app.check import compare_packs
from packplan.app.opening.runs import read_config
from packplan.app.opening.splits import open_encoders, open_splits
from packplan.app.opening.trainers import use_vision_tower_in_each_batch
from packplan.core.errors import ConfigError, RecordError
from tests.e2e import rank_main
from tests.e2e.ready import IN_CI, logged_losses
from tests.made.pictures import IMAGES_OF, showing, texts, write_scenes, write_sizes
from tests.made.vision_models import VISION_FAMILIES, write_vision_model
from tests.processes import ROOT, finished
from tests.records import chat, write_lines
from tools import models
from tools.models import NOT_BUILT, templates_that_pack

pytestmark = [
    pytest.mark.slow,
    # ms-swift's template of InternVL hands tensors to numpy.
    pytest.mark.filterwarnings("ignore:__array_wrap__ must accept context:DeprecationWarning"),
]

HEADERS = {"internvl", "glm4v", "qwen3_5", "qwen2_5_omni"}
"""Families whose images have lengths by their headers; those of the others are encoded in full."""

OMNI = pytest.param(
    "qwen2_5_omni",
    marks=pytest.mark.skipif(
        importlib.util.find_spec("qwen_omni_utils") is None, reason="qwen_omni_utils is not installed; it is an extra"
    ),
)

FAMILIES = ["internvl", "glm4v", "qwen3_5", "minicpmv4_6", "paddleocr_vl", OMNI]
"""One of Qwen with states, and those beside it; `python -m tools.models vision` compares all."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Records with no, one and three images."""
    folder = tmp_path_factory.mktemp("vision")
    scenes = write_scenes(folder, count=8)
    (folder / "few.jsonl").write_text("".join(scenes.read_text().splitlines(keepends=True)[:4]))
    return folder


@pytest.fixture(scope="module")
def model_of(folder):
    """Return a function that gives the folder of a family's model, which it writes once."""

    @cache
    def write(family: str) -> Path:
        write_vision_model(folder / family, family, texts(folder / "scenes.jsonl"), seed=0)
        return folder / family

    return write


@pytest.fixture
def vision_run(folder, model_of, write_run):
    """Return a function that writes the YAML of a run of a family."""

    def write(family: str, name: str = "run", **overlay):
        model_type, template = VISION_FAMILIES[family].swift
        sections = {
            "model": {"model": str(model_of(family)), "model_type": model_type},
            "template": {"max_length": 400, "template": template, "system": None},
            "custom": {"train_jsonl": str(folder / "scenes.jsonl")},
            "training": {"learning_rate": "1e-2", "packing_drop_last": False},
        }
        return write_run(name=name, **{key: {**keys, **overlay.get(key, {})} for key, keys in sections.items()})

    return write


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Records of images of 45 sizes, and of none to four of them."""
    return write_sizes(tmp_path_factory.mktemp("pictures"))


def measurer(path) -> SwiftMeasurer:
    return open_splits(read_config(path))["train"].source


@pytest.mark.parametrize("family", FAMILIES)
def test_lengths_are_those_of_full_encodes(vision_run, pictures, folder, family):
    """For 45 sizes and several images: from headers where possible, else by full encodes."""
    by_header = family in HEADERS
    data, images = (pictures, [*[1] * 45, 2, 3, 4, 0]) if by_header else (folder / "scenes.jsonl", [*IMAGES_OF] * 2)
    samples = measurer(vision_run(family, custom={"train_jsonl": str(data)}))
    in_full = list(samples.measure_many(range(len(samples)), in_full=True))

    assert images == [outcome.measurement.images for outcome in in_full]
    assert all((outcome.measurement.patches > 0) == (outcome.measurement.images > 0) for outcome in in_full)
    encoder, encoded = samples._encoder, []
    plain = encoder.encode
    encoder.encode = lambda index, *given: encoded.append(index) or plain(index, *given)
    assert in_full == list(samples.measure_many(range(len(samples)), in_full=False))
    assert by_header == (samples.image_costs is not None)
    if by_header:
        assert set(encoded) <= {0, 48}, "those alone that are audited"
    else:
        assert {index for index, number in enumerate(images) if number} <= set(encoded)


def swap(trainer) -> None:
    """Let two samples of a pack have each other's image."""
    collate = trainer.data_collator

    def swapped(items):
        samples = [dict(sample) for sample in items[0]]
        with_one = [sample for sample in samples if sample.get("num_images") == 1]
        first, last = with_one[0], with_one[-1]
        first["pixel_values"], last["pixel_values"] = last["pixel_values"], first["pixel_values"]
        return collate([PackOfRows(samples, items[0].pack)])

    trainer.data_collator = swapped


def blur(trainer) -> None:
    """Let the images of a pack see each other."""

    def mixed(_, __, output):
        return tree_map(
            lambda part: part + part.mean([*range(part.dim() - 1)]) if torch.is_tensor(part) else part, output
        )

    dummy = dummy_image(trainer.model, trainer.template)
    dummy.inner.get_submodule(dummy.towers[0]).register_forward_hook(mixed)


def loss_and_unused(prepared, index: int) -> tuple[float, set[str]]:
    """The loss of a sample, and the weights that it leaves out."""
    trainer = prepared.trainer
    batch = trainer.data_collator([PackOfRows([prepared.samples["train"].encode(index)], 0)])
    trainer.model.zero_grad()
    with trainer.media_hook():
        inputs = trainer._prepare_inputs(batch)
        loss = trainer.compute_loss(trainer.model, inputs, num_items_in_batch=torch.tensor(9.0))
        loss.backward()
    return loss.item(), {
        name for name, one in trainer.model.named_parameters() if one.requires_grad and one.grad is None
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_shown_to_pack(vision_run, ready, folder, family):
    """A swapped image and images that see each other are found; the dummy image reaches all."""
    few = {"train_jsonl": str(folder / "few.jsonl")}
    prepared = ready(path := vision_run(family, custom=few, template={"max_length": 1024}))
    trainer = prepared.trainer

    def failed() -> set[str]:
        report = compare_packs(read_config(path), trainer, prepared.planned["train"], num_packs=1)
        assert ((0, "mixed", 4),) == report.packs
        return {verdict.check for verdict in report.verdicts if not verdict.passed}

    assert set() == failed()
    plain = trainer.data_collator
    swap(trainer)
    assert {"logits", "sample loss"} <= failed()
    trainer.data_collator = plain

    before = [loss_and_unused(prepared, index)[0] for index in (1, 2)]
    dummy = dummy_image(trainer.model, trainer.template)
    assert [] == dummy.unreached_weights()
    dummy.ensure_tower_runs()
    assert [(loss, set()) for loss in before] == [loss_and_unused(prepared, index) for index in (1, 2)]

    blur(trainer)
    assert "isolation" in failed()


@pytest.mark.parametrize(
    ("family", "stage"),
    [
        ("qwen3_vl", 3),
        pytest.param("qwen2_5_vl", 2, marks=IN_CI),
        pytest.param("internvl", 3, marks=IN_CI),
        pytest.param("qwen2_5_omni", 3, marks=OMNI.marks),
    ],
)
def test_deepspeed_trains_a_family_the_same(vision_run, execute, folder, tmp_path, server, family, stage):  # noqa: PLR0917  # fixtures
    """ZeRO on two ranks, packs of one with and without images: the losses of one process."""
    keys = {"effective_batch_size": 2, "max_steps": 4, "learning_rate": 0.0, "train_dataloader_shuffle": False,
            "eval_strategy": "steps", "eval_steps": 4}  # fmt: skip
    overlay = {"custom": {"val_jsonl": str(folder / "few.jsonl")}, "template": {"max_length": 60}}
    alone = execute(vision_run(family, "alone", training=keys, **overlay)).history
    zero = {"zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": "auto"}
    path = vision_run(family, training={**keys, "deepspeed": zero, "use_cpu": True}, **overlay)

    assert [0, 0] == finished(server.ranks(2, rank_main.main, str(path), str(tmp_path), folder=tmp_path))

    assert "gradients are not clipped, though training.max_grad_norm is" in (tmp_path / "rank0.log").read_text()
    ranks = rank_main.seen(tmp_path, 2)
    images = [[IMAGES_OF[ranks[0]["raw_packs"][pack][0] % 4] for pack in rank["fetched"]] for rank in ranks]
    assert any((first > 0) != (second > 0) for first, second in zip(*images, strict=True)), "one has no image"
    expected = pytest.approx(logged_losses(alone, "eval_loss"), rel=1e-5)
    assert [expected] * 2 == [logged_losses(rank["history"], "eval_loss") for rank in ranks]


def test_what_cannot_be_counted_is_refused_by_record(vision_run, folder, tmp_path):
    """An image token in the text itself, with and without an image."""
    samples = measurer(vision_run("glm4v"))
    token = samples._encoder.template.tokenizer.decode([samples._encoder.image_tokens.token_id])
    image = [str(folder / "0-0.png")]
    records = [showing(text=token), showing(images=image, text=f"{token}?"), showing(images=image)]
    path = write_lines(tmp_path / "bad.jsonl", records)
    samples = measurer(vision_run("glm4v", custom={"train_jsonl": str(path)}))

    for in_full in (True, False):
        said = list(samples.measure_many(range(3), in_full=in_full))
        assert [RecordError, RecordError] == [type(one) for one in said[:2]]
        assert "bad.jsonl, line 1: the record has 1 image token, but its images need 0" in str(said[0])
        assert "its text may contain the image token itself" in str(said[0])
        assert 1 == said[2].measurement.images


def refused(path) -> str:
    with pytest.raises(ConfigError) as caught:
        open_encoders(read_config(path))
    return str(caught.value)


def test_a_template_that_cannot_see_here_is_refused_by_key(vision_run, write_run, model_of, tmp_path):
    """Half of its processor's sizes are gone; its model reads text only."""
    broken = tmp_path / "broken"
    shutil.copytree(model_of("glm4v"), broken)
    path = broken / "processor_config.json"
    sizes = json.loads(path.read_text())
    sizes["image_processor"]["size"] = {"shortest_edge": 12544}
    path.write_text(json.dumps(sizes))
    of_text = write_run("qwen2", "text", template={"template": "qwen2_5_vl"}, model={"model_type": "qwen2"})

    says = refused(vision_run("glm4v", model={"model": str(broken)}))
    assert re.search(r"template\.template is glm4v, which cannot encode an image here \(.*edge", says)
    assert re.search(r"template\.template is qwen2_5_vl, .* this model reads text only: name another", refused(of_text))


def test_a_missing_package_is_named_before_anything_is_measured(vision_run, monkeypatch):
    """One of a processor's class, of its template at an image, or of our extra."""

    def raising(error):
        def fail(*_, **__):
            raise error

        return fail

    pixels = ModuleNotFoundError("No module named 'pixels'", name="pixels")
    monkeypatch.setattr(GLM4VTemplate, "replace_tag", raising(pixels))
    monkeypatch.setattr(Qwen2_5OmniLoader, "_check_qwen_omni_utils", raising(PackageNotFoundError("qwen_omni_utils")))
    assert re.search(r"template\.template is glm4v, .*: install pixels", refused(vision_run("glm4v")))
    assert re.search(r"model\.model is .*: pip install 'packplan\[omni\]'", refused(vision_run("qwen2_5_omni")))
    monkeypatch.setitem(sys.modules, "qwen_vl_utils", None)
    says = refused(vision_run("qwen3_5"))
    assert re.search(r"model\.model is .* cannot open: .*qwen_vl_utils", says)


@pytest.mark.parametrize(("model_type", "named"), [("qwen3_omni", "qwen3_omni"), ("qwen3_omni_moe", None)])
def test_what_was_not_shown_to_pack_is_refused_by_name(vision_run, model_type, named):
    """Whether the packages of its template are installed or not; and by its model type alone."""
    says = refused(vision_run("internvl", model={"model_type": model_type}, template={"template": named}))

    assert re.search(r"template\.template is qwen3_omni, .* not shown to keep packed samples apart: set training", says)


def test_all_templates_that_declare_packing_are_on_the_page():
    """Each was shown by a tiny model, or says why there is none; and none is in both tables."""
    shown = {family.swift[1] for family in VISION_FAMILIES.values()}

    assert set(templates_that_pack()) == shown | set(NOT_BUILT)
    assert not shown & set(NOT_BUILT)
    own_code = {name for name, why_not in NOT_BUILT.items() if why_not.startswith("its model brings its own code")}
    classes = {
        name: [getattr(transformers, one, None) for meta in MODEL_MAPPING.values() for one in meta.architectures or ()
               if name in meta.candidate_templates]
        for name in own_code
    }  # fmt: skip
    assert {name: [None] for name in own_code} == classes
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert [] == [
        reason
        for reason, names in models.names_by_value(dict(sorted(NOT_BUILT.items()))).items()
        if f"\n| {reason} | {', '.join(names)} |" not in page
    ]
    assert [] == [
        name for name in sorted(VISION_FAMILIES) if f"\n| {name} | {VISION_FAMILIES[name].swift[1]} |" not in page
    ]


def test_text_that_is_frozen_trains_images_alone(vision_run, execute):
    """Packs of one: those without images change nothing, and stop nothing."""
    keys = {"freeze_llm": True, "effective_batch_size": 1}
    done = execute(vision_run("internvl", template={"max_length": 60}, training=keys))

    gradients = [entry["grad_norm"] for entry in done.history if "grad_norm" in entry]
    packs = done.planned["train"].raw.packs
    images = [IMAGES_OF[packs[pack][0] % 4] for pack in done.schedule.order(0)[: len(gradients)].tolist()]
    assert [number > 0 for number in images] == [gradient > 0 for gradient in gradients]
    assert {True, False} == {number > 0 for number in images}


def test_sound_is_refused_by_key_and_record(vision_run, model_of):
    """Keys that would train what hears or speaks; a record with sound; one with a video."""
    model = AutoModelForMultimodalLM.from_pretrained(model_of("qwen2_5_omni"))
    for key, value in {
        "trainable_parameters": ["talker"], "trainable_parameters_regex": "audio_tower",
        "target_modules": ["thinker.audio_tower.proj"], "target_regex": "^token2wav", "modules_to_save": ["talker"],
    }.items():  # fmt: skip
        adapters = {"tuner_type": "lora"} if not key.startswith("trainable") else {}
        config = read_config(vision_run("qwen2_5_omni", training={key: value, **adapters}))
        with pytest.raises(ConfigError, match=rf"training\.{key} .*, an audio part, "):
            _refuse_unmatched(model, config.training.trainer)
    mixed = read_config(vision_run("qwen2_5_omni", training={"trainable_parameters_regex": "proj"}))
    _refuse_unmatched(model, mixed.training.trainer)


@pytest.mark.parametrize("family", [OMNI])
def test_records_that_only_ears_and_eyes_take_are_refused(vision_run, tmp_path, family):
    """Sound, and videos, which this template reads by functions of its own."""
    path = write_lines(tmp_path / "bad.jsonl", [chat(**{key: ["a.bin"]}) for key in ("audios", "videos")])
    samples = measurer(vision_run(family, custom={"train_jsonl": str(path)}))

    said = [str(one) for one in samples.measure_many(range(2), in_full=False)]
    assert "line 1: the record has 'audios': " in said[0]
    assert "line 2: the record has videos, which Packplan cannot read for the template qwen2_5_omni" in said[1]


class Seeing(torch.nn.Module):
    """A model with a tower, of which no image reaches one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.unseen = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)
        self.language_model = torch.nn.Linear(4, 4)

    def get_image_features(self, pixel_values):
        return {"pooler_output": [self.tower(pixel_values)]}


def test_what_would_let_ranks_wait_is_refused_by_name(monkeypatch):
    """Weights that no image reaches, unless DDP looks or they are frozen; no image features."""
    monkeypatch.setattr(vision, "encode_image", lambda *_: {"pixel_values": torch.ones(2, 3), "input_ids": [1]})
    plain = SimpleNamespace(fsdp=None, ddp_find_unused_parameters=False)

    model = Seeing()
    with pytest.raises(ConfigError, match=r"find_unused_parameters is .* reaches 2 weights .*, such as unseen\.weight"):
        use_vision_tower_in_each_batch(model, None, plain)
    use_vision_tower_in_each_batch(model, None, SimpleNamespace(fsdp=None, ddp_find_unused_parameters=True))
    model.unseen.requires_grad_(requires_grad=False)
    use_vision_tower_in_each_batch(model, None, plain)
    with pytest.raises(ConfigError, match=r"model\.model is a Linear, which has no function for image features"):
        use_vision_tower_in_each_batch(torch.nn.Linear(2, 2), None, plain)
