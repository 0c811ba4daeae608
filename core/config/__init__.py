"""
Keys of a run's YAML as classes, their faults, advice on unknown keys, and what of them enters
fingerprints and is compared between ranks.
"""

from packplan.core.config.faults import LESS_DROPPED, closest, faults, tuners_of, unknown_key, with_remedy
from packplan.core.config.identity import (
    FIXED_ARGUMENTS,
    OWN,
    PATHS,
    UNCOMPARED,
    configured_inputs,
    flat_values,
    plan_policy,
    rank_differences,
    run_identity,
    run_values,
    stream_inputs,
)
from packplan.core.config.keys import key_of, keys_of
from packplan.core.config.refusals import REFUSALS, Host, refusals_of, refused_settings
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
