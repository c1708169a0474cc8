"""Against an independent implementation: the naive KDA of fla-core, loaded by path (no GPU compiler needed)."""

import importlib.metadata
import importlib.util

import pytest
import torch

from outrider.ops.kda import kda_recurrent
from outrider.ops.kda_chunk import kda_chunk
from outrider.ops.spans import spans_from_lengths


@pytest.fixture(scope="module")
def naive():
    # Deliberately no skip: fla-core and einops are pinned test requirements (`make setup`).
    path = importlib.metadata.distribution("fla-core").locate_file("fla/ops/kda/naive.py")
    spec = importlib.util.spec_from_file_location("fla_kda_naive", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def oracle(naive, function, q, k, v, log_decay, beta, state):
    """fla takes l2-normalised q and k, applies K**-0.5 itself, and keeps the state as [B, H, K, V]."""
    q, k = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    batch = [x[None] for x in (q, k, v, log_decay, beta)]
    out, final = function(*batch, initial_state=state[None].transpose(-1, -2), output_final_state=True)
    return out[0], final[0].transpose(-1, -2)


def test_recurrent_and_chunk_forms_match_fla(naive):
    torch.manual_seed(3)
    rows, heads, key, value = 128, 3, 16, 32
    q, k = (torch.randn(rows, heads, key) for _ in range(2))
    v, beta = torch.randn(rows, heads, value), torch.rand(rows, heads)
    log_decay, state = -5 * torch.rand(rows, heads, key) ** 3, torch.randn(heads, value, key)
    layout = spans_from_lengths((rows,))
    recurrent = oracle(naive, naive.naive_recurrent_kda, q, k, v, log_decay, beta, state)
    chunked = oracle(naive, naive.naive_chunk_kda, q, k, v, log_decay, beta, state)
    args = (q, k, v, log_decay, beta, state[None], layout)
    for result in (kda_recurrent(*args), kda_chunk(*args, chunk_size=16), kda_chunk(*args, chunk_size=64)):
        for expected_out, expected_state in (recurrent, chunked):  # fla computes in float32
            assert torch.allclose(result.out_THW, expected_out, atol=2e-5)
            assert torch.allclose(result.state_SHWK[0], expected_state, atol=2e-5)
    wrong = oracle(naive, naive.naive_recurrent_kda, q, k, v, log_decay, 1 - beta, state)
    assert not torch.allclose(wrong[0], recurrent[0], atol=1e-2), "the comparison must be able to fail"
