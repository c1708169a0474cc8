"""Write the trained drafter into its shipped form.

Usage: ``python recipes/k3_small/export_drafter.py RUN/checkpoint.pt models/k3-small-dspark``
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from config import K3_SMALL, K3_SMALL_DSPARK, MAX_POSITIONS

from outrider.training.dspark import DSparkForTraining
from outrider.training.export import drafter_config, write_drafter


def main() -> None:
    """Load the checkpoint and write the drafter."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    state = torch.load(arguments.checkpoint, weights_only=True)
    model = DSparkForTraining(K3_SMALL_DSPARK)
    model.load_state_dict(state["model"])
    config = drafter_config(
        K3_SMALL_DSPARK,
        target_name="k3-small",
        num_target_layers=K3_SMALL.num_layers,
        max_positions=MAX_POSITIONS,
    )
    write_drafter(model, state["draft_ids"], arguments.out, config=config)


if __name__ == "__main__":
    main()
