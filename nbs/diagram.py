"Boxes and arrows, for the pages that show how things hang together."
import matplotlib.pyplot as plt


def diagram(boxes, arrows, *, size=(9, 2), frames=()):
    """Draw named boxes at places and arrows between them.

    `boxes` is {name: (x, y)}, an arrow (from, to) or (from, to, what is said of it), a frame (title, names)."""
    fig, ax = plt.subplots(figsize=size)
    ax.axis("off")
    box = dict(boxstyle="round,pad=.5", fc="#e8f1f8", ec="#0072B2")
    drawn = {name: ax.text(x, y, name, ha="center", va="center", fontsize=8.5, linespacing=1.3, bbox=box)
             for name, (x, y) in boxes.items()}
    ax.set(xlim=(min(x for x, _ in boxes.values()) - .6, max(x for x, _ in boxes.values()) + .6),
           ylim=(min(y for _, y in boxes.values()) - .6, max(y for _, y in boxes.values()) + .6))
    for start, end, *said in arrows:
        ax.annotate("", boxes[end], boxes[start], annotation_clip=False, arrowprops=dict(
            arrowstyle="-|>", color="0.4", patchA=drawn[start].get_bbox_patch(), patchB=drawn[end].get_bbox_patch(),
            shrinkA=2, shrinkB=2))
        (x0, y0), (x1, y1) = boxes[start], boxes[end]
        if said: ax.text((x0 + x1)/2, (y0 + y1)/2 + .08, said[0], ha="center", va="bottom", fontsize=8, color="0.3")
    for title, names in frames:
        xs, ys = zip(*(boxes[n] for n in names), strict=True)
        ax.add_patch(plt.Rectangle((min(xs) - .55, min(ys) - .4), max(xs) - min(xs) + 1.1, max(ys) - min(ys) + .8,
                                   fill=False, ec="0.7", ls="--"))
        ax.text(min(xs) - .5, max(ys) + .45, title, fontsize=9, va="bottom")
