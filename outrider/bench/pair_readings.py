"""The readings of a drafter checkpoint that lie next to the given one.

Conventions that are one off raise no error and cost acceptance: which layers are tapped, which row predicts which
position, rotary numbers, the mask, the vocabulary map, and the order of tensors. Each neighbour here is the given
reading with one of them changed, so that it can be measured on the same anchors.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from outrider.models.dspark.config import BlockLayout, DSparkConfig, MarkovKind, RopeConfig
from outrider.models.dspark.joined import rope_frequencies

__all__ = ["Code", "Facts", "Reading", "State", "given_reading", "neighbours"]

Code = Literal["taps_shifted", "anchor_layout", "rope", "mask_id", "vocab_map", "tensor"]
State = dict[str, torch.Tensor]

# What trainers and model families use; others are not guessed.
THETAS = (1e4, 5e4, 1e5, 5e5, 1e6, 5e6, 8e6, 1e7, 1e8, 1e12)
YARN_ORIGINALS = (4096, 32768, 65536)
MASK_IDS = (4, 128799, 151669, 154856, 163608, 163824, 163837)
MIN_TURN = 0.25  # radians between two rotary forms at the longest distance, below which a text tells nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What neighbours depend on beside the checkpoint."""

    tap_ids: tuple[int, ...]  # target layers whose taps the texts hold
    target_theta: float | None
    longest_context: int  # tokens before the last anchor
    tap_key: str  # name of the tap ids in this config file
    head_VD: torch.Tensor | None  # the target's, where the drafter's head is gathered from it


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One way to understand a checkpoint."""

    label: str
    code: Code
    found: str  # what the checkpoint says
    expected: str  # what this reading says instead
    remedy: str
    config: DSparkConfig
    also: "Reading | None" = None  # a second convention that this one changes too
    edits: tuple[Callable[[State], None], ...] = ()

    def state(self, stored: Mapping[str, torch.Tensor]) -> State:
        """Parameters under this reading; ``stored`` is left alone."""
        state = dict(stored)
        for edit in self.edits:
            edit(state)
        return state


def given_reading(config: DSparkConfig) -> Reading:
    """The checkpoint as its own files say."""
    return Reading(label="as given", code="tensor", found="", expected="", remedy="", config=config)


def neighbours(current: Reading, stored: Mapping[str, torch.Tensor], facts: Facts) -> tuple[Reading, ...]:
    """All readings that differ from ``current`` in one convention, or in taps and layout.

    With both of these wrong, a drafter accepts so little that neither change alone shows.
    """
    taps, layouts = tuple(_tap_readings(current, facts)), tuple(_layout_readings(current))
    return (
        *taps,
        *layouts,
        *(_both(one, other) for one in taps for other in layouts),
        *_mask_readings(current),
        *_rope_readings(current, facts),
        *_vocabulary_readings(current, stored, facts),
        *_tensor_readings(current, stored),
    )


def _tap_readings(current: Reading, facts: Facts) -> Iterator[Reading]:
    config = current.config
    for shift, word in ((-1, "earlier"), (1, "later")):
        ids = tuple(t + shift for t in config.aux_layer_ids)
        if not set(ids) <= set(facts.tap_ids):
            continue
        written = [t - config.aux_layer_convention.offset for t in ids]
        yield replace(
            current,
            label=f"taps one layer {word}",
            code="taps_shifted",
            found=f"taps after layers {list(config.aux_layer_ids)} (0-based)",
            expected=f"taps after layers {list(ids)}",
            remedy=f"set {facts.tap_key} to {written}, or aux_layer_convention to what the ids mean",
            config=replace(config, aux_layer_ids=ids),
        )


def _layout_readings(current: Reading) -> Iterator[Reading]:
    config = current.config
    is_first = config.layout is BlockLayout.ANCHOR_FIRST
    if is_first and config.num_block_rows < 2:
        return
    other = BlockLayout.ANCHOR_DROP if is_first else BlockLayout.ANCHOR_FIRST
    meaning = {
        BlockLayout.ANCHOR_FIRST: "anchor-first: row k predicts position p + k + 1",
        BlockLayout.ANCHOR_DROP: "anchor-drop: row k predicts position p + k",
    }
    yield replace(
        current,
        label=other.value.replace("_", "-"),
        code="anchor_layout",
        found=meaning[config.layout],
        expected=meaning[other],
        remedy=f"set sample_from_anchor to {'false' if is_first else 'true'}",
        config=replace(config, layout=other),
    )


def _both(taps: Reading, layout: Reading) -> Reading:
    config = replace(taps.config, layout=layout.config.layout)
    return replace(taps, label=f"{taps.label}, {layout.label}", config=config, also=layout)


def _mask_readings(current: Reading) -> Iterator[Reading]:
    config = current.config
    near = [config.mask_token_id + step for step in (-1, 1, -2, 2)]
    for mask in dict.fromkeys((*near, *MASK_IDS)):
        if 0 <= mask < config.vocab_size and mask != config.mask_token_id:
            yield replace(
                current,
                label=f"mask {mask}",
                code="mask_id",
                found=f"mask_token_id {config.mask_token_id}",
                expected=f"mask_token_id {mask}",
                remedy=f"set mask_token_id to {mask}",
                config=replace(config, mask_token_id=mask),
            )


def _rope_readings(current: Reading, facts: Facts) -> Iterator[Reading]:
    config = current.config
    for rope in _rope_neighbours(config.rope, facts.target_theta):
        other = replace(config, rope=rope)
        if not _text_can_tell(config, other, facts.longest_context):
            continue
        yield replace(
            current,
            label=f"rotary {_written(rope)}",
            code="rope",
            found=_written(config.rope),
            expected=_written(rope),
            remedy=f"set rope_parameters (or rope_theta and rope_scaling) to {_written(rope)}",
            config=other,
        )


def _rope_neighbours(rope: RopeConfig, target_theta: float | None) -> Iterator[RopeConfig]:
    thetas = dict.fromkeys((*THETAS, *([] if target_theta is None else [target_theta])))
    for theta in thetas:
        if theta != rope.theta:
            yield replace(rope, theta=theta)
    if rope.yarn is not None:
        yield replace(rope, yarn=None)
        for original in YARN_ORIGINALS:
            if original != rope.yarn.original_max_position:
                yield replace(rope, yarn=replace(rope.yarn, original_max_position=original))


def _text_can_tell(one: DSparkConfig, other: DSparkConfig, distance: int) -> bool:
    """Whether two rotary forms differ visibly within ``distance`` positions."""
    (ours_F, our_gain), (theirs_F, their_gain) = rope_frequencies(one), rope_frequencies(other)
    return our_gain != their_gain or float((ours_F - theirs_F).abs().max()) * distance >= MIN_TURN


def _written(rope: RopeConfig) -> str:
    text = f"theta {rope.theta:g}"
    if rope.yarn is None:
        return f"{text}, no scaling"
    return f"{text}, yarn factor {rope.yarn.factor:g} over {rope.yarn.original_max_position}"


def _vocabulary_readings(current: Reading, stored: Mapping[str, torch.Tensor], facts: Facts) -> Iterator[Reading]:
    config = current.config
    if "d2t" not in stored:
        return
    d2t_U = current.state(stored)["d2t"]
    rows_U = torch.arange(d2t_U.numel(), device=d2t_U.device)
    maps = {
        "one id lower": (d2t_U - 1, "subtract 1 from every entry of d2t"),
        "one id higher": (d2t_U + 1, "add 1 to every entry of d2t"),
        "absolute": (d2t_U - rows_U, "store offsets in d2t: target id - draft id"),
    }
    for name, (offsets_U, remedy) in maps.items():
        ids_U = rows_U + offsets_U
        if int(ids_U.min()) < 0 or int(ids_U.max()) >= config.vocab_size or len(set(ids_U.tolist())) < ids_U.numel():
            continue
        yield replace(
            current,
            label=f"d2t {name}",
            code="vocab_map",
            found=f"d2t maps draft id 0 to {int(d2t_U[0])}",
            expected=f"draft id 0 means {int(ids_U[0])}",
            remedy=remedy,
            edits=(*current.edits, _map_edit(offsets_U, ids_U, facts.head_VD)),
        )


def _map_edit(offsets_U: torch.Tensor, ids_U: torch.Tensor, head_VD: torch.Tensor | None) -> Callable[[State], None]:
    def edit(state: State) -> None:
        state["d2t"] = offsets_U
        if head_VD is not None:
            state["lm_head.weight"] = head_VD[ids_U.to(head_VD.device)]

    return edit


def _tensor_readings(current: Reading, stored: Mapping[str, torch.Tensor]) -> Iterator[Reading]:
    """Tensors in another order, and parts of the drafter left out: a damaged part is worse than none."""
    for label, expected, edit in (*_orders(current.config), *_omissions(current.config)):
        yield replace(
            current,
            label=label,
            code="tensor",
            found="tensors as stored",
            expected=expected,
            remedy="convert the weights again from their source, and compare the tensors named",
            edits=(*current.edits, edit),
        )


_Change = tuple[str, str, Callable[[State], None]]


def _orders(config: DSparkConfig) -> Iterator[_Change]:
    num_taps, layers = len(config.aux_layer_ids), range(config.num_layers)
    orders = {tuple(reversed(range(num_taps))): "reversed"}
    for i in range(num_taps - 1):
        swapped = list(range(num_taps))
        swapped[i], swapped[i + 1] = i + 1, i
        orders.setdefault(tuple(swapped), f"with taps {i} and {i + 1} swapped")
    for step in (1, -1):
        orders.setdefault(tuple((i + step) % num_taps for i in range(num_taps)), f"rotated by {step:+d} taps")
    for order, word in orders.items():
        if num_taps > 1:
            yield f"fc {word}", f"columns of fc.weight {word}", _tap_order(order)
    for chosen in ([*layers], *([i] for i in layers if len(layers) > 1)):
        where = "all layers" if len(chosen) > 1 or len(layers) == 1 else f"layer {chosen[0]}"
        pairs = [(f"layers.{i}.mlp.gate_proj.weight", f"layers.{i}.mlp.up_proj.weight") for i in chosen]
        yield f"gate and up of {where}", f"gate_proj and up_proj of {where} swapped", _swap(pairs)
        pairs = [(f"layers.{i}.self_attn.k_proj.weight", f"layers.{i}.self_attn.v_proj.weight") for i in chosen]
        yield f"k and v of {where}", f"k_proj and v_proj of {where} swapped", _swap(pairs)
    for i in range(config.num_layers - 1):
        yield f"layers {i} and {i + 1}", f"layers {i} and {i + 1} swapped", _swap_layers(i)
    for kind in ("interleaved", "half-split"):
        yield (
            f"rows from {kind} pairs",
            f"rows of q_proj and k_proj permuted from {kind} rotary pairs",
            _pairing(config, kind),
        )


def _omissions(config: DSparkConfig) -> Iterator[_Change]:
    def change(part: str, *names: str) -> _Change:
        return f"without {part}", f"better without {part}: its weights are damaged", _zero(*names)

    for i in range(config.num_layers):
        yield change(f"layers.{i}.self_attn", f"layers.{i}.self_attn.o_proj.weight")
        yield change(f"layers.{i}.mlp", f"layers.{i}.mlp.down_proj.weight")
    for index in range(len(config.aux_layer_ids)):
        yield (
            f"without tap {index}",
            f"better without the columns of tap {index} in fc.weight: they are damaged",
            _zero_tap(index, len(config.aux_layer_ids)),
        )
    yield change("fc", "fc.weight")
    if config.markov is not MarkovKind.NONE:
        yield change("markov_head", "markov_head.markov_w2.weight")


def _tap_order(order: tuple[int, ...]) -> Callable[[State], None]:
    def edit(state: State) -> None:
        parts = state["fc.weight"].chunk(len(order), dim=1)
        state["fc.weight"] = torch.cat([parts[i] for i in order], dim=1)

    return edit


def _swap(pairs: list[tuple[str, str]]) -> Callable[[State], None]:
    def edit(state: State) -> None:
        for one, other in pairs:
            state[one], state[other] = state[other], state[one]

    return edit


def _swap_layers(index: int) -> Callable[[State], None]:
    def edit(state: State) -> None:
        prefix, other = f"layers.{index}.", f"layers.{index + 1}."
        _swap([(name, other + name.removeprefix(prefix)) for name in state if name.startswith(prefix)])(state)

    return edit


def _pairing(config: DSparkConfig, stored_as: str) -> Callable[[State], None]:
    """Rows of queries and keys, head by head, from pairs (0 1)(2 3).. to halves, or back."""
    half = config.head_dim // 2
    to_halves = torch.cat((torch.arange(0, config.head_dim, 2), torch.arange(1, config.head_dim, 2)))
    order = to_halves if stored_as == "interleaved" else torch.arange(config.head_dim).view(2, half).T.flatten()

    def edit(state: State) -> None:
        for layer in range(config.num_layers):
            for part in ("q", "k"):
                name = f"layers.{layer}.self_attn.{part}_proj.weight"
                heads_HKD = state[name].view(-1, config.head_dim, state[name].shape[1])
                state[name] = heads_HKD[:, order.to(heads_HKD.device)].flatten(0, 1)
                norm = f"layers.{layer}.self_attn.{part}_norm.weight"
                state[norm] = state[norm][order.to(state[norm].device)]

    return edit


def _zero(*names: str) -> Callable[[State], None]:
    def edit(state: State) -> None:
        for name in names:
            state[name] = torch.zeros_like(state[name])

    return edit


def _zero_tap(index: int, num_taps: int) -> Callable[[State], None]:
    def edit(state: State) -> None:
        weight = state["fc.weight"].clone()
        weight.chunk(num_taps, dim=1)[index].zero_()
        state["fc.weight"] = weight

    return edit
