"""MXFP4 weights: 4-bit E2M1 codes, one power-of-two scale (E8M0) per 32 inputs.

Source: k3-architecture section 7.3. Every decoded value is exact in bfloat16, float32 and float64 for
scales in the normal range.

Dims: O outputs, I inputs, B = I / 2 bytes, any leading dims.
"""

import torch

from outrider.errors import CheckpointError

__all__ = [
    "decode_mxfp4",
    "decode_mxfp4_reference",
    "encode_mxfp4",
    "pack_nibbles",
    "round_trip_mxfp4",
    "unpack_nibbles",
]

GROUP = 32  # inputs that share a scale
SCALE_BIAS = 127
SCALE_NAN = 255
SUBNORMAL_SCALE_BITS = 1 << 22  # float32 bits of 2^-127, scale code 0
MAX_EXPONENT = 2  # of the largest code: 6 = 1.5 * 2^2
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))


def pack_nibbles(codes_OI: torch.Tensor) -> torch.Tensor:
    """Codes 0..15 (uint8, ``[..., I]``) to bytes ``[..., I / 2]``; the even column is the low nibble."""
    return codes_OI[..., 0::2] | (codes_OI[..., 1::2] << 4)


def unpack_nibbles(packed_OB: torch.Tensor) -> torch.Tensor:
    """Bytes ``[..., I / 2]`` to codes 0..15 (uint8, ``[..., I]``)."""
    return torch.stack([packed_OB & 15, packed_OB >> 4], dim=-1).flatten(-2)


def _grouped(x_OI: torch.Tensor) -> torch.Tensor:
    """``[..., I] -> [..., I / 32, 32]``."""
    return x_OI.reshape(*x_OI.shape[:-1], -1, GROUP)


def decode_mxfp4(packed_OB: torch.Tensor, scale_OG: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Weights ``[..., O, I]`` in ``dtype``, exact for scale codes 3 to 252.

    Below, bfloat16 is subnormal; above, the largest codes are infinite in float32, in which all is formed.

    Both products are by powers of two, so the order of operations cannot round.
    """
    table = torch.tensor(E2M1, dtype=torch.float32, device=packed_OB.device)
    values = _grouped(table[unpack_nibbles(packed_OB).to(torch.int32)])
    return (values * _scale_values(scale_OG)[..., None]).flatten(-2).to(dtype)


def _scale_values(scale_OG: torch.Tensor) -> torch.Tensor:
    """``2^(code - 127)`` in float32, built from its bits: a power function need not be exact."""
    exponent_field = scale_OG.to(torch.int32) << 23
    return torch.where(scale_OG == 0, SUBNORMAL_SCALE_BITS, exponent_field).view(torch.float32)


def encode_mxfp4(weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise: scale ``2^(floor(log2(amax)) - 2)`` per group, codes by nearest value, ties to even code.

    Values above 6 scales saturate. Weights that already are representable come back unchanged.

    Returns:
        Packed codes ``[..., O, I / 2]`` and scales ``[..., O, I / 32]``, uint8.

    Raises:
        CheckpointError: when the inputs are not a multiple of the group.
    """
    if weight_OI.shape[-1] % GROUP:
        raise CheckpointError(
            f"{weight_OI.shape[-1]} inputs are not a multiple of {GROUP}; choose a divisible width for MXFP4"
        )
    grouped = _grouped(weight_OI.double())
    amax = grouped.abs().amax(-1)
    exponent = torch.frexp(amax).exponent.to(torch.int32) - 1 - MAX_EXPONENT
    # An all-zero group has no exponent: any scale decodes to zero, take 1.
    exponent = torch.where(amax > 0, exponent, 0).clamp(-SCALE_BIAS, SCALE_NAN - 1 - SCALE_BIAS)
    scale_OG = (exponent + SCALE_BIAS).to(torch.uint8)
    scaled = grouped / _scale_values(scale_OG).double()[..., None]
    magnitudes = torch.tensor(_MAGNITUDES, dtype=torch.float64, device=weight_OI.device)
    midpoints = (magnitudes[1:] + magnitudes[:-1]) / 2
    size = scaled.abs()
    lower = torch.bucketize(size, midpoints)  # at a midpoint: the code below
    is_tie = (size[..., None] == midpoints).any(-1)
    code = lower + (is_tie & (lower % 2 == 1)).to(lower.dtype)
    signed = code + torch.where(torch.signbit(scaled), 8, 0)
    packed = pack_nibbles(signed.flatten(-2).to(torch.uint8))
    return packed, scale_OG


def round_trip_mxfp4(weight_OI: torch.Tensor) -> torch.Tensor:
    """The nearest representable weights, in the dtype of the input."""
    packed, scale = encode_mxfp4(weight_OI)
    return decode_mxfp4(packed, scale, weight_OI.dtype)


def decode_mxfp4_reference(packed_OB: torch.Tensor, scale_OG: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Decode a two-dimensional pair one element at a time."""
    num_out, num_in = packed_OB.shape[0], packed_OB.shape[1] * 2
    weight_OI = torch.empty(num_out, num_in, dtype=torch.float64)
    for o in range(num_out):
        for i in range(num_in):
            byte = int(packed_OB[o, i // 2])
            code = byte >> 4 if i % 2 else byte & 15
            weight_OI[o, i] = E2M1[code] * 2.0 ** (int(scale_OG[o, i // GROUP]) - SCALE_BIAS)
    return weight_OI.to(dtype)
