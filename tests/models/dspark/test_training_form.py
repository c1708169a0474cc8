"""The training form of the drafter and its cached inference compute the same block."""

import torch

from outrider.models.dspark.block import BlockAnchors, BlockPredictor
from outrider.models.dspark.checkpoint import TargetTables, load_model
from outrider.models.kernels import EXACT_KERNELS
from outrider.ops.linear import embedding
from outrider.training.dspark import Blocks, DrafterConfig, DSparkForTraining
from outrider.training.export import drafter_config, write_drafter

CONFIG = DrafterConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=48,
    block_rows=5,
    mask_token_id=60,
    aux_layer_ids=(0, 2),
    target_vocab_size=61,
    draft_vocab_size=40,
    markov_rank=8,
)
NUM_TOKENS, PAGE_SIZE = 24, 4


def trained_and_loaded(directory):
    """A randomly initialised drafter, rounded to what its checkpoint stores, and the loaded one."""
    generator = torch.Generator().manual_seed(5)
    trained = DSparkForTraining(CONFIG).eval().requires_grad_(False)
    for parameter in trained.parameters():
        noise = torch.randn(parameter.shape, generator=generator) * 0.1
        parameter.copy_((parameter + noise).bfloat16().float())
    draft_ids = torch.randperm(61, generator=generator)[:40].sort().values
    config = drafter_config(CONFIG, target_name="toy", num_target_layers=4, max_positions=64)
    write_drafter(trained, draft_ids, directory, config=config)
    table = torch.randn(61, 32, generator=generator)
    model = load_model(
        directory, TargetTables(embedding_VD=table, head_VD=table), dtype=torch.float32, device=torch.device("cpu")
    )
    predictor = BlockPredictor(
        model,
        embedding_VD=table,
        head=lambda rows: rows,
        kernels=EXACT_KERNELS,
        max_context=64,
        with_confidence=True,
    )
    return trained, predictor, table


def test_cached_block_equals_the_training_block(tmp_path):
    trained, predictor, table = trained_and_loaded(tmp_path)
    generator = torch.Generator().manual_seed(6)
    ids = torch.randint(0, 60, (NUM_TOKENS,), generator=generator)
    taps = torch.randn(NUM_TOKENS, 2, 32, generator=generator)
    context = predictor.allocate_context(64)
    position = 0
    for accepted in (6, 0, 4, 2, 4, 0):  # the prompt's rows, then rounds that keep 1 + accepted rows
        rows = torch.arange(position, position + accepted + 1)
        predictor.store_context(context, taps[rows], rows, rows, max_position=int(rows[-1]))
        position += accepted + 1
        anchor = ids[position : position + 1]
        prediction = predictor.predict(
            context,
            BlockAnchors(
                token_ids_S=anchor,
                positions_S=torch.tensor([position]),
                page_table_SP=torch.arange(16)[None],
                page_size=PAGE_SIZE,
                max_position=position,
            ),
        )
        drafts = prediction.block.token_ids_SG[0]
        inputs = torch.full((5,), CONFIG.mask_token_id)
        inputs[0] = anchor
        blocks = Blocks(
            anchors_BA=torch.tensor([[position]]),
            inputs_BR=inputs[None],
            labels_BR=drafts[None],
            previous_BR=torch.cat((anchor, drafts[:-1]))[None],
            weights_BR=torch.ones(1, 5),
        )
        expected = trained(taps.flatten(1)[None], blocks, lambda ids: embedding(ids, table))
        logits = torch.stack([row[0] for row in prediction.logits])
        assert (logits - expected.logits_BRV[0]).abs().max() < 1e-4
        assert (prediction.block.confidence_SG[0] - expected.confidence_BR[0].sigmoid()).abs().max() < 1e-4
