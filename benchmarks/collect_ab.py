"""One result file from the run folder of `dm-plugin ab examples/ab/te_*.yaml`: the table, what ran, versions, losses.

python3 benchmarks/collect_ab.py runs/te_gpt --config examples/ab/te_gpt.yaml --json benchmarks/results/ab_te_gpt.json
"""

import argparse
import json
from pathlib import Path


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("run", type=Path)
    p.add_argument("--config", required=True, help="the YAML that was run")
    p.add_argument("--json", type=Path, required=True)
    args = p.parse_args()
    arms, common = {}, {}
    for log in sorted(args.run.glob("*/train.jsonl")):
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        about = json.loads((log.parent / "backend.json").read_text())
        common = {"device": about["device"], "versions": about["versions"], "shape": about["shape"]}
        arms[log.parent.name] = {
            "backend": about["backend"],
            "parameters": about["parameters"],
            "seconds_of_first_step": round(lines[0]["time"], 2),
            "losses": [round(line["loss"], 5) for line in lines],
        }
    table = json.loads((args.run / "table.json").read_text())
    record = {
        "what": "ab",
        "command": f"dm-plugin ab {args.config}",
        **common,
        "table": table["arms"],
        "arms": arms,
    }
    args.json.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {args.json}: {', '.join(arms)}")


if __name__ == "__main__":
    main()
