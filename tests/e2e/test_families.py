"""Families of every kind pack the whole way of training: small random models of them."""

import json
import shutil

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from packplan.adapters.attention import set_attention
from packplan.adapters.probe.probe_row import probe_ready_model
from packplan.adapters.probe.shrink import shrink_config
from packplan.adapters.probe.small_model import SmallModels, diversify_weights, hiding_warnings
from packplan.adapters.proof.comparison import difference_limit
from packplan.app import check
from packplan.app.opening.runs import read_config
from packplan.core.equality import CHECKS, EQUALITY_LIMITS, PackingVerdict, choose_attention
from packplan.core.errors import ConfigError
from tools.families import default_config

pytestmark = pytest.mark.slow

FAMILIES = {
    "llama": ("llama", "llama3_2", ()),
    "gemma2": (None, None, ()),
    "gemma3_text": (None, None, ()),
    "deepseek_v3": (None, "deepseek_v3_1", ()),
    "gpt_oss": (None, "chatml", ()),
    "lfm2": (None, "chatml", ("Lfm2ShortConv",)),
    "nemotron_h": (None, None, ("NemotronHMamba2Mixer",)),
}
"""Family -> model type and template, where several or none fit, and the layers by sample."""


@pytest.fixture
def sections(demo, text_jsonl, tmp_path):
    """Return a function that writes a family's small model, and gives the sections of a run."""
    few = tmp_path / "few.jsonl"

    def of(family, count=4):
        few.write_text("".join(text_jsonl.read_text().splitlines(keepends=True)[:count]))
        folder, like = tmp_path / family, demo / "models" / "qwen2"
        folder.mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(like / name, folder)
        sizes = AutoConfig.from_pretrained(like).to_dict()
        own = {key: sizes[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
        plain = default_config(family)
        config = type(plain)(**{**shrink_config(plain.to_dict()), **own})
        with hiding_warnings(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        diversify_weights(model)
        model.save_pretrained(folder)
        model_type, template, _ = FAMILIES[family]
        # The templates of some families say much before the first message.
        keys = {"max_length": 512 if family in {"llama", "gpt_oss"} else 200, "system": None, "template": template}
        keys |= {"today": "2026-11-28"} if family == "llama" else {}  # whose template writes the date
        return {
            "model": {"model": str(folder), "model_type": model_type}, "template": keys,
            "custom": {"train_jsonl": str(few)},
        }  # fmt: skip

    return of


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_packs_the_whole_way_of_training(write_run, sections, tmp_path, capsys, family):
    """No layer lets another sample be seen, in float32."""
    path = write_run("qwen2", training={"packing_drop_last": False}, **sections(family))

    assert 0 == check.main([str(path), "--json", "--packs", "1", "--quiet"])
    checks = {one["check"]: one for one in json.loads(capsys.readouterr().out)["checks"]}
    assert set(CHECKS) == set(checks)
    assert all(one["passed"] for one in checks.values())
    assert 0 == checks["positions"]["worst"] == checks["labels"]["worst"]
    verdict = json.loads((tmp_path / "run" / "static_packing" / "verdict.json").read_text())["verdict"]
    assert "varlen" == verdict["strategy"]
    assert FAMILIES[family][2] == tuple(verdict["split"])
    assert 0 == verdict["measured"].pop("isolation")
    assert max(verdict["measured"].values()) <= EQUALITY_LIMITS["float32"] / 4
    assert ["cpu, float32"] == verdict["loaded_on"]
    # In 16 bits, rounding stays within the limit of the type and of the depth.
    verdict = PackingVerdict.from_dict({**verdict, "measured": None})
    with hiding_warnings():
        model = SmallModels(default_config(family)).build(attention=verdict.native).bfloat16()
    set_attention(model, choose_attention("auto", verdict))
    probe_ready_model(model, native=verdict.native, named="auto")
    assert difference_limit(model) < 0.16


@pytest.mark.parametrize(
    ("family", "keys", "says"),
    [
        ("gpt_oss", {"today": "2026-11-28"}, {"template.template": "is gpt_oss, for which ms-swift does not support"}),
        ("lfm2", {}, {"template.template": "is not set, and ms-swift has no templates for Lfm2ForCausalLM"}),
        ("gemma3_text", {"system": "You look at scenes."}, {"template": "does not support `system`"}),
        ("llama", {}, {"model.model_type": "yi", "template.template": "llama3_2"}),
    ],
)
def test_a_template_that_does_not_fit_is_refused(write_run, execute, sections, family, keys, says):  # noqa: PLR0917  # fixtures
    """One that does not pack; none that is known; one without a system; several by name."""
    rest = sections(family)
    rest["template"], rest["model"]["model_type"] = {"max_length": 512, "system": None, **keys}, None

    with pytest.raises(ConfigError) as refused:
        check.check(read_config(write_run("qwen2", **rest)), num_packs=1)

    faults = {fault.path: fault.reason for fault in refused.value.faults}
    assert says.keys() == faults.keys()
    assert all(says[path] in faults[path] for path in says)
    if family == "gpt_oss":
        assert 1 == execute(write_run("qwen2", training={"packing": False, "max_steps": 1}, **rest)).num_steps
