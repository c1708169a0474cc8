"""Sizes of k3-small: every K3 feature at 192 wide, 7 layers, block 3 (7 > 2 * 3, 7 % 3 = 1)."""

from outrider.training.kimi_k3 import TrainConfig

K3_SMALL = TrainConfig(
    vocab_size=8192,
    hidden_size=192,
    num_layers=7,
    mla_layers=(3, 5, 6),
    attn_res_block_size=3,
    kda_heads=3,
    kda_head_dim=64,
    mla_heads=4,
    q_lora_rank=96,
    kv_lora_rank=96,
    qk_nope_head_dim=48,
    qk_rope_head_dim=16,
    v_head_dim=48,
    dense_intermediate=512,
    num_experts=16,
    experts_per_token=4,
    moe_intermediate=64,
    latent_size=96,
    num_shared_experts=4,
)
MAX_POSITIONS = 4096
MASK_TOKEN_ID = 8188
