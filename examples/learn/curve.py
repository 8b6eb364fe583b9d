"""The curves as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def draw(curves: Mapping[str, Sequence[float]], path: Path, *, window: int, group_size: int) -> None:
    """Mean score by group, smoothed over `window` groups; `path` gets the suffixes .png and .svg."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for name, scores in curves.items():
        smooth = [sum(scores[max(0, i - window + 1) : i + 1]) / min(i + 1, window) for i in range(len(scores))]
        axes.plot(range(1, len(smooth) + 1), smooth, label=name, linewidth=2.5 if name == "as sent" else 1.5)
    axes.axhline(0.9, color="grey", linewidth=0.8, linestyle=":")
    axes.set(
        xlabel=f"updates (one group of {group_size} trajectories each)",
        ylabel=f"mean reward, last {window} groups",
        ylim=(-0.02, 1.02),
        title="A policy that learns from the batches, and four that get them shifted by one position",
    )
    axes.legend(loc="center right")
    for suffix in (".png", ".svg"):
        figure.savefig(path.with_suffix(suffix), dpi=120, metadata={"Date": None} if suffix == ".svg" else None)
    plt.close(figure)
