"""``make audit`` with made-up packages and a made-up index."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tools import audit


@pytest.fixture
def index():
    """Return an index with one vulnerability, of the first package that is requested."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            queries = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["queries"]
            requested.extend(queries)
            rows = [{"vulns": [{"id": "PYSEC-1"}, {"id": "GHSA-2"}]}, *[{}] * (len(queries) - 1)]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"results": rows}).encode())

        def log_message(self, *_):
            pass

    requested: list = []
    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.requested = requested
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
    yield server
    server.shutdown()
    server.server_close()


def test_known_vulnerabilities_are_listed(index, monkeypatch, capsys, tmp_path):
    (tmp_path / "constraints.txt").write_text("# made\nnumpy==0.1+cpu  # pinned\nno-such-one==2\n")
    monkeypatch.setattr(audit, "CONSTRAINTS", tmp_path / "constraints.txt")
    assert audit.main(["--index", f"http://127.0.0.1:{index.server_address[1]}"]) == 1
    out = capsys.readouterr().out
    assert "2 packages are pinned, 1 of them are installed in another version" in out
    assert "numpy 0.1: PYSEC-1, GHSA-2" in out and "constraints.txt pins 0.1+cpu" in out
    assert index.requested[0] == {
        "package": {"name": "numpy", "ecosystem": "PyPI"},
        "version": "0.1",
    }


def test_an_unreachable_index_is_reported(capsys):
    assert audit.main(["--index", "http://127.0.0.1:9"]) == 0
    assert "vulnerabilities were not looked up: http://127.0.0.1:9" in capsys.readouterr().out


def test_installed_versions_equal_pinned_ones():
    expected = audit.pinned(audit.CONSTRAINTS.read_text())
    assert len(expected) > 50 and audit.version_mismatches(expected) == []


def test_a_changed_installed_file_is_found(tmp_path, monkeypatch):
    info = tmp_path / "made_up-1.0.dist-info"
    info.mkdir()
    (tmp_path / "made_up.py").write_text("x = 1\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: made-up\nVersion: 1.0\n")
    digest = "0oGtu3VXrhJLUfGeH8h4xVBgyYxLeRfDqdCUhQyBaDw"
    (info / "RECORD").write_text(f"made_up.py,sha256={digest},6\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert audit.altered_files(["made-up"]) == [
        ("made-up: made_up.py differs from the installed file")
    ]
    (tmp_path / "made_up.py").unlink()
    assert audit.altered_files(["made-up"]) == ["made-up: made_up.py is missing"]
