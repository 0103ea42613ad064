"""The same inputs through the installed peers: values and gradients to 1e-6 in float32, or a documented disagreement
that is what it was."""
import json
import math
from types import SimpleNamespace

import agreement
import peers
import pytest
import rows
import torch

TABLE = json.loads(agreement.OUT.read_text())
WRITTEN = {(x["peer"], x["theirs"], x["ours"]): x for x in TABLE["rows"]}


def present(peer):
    if reason := peers.missing(peer): pytest.skip(reason)


def named(r): return f"{r.peer}-{r.theirs}".replace(" ", "_")


@pytest.mark.parametrize("r", [r for r in rows.ROWS if r.because is None], ids=named)
def test_agrees(r):
    present(r.peer)
    value, gradient = rows.measure(r)
    # on some CPUs the rounding of float32 is more than that by itself
    if max(value, gradient) > rows.TOLERANCE: value, gradient = rows.measure(r, torch.float64)
    assert (value <= rows.TOLERANCE and gradient
            <= rows.TOLERANCE), f"{r.ours} is {value:.2g} away from {r.peer}'s {r.theirs}, its gradient {gradient:.2g}"


@pytest.mark.parametrize("r", [r for r in rows.ROWS if r.because], ids=named)
def test_disagrees_as_written(r):
    present(r.peer)
    found, written = agreement.disagreement(r), WRITTEN[r.peer, r.theirs, r.ours]
    for key, number in found.items():
        same = number == written[key] if isinstance(number, str) else math.isclose(number, written[key], rel_tol=.01,
                                                                                   abs_tol=rows.TOLERANCE)
        assert same, (
            f"{r.peer}'s {r.theirs}: {key} was {written[key]}, is {number}; {r.because}. If the peer has changed, "
            "run make parity and read the difference")
    assert "raises" in found or not max(map(abs, (x for x in found.values() if not isinstance(x, str))),
                                        default=1) <= rows.TOLERANCE, f"they agree now: {r.because}"


def test_table_is_current():
    "The file that the docs page shows has exactly these rows."
    assert TABLE["versions"] == peers.VERSIONS
    plain = [dict(peer=r.peer, theirs=r.theirs, ours=r.ours, wrt=list(r.wrt)) for r in rows.ROWS]
    assert [{k: x[k] for k in ("peer", "theirs", "ours", "wrt")}
            for x in TABLE["rows"]] == plain, "make parity writes the table"
    assert [x.get("because") for x in TABLE["rows"]] == [r.because for r in rows.ROWS]


def test_page_shows_the_table():
    "The stored output of nbs/conventions.ipynb is what the file gives now."
    page = json.loads((peers.ROOT/"nbs"/"conventions.ipynb").read_text())
    shown = "".join("".join(o.get("data", {}).get("text/markdown", "")) for cell in page["cells"]
                    for o in cell.get("outputs", []))
    for x in TABLE["rows"]:
        assert agreement.line(x) in shown, f"make parity writes the page; it lacks {agreement.line(x)}"


def test_rows_are_many_and_differ():
    assert len(WRITTEN) == len(rows.ROWS)
    assert sum(r.because is None for r in rows.ROWS) >= 200 and {r.peer for r in rows.ROWS} == set(peers.VERSIONS)


@pytest.mark.parametrize("peer", peers.VERSIONS)
def test_absent_peers_say_how_to_get_them(peer, monkeypatch, tmp_path):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(peers, "BESIDE", tmp_path)
    assert "make" in peers.missing(peer) and peers.VERSIONS[peer] in peers.missing(peer)


# -- the machinery itself

def test_a_wrong_value_and_a_wrong_gradient_are_seen():
    "One part in a hundred thousand of either."
    value = rows.Row("verl", "", "masked_mean(x, mask)", lambda c: 1.00001*c.x[c.mask].mean() + 1, ("x",), None)
    gradient = rows.Row("verl", "", "masked_mean(x, mask)",
                        lambda c: c.x[c.mask].mean().detach() + 1.1*(c.x - c.x.detach())[c.mask].mean(), ("x",), None)
    assert rows.measure(value)[0] > .1
    assert rows.measure(gradient)[0] <= rows.TOLERANCE < rows.measure(gradient)[1]


def test_shapes_are_compared():
    with pytest.raises(ValueError, match="ours gives"):
        rows.measure(rows.Row("verl", "", "masked_mean(x, mask, dim=-1)", lambda c: c.x.sum(), (), None))


def test_stubs_are_gone_and_imports_come_back():
    import sys
    present("verl")
    peers.verl()
    assert not any(name.split(".")[0] in ("verl", "tensordict", "omegaconf") and isinstance(module, peers.Stub)
                   for name, module in sys.modules.items())
    with peers.verl().imports():
        from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask
    assert compute_rollout_rejection_mask is peers.verl().rollout_corr_helper.compute_rollout_rejection_mask


def test_statements_are_found_or_missed_loudly():
    def f(a):
        if a > 0:
            b = a + 1
            c = 2*b
        return c
    assert peers.statements(f, "b = ", "c = ")(a=1).c == 4
    with pytest.raises(LookupError, match="has changed"): peers.statements(f, "b = ", "d = ")


def test_bare_trainers_have_no_more_than_given():
    present("trl")
    import trl
    made = peers.bare(trl.DPOTrainer, beta=.1)
    assert made.beta == .1 and not hasattr(made, "processing_class") and isinstance(made.accelerator, peers.Accelerator)
    assert isinstance(peers.defaults(trl.DPOConfig, beta=.3), SimpleNamespace)
    assert torch.is_tensor(made.accelerator.gather(torch.ones(1)))
