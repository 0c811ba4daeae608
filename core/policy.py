"""
Everything that decides a raw plan, as one value: checked once, fingerprinted, and handed whole to
`core.plan`.
"""

from __future__ import annotations

from decimal import Decimal

import attrs

from packplan.core.config import RunConfig
from packplan.core.fingerprint import Fingerprint, Value
from packplan.core.lengths import IntArray, positive, share
from packplan.core.packers import algorithm_named, checked_seed
from packplan.core.work import SampleWorks, WorkModel


def _packing_length(value: int) -> int:
    return positive("packing_length", value)


def _decimal(value: float | str | Decimal) -> str:
    return str(value)


@attrs.frozen(kw_only=True)
class PlanPolicy:
    """
    How samples become a raw plan, and which plans are refused.

    A new setting of planning is a field here, with what it adds to `fingerprint` and where `of`
    takes it from.

    Raises:
        ValueError: A field has no meaning; the message names it.

    >>> PlanPolicy(packing_length=4096, min_fill_ratio=0.55).min_fill_ratio
    '0.55'
    """

    packing_length: int = attrs.field(converter=_packing_length)
    """Tokens a pack of several samples may hold, >= 1. A sample of that many or more is long."""

    packing: bool = True
    """Whether samples share packs; if not, each is a pack by itself, and nothing is dropped."""

    algorithm: str = "constant_volume"
    """A name in `core.packers.ALGORITHMS`."""

    min_fill_ratio: str = attrs.field(default="0.65", converter=_decimal)
    """
    Share of `packing_length` from 0 to 1, as the decimal it is written as, and compared exactly.
    """

    drop_last: bool = True
    """Drop every pack filled below `min_fill_ratio`, wherever it stands; long packs are exempt."""

    allow_single_long: bool = True
    """Give each long sample a pack of its own; otherwise skip it."""

    seed: int = attrs.field(default=0, converter=checked_seed)
    """Seed of algorithms that draw, from 0 to 2**64 - 1."""

    max_dropped_share: str = attrs.field(default="0.01", converter=_decimal)
    """
    Share of all tokens from 0 to 1 that the fill filter may drop. The packs do not depend on it.
    """

    refuse_longer: bool = False
    """
    Whether a sample of more than `packing_length` tokens is an error. The packs do not depend on
    it.
    """

    work: WorkModel | None = None
    """
    What samples cost, for algorithms whose packs depend on it; None takes tokens and squares of
    lengths.
    """

    def __attrs_post_init__(self) -> None:
        share("min_fill_ratio", self.min_fill_ratio)
        share("max_dropped_share", self.max_dropped_share)
        algorithm_named(self.algorithm)

    @classmethod
    def of(cls, config: RunConfig, split: str, *, work: WorkModel | None = None) -> PlanPolicy:
        """
        Return how a run plans its split `train` or `eval`; evaluation never drops.

        Args:
            config: The run.

            split: `train` or `eval`.

            work: What samples cost, for algorithms whose packs depend on it.
        """
        training, is_train = config.training, split == "train"
        return cls(
            packing_length=config.packing_length,
            packing=training.packing if is_train else config.eval_packing,
            algorithm=training.packing_algorithm,
            min_fill_ratio=training.packing_min_fill_ratio,
            drop_last=training.packing_drop_last and is_train,
            # Without packing nothing is too long for a pack.
            allow_single_long=training.packing_allow_single_long or not training.packing,
            seed=training.seed,
            max_dropped_share=training.packing_max_dropped_share,
            refuse_longer=config.template.truncation_strategy == "raise",
            work=work,
        )

    def works(
        self,
        lengths: IntArray,
        *,
        images: IntArray,
        patches: IntArray,
        frames: IntArray | int = 0,
        video_patches: IntArray | int = 0,
    ) -> IntArray | None:
        """
        Return the work of each sample, shape (num_samples,); None if the packs do not depend on it.

        Args:
            lengths: Tokens of each sample; shape (num_samples,).

            images: Images of each sample; of the same shape.

            patches: Patches of all images of a sample together; of the same shape.

            frames: Frames that are sampled of all videos of a sample together; of the same shape.

            video_patches: Patches of all videos of a sample together; of the same shape.
        """
        if not self.packing or not algorithm_named(self.algorithm).weighs:
            return None
        model = self.work or WorkModel.estimated({}).trained()
        return SampleWorks.of(
            model, lengths, images=images, patches=patches, frames=frames, video_patches=video_patches
        ).samples

    def fingerprint(self, lengths_digest: str) -> Fingerprint:
        """
        Name what the raw plan of stored lengths depends on; a field that cannot change the packs is
        left out.

        The algorithm enters with its version; the ratio only where packs are dropped, the seed only
        where the algorithm draws, the model's work only where it weighs. Without packing,
        `packing_length` alone decides.
        """
        inputs: dict[str, Value] = {
            "lengths": lengths_digest,
            "packing": self.packing,
            "packing_length": self.packing_length,
        }
        if self.packing:
            algorithm = algorithm_named(self.algorithm)
            inputs |= {
                "algorithm": f"{self.algorithm} {algorithm.version}",
                "min_fill_ratio": self.min_fill_ratio if self.drop_last else None,
                "allow_single_long": self.allow_single_long,
            }
            if algorithm.draws:
                inputs["seed"] = self.seed
            if algorithm.weighs:
                inputs["work"] = str(self.work or WorkModel.estimated({}).trained())
        return Fingerprint(inputs)
