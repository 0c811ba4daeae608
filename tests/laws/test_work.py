"""Work: FLOPs of samples and packs, from the sizes of a model's layers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import ConfigError, InvalidLengthError
from core.work import SampleWorks, VisionWork, WorkModel, causal_pairs

GRIDS = st.tuples(st.integers(1, 3), st.integers(1, 20).map(lambda n: 2 * n), st.integers(1, 20).map(lambda n: 2 * n))

SAMPLES = st.lists(st.tuples(st.integers(1, 40_000), st.lists(GRIDS, max_size=3)), min_size=1, max_size=8)

MODEL = WorkModel(7, 3, VisionWork(per_patch=11, per_image_pair=5, per_window_pair=2, window=8))

TEXT = {
    "model_type": "qwen3", "hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 5, "intermediate_size": 16, "vocab_size": 100,
}  # fmt: skip


def window_pairs(rows: int, columns: int, window: int) -> int:
    """Count the pairs of patches in one window, patch by patch."""
    sizes: dict[tuple[int, int], int] = {}
    for row in range(rows):
        for column in range(columns):
            place = row // window, column // window
            sizes[place] = sizes.get(place, 0) + 1
    return sum(size**2 for size in sizes.values())


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(0, 3), st.integers(1, 40)), min_size=1, max_size=9))
def test_counts_give_what_images_of_equal_size_take(samples):
    """Where a sample's images are alike and its windows whole; the works are whole numbers."""
    grids = [[(1, 8, 8 * side)] * images for _, images, side in samples]
    lengths, images = [length for length, _, _ in samples], [images for _, images, _ in samples]
    patches = [64 * side * images for _, images, side in samples]

    works = SampleWorks.of(MODEL, lengths, images=images, patches=patches)

    assert MODEL.of(lengths, grids).tolist() == pytest.approx(works.samples.tolist())
    assert np.int64 == works.samples.dtype
    text = WorkModel(MODEL.per_position, MODEL.per_pair)
    assert text.of(lengths).tolist() == SampleWorks.of(text, lengths, images=images, patches=patches).samples.tolist()


def test_a_backward_pass_takes_twice_as_many_where_weights_are_trained():
    """Once more for what a layer is given, once more for its weights; attention has none."""
    forward = MODEL.of([9], [[(1, 8, 8)]])[0]

    assert 3 * forward == MODEL.trained().of([9], [[(1, 8, 8)]])[0]
    frozen = MODEL.trained(text=False, vision=False, vision_gradients=False)
    assert (2 * MODEL.per_position, 3 * MODEL.per_pair, MODEL.vision) == (
        frozen.per_position, frozen.per_pair, frozen.vision
    )  # fmt: skip
    adapters = MODEL.trained(text=False, vision=False).vision
    assert (2 * MODEL.vision.per_patch, 3 * MODEL.vision.per_image_pair) == (
        adapters.per_patch, adapters.per_image_pair
    )  # fmt: skip
    assert WorkModel(30, 6) == WorkModel(10, 2).trained()


def test_sizes_that_a_config_lacks_are_those_of_an_ordinary_model():
    """32 layers of a width of 4,096; those that it has are taken."""
    assert WorkModel(2 * 32 * 12 * 4096**2, 4 * 32 * 4096) == WorkModel.estimated({})
    assert WorkModel(2 * 3 * 12 * 64, 4 * 3 * 8) == WorkModel.estimated(
        {"text_config": {"hidden_size": 8, "num_hidden_layers": 3}}
    )


@given(SAMPLES)
def test_work_is_counted_pair_by_pair(samples):
    """
    Positions, pairs of tokens up to the diagonal, patches, and pairs within frames and windows,
    each at its price.
    """
    lengths, grids = zip(*samples, strict=True)

    expected = [
        7 * length
        + 3 * sum(range(1, length + 1))
        + sum(t * (11 * h * w + 5 * (h * w) ** 2 + 2 * window_pairs(h, w, 8)) for t, h, w in images)
        for length, images in samples
    ]

    assert expected == MODEL.of(lengths, grids).tolist()


@given(SAMPLES, st.randoms())
def test_a_samples_work_does_not_depend_on_its_company(samples, random):
    """
    Works follow their samples through any order, and those of two halves are those of the whole.
    """
    order = random.sample(range(len(samples)), len(samples))
    lengths, grids = zip(*samples, strict=True)
    works = MODEL.of(lengths, grids)

    assert works[order].tolist() == MODEL.of([lengths[i] for i in order], [grids[i] for i in order]).tolist()
    assert works.tolist() == [float(MODEL.of([length], [images])[0]) for length, images in samples]


def test_text_without_images_costs_the_same_in_both_models():
    """The vision tower works for images alone."""
    text = WorkModel(MODEL.per_position, MODEL.per_pair)

    assert text.of([5, 9]).tolist() == MODEL.of([5, 9]).tolist() == MODEL.of([5, 9], [[], []]).tolist()
    assert 0 == text.of_images([]).size


def test_head_dim_and_shared_keys_are_read():
    """
    Worked by hand: heads wider than the model's width gives them, half as many keys and values, no
    vision tower.
    """
    per_layer = 8 * 20 + 2 * 8 * 10 + 20 * 8 + 3 * 8 * 16

    assert WorkModel(2 * (3 * per_layer + 8 * 100), 4 * 3 * 20) == WorkModel.from_config(TEXT)
    assert WorkModel.from_config({**TEXT, "head_dim": 2}) == WorkModel.from_config({**TEXT, "head_dim": None})
    assert WorkModel.from_config({**TEXT, "num_key_value_heads": 4}) == WorkModel.from_config(
        {key: size for key, size in TEXT.items() if key != "num_key_value_heads"}
    )


def test_large_data_sets_do_not_overflow():
    """
    FLOPs of a million long samples of a large model pass 64-bit integers, and stay exact to a
    float's precision.
    """
    works = WorkModel(14 * 10**9, 4 * 10**5).of(np.full(10**6, 32_768))

    assert 2**63 < works.sum() == pytest.approx(10**6 * (14e9 * 32_768 + 4e5 * causal_pairs(32_768)), rel=1e-12)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({**TEXT, "model_type": "mamba"}, "'mamba'"),
        ({}, "None"),
        ({**TEXT, "layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({key: size for key, size in TEXT.items() if key != "vocab_size"}, "vocab_size"),
        ({**TEXT, "model_type": "qwen3_vl"}, "vision_config"),
    ],
)
def test_what_is_not_known_is_named(config, named):
    """
    An architecture, a kind of layer, or a size that is missing: never a number that looks right.
    """
    with pytest.raises(ConfigError, match=named):
        WorkModel.from_config(config)


def test_samples_that_cannot_be_are_refused():
    """A length of nothing, images of other samples, images that the model cannot see."""
    with pytest.raises(InvalidLengthError):
        MODEL.of([3, 0])
    with pytest.raises(ValueError, match="grids of 1 samples for 2 lengths"):
        MODEL.of([3, 4], [[]])
    with pytest.raises(ValueError, match="1 images for a model without a vision tower"):
        WorkModel(1, 1).of([3], [[(1, 2, 2)]])
