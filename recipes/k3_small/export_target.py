"""Write the trained target into its shipped form.

Usage: ``python recipes/k3_small/export_target.py RUN/checkpoint.pt TOKENIZER_DIR models/k3-small``
"""

import argparse
import shutil
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from config import K3_SMALL, MAX_POSITIONS, SPECIAL_IDS

from outrider.training.export import write_target
from outrider.training.kimi_k3 import KimiK3ForTraining


def main() -> None:
    """Load the checkpoint, write the model and copy the tokenizer beside it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    model = KimiK3ForTraining(K3_SMALL)
    model.load_state_dict(torch.load(arguments.checkpoint, weights_only=True)["model"])
    write_target(model, arguments.out, max_positions=MAX_POSITIONS, special_ids=SPECIAL_IDS)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(arguments.tokenizer / name, arguments.out / name)


if __name__ == "__main__":
    main()
