"""Errors, measurements and isolation: small values that others rely on."""

import json

import attrs
import numpy as np
import pytest

from packplan.adapters import versions
from packplan.core import errors
from packplan.core.equality import AUTO, BACKENDS, VARLEN, PackingVerdict, ProbeResult, choose_attention, yield_trials
from packplan.core.errors import Difference, ModelError, PackplanError, RunError, StaleError, counted, verb_for
from packplan.core.fingerprint import Fingerprint
from packplan.core.plan import refuse_longer
from packplan.core.policy import PlanPolicy
from packplan.core.samples.tables import COLUMNS, Measurement, column, from_row, to_row


def test_a_noun_agrees_with_its_number():
    assert ["1 pack", "0 packs", "2,000 batches"] == [counted(1, "pack"), counted(0, "pack"), counted(2000, "batch")]
    assert ("is", "are", "has", "have") == (verb_for(1), verb_for(0), *(verb_for(n, "has", "have") for n in (1, 2)))


def test_a_remedy_names_a_key_with_its_value():
    """Numbers of the error are in it; a text of several lines gets another one; some have none."""
    with pytest.raises(errors.ArgumentError) as raised:
        refuse_longer([9], PlanPolicy(packing_length=8, refuse_longer=True))
    assert str(raised.value).endswith("; raise the packing length (template.max_length) to 9")
    assert str(StaleError.for_lengths("runs", (Difference("key", 1, 2),))).split("\n")[2].startswith("  measure again")
    assert str(ModelError.for_leak("llama", "sdpa", "why")).endswith(" (model.attn_impl: auto)")
    assert str(ModelError.for_leak("llama", "auto", "why")).endswith(" (training.packing: false)")
    assert "1 finding" == str(errors.MismatchError("unsound", "1 finding"))


def test_a_difference_shortens_digests_and_calls_what_is_absent_unset():
    """So says each list of changed inputs; only where both would be unset, one is absent."""
    then, now = (Fingerprint(one) for one in ({"a": "5" * 64, "b": "x"}, {"a": "6" * 64, "c": None}))

    assert ["a was '555555555555', now '666666666666'", "b was 'x', now unset", "c was '(absent)', now unset"] == [
        str(one) for one in then.differences(now)
    ]
    assert "its first bytes have changed" == str(Difference("head", 8, 9))
    causes = StaleError.for_plan("c", (*then.differences(now)[1:], Difference("lengths", "5" * 64, "6" * 64)))
    assert "lengths" not in str(causes)
    assert "digest of the lengths was '5555" in str(StaleError.for_plan("c", (Difference("lengths", "5" * 64, "6"),)))


PASSED = ProbeResult(0, 3e-7)


def test_measurements_survive_the_table_and_sums():
    """Row by row; columns by name; a sum is truncated if a part of it is."""
    rows = [Measurement(9, 4, 2, 64), Measurement(5, 5, 0, 0, cut=True)]
    table = np.array([to_row(row) for row in rows], dtype=np.int32)

    assert rows == [from_row(table, index) for index in range(2)]
    assert [9, 5] == column(table, "length").tolist()
    assert len(COLUMNS) == table.shape[1]
    together = rows[0] + rows[1]
    assert (Measurement(14, 9, 2, 64, cut=True), rows[0]) == (together, together - rows[1])
    assert ("images", 2, 1) == attrs.astuple(rows[0].differences(attrs.evolve(rows[0], images=1))[0])


def verdict(strategy="varlen", attention="varlen", native="sdpa", split=(), measured=PASSED, **fields):
    """A verdict that passes, unless its strategy is None."""
    plain = {"native": native, "split": split, "keeps_rows": False, "measured": measured, "reason": "it says so"}
    return PackingVerdict("llama", strategy, attention, **plain, **fields)


FLASH = {"flash_installed": True}

ON_CPU = {"on_cpu": True}


@pytest.mark.parametrize(
    ("attn_impl", "verdict", "options", "name", "why", "leak"),
    [
        ("auto", verdict(), {}, "varlen", "the probe of llama passed with this attention", None),
        ("auto", verdict(split=("Mixer",)), {}, "varlen", "the probe of llama passed with this attention", None),
        ("auto", None, ON_CPU, "sdpa", "is auto", None),
        ("auto", verdict(None, native="eager"), {}, "eager", "must not share packs: it says so", "it says so"),
        ("varlen", verdict(), {}, "varlen", "names this attention", None),
        ("sdpa", verdict("own", "sdpa"), {}, "sdpa", "names this attention", None),
        ("sdpa", verdict(None), {}, "sdpa", "must not share packs: it says so", "it says so"),
        ("eager", None, {}, "eager", "names this attention", None),
        ("flash_attention_2", None, {}, "flash_attention_2", "names this attention", "flash-attn is not installed"),
        ("flash_attention_3", None, {}, "flash_attention_3", "names this attention", "flash-attn-3 is not installed"),
        ("flash_attention_2", None, FLASH | ON_CPU, "flash_attention_2", "names this attention", "only on a GPU"),
        ("flash_attention_2", None, FLASH, "flash_attention_2", "names this attention", None),
        ("flex_attention", None, ON_CPU, "flex_attention", "names this attention", "no backward pass on a CPU"),
        ("flex_attention", None, {}, "flex_attention", "names this attention", None),
    ],
)
def test_auto_takes_what_the_model_was_shown_to_pack_by(*, attn_impl, verdict, options, name, why, leak):
    """What is named is taken as it is; what cannot train here, or may not pack, says so."""
    found = choose_attention(attn_impl, verdict, **{"flash_installed": False, "on_cpu": False, **options})

    assert (name, verdict) == (found.name, found.verdict)
    assert why in found.why
    assert f"{name}: {found.why}" == str(found)
    assert (found.native if name == "varlen" else name) == found.loaded_backend
    assert found.leak is None if leak is None else leak in found.leak


def test_varlen_by_name_is_refused_where_it_does_not_run():
    with pytest.raises(ModelError, match=r"attn_impl varlen .*it says so", check=lambda one: one.kind == "attention"):
        choose_attention("varlen", verdict(None))


@pytest.mark.parametrize("measured", [ProbeResult(0.25, 1e-7), ProbeResult(float("inf"), 1e-7), None])
def test_a_verdict_survives_json(measured):
    """Numbers that are none too; people read them, or that nothing could be measured."""
    one = verdict(None, split=("Mixer", "Other"), measured=measured, not_exercised=("vision",))
    numbers = measured and f" (isolation {measured.isolation}, largest difference 1e-07)"

    assert one == PackingVerdict.from_dict(json.loads(json.dumps(one.to_dict(), allow_nan=False)))
    assert str(one).endswith(f"sample by sample{numbers or ''}; not tested: vision")


def test_trials_go_from_the_fastest_to_the_slowest():
    """Flash attention where it runs; what is named is tried alone."""

    def tried(*arguments, **options):
        return [(one.strategy, one.attention) for one in yield_trials(*arguments, **options)]

    assert ["flash", "varlen", "varlen", "own"] == [one for one, _ in tried("auto", native="sdpa", flash=True)]
    assert [("own", "eager")] == tried("auto", native="eager", flash=False)[2:3]
    assert {"varlen"} == {one for one, _ in tried("varlen", native="sdpa", flash=True)}
    ours = {AUTO: 3, VARLEN: 2}
    for name in BACKENDS:
        found = [("flash", name)] if name.startswith("flash") else [("own", name)] * 2
        found = [("varlen", VARLEN)] * 2 + [("own", "sdpa")] * (name == AUTO) if name in ours else found
        assert found == tried(name, native="sdpa", flash=False), name


def test_what_is_measured_passes_if_it_is_apart_and_equal():
    """Isolation has no threshold; what is not a number passes nothing."""
    assert ProbeResult(0, 2e-5, 2e-5, 2e-5).reason_against_packing(limit=2e-5) is None
    for found in (ProbeResult(1e-30, 0), ProbeResult(0, 0, 0, 3e-5), ProbeResult(0, float("nan"))):
        assert found.reason_against_packing(limit=2e-5) is not None
    assert "logits are 0 or not finite" in ProbeResult(float("inf"), 0).reason_against_packing(limit=1.0)


def test_errors_name_what_failed():
    """A worker and its method, a copy that changed; what is no sentence of ours stays as it is."""
    assert "worker 3 failed in step: it died" == str(RunError.for_worker(3, "step", "it died"))
    said = str(StaleError.for_sample(2, "a.jsonl, line 3", (Difference("length", 3, 4),), copy="cache/a"))
    assert said.endswith("length was 3, now 4; delete cache/a: the next run makes the copy again")
    assert {"file": "a.jsonl"} == StaleError.for_file("a.jsonl", "it has 2 rows").details
    assert "plain" == str(PackplanError("plain"))


def test_each_flash_attention_needs_its_own_package(monkeypatch):
    """Version 3 is a package of its own, with another module than version 2."""
    monkeypatch.setattr(versions, "find_spec", lambda name: "found" if name == "flash_attn_interface" else None)

    assert versions.has_flash_package("flash_attention_3")
    assert not any(versions.has_flash_package(name) for name in ("flash_attention_2", "flash_attn", "auto"))
