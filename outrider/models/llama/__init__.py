"""Llama and Qwen3: one code for grouped-query attention with rotary positions and a gated feed-forward."""
