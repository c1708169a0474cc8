"""The routed path of a loaded model: which form it takes, where its weights are, and that its values stay."""

import pytest
import torch

from outrider.models.numerics import NumericsChoice
from outrider.models.registry import load_target
from outrider.ops.native.library import library, library_for
from outrider.ops.native.moe import RoutedExperts
from outrider.testing.toy import ToyOptions, write_toy_checkpoint

CPU = torch.device("cpu")
UNPROBED = NumericsChoice(probe="skip")
SPARSE_LAYER = 1


def toy(quantized):
    return ToyOptions(num_layers=3, mla_layers=(1,), attn_res_block_size=2, quantized=quantized, num_shards=1)


def ffn_of(directory, dtype=torch.bfloat16, **options):
    return load_target(directory, dtype=dtype, numerics=UNPROBED, **options).layers[SPARSE_LAYER].ffn


@pytest.fixture
def native():
    if (found := library_for(torch.bfloat16, CPU)) is None:
        pytest.skip("no native operations on this machine")
    return found


@pytest.mark.parametrize("quantized", [True, False])
def test_the_kernel_holds_the_weights_and_gives_the_values_of_the_torch_form(tmp_path, native, monkeypatch, quantized):
    directory = write_toy_checkpoint(tmp_path / "toy", toy(quantized))
    ffn = ffn_of(directory)
    assert isinstance(ffn.routed, RoutedExperts)
    assert ffn.experts is None and not any("experts" in name for name in ffn.state_dict())
    with monkeypatch.context() as patch:
        patch.setenv("OUTRIDER_NATIVE", "0")
        library.cache_clear()
        in_torch = ffn_of(directory)
    library.cache_clear()
    assert in_torch.routed is None
    x_TD = torch.randn(9, ffn.gate.weight.shape[1], generator=torch.Generator().manual_seed(3)).bfloat16()
    got, expected = ffn(x_TD).float(), in_torch(x_TD).float()
    assert (got - expected).abs().max() <= 2.0**-6 * expected.abs().max()


def test_packed_bytes_are_kept_where_products_are_formed_from_them(tmp_path, native):
    directory = write_toy_checkpoint(tmp_path / "toy", toy(quantized=True))
    auto, packed, unpacked = (ffn_of(directory, experts=form).routed for form in ("auto", "packed", "unpacked"))
    assert auto.num_bytes == packed.num_bytes < unpacked.num_bytes
    x_TD = torch.randn(5, 64, generator=torch.Generator().manual_seed(4)).bfloat16()
    x_TL = x_TD[:, :32]
    assert torch.equal(auto(x_TD, x_TL), unpacked(x_TD, x_TL))


def test_the_torch_forms_decode_once_at_load(tmp_path, torch_forms):
    directory = write_toy_checkpoint(tmp_path / "toy", toy(quantized=True))
    assert "experts.gate_up" in ffn_of(directory).state_dict()
    assert "experts.gate_up_packed" in ffn_of(directory, experts="packed").state_dict()


def test_other_dtypes_take_the_torch_forms(tmp_path):
    directory = write_toy_checkpoint(tmp_path / "toy", toy(quantized=True))
    for dtype in (torch.float32, torch.float64):
        ffn = ffn_of(directory, dtype)
        assert ffn.routed is None and "experts.gate_up" in ffn.state_dict()


def test_an_unquantised_checkpoint_is_kept_as_it_is(tmp_path, native):
    directory = write_toy_checkpoint(tmp_path / "toy", toy(quantized=False))
    routed = ffn_of(directory).routed
    assert routed.num_bytes > 8 * (3 * 32 * 32) * 2
