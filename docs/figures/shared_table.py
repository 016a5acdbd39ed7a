"""Draw docs/figures/shared_table.svg from shared_table.json: `python docs/figures/shared_table.py`."""

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams |= {"svg.hashsalt": "pit-deploy", "svg.fonttype": "none"}

from matplotlib import pyplot  # noqa: E402

MARKERS = {
    "two tables": "s",
    "one table, raw": "x",
    "one table in the basis": "o",
    "one table in the basis, error feedback": "D",
}


def main() -> None:
    folder = Path(__file__).parent
    rows = json.loads((folder / "shared_table.json").read_text())["rows"]
    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    for kind, marker in MARKERS.items():
        of_kind = sorted((row for row in rows if row["kind"] == kind), key=lambda row: row["bits"])
        megabytes, kl = [row["megabytes"] for row in of_kind], [row["kl"] for row in of_kind]
        axes.plot(megabytes, kl, marker=marker, label=kind)
        for row in of_kind:
            place = (row["megabytes"], row["kl"])
            axes.annotate(f"int{row['bits']}", place, textcoords="offset points", xytext=(7, 4), fontsize=8)
    axes.set_yscale("log")
    axes.set_xlim(10, 72)
    axes.set_xlabel("tables, MB")
    axes.set_ylabel("KL to float tables, nats")
    axes.grid(alpha=0.3, which="both")
    axes.legend(frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(folder / "shared_table.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
