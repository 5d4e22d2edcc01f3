"""The real thing: SuperLink and SuperNodes as processes on loopback, the example app, a SuperNode killed and restarted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")
pytest.importorskip("sklearn")

from experiments.federated.deployment import deployment

# With residuals, which a restart loses.
UPLINK, THIN = "error_feedback(sparse_dithering(alpha=0.25))", "error_feedback(sparse_dithering(alpha=0.8))"
ASKED = "Receiving: train message"
DENSE = 4 * 190_410  # bytes of the example's model, as plain Flower sends it


@pytest.mark.timeout(500)
def test_a_supernode_is_killed_in_mid_round_and_comes_back(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    with deployment(tmp_path) as flwr:
        flwr.node(0, 2)
        doomed = flwr.node(1, 2, tersegrad="thin")
        # A node that has just started may need many seconds longer for its first answer than one that is warm.
        times: dict[str, Any] = {"num_server_rounds": 3, "timeout": 150.0, "patience": 30.0, "local_epochs": 1}
        run = flwr.submit(uplink=UPLINK, thin_uplink=THIN, result=str(result), **times)
        flwr.wait(lambda: flwr.log("node1").count(ASKED) == 2, 150, "the second round")
        flwr.kill(doomed)  # it has the question, and will never answer
        flwr.node(1, 2, tersegrad="thin")
        flwr.wait(lambda: run.poll() is not None, 300, "the run")
        assert result.exists(), flwr.log("run")[-5000:]
    report = json.loads(result.read_text())
    parcels = [p for r in report["parcels"] for p in r.values()]
    assert report["rounds"] == 3
    assert report["silent"] >= 1
    assert {r["kind"] for r in report["rejections"]} <= {"error"}  # Flower's word that the killed node is gone
    assert report["clients"] >= 3  # a SuperNode without a key is a new node after its restart, so it got a snapshot
    assert report["residuals_from_zero"] >= 2
    assert report["models_as_snapshot"] >= 3
    assert report["scores"]["3"] > report["scores"]["0"] + 10
    used = [p for p in parcels if p["outcome"] == "accepted"]
    back = [p for p in report["parcels"][2].values() if p["outcome"] == "accepted" and p["kind"] == "snapshot"]
    assert [(p["fresh"], p["compressor"]) for p in back] == [(True, THIN)]
    assert {p["compressor"] for p in used} >= {UPLINK}
    assert all(DENSE / p["uplink"] > 15 for p in used)
    assert all(DENSE / p["downlink"] > 7.9 for p in parcels)
