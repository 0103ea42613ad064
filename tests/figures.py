"""What covers what in a figure: a label over another, a legend or a note over a curve."""
from itertools import combinations, pairwise

import numpy as np
from matplotlib.patches import Rectangle
from matplotlib.transforms import Bbox


def labels(fig):
    "(what it is, its box in pixels) of the texts that are drawn, legends' among them."
    renderer = fig.canvas.get_renderer()
    def boxes(what, texts):
        for text in texts:
            if text.get_visible() and text.get_text().strip():
                yield f"{what} {text.get_text()!r}", text.get_window_extent(renderer)
    yield from boxes("title", [fig._suptitle] if fig._suptitle else [])
    for legend in fig.legends: yield from boxes("legend", legend.get_texts())
    for ax in fig.axes:
        if not ax.axison: continue
        yield from boxes("title", [ax.title, ax._left_title, ax._right_title])
        yield from boxes("text", ax.texts)
        if ax.get_legend(): yield from boxes("legend", [ax.get_legend().get_title(), *ax.get_legend().get_texts()])
        for axis in (ax.xaxis, ax.yaxis):
            yield from boxes("label", [axis.label, axis.offsetText])
            low, high = sorted(axis.get_view_interval())
            yield from boxes("tick", [t.label1 for t in axis.get_major_ticks() if low <= t.get_loc() <= high])


def curves(ax):
    "(name, places in pixels) of what is drawn in axes, close enough to each other to meet a box of a few pixels."
    for line in ax.lines:
        if len(line.get_xdata()) <= 2 and not line.get_label().strip("_").isalpha(): continue      # a rule: axhline
        path = line.get_transform().transform(np.column_stack([np.asarray(line.get_xdata(), float),
                                                               np.asarray(line.get_ydata(), float)]))
        path = path[np.isfinite(path).all(1)]
        if line.get_linestyle() not in ("None", "") and len(path) > 1:
            path = np.concatenate([a + np.linspace(0, 1, min(int(np.abs(b - a).max()//3) + 2, 500))[:, None]*(b - a)
                                   for a, b in pairwise(path)])
        yield line.get_label(), path
    for points in ax.collections:
        if len(at := points.get_offsets()): yield points.get_label(), points.get_offset_transform().transform(at)
    for bar in ax.patches:
        if isinstance(bar, Rectangle):
            box = bar.get_window_extent()
            xs, ys = (np.linspace(low, high, 20) for low, high in ((box.x0, box.x1), (box.y0, box.y1)))
            yield bar.get_label(), np.stack(np.meshgrid(xs, ys), -1).reshape(-1, 2)


def smaller(box): return Bbox.from_extents(box.x0 + 1, box.y0 + 1, box.x1 - 1, box.y1 - 1)


def covered(fig):
    "Sentences on what covers what; none where all can be read."
    fig.canvas.draw()
    drawn = [(what, smaller(box)) for what, box in labels(fig)]
    found = [f"{a} and {b} overlap" for (a, x), (b, y) in combinations(drawn, 2) if x.overlaps(y)]
    legends = [x for x in (*fig.legends, *(ax.get_legend() for ax in fig.axes)) if x]
    notes = [(str([t.get_text() for t in x.get_texts()]), smaller(x.get_window_extent())) for x in legends]
    for ax in fig.axes:
        inside = ax.get_window_extent()
        for name, at in curves(ax):
            at = at[((at > inside.min) & (at < inside.max)).all(1)]
            found += [f"the legend of {what} is over the curve {name!r}" for what, box in notes
                      if ((at > box.min) & (at < box.max)).all(1).any()]
    return found
