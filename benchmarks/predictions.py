"""Print predicted times of the fused kernels next to the times measured by `kernels.py`, in clocks per element.

python benchmarks/predictions.py FOLDER/kernels_*.json
The predictions in `results/predicted/gluon_kernels.csv` are from a timing model of the compiled code on an H100.
"""

import argparse
import csv
import json
from pathlib import Path

PREDICTED = Path(__file__).parent / "results/predicted/gluon_kernels.csv"
SHAPE = ("batch_size", "heads", "tokens", "causal", "window")


def predictions() -> dict[tuple[str, ...], float]:
    """Read the predicted clocks by shape and kernel."""
    lines = (line for line in PREDICTED.read_text().splitlines() if not line.startswith("#"))
    return {(*(row[name] for name in SHAPE), row["kernel"]): float(row["clocks"]) for row in csv.DictReader(lines)}


def measurements(path: Path) -> dict[tuple[str, ...], float]:
    """Read the measured clocks by shape and kernel from a result file of `kernels.py`."""
    record = json.loads(path.read_text())
    found = {}
    for row in record["results"]:
        values = record["options"] | {"tokens": row["tokens"]}
        found[(*(str(int(values[name] or 0)) for name in SHAPE), row["name"])] = row["clocks"]
    return found


def main() -> None:
    """Print one line per predicted kernel for each measured shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="result files of kernels.py")
    files, predicted = parser.parse_args().files, predictions()
    for path in files:
        measured = measurements(path)
        for key, clocks in predicted.items():
            if key[:-1] not in {other[:-1] for other in measured}:
                continue
            shape = ", ".join(f"{name}={value}" for name, value in zip(SHAPE, key, strict=False))
            result = "not measured"
            if key in measured:
                result = f"measured {measured[key]:6.3f} ratio {measured[key] / clocks:5.2f}"
            print(f"{key[-1]:18} predicted {clocks:6.3f} {result}  {shape}")


if __name__ == "__main__":
    main()
