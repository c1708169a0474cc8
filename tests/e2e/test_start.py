"""What a start does not do: import what only other commands, training or plots need."""

import json
import subprocess
import sys
from pathlib import Path

MODELS = Path(__file__).resolve().parents[2] / "models"
# Each takes from a twentieth of a second to seconds. numpy is torch's own; tyro may bring parts of rich.
HEAVY = {
    "fontTools", "hypothesis", "matplotlib", "mpmath", "pandas", "pytest", "rich.progress", "scipy", "sympy",
    "torch._dynamo", "torch._inductor", "transformers", "triton",
}  # fmt: skip
OTHER_COMMANDS = {
    "outrider.bench",
    "outrider.cli.bench",
    "outrider.cli.demo",
    "outrider.cli.verify",
    "outrider.testing",
}

PROGRAM = """
import json, sys
from outrider.cli import main
status = main(sys.argv[1:])
print()  # a text ends without a line end
print(json.dumps({"status": status, "modules": sorted(sys.modules)}))
"""


def test_generate_imports_nothing_heavy() -> None:
    arguments = ["generate", str(MODELS / "k3-small"), "--drafter", str(MODELS / "k3-small-dspark"), "--threads", "1"]
    arguments += ["--prompt", "The lighthouse", "--max-tokens", "9"]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=False, cwd=MODELS.parent
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["status"] == 0
    modules = set(report["modules"])
    assert {"torch", "outrider.speculative.drafter", "outrider.models.dspark.checkpoint"} <= modules
    assert not modules & HEAVY
    assert not modules & OTHER_COMMANDS
