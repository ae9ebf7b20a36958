"""Security rules: a run executes no code from files, writes only to its directory, and opens no
port by default.

Rules about code that must not exist are checked on the source.
"""

import ast
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.driver.connect import check_run_root
from cluster.jobs import submit as jobs
from configs.load import ConfigError, load, parse
from records.prometheus import PrometheusExporter
from records.rundir import RunDirectory

ROOT = Path(__file__).parent.parent
FOLDERS = (
    "configs",
    "policy",
    "rewards",
    "learner",
    "records",
    "planning",
    "analysis",
    "actors",
    "cluster",
    "simulator",
    "cli",
    "shapes",
)
UNPICKLERS = {
    "pickle",
    "_pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "joblib",
    "shelve",
    "marshal",
    "yaml",
}


def sources() -> Iterator[tuple[str, ast.Module]]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def unsafe(tree: ast.AST) -> Iterator[str]:
    """Yield the calls of a module that read a file in a way that could run code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (
                f"import {alias.name}"
                for alias in node.names
                if alias.name.partition(".")[0] in UNPICKLERS
            )
        elif (
            isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in UNPICKLERS
        ):
            yield f"from {node.module}"
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if name in ("eval", "exec", "os.system") or keywords.get("shell") == "True":
                yield f"{name}()"
            if name == "torch.load" and keywords.get("weights_only") != "True":
                yield "torch.load() without weights_only=True"
            if (
                name in ("np.load", "numpy.load")
                and keywords.get("allow_pickle", "False") != "False"
            ):
                yield "np.load() with allow_pickle"


def test_no_file_reader_can_execute_code():
    assert {name: found for name, tree in sources() if (found := list(unsafe(tree)))} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from cloudpickle import loads",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "eval(text)",
        "subprocess.run(line, shell=True)",
    ],
)
def test_the_search_for_unsafe_readers_finds_them(source):
    assert len(list(unsafe(ast.parse(source)))) == 1


def test_no_code_binds_every_interface():
    everywhere = re.compile(r"""["']0\.0\.0\.0["']|["']::["']|INADDR_ANY|host\s*=\s*["']["']""")
    found = {
        str(path.relative_to(ROOT))
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if everywhere.search(path.read_text())
    }
    assert found == set()


def test_metrics_are_served_on_loopback_by_default():
    logging = load("quickstart").logging
    assert (logging.prometheus_host, logging.prometheus_port) == ("127.0.0.1", 0)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    exporter = PrometheusExporter(port)
    try:
        # the addresses of 127/8 are all local: listening on one leaves the others free
        with socket.socket() as elsewhere:
            assert elsewhere.connect_ex(("127.0.0.2", port)) != 0
    finally:
        exporter.close()


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "a/b",
        "/etc/x",
        "..",
        ".",
        ".hidden",
        "-x",
        "",
        "a b",
        "a\nb",
        "a\0b",
        "ünter",
        "x" * 101,
        "a;b",
        "$(a)",
        "a\\b",
    ],
)
def test_the_name_of_a_run_is_one_plain_word(name):
    tree = load("quickstart").model_dump(mode="json")
    with pytest.raises(ConfigError, match="name = .*letters, digits"):
        parse({**tree, "name": name})


def test_a_run_stays_in_its_root(tmp_path):
    config = load("quickstart", ["name=a..b", f"run_root={tmp_path}"])
    assert RunDirectory.of(config).path.parent == tmp_path


@pytest.mark.parametrize("key", ["run_root", "prompts.train", "prompts.test", "model.path"])
@pytest.mark.parametrize("value", ["", " ", "a\0b", "a\nb", "\x1b[31m"])
def test_paths_must_be_printable(key, value):
    tree = load("quickstart").model_dump(mode="json")
    *parents, last = key.split(".")
    node = tree
    for parent in parents:
        node = node[parent]
    node[last] = value
    with pytest.raises(ConfigError, match=f"{key} = .*control characters") as error:
        parse(tree)
    assert str(error.value).count("\n") == 0


@pytest.mark.parametrize("inside", ["", "/../working_dir_files/x"])
def test_a_run_root_in_a_jobs_directory_is_refused(inside):
    root = f"/tmp/ray/session/runtime_resources/working_dir_files/_ray_pkg{inside}"
    with pytest.raises(ConfigError, match="would be deleted with it"):
        check_run_root(load("quickstart", [f"run_root={root}"]), joined=True)


def test_files_of_a_job_are_never_written_outside_its_folder(tmp_path, monkeypatch):
    """A relative prompt file above the submitted directory must not be copied to above the staged
    one.
    """
    (tmp_path / "here").mkdir()
    (tmp_path / "up.txt").write_text("a cat\n")
    monkeypatch.chdir(tmp_path / "here")
    config = load("quickstart", ["prompts.train=../up.txt"])
    with pytest.raises(
        ConfigError, match=r"'\.\./up\.txt' is outside the directory that is submitted"
    ):
        jobs.stage(tmp_path / "deep" / "tree", "quickstart", config)
    assert not (tmp_path / "deep" / "up.txt").exists()
