"""Sliders beside a picture, in a kernel as Jupyter runs it."""
import nbclient
import nbformat


def test_a_move_of_a_slider_draws_again_in_the_same_place():
    cells = ["import matplotlib.pyplot as plt\nfrom rlblocks import explore\n"
             "kernel = get_ipython().kernel; asked = kernel.get_parent\n"
             "kernel.get_parent = lambda *a: asked(*a) | dict(content=dict(allow_stdin=True))\n"        # as of a person
             "def line(slope=1.): plt.plot([0, slope]); print(slope)\n"
             "explore(line, slope=(0., 2.))",
             "from ipywidgets.widgets import widget\n"
             "made = [w for w in widget._instances.values() if type(w).__name__ == 'FloatSlider']\n"
             "assert len(made) == 1 and (made[0].min, made[0].max, made[0].value) == (0., 2., 1.)\n"
             "made[0].value = 2."]
    runs = []
    for n in (1, 2):
        nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells[:n]])
        nbclient.NotebookClient(nb, kernel_name="python3", timeout=120).execute()
        pictures = [o.data["image/png"] for o in nb.cells[0].outputs if "image/png" in o.get("data", {})]
        assert len(pictures) == 1
        runs.append(pictures[0])
    assert runs[0] != runs[1]
