"""Jupyter that is started with this configuration (`make lab`) saves the notebooks of nbs/ and tutorials/ as they are kept: without execution
counts, and without metadata that each machine writes in its own way. One that was opened and saved is unchanged."""


def clean(model, path, **_):
    "Drop from a notebook what is not kept, before it is saved."
    if model["type"] != "notebook" or not path.startswith(("nbs/", "tutorials/")): return
    notebook = model["content"]
    notebook["metadata"] = dict(kernelspec=dict(display_name="python3", language="python", name="python3"))
    for cell in notebook["cells"]:
        cell["metadata"] = {}
        if cell["cell_type"] != "code": continue
        cell["execution_count"] = None
        for out in cell["outputs"]:
            if "metadata" in out: out["metadata"] = {k: v for k, v in out["metadata"].items() if k == "image/png"}
            if out["output_type"] == "execute_result": out["execution_count"] = None


c.ContentsManager.pre_save_hook = clean  # noqa: F821 (Jupyter's own name)
