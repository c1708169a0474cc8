"""Checkpoint names of the Llama family and where each tensor goes; the only list of names."""

from collections.abc import Iterable

import torch

from outrider.errors import CheckpointError
from outrider.models.llama.config import LlamaConfig
from outrider.models.weights import Assignment, CheckpointReader, SourceTensor

__all__ = ["assignments", "skipped_prefixes"]

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def skipped_prefixes(config: LlamaConfig, reader: CheckpointReader) -> tuple[str, ...]:
    """Names left unread: the head that some exports of tied models write again, once it was found equal.

    Raises:
        CheckpointError: it is another one, so config and weights contradict each other.
    """
    if not config.tied_head or HEAD not in reader or EMBEDDING not in reader:
        return ()
    if not torch.equal(reader.load(HEAD), reader.load(EMBEDDING)):
        raise CheckpointError(
            f"tensor {HEAD!r} differs from {EMBEDDING!r} but tie_word_embeddings is true; correct the config"
        )
    return (HEAD,)


def assignments(config: LlamaConfig) -> tuple[Assignment, ...]:
    """What goes where; projections that read the same input are joined into one weight by rows."""
    width = config.hidden_size
    items = [
        _whole("embedding", EMBEDDING, (config.vocab_size, width)),
        _whole("norm", "model.norm.weight", (width,)),
    ]
    if not config.tied_head:
        items.append(_whole("own_head", HEAD, (config.vocab_size, width)))
    for i in range(config.num_layers):
        items += _layer(config, f"model.layers.{i}.", f"layers.{i}.")
    return tuple(items)


def _layer(config: LlamaConfig, names: str, parameters: str) -> list[Assignment]:
    width, inner = config.hidden_size, config.intermediate_size
    query, kv = config.query_size, config.kv_size
    items = [
        _whole(f"{parameters}attention_norm", f"{names}input_layernorm.weight", (width,)),
        _whole(f"{parameters}ffn_norm", f"{names}post_attention_layernorm.weight", (width,)),
        _whole(f"{parameters}o_proj", f"{names}self_attn.o_proj.weight", (width, query)),
        _whole(f"{parameters}down_proj", f"{names}mlp.down_proj.weight", (width, inner)),
    ]
    if config.head_norms:
        for norm in ("q_norm", "k_norm"):
            items.append(_whole(f"{parameters}{norm}", f"{names}self_attn.{norm}.weight", (config.head_dim,)))
    qkv = ((f"self_attn.{name}_proj", size) for name, size in (("q", query), ("k", kv), ("v", kv)))
    items += _joined(f"{parameters}qkv_proj", names, qkv, width)
    return items + _joined(
        f"{parameters}gate_up_proj", names, (("mlp.gate_proj", inner), ("mlp.up_proj", inner)), width
    )


def _whole(parameter: str, name: str, shape: tuple[int, ...]) -> Assignment:
    return Assignment(sources=(SourceTensor(name=name, shape=shape),), parameter=parameter)


def _joined(parameter: str, names: str, parts: Iterable[tuple[str, int]], in_size: int) -> list[Assignment]:
    items, begin = [], 0
    for name, num_rows in parts:
        source = SourceTensor(name=f"{names}{name}.weight", shape=(num_rows, in_size))
        items.append(Assignment(sources=(source,), parameter=parameter, rows=(begin, begin + num_rows)))
        begin += num_rows
    return items
