import pytest
import torch

from outrider.errors import CheckpointError
from outrider.ops import quant


def test_all_bytes_and_scales_match_the_table(dtype):
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16)
    for code in (0, 1, 100, 110, 123, 127, 130):
        scale = torch.full((16, 1), code, dtype=torch.uint8)
        got = quant.decode_mxfp4(packed, scale, dtype)
        assert torch.equal(got, quant.decode_mxfp4_reference(packed, scale, dtype))
        assert got[0, 2].item() == 0.5 * 2.0 ** (code - 127), "the even column is the low nibble"
        assert got[0, 3].item() == 0.0


@pytest.mark.parametrize("width", [32, 96, 2880, 3584])
def test_any_number_of_groups_decodes_by_the_table(width):
    """One group, an odd number, and widths of released models; scales at both ends of their range."""
    packed = torch.randint(0, 256, (2, width // 2), dtype=torch.uint8)
    scale = torch.randint(1, 253, (2, width // 32), dtype=torch.uint8)
    scale[0, 0], scale[1, -1] = 0, 252
    for dtype in (torch.float64, torch.float32):
        assert torch.equal(quant.decode_mxfp4(packed, scale, dtype), quant.decode_mxfp4_reference(packed, scale, dtype))


def test_every_value_is_exact_in_bfloat16():
    packed, scale = (
        torch.randint(0, 256, (64, 64), dtype=torch.uint8),
        torch.randint(3, 255, (64, 4), dtype=torch.uint8),
    )
    wide = quant.decode_mxfp4(packed, scale, torch.float64)
    assert torch.equal(quant.decode_mxfp4(packed, scale, torch.bfloat16).double(), wide)


def test_nibbles_round_trip_and_order():
    codes = torch.randint(0, 16, (5, 64), dtype=torch.uint8)
    assert torch.equal(quant.unpack_nibbles(quant.pack_nibbles(codes)), codes)
    assert quant.pack_nibbles(torch.tensor([[1, 15]], dtype=torch.uint8)).item() == 0xF1


def test_encoding_a_representable_weight_returns_it(dtype):
    packed, scale = (
        torch.randint(0, 256, (3, 20, 32), dtype=torch.uint8),
        torch.randint(100, 130, (3, 20, 2), dtype=torch.uint8),
    )
    packed[..., 3] = 0x07  # a code of 6 in each group pins the scale
    packed[..., 19] = 0x0E
    packed[..., 20] = 0x77
    weight = quant.decode_mxfp4(packed, scale, dtype)
    again, again_scale = quant.encode_mxfp4(weight)
    assert torch.equal(quant.decode_mxfp4(again, again_scale, dtype), weight)
    assert torch.equal(again_scale, scale) and torch.equal(again, packed)
    assert torch.equal(quant.round_trip_mxfp4(weight), weight)


def test_rounding_is_to_the_nearest_value_with_ties_to_even_codes():
    group = torch.zeros(1, 32)
    values = [6.0, 5.0, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25, 0.2, 5.1, -5.0, -0.25, 4.9]
    group[0, : len(values)] = torch.tensor(values)
    expected = [6.0, 4.0, 4.0, 2.0, 2.0, 1.0, 1.0, 0.0, 0.0, 6.0, -4.0, 0.0, 4.0]
    assert quant.round_trip_mxfp4(group)[0, : len(values)].tolist() == expected


def test_round_trip_error_is_bounded_and_idempotent(dtype):
    weight = torch.randn(40, 96).to(dtype)
    once = quant.round_trip_mxfp4(weight)
    assert once.dtype == weight.dtype
    assert torch.equal(quant.round_trip_mxfp4(once), once)
    amax = weight.double().view(40, 3, 32).abs().amax(-1, keepdim=True)
    error = (once.double() - weight.double()).view(40, 3, 32).abs()
    assert bool((error <= amax / 4).all())  # half a step at the top, or saturation from just below 8 to 6
    assert quant.round_trip_mxfp4(torch.zeros(2, 32)).abs().sum() == 0


def test_a_width_that_is_no_multiple_of_the_group_is_refused():
    with pytest.raises(CheckpointError, match="multiple"):
        quant.encode_mxfp4(torch.zeros(2, 40))
