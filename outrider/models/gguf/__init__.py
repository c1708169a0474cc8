"""GGUF files as checkpoints in the Hugging Face form, for the Llama family."""
