"""Draw a benchmark's ratios: python benchmarks/plot.py RESULTS.json CHART.svg.

Needs only matplotlib.
"""

# pyright: reportMissingImports=false
import json
import statistics
import sys
from pathlib import Path

DRAWN = {
    "training": "One process: steps/s over the bare loop's",
    "strategies": "Several ranks: steps/s over the bare loop's on one process",
}


def draw(results: dict, chart: Path) -> None:
    """Draw one bar per contender, with quartiles.

    Raises:
        ValueError: where there is nothing to draw.
    """
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "benchmark", "svg.fonttype": "none", "font.size": 9}
    from matplotlib import pyplot

    found = {
        name: results["sections"][name]
        for name in DRAWN
        if results["sections"].get(name, {}).get("records")
    }
    if not found:
        raise ValueError(
            f"the results have neither of {', '.join(DRAWN)}: there is nothing to draw"
        )
    rows = [sum(bool(r["seconds"]) for r in section["records"]) for section in found.values()]
    figure, axes = pyplot.subplots(
        len(found), 1, figsize=(7, 0.8 * len(found) + 0.3 * sum(rows)), squeeze=False,
        gridspec_kw={"height_ratios": rows}, layout="constrained",
    )  # fmt: skip
    for axis, (name, section) in zip(axes[:, 0], found.items(), strict=True):
        reference = section["records"][0]["seconds"]
        records = [record for record in section["records"] if record["seconds"]][::-1]
        for place, record in enumerate(records):
            ratios = [b / a for a, b in zip(record["seconds"], reference, strict=False)]
            low, middle, high = (
                statistics.quantiles(ratios, n=4, method="inclusive")
                if len(ratios) > 1
                else ratios * 3
            )
            ours = record["name"].startswith("ours")
            axis.barh(
                place,
                middle,
                color="tab:blue" if ours else "lightgray",
                xerr=[[middle - low], [high - middle]],
            )
            axis.text(0.02, place, f"{middle:.2f}", va="center", color="white" if ours else "black")
        axis.set_yticks(range(len(records)), [record["name"] for record in records])
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.set_title(f"{DRAWN[name]} ({section['model']}, {section['precision']})", fontsize=9)
    figure.savefig(chart, metadata={"Date": None})


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
