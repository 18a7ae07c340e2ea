"""`fserver env`: what it prints, and what it keeps to itself."""

from __future__ import annotations

import json
import os

import pytest

from fserver import cli, env


def run(capsys: pytest.CaptureFixture[str], *args: str, status: int = 0) -> tuple[str, str]:
    """Standard output and error."""
    assert cli.main(["env", *args]) == status
    return capsys.readouterr()


def rows(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, dict]:
    return {s["name"]: s for s in json.loads(run(capsys, "--json", *args)[0])["settings"]}


def test_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DMLC_NUM_WORKER", "3")
    monkeypatch.setenv("STEPMESH_BAKCEND", "CPU")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    args = ("--json", "DMLC_NUM_SERVER=2", "DMLC_ROLE=worker")
    found = json.loads(run(capsys, *args, status=1)[0])
    assert set(found) == {"settings", "unknown", "warnings", "errors", "missing"}
    assert found["errors"] == found["missing"] == [PORT]
    of = {s["name"]: s for s in found["settings"]}
    for s in found["settings"]:
        assert s["meaning"] and s["default"] and s["allowed"] and s["section"]
        assert s["origin"] in ("default", "environment", "argument")
    assert (of["DMLC_NUM_WORKER"]["value"], of["DMLC_NUM_WORKER"]["origin"]) == ("3", "environment")
    assert (of["DMLC_NUM_SERVER"]["value"], of["DMLC_NUM_SERVER"]["origin"]) == ("2", "argument")
    assert of["DMLC_PORT"]["origin"] == "default"
    assert of["STEPMESH_BACKEND"]["source"] == "STEPMESH_BAKCEND"
    assert of["CUDA_VISIBLE_DEVICES"]["value"] == "1,0"


PORT = "conf: DMLC_PS_ROOT_PORT is not set: want the port of the scheduler, 1 to 65535"


def test_status(capsys: pytest.CaptureFixture[str]) -> None:
    """1 if a node could not start. Without a role no node is described, so nothing is missing."""
    for args in ((), ("FSERVER_LOG=debug",), ("DMLC_ROLE=server", "DMLC_PS_ROOT_PORT=7000")):
        assert run(capsys, *args)[1] == ""
        assert json.loads(run(capsys, "--json", *args)[0])["errors"] == []
    assert run(capsys, "DMLC_ROLE=worker", status=1)[1] == f"{PORT}\n"
    assert run(capsys, "FSERVER_LOG=loud", status=1)[1].count("\n") == 1
    assert json.loads(run(capsys, "--json", "FSERVER_LOG=loud", status=1)[0])["errors"]


def test_text(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DMLC_NUM_WORKER", "3")
    monkeypatch.setenv("STEPMESH_BAKCEND", "CPU")
    out, err = run(capsys, "DMLC_PS_ROOT_PORT=7000")
    assert max(map(len, out.splitlines())) <= 100
    assert "\n* DMLC_NUM_WORKER                3  (environment)\n" in out
    assert "\n* DMLC_PS_ROOT_PORT              7000  (argument)\n" in out
    assert "\n* STEPMESH_BACKEND               CPU  (environment, as STEPMESH_BAKCEND)\n" in out
    assert "\n  DMLC_NUM_SERVER                1  (default)\n" in out
    assert "      number of server groups\n" in out
    assert err == ""

    out, _ = run(capsys, "--set")
    assert "DMLC_NUM_WORKER" in out and "DMLC_NUM_SERVER" not in out


def test_unknown_names_are_pointed_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DMLC_NUM_WORKERS", "3")
    found = json.loads(run(capsys, "--json", "FSERVER_SECRETS=x")[0])
    assert found["unknown"] == [
        {"name": "DMLC_NUM_WORKERS", "nearest": "DMLC_NUM_WORKER"},
        {"name": "FSERVER_SECRETS", "nearest": "FSERVER_SECRET"},
    ]
    with pytest.raises(SystemExit):
        cli.main(["env", "transport=tcp"])
    assert "did you mean FSERVER_TRANSPORT?" in capsys.readouterr().err
    monkeypatch.setenv("FSEVER_SECRET", "hunter2")
    _, err = run(capsys, "DMLC_PORT=many", status=1)
    assert "FSEVER_SECRET" in err and "FSERVER_SECRET)" in err and "hunter2" not in err
    assert "DMLC_NUM_WORKERS" in err and "DMLC_NUM_WORKER)" in err
    assert 'DMLC_PORT="many": want a whole number' in err


def test_a_secret_is_not_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSERVER_SECRET", "hunter2 hunter2 hunter2")
    for args in ((), ("--json",), ("FSERVER_SECRET=hunter2",)):
        out, err = run(capsys, *args)
        assert "hunter2" not in out + err
    assert rows(capsys)["FSERVER_SECRET"]["value"] == "set"
    with pytest.raises(SystemExit):
        cli.main(["env", "hunter2"])
    assert "hunter2" not in "".join(capsys.readouterr())


def test_a_switch_takes_both_spellings(capsys: pytest.CaptureFixture[str]) -> None:
    switches = [s for s in rows(capsys).values() if s["type"] == "flag"]
    assert {"FSERVER_TLS", "FSERVER_HOST_SCHEDULER", "PS_RESEND"} <= {s["name"] for s in switches}
    for given, shown in (("0", "0"), ("off", "0"), ("1", "1"), ("On", "1")):
        found = rows(capsys, "FSERVER_SECRET=s", *(f"{s['name']}={given}" for s in switches))
        assert {found[s["name"]]["value"] for s in switches} == {shown}
    assert {s["allowed"] for s in switches} == {"0, 1, off or on"}


def test_a_long_value_stays_inside_the_table() -> None:
    row = {
        "section": "s", "name": "N", "value": "x " * 200, "default": "", "meaning": "m",
        "origin": "default", "source": "default",
    }  # fmt: skip
    assert max(map(len, env.table([row]).splitlines())) <= 100


def test_a_value_that_is_no_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DMLC_INTERFACE", os.fsdecode(b"\xff"))
    error = run(capsys, status=1)[1]
    assert error == "conf: DMLC_INTERFACE is not UTF-8: encode the value as UTF-8, or unset it\n"
