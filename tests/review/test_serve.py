"""`dm-plugin watch`: the page on the loopback interface, new when dumps are."""

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_dumps import KINDS, metadata, site_fields, site_name, write_arm, write_dump

from dm_plugin.review import serve
from dm_plugin.review.report import build_payload, render
from dm_plugin.review.runs import discover


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    def build() -> str:
        problems: list = []
        return render(build_payload(discover([tmp_path], problems), problems, title="live"))

    server = serve.server(tmp_path, build, every=0.2)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    assert server.server_address[0] == "127.0.0.1"
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def test_it_starts_before_the_first_dump_and_follows_what_lands(address: str, tmp_path: Path) -> None:
    assert "No dumps yet" in get(f"{address}/")
    assert json.loads(get(f"{address}/state"))["files"] == 0
    arm = write_arm(tmp_path, "matched", layers=2, steps=(0, 10))
    assert json.loads(get(f"{address}/state"))["files"] == 2
    page = get(f"{address}/")
    assert "fetch('/state')" in page
    assert "connect-src 'self'" in page
    assert page == get(f"{address}/")  # built once for one state
    import numpy as np

    fields = site_fields(KINDS["stale"], np.random.default_rng(0))
    write_dump(arm / "dumps", 20, {f"{site_name(0)}/{k}": v for k, v in fields.items()}, meta=metadata(20))
    assert get(f"{address}/") != page


def test_it_answers_nothing_else(address: str) -> None:
    for path in ("/../etc/passwd", "/matched/train.jsonl", "/state/"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(f"{address}{path}")
