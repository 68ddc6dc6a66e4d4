"""The demo's one-page picture: what was learned (top) and how fast the operation is (bottom)."""

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter, NullLocator
from model import FLASH_QLA, NONE, PYTORCH
from train import smoothed

COLORS = {FLASH_QLA.name: "#1f5fbf", NONE.name: "#d9761a", PYTORCH.name: "#6b6b6b"}
LABELS = {
    FLASH_QLA.name: "gated delta rule (flash_qla)",
    NONE.name: "same model, operation replaced by o = v",
    PYTORCH.name: "plain PyTorch (chunks of 64)",
}
POSITIONS_PER_POINT = 32


def draw_training(ax, courses):
    for course in courses:
        color = COLORS[course.name]
        ax.plot(*zip(*smoothed(course.train), strict=True), color=color, lw=1, alpha=0.45)
        ax.plot(*zip(*course.held_out, strict=True), "o-", color=color, lw=1.6, ms=4, label=LABELS[course.name])
    end = max(y for course in courses for _, y in course.held_out[-1:])
    ax.set(
        title="Loss while training", xlabel="bytes seen by each model", ylabel="bits per byte", ylim=(None, min(8.2, 2.2 * end))
    )
    ax.xaxis.set_major_formatter(EngFormatter())
    ax.legend(title="dots: held-out text, thin lines: training text", title_fontsize=8)


def draw_positions(ax, by_position):
    top = 0.0
    for name, losses in by_position.items():
        size = min(POSITIONS_PER_POINT, len(losses))
        points = losses[: len(losses) // size * size].view(-1, size).mean(1).tolist()
        top = max(top, *points)
        middles = [(i + 0.5) * size for i in range(len(points))]
        ax.plot(middles, points, color=COLORS[name], lw=1.6, label=LABELS[name])
    low = ax.get_ylim()[0]
    ax.set(
        title="Held-out loss by position: what the memory is worth",
        xlabel="bytes read before (position in the sequence)",
        ylabel="bits per byte",
        ylim=(low, top + 0.3 * (top - low)),  # room for the legend
    )
    ax.legend(loc="upper right")


def draw_rates(ax, kind, lengths, rates, shape):
    for name, values in rates.items():
        ax.plot(lengths, values, "o-", color=COLORS[name], lw=1.6, ms=4, label=LABELS[name])
    ours, plain = rates[FLASH_QLA.name], rates[PYTORCH.name]
    for x, a, b in zip(lengths, ours, plain, strict=True):
        ax.annotate(
            f"{a / b:.1f}x",
            (x, a),
            xytext=(0, 7),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=COLORS[FLASH_QLA.name],
        )
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    low, high = min(ours + plain), max(ours + plain)
    ax.set(
        title=f"Speed of the operation alone: {kind}",
        xlabel=f"sequence length T ({shape})",
        ylabel="tokens per second",
        ylim=(low / 1.6, high * 2.2),
    )
    ax.set_xticks(lengths, [str(length) for length in lengths])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(EngFormatter())
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.legend(loc="lower right")


def draw(path, courses, by_position, lengths, rates, shape, headline):
    """rates: as throughput.operation_rates returns them."""
    plt.rcParams.update(
        {
            "font.size": 9,
            "axes.grid": True,
            "grid.alpha": 0.25,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "legend.frameon": False,
            "legend.fontsize": 8,
        }
    )
    figure, axes = plt.subplots(2, 2, figsize=(11.7, 8.3), layout="constrained")
    draw_training(axes[0, 0], courses)
    draw_positions(axes[0, 1], by_position)
    for ax, (kind, values) in zip(axes[1], rates.items(), strict=True):
        draw_rates(ax, kind, lengths, values, shape)
    figure.suptitle(headline, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
