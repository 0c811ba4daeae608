"""A loss on packed logits is the loss of the sequences alone, whichever way it runs."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st

from packplan.adapters import policy_loss, sequence_loss
from packplan.adapters.policy_loss import PolicyLoss
from packplan.adapters.sequence_loss import (
    NO_TARGET,
    FusedLoss,
    PackedLoss,
    combined,
    normalisers,
    refuse_whole_batch,
    token_log_probabilities,
)
from packplan.core.config import GrpoConfig
from packplan.core.context_parallel import PackedLayout
from packplan.core.errors import ArgumentError
from tests.nearness import FLOAT32, assert_near

VOCABULARY = 11


def plain_policy_loss(logits, data, *, num_sequences, num_tokens):  # every loss is given both
    """Return the clipped policy loss of padded rows as it is commonly written; token mean."""
    mask, advantages = data["token_mask"][:, 1:], data["advantages"][:, None]
    every = torch.log_softmax(logits[:, :-1].float(), -1)
    log_probabilities = every.gather(-1, data["input_ids"][:, 1:, None])[..., 0]
    ratios = (log_probabilities - data["old_log_probabilities"][:, 1:]).exp()
    losses = torch.maximum(-ratios * advantages, -ratios.clamp(0.8, 1.2) * advantages)
    return (losses * mask).sum() / num_tokens, {"ratio": (ratios.detach() * mask).sum() / num_tokens}


NAMED = {
    "PPO": PolicyLoss(),
    "GRPO": PolicyLoss(clip_low=0.1, clip_high=0.4, kl_weight=0.3, normalisation="sequence"),
    "penalty": PolicyLoss(kl_weight=0.1),
    "dual clip, Dr. GRPO": PolicyLoss(0.2, 0.28, dual_clip=1.5, normalisation="constant", divisor=7),
    "CISPO": PolicyLoss(0.3, 0.5, 0.2, surrogate="cispo", kl_estimator="k2", kl_input_clamp=1.5),
    "REINFORCE": PolicyLoss(surrogate="reinforce", kl_weight=0.2, kl_estimator="k1", kl_output_clamp=0.5),
    "on-policy ratio of 1, clamps of the divergence": PolicyLoss(
        on_policy=True, kl_weight=0.3, kl_sampling=True, kl_input_clamp=2, kl_output_clamp=1
    ),
    "GSPO": PolicyLoss(0.2, 0.3, surrogate="gspo", normalisation="sequence", dual_clip=2),
    "icepop": PolicyLoss(surrogate="gspo", correction="icepop", correction_max=1.5, entropy_weight=0.2),
    "truncated importance": PolicyLoss(correction="truncated", correction_max=1.2, value_weight=0.5, value_clip=0.3),
    "entropy, values": PolicyLoss(entropy_weight=0.7, value_weight=0.3, normalisation="sequence"),
}

LOSSES = [*NAMED.values()]

OF_TOKENS = (
    "old_log_probabilities", "reference_log_probabilities", "engine_log_probabilities", "old_values", "returns",
)  # fmt: skip


@st.composite
def batches(draw) -> tuple[torch.Tensor, dict, PackedLayout]:
    """
    Logits and fields of a padded batch, and a layout of its sequences; what padding holds is not a
    number.
    """
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    layout = PackedLayout.from_lengths(lengths, cp_size=draw(st.integers(1, 3)), tp_size=draw(st.integers(1, 2)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = (len(lengths), max(lengths) + draw(st.integers(0, 2)))
    inside = torch.arange(shape[1]) < torch.tensor(lengths)[:, None]
    counts = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    fields = {
        "input_ids": torch.randint(0, VOCABULARY, shape, generator=generator),
        "token_mask": (inside & counts).float(),
        "advantages": torch.randn(len(lengths), generator=generator),
        **{name: -1 - 3 * torch.rand(shape, generator=generator) for name in OF_TOKENS},
        "names": [f"sequence {number}" for number in range(len(lengths))],
    }
    for name in OF_TOKENS:
        fields[name] = fields[name].masked_fill(~inside, torch.nan)
    logits = 2 * torch.randn(*shape, VOCABULARY, generator=generator)
    event(f"a sequence of one token: {1 in lengths}")
    event(f"a sequence without a token that counts: {0 in fields['token_mask'][:, 1:].sum(1)}")
    return logits, fields, layout


def pack(batch: torch.Tensor, layout: PackedLayout, padding: float) -> torch.Tensor:
    """Return the row of a batch of logits."""
    row = torch.full((1, layout.num_positions, VOCABULARY), padding)
    row[0, layout.is_token] = batch[layout.sequence[layout.is_token], layout.position_ids[layout.is_token]]
    return row


def unpack(row: torch.Tensor, layout: PackedLayout, shape: torch.Size) -> torch.Tensor:
    """Return the batch of a row of gradients; padding in the row has to have none."""
    assert not row[0, ~layout.is_token].any()
    batch = torch.zeros(shape)
    batch[layout.sequence[layout.is_token], layout.position_ids[layout.is_token]] = row[0, layout.is_token]
    return batch


def values_of(logits):
    """Return what a value head predicts, here a part of each row of logits."""
    return logits[..., 0] / 3


def run(loss, logits, *args, **options):
    """Return loss, metrics and the logits' gradient, which a value head's error reaches too."""
    logits = logits.clone().requires_grad_()
    if isinstance(loss, FusedLoss):
        options["values"] = values_of(logits)
    value, metrics = loss(logits, *args, **options)
    (gradient,) = torch.autograd.grad(value, logits)
    return float(value.detach()), {name: float(metric) for name, metric in metrics.items()}, gradient


def test_losses_are_opened_by_name_with_the_settings_of_a_run():
    """Each setting reaches the loss; its defaults are those of the run."""
    grpo = GrpoConfig(ratio_clip_min=0.1, ratio_clip_max=0.3, kl_coefficient=0.5, normalisation="sequence")

    assert PolicyLoss(0.1, 0.3, 0.5, "sequence", 64) == policy_loss.LOSSES["clipped"](grpo)
    assert PolicyLoss(divisor=64) == policy_loss.LOSSES[GrpoConfig().loss](GrpoConfig())
    grpo = GrpoConfig(
        loss="cispo", normalisation="constant", max_new_tokens=9, ratio_clip_c=3, force_on_policy_ratio=True,
        kl_coefficient=0.1, kl_estimator="k1", kl_input_clamp_value=20, kl_output_clamp_value=10,
        kl_sampling_gradient=True,
    )  # fmt: skip
    assert PolicyLoss(
        divisor=64, surrogate="gspo", entropy_weight=0.1, correction="icepop", correction_max=3, correction_min=0.1,
        value_weight=0.4, value_clip=0.2,
    ) == policy_loss.LOSSES["gspo"](GrpoConfig(
        loss="gspo", entropy_coefficient=0.1, importance_correction="icepop", importance_max=3, importance_min=0.1,
        baseline="value", value_coefficient=0.4, value_clip=0.2,
    ))  # fmt: skip
    assert PolicyLoss(
        0.2, 0.2, 0.1, "constant", 9, "cispo", 3, on_policy=True, kl_estimator="k1", kl_input_clamp=20,
        kl_output_clamp=10, kl_sampling=True,
    ) == policy_loss.LOSSES["cispo"](grpo)  # fmt: skip


KL = "reference_log_probabilities"


def with_values(loss, logits, data, **options):
    """Return the loss of one sequence and of what a value head predicts of it."""
    return loss(logits, data, values=values_of(logits), **options)


def of_ranks(loss, row, fields, layout, **options):
    """Return what each rank of a group finds, whose sums over the group are those of all ranks."""
    sums = []

    def found(rank, total):
        own = {"layout": layout, "cp_rank": rank, "sum_over_ranks": total, **options}
        return run(loss, row[:, layout.positions(rank)], fields, **own)

    for rank in range(layout.cp_size):
        found(rank, lambda part: sums.append(part) or part)
    return [found(rank, lambda _: sum(sums)) for rank in range(layout.cp_size)]


def token_reference(loss, p, advantage, token):
    """Return the loss of a token of log-probability *p*, from the definitions."""
    ratio = (p - (p.detach() if loss.on_policy else token["old_log_probabilities"])).exp()
    if loss.surrogate == "gspo":
        ratio = token["sequence_ratio"]
        if loss.correction != "none":  # factors of tokens weigh their own gradients: GSPO-token
            ratio = ratio.detach() * (p - p.detach()).exp()
    low, high = 1 - loss.clip_low, 1 + loss.clip_high
    if loss.surrogate == "reinforce":
        gain = advantage * p
    elif loss.surrogate == "cispo":
        gain = ratio.detach().clamp(low, high) * advantage * p
    elif loss.dual_clip and advantage < 0 and ratio > loss.dual_clip:
        gain = 0 * p + loss.dual_clip * advantage
    else:
        gain = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    away = token[KL] - p
    if loss.kl_input_clamp and away.detach().abs() > loss.kl_input_clamp:
        away = 0 * p + loss.kl_input_clamp * away.detach().sign()
    kl = {"k1": -away, "k2": away**2 / 2, "k3": away.exp() - 1 - away}[loss.kl_estimator]
    if loss.kl_output_clamp and kl.detach().abs() > loss.kl_output_clamp:
        kl = 0 * p + loss.kl_output_clamp * kl.detach().sign()
    sampled = kl.detach() * (p - p.detach()) if loss.kl_sampling else 0
    if loss.correction != "none":
        trust = (token["old_log_probabilities"] - token["engine_log_probabilities"]).exp()
        is_beyond = trust > loss.correction_max or trust < loss.correction_min
        left = 0 if is_beyond else trust
        gain = gain * (left if loss.correction == "icepop" else trust.clamp(max=loss.correction_max))
    error = (token["value"] - token["returns"]) ** 2
    if loss.value_clip:
        near = token["value"].clamp(token["old_values"] - loss.value_clip, token["old_values"] + loss.value_clip)
        error = torch.maximum(error, (near - token["returns"]) ** 2)
    bonus = loss.entropy_weight * token["entropy"]
    return loss.kl_weight * (kl + sampled) + loss.value_weight * error / 2 - gain - bonus


def largest_term(loss, p, advantage, token):
    """Return a bound on the terms of a token's loss and of its gradient."""
    p = p.detach()
    away = token[KL] - p
    ratio = torch.exp(p - token["old_log_probabilities"])
    gain = ratio.clamp(min=1 + loss.clip_high) * (1 + p.abs()) * advantage.abs()
    if loss.surrogate == "gspo":
        gain = gain + token["sequence_ratio"].detach() * advantage.abs()
    gain = gain * loss.correction_max
    error = (token["value"].detach().abs() + token["returns"].abs() + 2) ** 2
    rest = loss.value_weight * error + 4 * loss.entropy_weight
    return float(gain + rest + loss.kl_weight * (away.exp() + 2 + away.abs() + away**2))


def reference(logits, fields, loss: PolicyLoss) -> tuple[torch.Tensor, float]:
    """
    Return the loss in float64, token by token, from its definition; and the sum of its absolute
    terms.
    """
    rows, sizes = [], []
    for b, mask in enumerate(fields["token_mask"].tolist()):
        tokens, terms = [], []
        every = torch.log_softmax(logits[b, :-1].double(), -1)
        counted = [t for t in range(1, len(mask)) if mask[t]]
        drawn = {t: every[t - 1][fields["input_ids"][b, t]] for t in counted}
        away = [drawn[t] - fields["old_log_probabilities"][b, t].double() for t in counted]
        sequence_ratio = (sum(away) / max(1, len(away)) + 0 * every.sum()).exp()
        for t in range(1, len(mask)):
            if mask[t]:
                p = drawn[t]
                token = {name: fields[name][b, t].double() for name in OF_TOKENS} | {
                    "sequence_ratio": sequence_ratio,
                    "entropy": -(every[t - 1].exp() * every[t - 1]).sum(),
                    "value": values_of(logits[b, t - 1].double()),
                }
                tokens.append(token_reference(loss, p, fields["advantages"][b].double(), token))
                terms.append(largest_term(loss, p, fields["advantages"][b].double(), token))
        rows.append(tokens)
        sizes.append(terms)

    def mean(of):
        if loss.normalisation == "token":
            return sum(map(sum, of)) / max(1, sum(map(len, of)))
        if loss.normalisation == "constant":
            return sum(map(sum, of)) / loss.divisor / max(1, sum(map(bool, of)))
        return sum(sum(tokens) / len(tokens) for tokens in of if tokens) / max(1, sum(map(bool, of)))

    return torch.as_tensor(mean(rows)), float(mean(sizes))


def near_metrics(expected: dict[str, float]) -> object:
    """
    Return what equals metrics up to rounding.

    A divergence of v is a difference, expm1(a) - a, whose terms are below 3 (v + 1); the others are
    sums of one sign.
    """
    return pytest.approx(expected, rel=FLOAT32, abs=FLOAT32)


@pytest.mark.parametrize("loss", LOSSES, ids=NAMED)
@given(batch=batches())
def test_every_way_gives_the_loss_of_the_sequences_alone(batch, loss):
    """
    Fused, in a loop, padded, and over the parts of ranks: value, metrics and gradients; padding has
    no gradient.
    """
    logits, fields, layout = batch
    num_sequences, num_tokens = normalisers(fields["token_mask"])
    given = {"num_sequences": num_sequences, "num_tokens": num_tokens}
    exact = logits.clone().requires_grad_()
    expected, scale = reference(exact, fields, loss)
    (gradient,) = torch.autograd.grad(expected + 0 * exact.sum(), exact)
    expected = float(expected.detach())
    row = pack(logits, layout, padding=100.0)

    padded = run(FusedLoss(loss), logits, fields, **given)
    fused = run(FusedLoss(loss), row, fields, layout=PackedLayout(layout.cu_seqlens, layout.cu_seqlens_padded), **given)
    one_by_one = PackedLoss(partial(with_values, FusedLoss(loss)))
    loop = run(one_by_one, row, fields, layout=layout, **given)
    parts = of_ranks(FusedLoss(loss), row, fields, layout, **given)
    shared = (
        sum(part[0] for part in parts),
        {name: float(value) for name, value in combined([part[1] for part in parts]).items()},
        torch.cat([part[2] for part in parts], dim=1)[:, layout.restore],
    )

    for value, metrics, found in (padded, fused, loop, shared):
        assert_near(value, expected, scale=scale)
        assert near_metrics(padded[1]) == metrics
        assert_near(
            found if found.shape == logits.shape else unpack(found, layout, logits.shape), gradient, scale=scale
        )


@given(batches(), st.sampled_from(LOSSES))
def test_padding_never_counts(batch, loss):
    """
    Whatever a mask says of positions beyond a sequence's end, and of a first token, which nothing
    predicts.
    """
    logits, fields, layout = batch
    layout = PackedLayout(layout.cu_seqlens, layout.cu_seqlens_padded)
    row = pack(logits, layout, padding=100.0)
    given = {"layout": layout, "num_sequences": 3, "num_tokens": 7}
    inside = torch.arange(fields["token_mask"].shape[1]) < torch.as_tensor(layout.lengths.copy())[:, None]
    careless = fields["token_mask"].masked_fill(~inside, 1)
    careless[:, 0] = 1

    expected = run(FusedLoss(loss), row, fields, **given)
    found = run(FusedLoss(loss), row, {**fields, "token_mask": careless}, **given)

    assert expected[:2] == found[:2]
    assert torch.equal(expected[2], found[2])


@given(batches())
def test_an_ordinary_loss_runs_unchanged(batch):
    """
    One that knows nothing of packing, one sequence at a time, without its padding; other fields are
    cut to it.
    """
    logits, fields, layout = batch
    num_sequences, num_tokens = normalisers(fields["token_mask"])
    given = {"num_sequences": num_sequences, "num_tokens": max(1, num_tokens)}
    fields["old_log_probabilities"] = fields["old_log_probabilities"].nan_to_num(-1)
    seen = []

    def noting(logits, data, **options):
        seen.append((logits.shape[1], data["input_ids"].shape, data["advantages"].shape, data["names"]))
        return plain_policy_loss(logits, data, **options)

    expected = run(plain_policy_loss, logits, fields, **given)
    found = run(PackedLoss(noting), pack(logits, layout, padding=100.0), fields, layout=layout, **given)

    # A ratio of its limit, 0.8, at least.
    scale = float(fields["advantages"].abs().max()) * (1 + expected[1]["ratio"])
    assert_near(found[0], expected[0], scale=scale)
    assert near_metrics(expected[1]) == found[1]
    assert_near(unpack(found[2], layout, logits.shape), expected[2], scale=scale)
    lengths = layout.lengths.tolist()
    assert seen == [(n, (1, n), (1,), [f"sequence {number}"]) for number, n in enumerate(lengths)]


def test_metrics_combine_as_their_names_say():
    """The least, the greatest, or the sum; one that is missing somewhere is that of the others."""
    parts = [{"kl": 1.0, "ratio_min": torch.tensor(0.5), "ratio_max": 2}, {"kl": 3, "ratio_min": 0.7, "ratio_max": 4.0}]

    assert {"kl": 4, "ratio_min": 0.5, "ratio_max": 4, "rare": 7} == combined([*parts, {"rare": 7}])
    assert {} == combined([])


def test_without_a_token_that_counts_there_is_no_loss():
    """Nor a gradient; extremes are those of nothing."""
    fields = {"input_ids": torch.ones(1, 3).long(), "token_mask": torch.tensor([[1.0, 0, 0]]),
              "advantages": torch.ones(1), "old_log_probabilities": torch.full((1, 3), -torch.inf)}  # fmt: skip
    value, metrics, gradient = run(FusedLoss(PolicyLoss()), torch.ones(1, 3, 5), fields, num_sequences=0, num_tokens=0)

    assert 0 == value == metrics["ratio"]
    assert (torch.inf, -torch.inf) == (metrics["ratio_min"], metrics["ratio_max"])
    assert not gradient.any()


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, FLOAT32), (torch.bfloat16, 4e-3)])
def test_log_probabilities_are_computed_block_by_block(monkeypatch, dtype, near):
    """
    As log-softmax gives them, also in a last block that is not full; rows without a target have
    none.
    """
    monkeypatch.setattr(sequence_loss, "_CPU_BLOCK", 3 * 50)
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(10, 50, generator=generator)).to(dtype).requires_grad_()
    targets = torch.randint(0, 50, (10,), generator=generator)
    targets[4] = NO_TARGET
    outer = torch.randn(10, generator=generator)
    expected = torch.log_softmax(logits.float(), -1).gather(1, targets.clamp(min=0)[:, None])[:, 0] * (targets >= 0)
    (gradient,) = torch.autograd.grad((expected * outer).sum(), logits)

    found = token_log_probabilities(logits, targets)
    (mine,) = torch.autograd.grad((found * outer).sum(), logits)

    assert (torch.float32, dtype) == (found.dtype, mine.dtype)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert (mine.float() - gradient.float()).norm() <= near * gradient.float().norm()
    assert not mine[4].any()


@pytest.mark.parametrize("with_both", [True, False])
def test_entropy_is_computed_block_by_block(monkeypatch, with_both):
    """In nats, with its gradient, beside that of log-probabilities or alone."""
    monkeypatch.setattr(sequence_loss, "_CPU_BLOCK", 3 * 50)
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(10, 50, generator=generator)
    logits[2, 7] = -torch.inf
    logits.requires_grad_()
    targets = torch.randint(8, 50, (10,), generator=generator)
    targets[4] = NO_TARGET
    outer = torch.randn(2, 10, generator=generator)
    every = torch.log_softmax(logits.double(), -1)
    exact = -(every.exp() * every.masked_fill(every == -torch.inf, 0)).sum(-1) * (targets >= 0)
    drawn = every.gather(1, targets.clamp(min=0)[:, None])[:, 0] * (targets >= 0)
    (gradient,) = torch.autograd.grad((exact * outer[0] + with_both * drawn * outer[1]).sum(), logits)

    found, entropy = sequence_loss._token_statistics(logits, targets, with_entropy=True)
    of_both = (entropy * outer[0]).sum() + ((found * outer[1]).sum() if with_both else 0)
    (mine,) = torch.autograd.grad(of_both, logits)

    torch.testing.assert_close(entropy.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine, gradient, rtol=1e-4, atol=1e-5)
    assert not mine[4].any()


def test_no_second_copy_of_the_logits_is_kept():
    """Between forward and backward: the logits themselves, and a few numbers of each row."""
    kept = {}
    logits = torch.randn(64, 1000, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        token_log_probabilities(logits, torch.zeros(64, dtype=torch.long))

    assert logits.data_ptr() in kept
    assert sum(tensor.nbytes for tensor in kept.values()) < logits.nbytes + 64 * 16


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_with_the_sampling_s_term_a_penalty_has_the_divergence_s_gradient(estimator):
    """Over all tokens of a policy, each as often as it is drawn; without the term it has not."""
    generator = torch.Generator().manual_seed(0)
    logits, other = torch.randn(2, 6, dtype=torch.float64, generator=generator)
    logits.requires_grad_()
    policy, towards = torch.log_softmax(logits, 0), torch.log_softmax(other, 0)
    (gradient,) = torch.autograd.grad((policy.exp() * (policy - towards)).sum(), logits, retain_graph=True)
    fields = {"advantages": torch.zeros(6), "old_log_probabilities": policy.detach(), KL: towards}
    fields["entropy"] = torch.zeros(6)

    def of_penalty(*, kl_sampling):
        losses, _ = PolicyLoss(kl_weight=1, kl_estimator=estimator, kl_sampling=kl_sampling)(policy, fields)
        return torch.autograd.grad((policy.exp().detach() * losses).sum(), logits, retain_graph=True)[0]

    torch.testing.assert_close(of_penalty(kl_sampling=True), gradient)
    assert (of_penalty(kl_sampling=False) - gradient).norm() > 0.1 * gradient.norm()


def test_one_token_far_from_the_reference_does_not_decide_a_clamped_penalty():
    """Its estimate would be exp(30); NeMo-RL's clamps, 20 and 10, leave 10, and no gradient."""
    p = torch.tensor([-30.0, -1.0], requires_grad=True)
    fields = {"advantages": torch.zeros(2), "old_log_probabilities": p.detach(), KL: torch.tensor([0.0, -1.5])}
    fields["entropy"] = torch.zeros(2)

    _, metrics = PolicyLoss(kl_weight=1, kl_input_clamp=20, kl_output_clamp=10)(p, fields)
    (gradient,) = torch.autograd.grad(metrics["reference_kl"].sum(), p)

    assert [10, pytest.approx(float(np.exp(-0.5)) - 0.5)] == metrics["reference_kl"].tolist()
    assert [0, pytest.approx(1 - float(np.exp(-0.5)))] == gradient.tolist()


def test_a_bad_answer_that_became_likely_has_a_limit():
    """By hand: dual clip bounds what a ratio of 9 multiplies, and leaves good answers alone."""
    p = torch.tensor([9.0, 2.0, 9.0]).log().requires_grad_()
    fields = {"advantages": torch.tensor([-1.0, -1.0, 1.0])}
    fields |= dict.fromkeys(("old_log_probabilities", "entropy"), torch.zeros(3))

    losses, metrics = PolicyLoss(dual_clip=3)(p, fields)
    (gradient,) = torch.autograd.grad(losses.sum(), p)

    assert [3, 2, pytest.approx(-1.2)] == losses.tolist()
    assert [0, 2, 0] == gradient.tolist()
    assert [1, 0, 1] == metrics["clipped"].tolist()


def test_a_ratio_beyond_its_limit_is_not_pushed_further():
    """
    By hand: what is good is not made more likely above 1 + clip_high, what is bad not less likely
    below 1 - clip_low.
    """
    loss = PolicyLoss(clip_low=0.1, clip_high=0.3)
    ratios = torch.tensor([1.2, 1.4, 0.85, 1.4, 0.95])
    log_probabilities = ratios.log().requires_grad_()
    advantages = torch.tensor([2.0, 2.0, -2.0, -2.0, -2.0])

    none = dict.fromkeys(("old_log_probabilities", "entropy"), torch.zeros_like(ratios))
    losses, metrics = loss(log_probabilities, {"advantages": advantages, **none})
    (gradient,) = torch.autograd.grad(losses.sum(), log_probabilities)

    assert [-2.4, -2.6, 1.8, 2.8, 1.9] == pytest.approx(losses.tolist())
    assert [-2.4, 0, 0, 2.8, 1.9] == pytest.approx(gradient.tolist())
    assert [0, 1, 1, 0, 0] == metrics["clipped"].tolist()


class DPOLoss:
    """Callable, and named as a loss that compares sequences."""

    def __call__(self, logits, data, **_):
        return logits.sum(), {}


class SimPOLoss(DPOLoss):
    pass


class PairedLoss(DPOLoss):
    needs_whole_batch = True


class PreferenceFreeLoss(DPOLoss):
    needs_whole_batch = False


def kto_loss(logits, data, **_):
    return logits.sum(), {}


@pytest.mark.parametrize("loss", [DPOLoss(), SimPOLoss(), PairedLoss(), kto_loss, partial(kto_loss, scale=2)])
def test_losses_that_compare_sequences_are_refused_by_name(loss):
    """Whichever way they would run; unless one says that its parts add up."""
    for refuse in (PackedLoss, FusedLoss, refuse_whole_batch):
        with pytest.raises(ArgumentError, match="needs the whole batch at once") as caught:
            refuse(loss)
        assert caught.value.details["loss"] in {"DPOLoss", "SimPOLoss", "PairedLoss", "kto_loss"}
    for other in (PreferenceFreeLoss(), PolicyLoss(), plain_policy_loss, lambda: None):
        refuse_whole_batch(other)


def test_what_does_not_fit_is_refused():
    """A field that is missing, logits of another row, limits below 0, an unknown normalisation."""
    fields = {"input_ids": torch.ones(1, 3).long(), "token_mask": torch.ones(1, 3), "advantages": torch.ones(1)}
    given = {"num_sequences": 1, "num_tokens": 2}
    with pytest.raises(ValueError, match="needs old_log_probabilities, but the data have input_ids, token_mask, adv"):
        FusedLoss(PolicyLoss())(torch.ones(1, 3, 5), fields, **given)
    layout = PackedLayout.from_lengths([3], cp_size=2)
    for loss in (FusedLoss(PolicyLoss()), PackedLoss(plain_policy_loss)):
        with pytest.raises(
            ValueError, match=r"layout has \d positions in 1 row, but the logits have the shape \(1, 3, 5\)"
        ):
            loss(torch.ones(1, 3, 5), fields, layout=layout, **given)
    fields |= dict.fromkeys(("old_log_probabilities", "old_values", "returns"), torch.zeros(1, 3))
    with pytest.raises(ValueError, match="needs the values"):
        FusedLoss(PolicyLoss(value_weight=1))(torch.ones(1, 3, 5), fields, **given)
    with pytest.raises(ValueError, match="clip_low"):
        PolicyLoss(clip_low=-1)
    with pytest.raises(ValueError, match="normalisation"):
        PolicyLoss(normalisation="mean")
