import math

import pytest
import torch

from outrider.errors import ConfigError
from outrider.ops import rope

YARN = rope.YarnScaling(factor=32.0, original_max_positions=4096)


@pytest.mark.parametrize("scaling", [None, YARN])
def test_rotations_match_the_complex_product(scaling, dtype, assert_close):
    table = rope.rotary_table(300, 32, 1e4, scaling, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    x, positions = torch.randn(6, 3, 32).to(dtype), torch.tensor([0, 1, 7, 299, 64, 7])
    assert_close(rope.apply_half(x, table, positions), rope.apply_half_reference(x, table, positions))


def test_scores_depend_on_the_distance_only():
    table = rope.rotary_table(200, 16, 1e4, dtype=torch.float64)
    q, k = torch.randn(1, 1, 16, dtype=torch.float64), torch.randn(1, 1, 16, dtype=torch.float64)

    def score(i, j):
        return (rope.apply_half(q, table, torch.tensor([i])) * rope.apply_half(k, table, torch.tensor([j]))).sum()

    assert torch.allclose(score(10, 3), score(150, 143), rtol=1e-12)
    assert not torch.allclose(score(10, 3), score(10, 4))


def test_a_row_does_not_depend_on_the_others_or_on_the_table_size(dtype, threads):
    small, large = rope.rotary_table(40, 32, 1e6, YARN), rope.rotary_table(400, 32, 1e6, YARN)
    x, positions = torch.randn(17, 3, 32).to(dtype), torch.arange(17)
    whole = rope.apply_half(x, large, positions)
    for rows in [slice(0, n) for n in range(1, 17)] + [slice(16, 17)]:
        assert torch.equal(rope.apply_half(x[rows], small, positions[rows]), whole[rows])


def test_yarn_matches_transformers_formula_and_limits():
    plain, one = rope.rotary_frequencies(64, 1e6)
    scaled, factor = rope.rotary_frequencies(64, 1e6, YARN)
    assert one == 1.0 and math.isclose(factor, 0.1 * math.log(32) + 1)
    assert torch.equal(scaled[:7], plain[:7])  # fast frequencies keep their speed
    assert torch.allclose(scaled[-4:], plain[-4:] / 32)
    middle = scaled / plain
    assert bool((middle[1:] <= middle[:-1] + 1e-15).all()) and 1 / 32 < middle[9] < 1
    low, high = (64 * math.log(4096 / (n * 2 * math.pi)) / (2 * math.log(1e6)) for n in (32, 1))
    ramp = min(max((12 - math.floor(low)) / (math.ceil(high) - math.floor(low)), 0.0), 1.0)
    assert math.isclose(middle[12].item(), 1 - ramp + ramp / 32)


def test_yarn_magnitudes():
    def factor(**kwargs):
        return rope.rotary_frequencies(64, 1e6, rope.YarnScaling(factor=32.0, original_max_positions=4096, **kwargs))[1]

    assert factor(mscale=1.0, mscale_all_dim=1.0) == 1.0
    assert factor(attention_factor=1.25) == 1.25
    assert math.isclose(factor(mscale=2.0, mscale_all_dim=1.0), (0.2 * math.log(32) + 1) / (0.1 * math.log(32) + 1))
    assert rope.yarn_magnitude(1.0) == 1.0


@pytest.mark.parametrize("truncate", [True, False])
def test_against_transformers(truncate):
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": truncate,
    }
    config = Qwen3Config(rope_parameters=parameters, max_position_embeddings=131072, head_dim=64)
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    scaling = rope.YarnScaling(factor=32.0, original_max_positions=4096, truncate=truncate)
    ours, our_factor = rope.rotary_frequencies(64, 1e6, scaling)
    assert torch.allclose(ours.float(), frequencies, rtol=1e-5)
    assert math.isclose(our_factor, factor)


def test_odd_widths_are_refused():
    with pytest.raises(ConfigError, match="odd"):
        rope.rotary_frequencies(7, 1e4)


@pytest.mark.parametrize(
    ("parameters", "scaling"),
    [
        ({"rope_type": "linear", "factor": 2.5}, rope.LinearScaling(factor=2.5)),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            rope.Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192),
        ),
    ],
)
def test_scaled_frequencies_agree_with_transformers(parameters: dict[str, object], scaling: rope.RopeScaling) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(head_dim=128, rope_parameters={"rope_theta": 500_000.0, **parameters})
    expected, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    found, found_factor = rope.rotary_frequencies(128, 500_000.0, scaling)
    assert found_factor == factor == 1.0
    assert torch.allclose(found.float(), expected, rtol=3e-6, atol=0)
