"""Plan policy: all settings that decide a raw plan, with their checks and their fingerprint."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.core.errors import ArgumentError
from packplan.core.fingerprint import Fingerprint, Value
from packplan.core.lengths import as_whole_number, exact_share, require_bools
from packplan.core.packers import as_seed, find_algorithm
from packplan.core.packers.drawing import REDRAW_VERSION
from packplan.core.shuffling import seeded_permutation

if TYPE_CHECKING:
    from packplan.core.work.model import WorkModel


def _packing_length(value: int) -> int:
    return as_whole_number("packing_length", value)


def _decimal_text(value: float | str | Decimal | Fraction) -> str:
    return str(value)


@attrs.frozen(kw_only=True)
class Part:
    """
    Part of a data set's records: the records held out for evaluation, or all other records.

    >>> [Part(val_share="0.3", seed=7, held_out=out).selects(4).tolist() for out in (False, True)]
    [[True, False, True, True], [False, True, False, False]]
    """

    val_share: str
    """
    Share of the records that are held out, above 0 and below 1. At least one record is held out.
    """

    seed: int
    """Seed of the draw, from 0."""

    held_out: bool

    def selects(self, num: int) -> NDArray[np.bool_]:
        """Return whether each of *num* records is in this part; shape (num,)."""
        drawn = seeded_permutation(num, seed=(self.seed, 1))[: max(int(Fraction(self.val_share) * num), 1)]
        return np.isin(np.arange(num), drawn, invert=not self.held_out)


@attrs.frozen(kw_only=True)
class PlanPolicy:
    """
    All settings that decide a raw plan or refuse it.

    A new planning setting needs a field of this class, an entry in `fingerprint`, and a line in
    `core.config.identity.plan_policy`. The setting's YAML key also has to declare `plan`
    (`core.config.keys`).

    Raises:
        ArgumentError: A field has an invalid value. The message names the field.

    >>> PlanPolicy(packing_length=4096, min_fill_ratio=0.55).min_fill_ratio
    '0.55'
    """

    packing_length: int = attrs.field(converter=_packing_length)
    """
    Maximum number of tokens in a pack of several samples, >= 1. A sample with at least this many
    tokens is long.
    """

    packing: bool = True
    """
    Whether samples share packs. If false, each sample is a pack by itself, and no pack is dropped.
    """

    algorithm: str = "constant_volume"
    """Name of the packing algorithm, a key of `core.packers.ALGORITHMS`."""

    min_fill_ratio: str = attrs.field(default="0", converter=_decimal_text)
    """
    Share of `packing_length` below which a pack is dropped, from 0 to 1, compared as an exact
    decimal. 0 drops no pack.
    """

    drop_last: bool = True
    """Whether packs filled below `min_fill_ratio` are dropped. Packs of long samples are kept."""

    allow_single_long: bool = True
    """Whether each long sample becomes a pack by itself. If false, long samples are skipped."""

    seed: int = attrs.field(default=0, converter=as_seed)
    """Seed of random algorithms, from 0 to 2**64 - 1."""

    max_dropped_share: str = attrs.field(default="0.01", converter=_decimal_text)
    """
    Largest share of all tokens that the fill filter may drop in several packs, from 0 to 1. The
    packs do not depend on this limit.
    """

    refuse_longer: bool = False
    """
    Whether a sample of more than `packing_length` tokens is an error. The packs do not depend on
    this setting.
    """

    replanned: bool = False
    """Whether each epoch has its own packs, drawn from `seed` and the epoch's number."""

    max_images: int | None = None
    """
    Maximum number of images in a pack of several samples, >= 1; None sets no limit. A pack with
    this many images counts as full.
    """

    part: Part | None = None
    """
    Part of the records that is planned; None plans all records. The part changes the packs only
    because it decides which lengths are planned.
    """

    work: WorkModel | None = None
    """
    Model of the samples' work, for algorithms that pack by work. None derives the work from the
    lengths.
    """

    def __attrs_post_init__(self) -> None:
        flags = ("packing", "drop_last", "allow_single_long", "refuse_longer", "replanned")
        require_bools(**{name: getattr(self, name) for name in flags})
        exact_share("min_fill_ratio", self.min_fill_ratio)
        exact_share("max_dropped_share", self.max_dropped_share)
        if self.max_images is not None:
            as_whole_number("max_images", self.max_images)
        if find_algorithm(self.algorithm).keeps_order and self.replanned:
            message = f"replanned is True, but {self.algorithm} keeps the order of the data: choose another algorithm"
            raise ArgumentError("argument", message)

    @property
    def uses_works(self) -> bool:
        """Whether the packs depend on the work of the samples."""
        return self.packing and "works" in find_algorithm(self.algorithm).takes

    @property
    def counts_lengths(self) -> bool:
        """Whether the packing algorithm needs only the number of samples per length."""
        return self.packing and self.max_images is None and find_algorithm(self.algorithm).counts_lengths

    def fingerprint(self, lengths_digest: str) -> Fingerprint:
        """
        Return the fingerprint of the raw plan that this policy makes from the lengths with this
        digest.

        Fields that cannot change the packs are left out.

        The algorithm enters the fingerprint with its version. `min_fill_ratio` enters only if packs
        are dropped, `seed` only if packs are drawn, and `work` only if the algorithm packs by work.
        Without packing, only `packing_length` and `allow_single_long` can change the packs.
        """
        inputs: dict[str, Value] = {
            "lengths": lengths_digest,
            "packing": self.packing,
            "packing_length": self.packing_length,
        }
        if self.part is not None:
            inputs["part"] = str(self.part)
        if self.packing:
            algorithm = find_algorithm(self.algorithm)
            inputs |= {
                "algorithm": f"{self.algorithm} {algorithm.version}",
                "min_fill_ratio": self.min_fill_ratio if self.drop_last else None,
                "allow_single_long": self.allow_single_long,
            }
            if self.max_images is not None:
                inputs["max_images"] = self.max_images
            if self.replanned:
                inputs["replanned"] = REDRAW_VERSION
            if "seed" in algorithm.takes or self.replanned:
                inputs["seed"] = self.seed
            if "works" in algorithm.takes:
                inputs["work"] = str(self.work)
        elif not self.allow_single_long:
            inputs["allow_single_long"] = False
        return Fingerprint(inputs)
