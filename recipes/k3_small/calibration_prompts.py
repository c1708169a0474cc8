"""Tasks of ``make_tasks.py`` as a prompt file for ``outrider calibrate`` and the benches: questions without answers.

Usage: ``python recipes/k3_small/calibration_prompts.py TASKS.jsonl PROMPTS.jsonl``
"""

import json
import sys
from pathlib import Path


def main() -> None:
    """Write one row per task: its tier as category, its kind as sub_category, its question as the only turn."""
    tasks, prompts = map(Path, sys.argv[1:])
    rows = []
    for number, line in enumerate(tasks.read_text(encoding="utf8").splitlines()):
        task = json.loads(line)
        rows.append(
            {
                "question_id": f"{task['kind']}/{number}",
                "category": task["tier"],
                "sub_category": task["kind"],
                "turns": [task["turns"][0]["content"]],
            }
        )
    prompts.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf8")


if __name__ == "__main__":
    main()
