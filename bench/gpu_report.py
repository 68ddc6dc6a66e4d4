"""Table on screen, bars and picture of the GPU benchmark."""

from dataclasses import asdict

from bars import Bar, print_bars

LIBRARIES = ("ours", "fla", "flash-qla", "flashinfer")
AGREE = 0.02  # norms of results that differ by more are told
BARS = [  # how many times as fast as fla: operation, heads, bound
    ("forward", "(16,64)", 2.0),
    ("forward", "(16,32)", 1.0),
    ("forward", "(2,8)", 0.5),
    ("backward", "(16,32)", 1.0),
    ("backward", "(2,4)", 1 / 1.5),
]
DECODE_US = {1: 8, 32: 39, 512: 540}
HOST_US = 60  # of an eager call, forward (16,32) 1x2048
MEMORY = 1.6  # of a forward's outputs, beyond inputs and outputs


class Report:
    """The rows so far. `recorded`: the contents of gpu_recorded.json; nothing of it for tiny rows."""

    def __init__(self, recorded, tiny=False):
        self.source = recorded["source"]
        self.recorded = {} if tiny else recorded
        self.tiny = tiny
        self.rows = []

    def print_header(self):
        print(
            f"{'ms':<56}" + "".join(f"{name:>11}" for name in LIBRARIES) + f"{'x fla':>7}{'MB':>7}{'host us':>9}{'first ms':>10}"
        )

    def add(self, case, figures):
        recorded = self.recorded.get(case.name, {})
        row = {"row": case.name, **asdict(case), "requests": len(case.lengths), "figures": figures, "recorded": recorded}
        del row["peers"]
        row["differs"] = disagreement(figures)
        row["least_bytes"] = case.least_bytes
        self.rows.append(row)
        print(table_line(row), flush=True)
        for name, figure in figures.items():
            if "refused" in figure:
                print(f"    {name}: {figure['refused']}", flush=True)
        for name, share in row["differs"].items():
            if share > AGREE:
                print(f"    {name}: norms of its results differ from ours by up to {100 * share:.1f} %", flush=True)

    def bars(self):
        return [asdict(bar) | {"reached": bar.reached} for bar in all_bars(self.rows)]

    def print_end(self):
        """Prints what belongs to all rows; returns the number of bars missed."""
        print("  *: recorded, not measured in this run (gpu_recorded.json)  MB: peak of an eager call of ours beyond its inputs")
        for name in LIBRARIES[1:]:
            shares = [row["figures"][name]["ms"] / row["recorded"][name]["ms"] for row in self.rows if both(row, name)]
            if shares:
                print(f"  {name} in this run / recorded: {min(shares):.2f} to {max(shares):.2f} ({len(shares)} rows)")
        return 0 if self.tiny else print_bars(all_bars(self.rows))[1]


def both(row, name):
    return "ms" in row["figures"].get(name, {}) and "ms" in row["recorded"].get(name, {})


def time_of(row, name):
    """(milliseconds, recorded?) of a library, or None."""
    if "ms" in row["figures"].get(name, {}):
        return row["figures"][name]["ms"], False
    if "ms" in row["recorded"].get(name, {}):
        return row["recorded"][name]["ms"], True
    return None


def ratio(row, name="fla"):
    """How many times as fast ours is."""
    ours, other = time_of(row, "ours"), time_of(row, name)
    return other[0] / ours[0] if ours and other else None


def disagreement(figures):
    """{library: largest relative difference of a result's norm from ours}."""
    ours = figures.get("ours", {}).get("norms")
    differs = {}
    for name, figure in figures.items():
        if ours and name != "ours" and figure.get("norms"):
            pairs = zip(ours, figure["norms"], strict=False)
            differs[name] = max(abs(a - b) / max(abs(a), 1e-30) for a, b in pairs)
    return differs


def cell(value, digits, width):
    return f"{'-' if value is None else f'{value:.{digits}f}':>{width}}"


def table_line(row):
    line = f"{row['row']:<56.56}"
    for name in LIBRARIES:
        found = time_of(row, name)
        refused = "refused" if "refused" in row["figures"].get(name, {}) else "-"
        line += f"{refused if found is None else f'{found[0]:.4f}' + ('*' if found[1] else ' '):>11}"
    ours = row["figures"].get("ours", {})
    extra = ours.get("extra_bytes")
    line += cell(ratio(row), 2, 7) + cell(None if extra is None else extra / 1e6, 0, 7)
    return line + cell(ours.get("host_us"), 0, 9) + cell(ours.get("first_ms"), 1, 10)


def all_bars(rows):
    bars = []
    for row in rows:
        bound = next((bound for op, heads, bound in BARS if row["row"].startswith(f"{op} {heads} ")), None)
        if bound and time_of(row, "fla"):
            bars.append(Bar(f"{row['row'][:60]}: against fla", "x", bound, ratio(row)))
        ours = row["figures"].get("ours", {})
        if row["op"] == "decode" and row["requests"] in DECODE_US:
            value = 1e3 * ours["ms"] if "ms" in ours else None
            bars.append(Bar(row["row"], " us", DECODE_US[row["requests"]], value, at_least=False))
        if row["row"] == "forward (16,32) 1x2048":
            bars.append(Bar(f"{row['row']}: host time", " us", HOST_US, ours.get("host_us"), at_least=False))
    memory = [memory_share(row) for row in rows if row["op"] == "forward"]
    largest = max((share for share in memory if share is not None), default=None)
    return [*bars, Bar("forward: memory beyond inputs and outputs, of the outputs", "x", MEMORY, largest, at_least=False)]


def memory_share(row):
    ours = row["figures"].get("ours", {})
    if ours.get("extra_bytes") is None:
        return None
    return (ours["extra_bytes"] - ours["output_bytes"]) / ours["output_bytes"]


def draw(path, title, report):
    """Bars of milliseconds, a panel an operation. Recorded figures are hatched. Nothing without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        print("no matplotlib: no picture")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colors = dict(zip(LIBRARIES, ("#1f5fbf", "#c44e52", "#8a4fbf", "#1a8a5a"), strict=True))
    groups = [[row for row in report.rows if row["op"] == op and any(time_of(row, name) for name in LIBRARIES)]
              for op in ("forward", "backward", "decode")]  # fmt: skip
    groups = [group for group in groups if group]
    if not groups:
        return
    with plt.rc_context({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}):
        figure, panels = plt.subplots(
            len(groups), 1, figsize=(9, 2 + 0.42 * sum(map(len, groups))), layout="constrained",
            height_ratios=[len(group) + 1 for group in groups], squeeze=False,
        )  # fmt: skip
        for ax, group in zip(panels[:, 0], groups, strict=True):
            draw_group(ax, group, colors)
        panels[0, 0].legend(handles=legend(plt, colors), ncols=5, loc="lower left", bbox_to_anchor=(0, 1.02), frameon=False)
        panels[-1, 0].set_xlabel("milliseconds, median of graph replays")
        figure.suptitle(title, fontsize=9)
        figure.savefig(path, dpi=130)
        plt.close(figure)


def draw_group(ax, rows, colors):
    for i, row in enumerate(rows):
        for j, name in enumerate(LIBRARIES):
            found = time_of(row, name)
            if found is None:
                continue
            ms, recorded = found
            style = {"color": "white", "edgecolor": colors[name], "hatch": "////"} if recorded else {"color": colors[name]}
            ax.barh(i + 0.2 * j - 0.3, ms, height=0.18, **style)
            ax.annotate(f"{ms:.3g}", (ms, i + 0.2 * j - 0.3), xytext=(2, 0), textcoords="offset points", va="center", fontsize=5)
    ax.set_yticks(range(len(rows)), [row["row"] if len(row["row"]) < 45 else row["row"][:42] + "..." for row in rows])
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_formatter("")


def legend(plt, colors):
    handles = [plt.Rectangle((0, 0), 1, 1, color=color, label=name) for name, color in colors.items()]
    return [*handles, plt.Rectangle((0, 0), 1, 1, facecolor="white", edgecolor="black", hatch="////", label="recorded earlier")]
