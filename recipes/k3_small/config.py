"""Sizes of k3-small and its drafter.

The target has every K3 feature at 192 wide, 7 layers, block 3 (7 > 2 * 3, 7 % 3 = 1).
"""

from outrider.training.dspark import DrafterConfig
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
SPECIAL_IDS = {"bos_token_id": 8176, "eos_token_id": 8178, "pad_token_id": 8191}

K3_SMALL_DSPARK = DrafterConfig(
    hidden_size=192,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=96,  # a match of five lags has 72 dims
    intermediate_size=512,
    block_rows=7,
    mask_token_id=MASK_TOKEN_ID,
    aux_layer_ids=(1, 2, 5),  # 1 says the lags, 2 the token
    target_vocab_size=8192,
    draft_vocab_size=6144,  # 99 % of the answers' tokens; 4,096 cover 96.5 %
    markov_rank=64,
    rope_theta=1e12,  # three quarters of the rotary pairs hardly turn: matching content at any distance
)
