"""Requests to a running job: schema-checked, atomic, never fatal."""

import json
import logging
import os

import pytest

from dm_plugin import control
from dm_plugin.control import Watcher, parse_layers


@pytest.mark.parametrize(
    ("text", "want"),
    [("0-3,7", {0, 1, 2, 3, 7}), (" 5 ", {5}), ("2 - 4", {2, 3, 4}), (None, None), ("all", None), ("", None)],
)
def test_layer_lists(text, want) -> None:
    assert parse_layers(text) == want


@pytest.mark.parametrize("text", ["a", "1,,2", "-1", "0-99999999999"])
def test_bad_layer_lists_name_the_part(text) -> None:
    with pytest.raises(ValueError, match="neither a layer number nor a range"):
        parse_layers(text)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"steps": 0}, "steps=0"),
        ({"start_step": -1}, "start_step=-1"),
        ({"probes": ["rows"]}, r"probes=\['rows'\]"),
        ({"layers": "x"}, "layers='x'"),
    ],
)
def test_bad_requests_are_refused_before_they_are_written(tmp_path, options, text) -> None:
    with pytest.raises(ValueError, match=text):
        control.send(tmp_path, "start", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_request_is_read_once_and_covers_its_steps(tmp_path, monkeypatch) -> None:
    watcher = Watcher(tmp_path)
    assert watcher.poll(0) is None
    control.send(tmp_path, "start", start_step=5, steps=2, layers="1")
    reads = []
    real = control.parse
    monkeypatch.setattr(control, "parse", lambda body: reads.append(1) or real(body))
    assert [s for s in range(1, 10) if watcher.poll(s)] == [5, 6]
    assert len(reads) == 1
    control.send(tmp_path, "start", steps=1)
    assert [s for s in range(10, 14) if watcher.poll(s)] == [10]
    control.send(tmp_path, "stop")
    assert watcher.poll(14) is None
    (tmp_path / control.REQUEST).unlink()
    assert watcher.poll(15) is None


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"schema": 9}',
        '{"schema": 1, "action": "burn"}',
        '{"schema": 1, "action": "start", "layers": [1]}',
        '{"schema": 1, "action": "start", "layers": "0-99999999999"}',
        '{"schema": 1, "action": "start", "probes": [[1]]}',
        "[" * 50_000,
        " " * 100_000,
    ],
)
def test_a_corrupt_request_is_ignored_with_one_warning(tmp_path, caplog, text) -> None:
    (tmp_path / control.REQUEST).write_text(text)
    watcher = Watcher(tmp_path)
    with caplog.at_level(logging.WARNING, logger="dm_plugin"):
        assert [watcher.poll(s) for s in range(3)] == [None] * 3
    assert len(caplog.records) == 1
    assert "is ignored" in caplog.text


def test_status_collects_every_rank_and_survives_a_half_written_one(tmp_path) -> None:
    for rank in range(2):
        Watcher(tmp_path, rank).report(7, "idle", written=rank, lost=0)
    (tmp_path / control.STATUS / "rank_00009.json").write_text("{")
    request, ranks = control.status(tmp_path)
    assert request is None
    assert [(r["rank"], r["written"]) for r in ranks] == [(0, 0), (1, 1)]
    control.send(tmp_path, "start")
    assert control.status(tmp_path)[0]["action"] == "start"
    assert json.loads((tmp_path / control.REQUEST).read_text())["schema"] == 1


def test_a_pipe_or_a_folder_in_the_requests_place_holds_no_job_up(tmp_path, caplog) -> None:
    for i, make in enumerate((os.mkfifo, os.mkdir)):
        run = tmp_path / str(i)
        run.mkdir()
        make(run / control.REQUEST)
        assert Watcher(run).poll(0) is None
    assert caplog.text.count("is no regular file") == 2


def test_a_request_is_over_after_its_last_step(tmp_path) -> None:
    watcher = control.Watcher(tmp_path)
    assert not watcher.over(0)
    control.send(tmp_path, "start", start_step=3, steps=2)
    watcher.poll(1)
    assert [watcher.over(step) for step in (2, 3, 4, 5)] == [False, False, False, True]
    control.send(tmp_path, "start")
    watcher.poll(6)
    assert not watcher.over(1000)


@pytest.mark.parametrize("clock", [0, 1, 4_102_444_800])
def test_a_request_counts_whatever_the_clock_of_its_writer_says(tmp_path, clock: int) -> None:
    watcher = control.Watcher(tmp_path)
    assert watcher.poll(0) is None
    control.send(tmp_path, "start", steps=2)
    os.utime(tmp_path / control.REQUEST, (clock, clock))
    assert watcher.poll(1) is not None
    assert watcher.poll(2) is not None
    assert watcher.poll(3) is None
    control.send(tmp_path, "stop")
    os.utime(tmp_path / control.REQUEST, (clock, clock))  # the same time as before: the new file is another one
    assert watcher.poll(2) is None
