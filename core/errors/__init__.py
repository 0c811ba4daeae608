"""
Everything that this project raises on purpose.

    PackplanError
    ├── UserError                  the caller can fix it: exit status 2
    │   ├── ConfigError            the YAML: every fault at once, each with its path
    │   ├── RecordError            one record of a data file: file, line, reason
    │   ├── DataSetError           a data set as a whole
    │   ├── ArgumentError          what a library function was given; a ValueError too
    │   │   ├── InvalidLengthError  a length no packer can place: index and value
    │   │   ├── WorkError           works that cannot be balanced: index and value, or their number
    │   │   ├── TooFewSamplesError  more packs are wanted than there are samples
    │   │   ├── OverBudgetError     a sequence of an RL batch is wider than a microbatch may be
    │   │   ├── UnevenShardsError   the workers do not divide an RL batch
    │   │   ├── BatchError          a batch in memory that is none, or does not fit
    │   │   ├── EmptyPlanError      no pack remains
    │   │   ├── DroppedTokensError  the fill filter drops packs with more of the tokens than it may
    │   │   ├── SampleTooLongError  a sample over the limit, where the template is to raise
    │   │   ├── PlanTooShortError   too few packs for a batch on each rank
    │   │   ├── BatchSizeError      an effective batch that the ranks cannot realise
    │   │   └── WholeBatchLossError a loss that cannot be computed part by part
    │   ├── IsolationError         an attention backend that is not known to keep samples apart
    │   ├── ProbeError             a model cannot be asked whether it keeps samples apart
    │   ├── AttentionError         an attention backend that does not run as configured
    │   ├── StaleLengthsError      stored lengths were measured from other inputs
    │   ├── PlanChangedError       a checkpoint was trained from another plan
    │   ├── ChangedImageError      an image is not the one that was measured
    │   ├── ContractError          a fetched sample is not the sample that was planned
    │   ├── NotBuiltError          what is to be looked at is not stored
    │   ├── OutputError            the output cannot be written, or has no room
    │   ├── LockedError            another job writes the same folder
    │   ├── RankZeroError          rank 0 failed, died, or was too slow, while others waited
    │   ├── RankGoneError          another rank did not respond in time
    │   ├── DifferentRunsError     ranks were given different configurations, weights or versions
    │   ├── LostProcessError       a process that measures or loads data ended
    │   ├── NotFiniteError         a loss or gradient is not finite, or weights are ruined
    │   └── WorkerError            a worker of reinforcement learning raised or died
    └── VerificationError          something stored or shared is not what it claims: exit status 3
        ├── CorruptArtefactError   a file differs from its digest
        ├── CoverageError          other packs were consumed than were planned
        ├── UnequalError           packed samples do not give what they give alone
        ├── UnsoundError           artefacts or data are not what was measured and planned
        └── RanksDisagreeError     ranks hold different plans or step counts

Fields are positional, so that errors survive pickling between processes.
"""

from __future__ import annotations

from packplan.core.errors.base import (
    ArgumentError,
    Difference,
    Fault,
    PackplanError,
    RankDifference,
    UserError,
    VerificationError,
)
from packplan.core.errors.batches import (
    BatchError,
    OverBudgetError,
    UnevenShardsError,
    WholeBatchLossError,
    WorkerError,
)
from packplan.core.errors.inputs import ConfigError, DataSetError, OutputError, RecordError
from packplan.core.errors.models import AttentionError, IsolationError, ProbeError, UnequalError
from packplan.core.errors.planning import (
    BatchSizeError,
    DroppedTokensError,
    EmptyPlanError,
    InvalidLengthError,
    PlanTooShortError,
    SampleTooLongError,
    TooFewSamplesError,
    WorkError,
)
from packplan.core.errors.running import (
    CoverageError,
    DifferentRunsError,
    LostProcessError,
    NotFiniteError,
    RankGoneError,
    RanksDisagreeError,
    RankZeroError,
)
from packplan.core.errors.stored import (
    ChangedImageError,
    ContractError,
    CorruptArtefactError,
    LockedError,
    NotBuiltError,
    PlanChangedError,
    StaleLengthsError,
    UnsoundError,
)
from packplan.core.errors.words import MAX_LINE, MAX_LINES, agree, counted, in_ranges, ranging, shortened

__all__ = [
    "MAX_LINE",
    "MAX_LINES",
    "ArgumentError",
    "AttentionError",
    "BatchError",
    "BatchSizeError",
    "ChangedImageError",
    "ConfigError",
    "ContractError",
    "CorruptArtefactError",
    "CoverageError",
    "DataSetError",
    "Difference",
    "DifferentRunsError",
    "DroppedTokensError",
    "EmptyPlanError",
    "Fault",
    "InvalidLengthError",
    "IsolationError",
    "LockedError",
    "LostProcessError",
    "NotBuiltError",
    "NotFiniteError",
    "OutputError",
    "OverBudgetError",
    "PackplanError",
    "PlanChangedError",
    "PlanTooShortError",
    "ProbeError",
    "RankDifference",
    "RankGoneError",
    "RankZeroError",
    "RanksDisagreeError",
    "RecordError",
    "SampleTooLongError",
    "StaleLengthsError",
    "TooFewSamplesError",
    "UnequalError",
    "UnevenShardsError",
    "UnsoundError",
    "UserError",
    "VerificationError",
    "WholeBatchLossError",
    "WorkError",
    "WorkerError",
    "agree",
    "counted",
    "in_ranges",
    "ranging",
    "shortened",
]
