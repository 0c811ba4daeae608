"""
Proof that packed samples are apart, on any model of torch and on anybody's batch.

`batches` reads where samples begin, and cuts a packed batch into its samples. `gradients` computes
which samples a result depends on. `modules` finds the first module that mixes samples, or that
computes something else than for a sample alone. `limits` says what rounding explains. `checks` has
the two assertions on a batch. `taking` runs an optimizer step of a trainer, and `steps` has the
assertion on its loss. `packplan.testing` offers all three.
"""

from packplan.adapters.proof.checks import assert_equal_to_alone, assert_isolated
from packplan.adapters.proof.gradients import Watched, logit_reaches, watching
from packplan.adapters.proof.limits import difference_of, limit_of, precision_of, rounds_choices
from packplan.adapters.proof.modules import MixingModule, first_different, first_leak, first_mixing
from packplan.adapters.proof.steps import StepLoss, assert_step_loss
from packplan.adapters.proof.taking import restored, untouched
