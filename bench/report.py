"""The benchmark's table on screen and its picture."""

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from bars import share_bound
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter, NullLocator

HEADER = f"{'case':<48} {'implementation':<15} {'threads':>7} {'tokens/s':>11} {'of peak':>8} {'bar':>5} {'x PyTorch':>10}"
COLORS = {"f32": "#1f5fbf", "bf16": "#1a8a5a", "f16": "#8a4fbf"}


def ratio_to_pytorch(row, pytorch_rows):
    """How many times as fast a row of flashqla_bench is as plain PyTorch with the same sizes, dtype and threads, if measured."""
    keys = ("op", "B", "T", "Hq", "Hv", "K", "V", "dtype", "threads")
    for other in pytorch_rows:
        if all(row[key] == other[key] for key in keys):
            return row["tokens_per_second"] / other["tokens_per_second_pytorch"]
    return None


def _case_words(row):
    words = f"{row['op'].replace('_', ' + ')} {row['dtype']} T={row['T']}" + (f" B={row['B']}" if row["B"] > 1 else "")
    words += f" D={row['K']}" if row["K"] == row["V"] else f" K={row['K']} V={row['V']}"
    if row["op"] == "recurrent" and "states" in row:
        words += f", {row['states']} {row['state']} states {'[K,V]' if row['layout'] == 'key_value' else '[V,K]'}"
    return words


def table_line(row, ratio):
    share = f"{100 * row['share_of_peak']:.0f} %" if row.get("share_of_peak") is not None else "-"
    if row["op"] == "recurrent" and row.get("states") == "cold":
        share = f"{row['time_to_state_time']:.2f} tm"
    bound = f"{100 * share_bound(row):.0f} %" if share_bound(row) else ""
    times = f"{ratio:.1f}" if ratio is not None else "-"
    rate = f"{row['tokens_per_second']:,.0f}"
    return f"{_case_words(row):<48} {row['implementation']:<15} {row['threads']:>7} {rate:>11} {share:>8} {bound:>5} {times:>10}"


def print_rows(rows, pytorch_rows):
    print("\nThe library itself (flashqla_bench)")
    print(HEADER)
    for row in rows:
        print(table_line(row, ratio_to_pytorch(row, pytorch_rows)))
    print("  tm: time of the call / time to read and write its states once at the measured memory bandwidth")
    print("\nCalled from PyTorch, against the plain PyTorch formulation, in turn")
    print(HEADER)
    for row in pytorch_rows:
        print(table_line(row, row["ratio"]))


def _draw_lengths(ax, rows, pytorch_rows, op):
    """Tokens per second against T, one thread: the fastest implementation of each dtype, and plain PyTorch."""
    standard = [r for r in rows if r["op"] == op and r["threads"] == 1 and (r["B"], r["Hv"], r["K"], r["V"]) == (1, 32, 128, 128)]
    lengths = set()
    for dtype, color in COLORS.items():
        best = {}
        for row in standard:
            if row["dtype"] == dtype:
                best[row["T"]] = max(best.get(row["T"], 0), row["tokens_per_second"])
        plain = {
            r["T"]: r["tokens_per_second_pytorch"] for r in pytorch_rows if (r["op"], r["dtype"], r["threads"]) == (op, dtype, 1)
        }
        for points, style, label in ((best, "o-", f"flashqla {dtype}"), (plain, "s--", f"plain PyTorch {dtype}")):
            if points:
                ax.plot(*zip(*sorted(points.items()), strict=True), style, color=color, lw=1.5, ms=4, label=label)
                lengths |= set(points)
    ax.set(title=f"{op}, one thread (Hq 16, Hv 32, D 128)", xlabel="sequence length T", ylabel="tokens per second")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(sorted(lengths), [str(length) for length in sorted(lengths)])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(EngFormatter())
    ax.yaxis.set_minor_formatter(NullFormatter())
    if lengths:
        ax.legend()


def _draw_shares(ax, rows):
    """Share of the peak, one thread, D = 128: one bar for each implementation and length."""
    shown = [
        row
        for row in rows
        if row["op"] != "recurrent"
        and row["threads"] == 1
        and row["T"] in (512, 2048)
        and row["K"] == row["V"] == 128
        and row["implementation_asked"] != "best"
    ]
    labels = [f"{row['op']} {row['dtype']} {row['implementation']} T={row['T']}" for row in shown]
    shares = [100 * row["share_of_peak"] for row in shown]
    ax.barh(range(len(shown)), shares, color=[COLORS[row["dtype"]] for row in shown], height=0.7)
    for i, share in enumerate(shares):
        ax.annotate(
            f"{share:.0f}",
            (share, i),
            xytext=(-3, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            color="white",
            fontsize=8,
        )
    for i, bound in enumerate(map(share_bound, shown)):
        if bound:
            ax.plot([100 * bound] * 2, [i - 0.42, i + 0.42], color="black", lw=2)
    ax.set_yticks(range(len(shown)), labels, fontsize=8)
    ax.invert_yaxis()
    ax.set(title="Share of the machine's measured peak, one thread", xlabel="percent; black: the bar to reach")


def draw(path, machine, rows, pytorch_rows):
    style = {"font.size": 9, "axes.grid": True, "grid.alpha": 0.25, "axes.spines.top": False, "axes.spines.right": False}
    with plt.rc_context({**style, "legend.frameon": False, "legend.fontsize": 8}):
        figure = plt.figure(figsize=(11.7, 8.3), layout="constrained")
        grid = figure.add_gridspec(2, 2)
        _draw_lengths(figure.add_subplot(grid[0, 0]), rows, pytorch_rows, "forward")
        _draw_lengths(figure.add_subplot(grid[1, 0]), rows, pytorch_rows, "backward")
        _draw_shares(figure.add_subplot(grid[:, 1]), rows)
        figure.suptitle(f"flashqla on {machine}", fontsize=10)
        figure.savefig(path, dpi=130)
        plt.close(figure)
