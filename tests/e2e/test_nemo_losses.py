"""
Each behaviour of NeMo-RL's clipped policy loss, on the numbers of its own tests, token by token.

Expected values are of the definitions, in float64. Where NeMo-RL's test states a loss, it is beside
them, to the digits that it has there (`tests/unit/algorithms/test_loss_functions.py` of NeMo-RL).
"""

from __future__ import annotations

from math import exp, inf, log

import attrs
import pytest
import torch

from packplan.adapters.losses import FusedLoss, PolicyLoss, normalisers

NOW, OLD, ENGINE = [log(0.5) - 1, -1.0, log(1.5) - 1], [-1.0, -1.0, -1.0], [-0.5, -1.5, -0.8]
"""Log-probabilities of an answer of three tokens. Ratios of the first two are 0.5, 1 and 1.5."""

ADVANTAGES = [1.0, -1.0, 2.0]

TRUST = [exp(old - engine) for old, engine in zip(OLD, ENGINE, strict=True)]
"""Ratios of the policy's old probabilities to those of the engine: 0.61, 1.65 and 0.82."""

CLIPPED = [-0.5, 1.0, -2.4]
"""Losses of the three tokens under the clipped objective, with limits of 0.8 and 1.2."""

MEAN_RATIO = 0.75 ** (1 / 3)
"""Ratio of the whole answer: the geometric mean of 0.5, 1 and 1.5."""

OF_ANSWER = [-MEAN_RATIO, MEAN_RATIO, -2 * MEAN_RATIO]
"""Losses of the three tokens under GSPO."""


@attrs.frozen
class Case:
    """A behaviour: settings, log-probabilities of answers, and the loss of each token."""

    settings: dict
    expected: list[float]
    stated: float | None = None
    """Mean that NeMo-RL's test states."""

    now: list[list[float]] = [NOW]  # noqa: RUF008  # never changed
    old: list[list[float]] = [OLD]  # noqa: RUF008
    engine: list[list[float]] = [ENGINE]  # noqa: RUF008
    advantages: list[float] = ADVANTAGES


def weighed(factors, losses=CLIPPED):
    return [factor * loss for factor, loss in zip(factors, losses, strict=True)]


def corrected(name, most=inf, least=0.5, **others):
    return {"correction": name, "correction_max": most, "correction_min": least, **others}


GSPO = {"surrogate": "gspo", "normalisation": "sequence"}

CISPO = {"surrogate": "cispo"}

OF_CISPO = [-0.8 * NOW[0], 1.0 * NOW[1], -2 * 1.2 * NOW[2]]

CASES = {
    "clipping": Case({}, CLIPPED, -0.6333),
    "REINFORCE": Case({"surrogate": "reinforce"}, [0.5, -1.0, 3.0], 0.8333, now=[[-0.5, -1.0, -1.5]]),
    "on-policy ratio of 1": Case({"on_policy": True}, [-1.0, 1.0, -2.0], -0.6667),
    "CISPO": Case(CISPO, OF_CISPO),
    "CISPO, per-token importance": Case(CISPO | corrected("truncated"), weighed(TRUST, OF_CISPO)),
    "dual clip": Case(
        {"dual_clip": 3.0}, [-0.5, 1.0, 12.0], 4.1667,
        now=[[log(0.5) - 1, -1.0, log(10) - 3]], old=[[-1.0, -1.0, -3.0]], advantages=[1.0, -1.0, -4.0],
    ),
    "per-token importance": Case(corrected("truncated"), weighed(TRUST), -0.2065),
    "truncated importance": Case(corrected("truncated", 0.8), weighed([TRUST[0], 0.8, 0.8]), -0.4744),
    "icepop": Case(
        corrected("icepop", 5.0), [-TRUST[0], 0.0, -2 * TRUST[2]], now=[OLD], engine=[[-0.5, -3.5, -0.8]]
    ),
    "mask of sequences, within": Case(
        corrected("sequence_mask", 1.002, 0.999), weighed([exp(0.0005)] * 3, [-1, 1, -2]),
        now=[OLD], engine=[[-1.0005] * 3],
    ),
    "mask of sequences, an impossible token": Case(
        corrected("sequence_mask", 1.002, 0.999), [0.0] * 3, now=[OLD], engine=[[-1.0005, -inf, -1.0005]]
    ),
    "GSPO": Case(GSPO, OF_ANSWER, -0.6057),
    "GSPO, two answers": Case(
        GSPO, [*OF_ANSWER, -1.2, MEAN_RATIO * exp(1), -2.4], -0.4912, now=[NOW] * 2, old=[OLD, [-2.0] * 3]
    ),
    "GSPO, importance of the answer": Case(GSPO | corrected("sequence"), weighed([exp(-0.2)] * 3, OF_ANSWER)),
    "GSPO, truncated importance": Case(GSPO | corrected("sequence", 0.8), weighed([0.8] * 3, OF_ANSWER), -0.4846),
}  # fmt: skip


@attrs.define
class Noting:
    """The loss of each token, beside what it adds up to."""

    loss: PolicyLoss
    fields: tuple[str, ...] = attrs.field(init=False)
    normalisation: str = attrs.field(init=False)
    divisor: float = 1
    found: list[float] = attrs.field(factory=list)

    def __attrs_post_init__(self):
        self.fields, self.normalisation = self.loss.fields, self.loss.normalisation

    def __call__(self, log_probabilities, fields):
        losses, metrics = self.loss(log_probabilities, fields)
        self.found += losses.view(-1, 4)[:, :-1].flatten().tolist()  # the last position predicts nothing
        return losses, metrics


def logits_of(rows):
    """Return logits of a vocabulary of two, whose token 0 has these log-probabilities."""
    held = torch.full((len(rows), 4, 2), 0.0, dtype=torch.float64)
    held[:, :3, 0] = torch.tensor(rows, dtype=torch.float64)
    held[:, :3, 1] = torch.log1p(-held[:, :3, 0].exp())
    return held


def of_tokens(rows):
    """Return a field of which the first token of each row has no entry."""
    return torch.nn.functional.pad(torch.tensor(rows), (1, 0), value=torch.nan)


def run(settings, now, **fields):
    """Return the loss, its metrics, and the loss of each token."""
    data = {"input_ids": torch.zeros(len(now), 4, dtype=torch.long), "token_mask": torch.ones(len(now), 4)}
    num_sequences, num_tokens = normalisers(data["token_mask"])
    noting = Noting(PolicyLoss(**settings))
    data |= {name: of_tokens(rows) for name, rows in fields.items()}
    loss, metrics = FusedLoss(noting)(logits_of(now), data, num_sequences=num_sequences, num_tokens=num_tokens)
    return float(loss), {name: float(value) for name, value in metrics.items()}, noting.found


@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_nemo_rl(name):
    """Token by token, and their mean, which is the one that NeMo-RL states."""
    case = CASES[name]

    loss, _, found = run(
        case.settings, case.now, advantages=[case.advantages] * len(case.now), old_log_probabilities=case.old,
        engine_log_probabilities=case.engine,
    )  # fmt: skip

    mean = sum(case.expected) / len(case.expected)
    assert case.expected == pytest.approx(found, rel=1e-5, abs=1e-6)
    assert mean == pytest.approx(loss, rel=1e-5, abs=1e-6)
    assert case.stated is None or case.stated == pytest.approx(mean, abs=1e-4)


@pytest.mark.parametrize(
    ("estimator", "free", "clamped"),
    [
        ("k1", [-1.0, 14.0, 29.0], [-1.0, 10.0, 10.0]),
        ("k2", [0.5, 98.0, 420.5], [0.5, 10.0, 10.0]),
        ("k3", [exp(1) - 2, 13.0, 28.0], [exp(1) - 2, 10.0, 10.0]),
    ],
)
def test_estimates_of_the_divergence_are_clamped_as_in_nemo_rl(estimator, free, clamped):
    """Of a policy at -1 and references at 0, -15 and -30; its default clamps are 20 and 10."""
    expected = {None: free, 20.0: clamped}
    for input_clamp, divergences in expected.items():
        _, metrics, found = run(
            {"kl_weight": 0.1, "kl_estimator": estimator, "kl_input_clamp": input_clamp,
             "kl_output_clamp": input_clamp and 10.0},
            [OLD], advantages=[[0.0] * 3], old_log_probabilities=[OLD],
            reference_log_probabilities=[[0.0, -15.0, -30.0]],
        )  # fmt: skip

        assert [0.1 * one for one in divergences] == pytest.approx(found, rel=1e-5)
        assert sum(divergences) / 3 == pytest.approx(metrics["reference_kl"], rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "values", "gradient"),
    [
        ({"kl_input_clamp": 2.0}, [exp(2) - 3, exp(1) - 2], [0.0, -1.0]),
        ({"kl_output_clamp": 1.0}, [1.0, exp(1) - 2], [0.0, -1.0]),
        ({}, [exp(3) - 4, exp(1) - 2], [-3.0, -1.0]),
    ],
)
def test_a_clamped_divergence_does_not_keep_the_gradient_of_the_sampling(settings, values, gradient):
    """Without a clamp that gradient is the estimate's, added to its own (1 - ratio)."""
    p = torch.tensor([-3.0, -1.0], dtype=torch.float64, requires_grad=True)
    fields = {name: torch.zeros(2) for name in PolicyLoss(kl_weight=1).fields}

    losses, _ = PolicyLoss(kl_weight=1, kl_sampling=True, surrogate="reinforce", **settings)(p, fields)
    (found,) = torch.autograd.grad(losses.sum(), p)

    assert values == pytest.approx(losses.tolist())
    assert gradient == pytest.approx(found.tolist())


def test_the_penalty_is_the_mean_divergence_times_its_weight():
    """NeMo-RL states 0.0362 for a weight of 0.1."""
    p = torch.tensor([0.0, -1.0, -2.0])
    fields = {"advantages": torch.zeros(3), "old_log_probabilities": torch.zeros(3), "entropy": torch.zeros(3)}

    losses, _ = PolicyLoss(kl_weight=0.1)(p, {**fields, "reference_log_probabilities": torch.full((3,), -1.0)})

    assert 0.0362 == pytest.approx(float(losses.mean()), abs=1e-4)


def test_entropy_is_that_of_the_distribution():
    """NeMo-RL estimates it from the drawn tokens; this is exact, in nats, and may be rewarded."""
    fields = {"advantages": [[0.0] * 3], "old_log_probabilities": [OLD]}
    of_two = [-(exp(p) * p + (1 - exp(p)) * log(1 - exp(p))) for p in NOW]

    loss, metrics, _ = run({}, [NOW], **fields)
    rewarded, _, found = run({"entropy_weight": 0.3}, [NOW], **fields)

    assert sum(of_two) / 3 == pytest.approx(metrics["entropy"], rel=1e-5)
    assert [-0.3 * one for one in of_two] == pytest.approx(found, rel=1e-5)
    assert -0.3 * metrics["entropy"] == pytest.approx(rewarded - loss, rel=1e-5)


@pytest.mark.parametrize(("most", "share"), [(0.8, 2 / 3), (1.0, 1 / 3), (inf, 0)])
def test_how_many_tokens_a_correction_changes_is_logged(most, share):
    """And the mean and the largest of its factors."""
    fields = {"advantages": [ADVANTAGES], "old_log_probabilities": [OLD], "engine_log_probabilities": [ENGINE]}

    _, metrics, _ = run(corrected("truncated", most), [NOW], **fields)

    factors = [min(one, most) for one in TRUST]
    assert share == pytest.approx(metrics["corrected"])
    assert (sum(factors) / 3, max(factors)) == pytest.approx((metrics["correction"], metrics["correction_max"]))
