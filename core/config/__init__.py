"""
Keys of a run's YAML as classes, their faults, advice on unknown keys, and what of them enters
fingerprints and is compared between ranks.
"""

from packplan.core.config.advice import closest, unknown_key
from packplan.core.config.faults import faults, tuners_of
from packplan.core.config.identity import FIXED_ARGUMENTS, UNCOMPARED, run_identity
from packplan.core.config.keys import key_of, keys_of
from packplan.core.config.planning import configured_inputs, plan_policy, stream_inputs
from packplan.core.config.ranks import OWN, PATHS, flat_values, rank_differences, run_values
from packplan.core.config.refusals import REFUSALS, Host, refusals_of, refused_settings
from packplan.core.config.remedies import LESS_DROPPED, with_remedy
from packplan.core.config.rl import PolicyConfig, RlConfig, rl_faults
from packplan.core.config.run import (
    TUNERS,
    CustomConfig,
    ModelConfig,
    PathText,
    RunConfig,
    TemplateConfig,
    TrainingConfig,
)
