"""Neighbouring readings: what they change, what they leave alone, and which texts can tell them apart."""

from dataclasses import replace
from itertools import permutations

import pytest
import torch

from outrider.bench.pair_readings import Facts, Reading, given_reading, neighbours
from outrider.models.dspark.config import BlockLayout, DSparkConfig
from outrider.models.dspark.config_json import parse_config
from outrider.models.dspark.model import DSparkModel
from outrider.testing.toy_dspark import ToyDrafterOptions, toy_drafter_config, toy_drafter_weights

OPTIONS = ToyDrafterOptions(family="speculators", draft_vocab_size=41)
CONFIG = parse_config(toy_drafter_config(OPTIONS))
STORED = toy_drafter_weights(OPTIONS, seed=1)
FACTS = Facts(
    tap_ids=(0, 1, 2, 3, 4, 5),
    target_theta=777.0,
    longest_context=400,
    tap_key="aux_hidden_state_layer_ids",
    head_VD=None,
)


def readings(config: DSparkConfig = CONFIG, facts: Facts = FACTS) -> dict[str, Reading]:
    found = neighbours(given_reading(config), STORED, facts)
    assert len({each.label for each in found}) == len(found)
    return {each.label: each for each in found}


def test_every_reading_is_a_drafter_and_leaves_the_stored_weights_alone() -> None:
    before = {name: tensor.clone() for name, tensor in STORED.items()}
    found = readings()
    assert {each.code for each in found.values()} == {
        "taps_shifted", "anchor_layout", "rope", "mask_id", "vocab_map", "tensor",
    }  # fmt: skip
    for each in found.values():
        assert each.found and each.expected and each.remedy
        state = each.state(STORED)
        with torch.device("meta"):
            DSparkModel(each.config).load_state_dict(state, assign=True)
        changed = each.config != CONFIG or any(not torch.equal(state[name], STORED[name]) for name in STORED)
        assert changed, each.label
    assert all(torch.equal(STORED[name], before[name]) for name in STORED)


def test_taps_move_only_to_layers_that_the_texts_hold() -> None:
    found = readings()  # taps after 0, 2 and 4: none comes before layer 0
    assert "taps one layer earlier" not in found
    later = found["taps one layer later"]
    assert later.config.aux_layer_ids == (1, 3, 5)
    assert "set aux_hidden_state_layer_ids to [2, 4, 6]" in later.remedy  # as this form writes them
    both = found["taps one layer later, anchor-drop"]
    assert (both.config.aux_layer_ids, both.config.layout) == ((1, 3, 5), BlockLayout.ANCHOR_DROP)
    assert both.also is not None and both.also.code == "anchor_layout"
    assert "taps one layer later" not in readings(facts=replace(FACTS, tap_ids=(0, 1, 2, 3, 4)))


def test_rotary_forms_are_tried_only_where_texts_can_tell() -> None:
    def forms(config: DSparkConfig, longest: int) -> set[str]:
        found = readings(config, replace(FACTS, longest_context=longest))
        return {label for label, each in found.items() if each.code == "rope"}

    assert forms(CONFIG, 1) < forms(CONFIG, 400)
    assert "rotary theta 777, no scaling" in forms(CONFIG, 400)  # the target's own
    yarn = parse_config(toy_drafter_config(replace(OPTIONS, yarn_factor=4.0)))
    assert "rotary theta 10000, no scaling" in forms(yarn, 1)  # its factor on the scores shows at any length


def test_all_orders_of_three_taps_are_tried() -> None:
    parts = STORED["fc.weight"].chunk(3, dim=1)
    wanted = [torch.cat([parts[i] for i in order], dim=1) for order in permutations(range(3))][1:]
    tried = [each.state(STORED)["fc.weight"] for each in readings().values() if each.label.startswith("fc ")]
    assert len(tried) == len(wanted)
    assert all(any(torch.equal(one, other) for other in tried) for one in wanted)


def test_row_orders_of_rotary_pairs_undo_each_other() -> None:
    found, name = readings(), "layers.1.self_attn.k_proj.weight"
    halves = found["rows from interleaved pairs"].state(STORED)
    back = found["rows from half-split pairs"].state(halves)
    assert not torch.equal(halves[name], STORED[name]) and torch.equal(back[name], STORED[name])


@pytest.mark.parametrize("by", [-1, 1])
def test_a_shifted_map_is_a_neighbour_and_takes_a_gathered_head_along(by: int) -> None:
    head_VD = torch.randn(OPTIONS.vocab_size, OPTIONS.hidden_size, dtype=torch.float64)
    ids = torch.arange(41) + STORED["d2t"] + by
    label = "d2t one id higher" if by > 0 else "d2t one id lower"
    found = readings(facts=replace(FACTS, head_VD=head_VD))
    if int(ids.min()) < 0 or int(ids.max()) >= OPTIONS.vocab_size:
        assert label not in found
        return
    state = found[label].state(STORED)
    assert torch.equal(state["d2t"], STORED["d2t"] + by)
    assert torch.equal(state["lm_head.weight"], head_VD[ids])
