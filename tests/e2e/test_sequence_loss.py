"""A loss on packed logits is the loss of the sequences alone, whichever way it runs."""

from functools import partial

import attrs
import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st

from packplan.adapters.losses import (
    FusedLoss,
    PackedLoss,
    combine_metrics,
    normalisers,
    refuse_whole_batch_loss,
    token_statistics,
)
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


@attrs.frozen
class OwnLoss:
    """A loss of tokens that reads every kind of field."""

    normalisation: str
    divisor: float = 7.0
    fields = ("advantages", "old_log_probabilities", "entropy", "sequence_tokens", "sequence_log_ratio")

    def __call__(self, p, fields):
        ratios = (p - fields["old_log_probabilities"]).exp()
        of_sequence = fields["sequence_log_ratio"].exp() / fields["sequence_tokens"]
        gains = ratios * of_sequence.clamp(max=2) * fields["advantages"] + 0.2 * fields["entropy"]
        return -gains, dict.fromkeys(("ratio", "ratio_min", "ratio_max"), ratios)


NAMED = {name: OwnLoss(name) for name in ("token", "sequence", "constant")}


@st.composite
def batches(draw) -> tuple[torch.Tensor, dict, PackedLayout]:
    """Logits and fields of a padded batch, and a layout; padding holds nan."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    layout = PackedLayout.from_lengths(
        lengths, cp_size=draw(st.sampled_from([1, 2, 4])), tp_size=draw(st.integers(1, 2))
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = (len(lengths), max(lengths) + draw(st.integers(0, 2)))
    inside = torch.arange(shape[1]) < torch.tensor(lengths)[:, None]
    counts = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    fields = {
        "input_ids": torch.randint(0, VOCABULARY, shape, generator=generator),
        "token_mask": (inside & counts).float(),
        "advantages": torch.randn(len(lengths), generator=generator),
        "old_log_probabilities": (-1 - 3 * torch.rand(shape, generator=generator)).masked_fill(~inside, torch.nan),
        "names": [f"sequence {number}" for number in range(len(lengths))],
    }
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


def run(loss, logits, *args, **options):
    """Return loss, metrics and the logits' gradient."""
    logits = logits.clone().requires_grad_()
    value, metrics = loss(logits, *args, **options)
    (gradient,) = torch.autograd.grad(value, logits)
    return float(value.detach()), {name: float(metric) for name, metric in metrics.items()}, gradient


def of_ranks(loss, row, fields, layout, **options):
    """Return what each rank of a group finds, whose sums over the group are those of all ranks."""

    def found(rank, total):
        own = {"layout": layout, "cp_rank": rank, "sum_over_ranks": total, **options}
        return run(loss, row[:, layout.positions(rank)], fields, **own)

    parts = []
    for rank in range(layout.cp_size):
        found(rank, lambda part: parts.append(part) or part)
    return [found(rank, lambda _: sum(parts)) for rank in range(layout.cp_size)]


def reference(logits, fields, loss: OwnLoss) -> tuple[torch.Tensor, float]:
    """Return the loss in float64, token by token, and the same of bounds on its terms."""
    rows, sizes = [], []
    for b, mask in enumerate(fields["token_mask"].tolist()):
        every = torch.log_softmax(logits[b, :-1].double(), -1)
        counted = [t for t in range(1, len(mask)) if mask[t]]
        old = fields["old_log_probabilities"][b].double()
        drawn = {t: every[t - 1][fields["input_ids"][b, t]] for t in counted}
        away = sum(drawn[t].detach() - old[t] for t in counted) / max(1, len(counted))
        rows.append([])
        sizes.append([])
        for t in counted:
            weight = (away.exp() / len(counted)).clamp(max=2) * fields["advantages"][b].double()
            gain = (drawn[t] - old[t]).exp() * weight
            entropy = -(every[t - 1].exp() * every[t - 1]).sum()
            rows[-1].append(-gain - 0.2 * entropy)
            sizes[-1].append(float(gain.abs().detach() + 6))

    def mean(of):
        if loss.normalisation == "token":
            return sum(map(sum, of)) / max(1, sum(map(len, of)))
        if loss.normalisation == "constant":
            return sum(map(sum, of)) / loss.divisor / max(1, sum(map(bool, of)))
        return sum(sum(tokens) / len(tokens) for tokens in of if tokens) / max(1, sum(map(bool, of)))

    return torch.as_tensor(mean(rows)), float(mean(sizes))


def same_metrics(found, expected) -> bool:
    """Equal up to rounding: a divergence v is a difference whose terms are below 3 (v + 1)."""
    return pytest.approx(expected, rel=FLOAT32, abs=FLOAT32) == found


@pytest.mark.parametrize("loss", NAMED.values(), ids=NAMED)
@given(batch=batches())
def test_every_way_gives_the_loss_of_the_sequences_alone(batch, loss):
    """Fused, in a loop, padded, over ranks; whatever a mask says of padding and first tokens."""
    logits, fields, layout = batch
    num_sequences, num_tokens = normalisers(fields["token_mask"])
    given = {"num_sequences": num_sequences, "num_tokens": num_tokens}
    exact = logits.clone().requires_grad_()
    expected, scale = reference(exact, fields, loss)
    (gradient,) = torch.autograd.grad(expected + 0 * exact.sum(), exact)
    row, whole = pack(logits, layout, padding=100.0), PackedLayout(layout.cu_seqlens, layout.cu_seqlens_padded)

    padded = run(FusedLoss(loss), logits, fields, **given)
    inside = torch.arange(logits.shape[1]) < torch.as_tensor(layout.lengths.copy())[:, None]
    fields["token_mask"] = fields["token_mask"].masked_fill(~inside, 1)
    fields["token_mask"][:, 0] = 1
    parts = of_ranks(FusedLoss(loss), row, fields, layout, **given)
    ways = (
        padded,
        run(FusedLoss(loss), row, fields, layout=whole, **given),
        run(PackedLoss(FusedLoss(loss)), row, fields, layout=layout, **given),
        (
            sum(part[0] for part in parts),
            {name: float(value) for name, value in combine_metrics([part[1] for part in parts]).items()},
            torch.cat([part[2] for part in parts], dim=1)[:, layout.restore],
        ),
    )

    for value, metrics, found in ways:
        assert_near(value, float(expected.detach()), scale=scale)
        assert same_metrics(metrics, padded[1])
        assert_near(
            found if found.shape == logits.shape else unpack(found, layout, logits.shape), gradient, scale=scale
        )


@given(batches())
def test_an_ordinary_loss_runs_unchanged(batch):
    """One that knows nothing of packing, one sequence at a time, with fields cut to it."""
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
    assert same_metrics(found[1], expected[1])
    assert_near(unpack(found[2], layout, logits.shape), expected[2], scale=scale)
    lengths = layout.lengths.tolist()
    assert seen == [(n, (1, n), (1,), [f"sequence {number}"]) for number, n in enumerate(lengths)]


def test_metrics_combine_as_their_names_say():
    """The least, the greatest, or the sum; one that is missing somewhere is that of the others."""
    parts = [{"kl": 1.0, "ratio_min": torch.tensor(0.5), "ratio_max": 2}, {"kl": 3, "ratio_min": 0.7, "ratio_max": 4.0}]

    assert {"kl": 4, "ratio_min": 0.5, "ratio_max": 4, "rare": 7} == combine_metrics([*parts, {"rare": 7}])


def test_without_a_token_that_counts_there_is_no_loss():
    """Nor a gradient; extremes are those of nothing."""
    fields = {
        "input_ids": torch.ones(1, 3).long(), "token_mask": torch.tensor([[1.0, 0, 0]]), "advantages": torch.ones(1),
        "old_log_probabilities": torch.full((1, 3), -torch.inf),
    }  # fmt: skip
    loss, logits = FusedLoss(OwnLoss("token")), torch.ones(1, 3, 5)

    value, metrics, gradient = run(loss, logits, fields, num_sequences=0, num_tokens=0)

    assert (0, {"ratio": 0, "ratio_min": torch.inf, "ratio_max": -torch.inf}) == (value, metrics)
    assert not gradient.any()


@pytest.mark.parametrize(
    ("dtype", "near", "weights"),
    [(torch.float32, FLOAT32, (0, 1)), (torch.float32, 1e-4, (1, 0)), (torch.bfloat16, 4e-3, (0, 1)),
     (torch.float32, 1e-4, (1, 1))],
)  # fmt: skip
def test_token_statistics_are_computed_block_by_block(dtype, near, weights):
    """Log-probabilities, entropy in nats, or both, in ragged blocks; none without a target."""
    vocabulary = token_statistics._CPU_BLOCK // 3
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(10, vocabulary, generator=generator)).to(dtype)
    logits[2, 7] = -torch.inf
    logits.requires_grad_()
    targets = torch.randint(8, vocabulary, (10,), generator=generator)
    targets[4] = token_statistics.NO_TARGET
    outer = torch.randn(2, 10, generator=generator) * torch.tensor(weights)[:, None]
    every = torch.log_softmax(logits.double(), -1)
    exact = -(every.exp() * every.masked_fill(every == -torch.inf, 0)).sum(-1) * (targets >= 0)
    drawn = every.gather(1, targets.clamp(min=0)[:, None])[:, 0] * (targets >= 0)
    (gradient,) = torch.autograd.grad((exact * outer[0] + drawn * outer[1]).sum(), logits)

    found, entropy = token_statistics.token_statistics(logits, targets, with_entropy=bool(weights[0]))
    given = [(one * outer[n]).sum() for n, one in enumerate((entropy, found)) if weights[n]]
    (mine,) = torch.autograd.grad(sum(given), logits)

    assert (torch.float32, dtype) == (found.dtype, mine.dtype)
    torch.testing.assert_close(found.double(), drawn, rtol=1e-5, atol=1e-5)
    if weights[0]:
        torch.testing.assert_close(entropy.double(), exact, rtol=1e-5, atol=1e-5)
    assert (mine.double() - gradient.double()).norm() <= near * gradient.double().norm()
    assert not mine[4].any()


def test_no_second_copy_of_the_logits_is_kept():
    """Between forward and backward: the logits themselves, and a few numbers of each row."""
    kept = {}
    logits = torch.randn(64, 1000, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        token_statistics.token_statistics(logits, torch.zeros(64, dtype=torch.long), with_entropy=False)

    assert logits.data_ptr() in kept
    assert sum(tensor.nbytes for tensor in kept.values()) < logits.nbytes + 64 * 16


def named(name, **marks):
    """Return a loss that is an instance of a class of this name, with these attributes."""
    return type(name, (), {"__call__": lambda *_, **__: None, **marks})()


def kto_loss():
    """Named as a function may be."""


@pytest.mark.parametrize(
    ("name", "loss"),
    [("DPOLoss", named("DPOLoss")), ("SimPOLoss", named("SimPOLoss")), ("kto_loss", kto_loss),
     ("PairedLoss", named("PairedLoss", needs_whole_batch=True)), ("kto_loss", partial(kto_loss, scale=2))],
)  # fmt: skip
def test_losses_that_compare_sequences_are_refused_by_name(name, loss):
    """Whichever way they would run; unless one says that its parts add up."""
    for refuse in (PackedLoss, FusedLoss, refuse_whole_batch_loss):
        with pytest.raises(ArgumentError, match="needs the whole batch at once") as caught:
            refuse(loss)
        assert name == caught.value.details["loss"]
    for other in (named("PreferenceFreeLoss", needs_whole_batch=False), OwnLoss("token"), plain_policy_loss):
        refuse_whole_batch_loss(other)


@pytest.mark.parametrize(
    ("kind", "loss", "cp_size", "says"),
    [(FusedLoss, OwnLoss("token"), 1, "needs old_log_probabilities, but the data have input_ids"),
     (FusedLoss, OwnLoss("tokens"), 1, "one of token, sequence, constant$"), (PackedLoss, None, 1, "is None, but"),
     (FusedLoss, OwnLoss("token"), 2, r"layout has \d positions in 1 row, but the logits have"),
     (PackedLoss, plain_policy_loss, 2, r"layout has \d positions in 1 row, but the logits have")],
)  # fmt: skip
def test_what_does_not_fit_is_refused(kind, loss, cp_size, says):
    """A field that is missing, logits of another row, and what is no loss."""
    fields = {"input_ids": torch.ones(1, 3).long(), "token_mask": torch.ones(1, 3), "advantages": torch.ones(1)}
    layout = PackedLayout.from_lengths([3], cp_size=cp_size)
    with pytest.raises(ArgumentError, match=says):
        kind(loss)(torch.ones(1, 3, 5), fields, layout=layout, num_sequences=1, num_tokens=2)
